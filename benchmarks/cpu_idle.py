"""Waits until the machine is idle between two runs.

Work that a contender leaves behind, such as processes that start for its next run, must not count for the run that
follows, ours or a peer's.
"""

from __future__ import annotations

import time
from pathlib import Path

RESTING_SHARE = 0.1  # the busy share over all processors
POLL_INTERVAL_S = 0.5
POLLS = 2
REST_TIMEOUT_S = 30.0


def come_to_rest() -> None:
    """Wait until the processors were idle for `POLLS` polls; print a warning after a timeout."""
    until = time.monotonic() + REST_TIMEOUT_S
    calm, before = 0, _times()
    while calm < POLLS:
        if time.monotonic() > until:
            print(f"the machine is busy, and was for {REST_TIMEOUT_S:.0f} s", flush=True)
            return
        time.sleep(POLL_INTERVAL_S)
        now = _times()
        busy = 1 - (now[0] - before[0]) / max(now[1] - before[1], 1)
        calm, before = (calm + 1 if busy < RESTING_SHARE else 0), now


def _times() -> tuple[int, int]:
    """Return the idle and the total time of all processors, in ticks."""
    ticks = [int(one) for one in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)
