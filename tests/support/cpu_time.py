"""A bound of CPU time that holds on a slow or busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# What `_calibrate` takes on a quiet machine with cores of 2024.
QUIET_S = 0.012
ADDITIONS = 400_000


@contextmanager
def cpu_at_most(limit_s: float, clock: Callable[[], float] = time.thread_time) -> Iterator[None]:
    """Fail a test whose block takes more CPU time than `limit_s` would be on a quiet machine.

    A machine whose cores are shared or slow takes longer for everything, so the limit grows with the time that a fixed
    loop takes before and after the block. `clock` is `time.process_time` where the work is done by other threads.
    """
    before_s = _calibrate()
    started_s = clock()
    yield
    taken_s = clock() - started_s
    slowdown = max(1.0, before_s / QUIET_S, _calibrate() / QUIET_S)
    assert taken_s <= limit_s * slowdown, f"{taken_s:.3f} s of CPU, more than {limit_s:g} s x {slowdown:.1f}"


def _calibrate() -> float:
    started_s = time.thread_time()
    total = 0
    for number in range(ADDITIONS):
        total += number
    return time.thread_time() - started_s
