"""Processes that race one another: each of the pool's runs the same task, and they start it together."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from multiprocessing.synchronize import Barrier
from typing import Any, TypeVar

from shared.resource_log import Record, ResourceLog
from shared.settings import StoreSettings
from shared.storage import ObjectExists, ObjectStore, open_store

T = TypeVar("T")

RACERS = 4
TOGETHER_TIMEOUT_S = 240.0

_barrier: Barrier | None = None
_open = cache(open_store)


class Racers:
    """`RACERS` processes, each with its own connection to the store."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def race(self, task: Callable[..., T], *arguments: Any) -> list[T]:
        """Run `task(racer's number, *arguments)` in every process at once; return what each returned."""
        futures = [self._pool.submit(_together, task, number, *arguments) for number in range(RACERS)]
        return [future.result() for future in futures]


@contextmanager
def racers() -> Iterator[Racers]:
    # Not forked: the store's client has threads.
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(RACERS)
    with ProcessPoolExecutor(RACERS, mp_context=context, initializer=_start, initargs=(barrier,)) as pool:
        yield Racers(pool)


def _start(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def _together(task: Callable[..., T], *arguments: Any) -> T:
    assert _barrier is not None
    # Which also keeps one process from taking two of the tasks.
    _barrier.wait(TOGETHER_TIMEOUT_S)
    return task(*arguments)


def claim_keys(racer: int, settings: StoreSettings, keys: int) -> list[int]:
    """Try to create each of `keys` objects, with the racer's number as bytes; return those it won."""
    return [key for key in range(keys) if _created(_open(settings), f"race/{key}", f"{racer}".encode())]


def _created(store: ObjectStore, key: str, data: bytes) -> bool:
    try:
        store.put_if_absent(key, data)
    except ObjectExists:
        return False
    return True


def count_up(racer: int, settings: StoreSettings, prefix: str, times: int) -> int:
    """Add 1 to the log's counter `times` times, and to the racer's own; return the highest number it saw."""

    def add(newest: Record | None) -> dict[str, int]:
        state = newest.state if newest else {}
        return {**state, "sum": state.get("sum", 0) + 1, f"{racer}": state.get(f"{racer}", 0) + 1}

    log = ResourceLog(_open(settings), prefix)
    seen = 0
    for _ in range(times):
        record = log.update(add)
        assert record is not None
        assert record.number > seen
        seen = record.number
    return seen
