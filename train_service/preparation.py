"""The tables of rows that Ray Data's tasks prepare, for a rank that waits for them, but not for ever.

Nothing of Ray's holds a CPU for these tasks. Where others take the last one, Ray Data waits without a word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing

import pyarrow as pa

from shared.dataset_stream import DatasetStream
from shared.errors import Unavailable
from shared.jobs.transitions import NO_ROOM
from shared.transforms import Pipeline
from shared.transforms.steps.custom import DEFAULT_TIMEOUT_S, Custom
from train_service.domain.bundles import INGEST_CPUS
from train_service.domain.spec import TrainingSpec
from train_service.domain.watchdog import STARTING_SECONDS
from train_service.patience import PATIENCE_S, store_call
from train_service.placement import usable_nodes

POLL_S = 1.0
# The first tasks import and compile.
FIRST_WITHIN_S = STARTING_SECONDS
# A piece of many small rows may take long to prepare, and other work may have the CPUs for a while.
NEXT_WITHIN_S = PATIENCE_S
# Ray Data gives what a task makes on in blocks, which need not begin and end as the pieces do.
PIECES_A_BLOCK = 2


def longest_s(spec: TrainingSpec) -> float:
    """How long the functions of the transform may take, by their own limits, until a task has made something."""
    steps = Pipeline.from_config(spec.transform, spec.input_column).steps
    limits = (step.timeout_s or DEFAULT_TIMEOUT_S for step in steps if isinstance(step, Custom))
    return PIECES_A_BLOCK * sum(limits)


def prepared(
    stream: DatasetStream, touched: Callable[[], None], longest_s: float = 0.0
) -> Generator[pa.Table, None, None]:
    """The tables of `stream`; `touched` is called for each, and whenever a task got on. For `longest_s` a task may be
    at work on functions of its own.

    Raises `Unavailable` where no task gets on, and what the stream raises. Whoever takes the tables may take his time.
    """
    watch = _Watch(stream, touched, longest_s)
    with closing(stream.tables(watch.look, POLL_S)) as tables:
        while True:
            with store_call():  # as there: who waits here gives up by himself
                table = next(tables, None)
            if table is None:
                return
            watch.got_on()
            yield table
            watch.got_on()


class _Watch:
    def __init__(self, stream: DatasetStream, touched: Callable[[], None], longest_s: float) -> None:
        self._stream = stream
        self._touched = touched
        self._done = 0
        self._since = time.monotonic()
        self._longest_s = longest_s
        self._within_s = FIRST_WITHIN_S + longest_s

    def got_on(self) -> None:
        self._touched()
        self._since, self._within_s = time.monotonic(), NEXT_WITHIN_S + self._longest_s

    def look(self) -> None:
        if (done := self._stream.done) > self._done:
            self._done = done
            self.got_on()
        elif time.monotonic() - self._since > self._within_s:
            text = f"Ray Data has prepared no row for {self._within_s:.0f} s"
            if not _has_free_cpu():
                # Not a failure: the next attempt begins once there is room for its tasks, too.
                raise Unavailable(f"{text}: its tasks found no CPU", reason=NO_ROOM)
            raise Unavailable(f"{text}, though a CPU is free: a task stands still", reason="PREPARATION_STALLED")


def _has_free_cpu() -> bool:
    return any(node.free.get("CPU", 0.0) >= INGEST_CPUS for node in usable_nodes())
