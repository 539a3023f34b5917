"""A bound of CPU time that holds on a slow or busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# What the two loops take on a quiet machine with cores of 2024.
QUIET_S = 0.012
QUIET_OBJECTS_S = 0.085
ADDITIONS = 400_000
OBJECTS = 150_000


@contextmanager
def cpu_at_most(limit_s: float, clock: Callable[[], float] = time.thread_time) -> Iterator[None]:
    """Fail a test whose block takes more CPU time than `limit_s` would be on a quiet machine.

    A machine whose cores are shared or slow takes longer for everything, so the limit grows with `slowdown` before and
    after the block. `clock` is `time.process_time` where the work is done by other threads.
    """
    before = slowdown()
    started_s = clock()
    yield
    taken_s = clock() - started_s
    factor = max(before, slowdown())
    assert taken_s <= limit_s * factor, f"{taken_s:.3f} s of CPU, more than {limit_s:g} s x {factor:.1f}"


def slowdown() -> float:
    """Return how many times as long as on a quiet machine two fixed loops take now, at least 1.

    One computes in registers. The other makes objects: a virtual machine whose host is short of memory computes as fast
    as ever, and takes several times as long for each new page.
    """
    started_s = time.thread_time()
    total = 0
    for number in range(ADDITIONS):
        total += number
    added_s = time.thread_time()
    places = {str(number): number for number in range(OBJECTS)}
    for name in [*places][::-1]:
        total += places[name]
    return max(1.0, (added_s - started_s) / QUIET_S, (time.thread_time() - added_s) / QUIET_OBJECTS_S)
