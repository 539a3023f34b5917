"""Waiting for a condition, instead of sleeping and hoping."""

from __future__ import annotations

import time
from collections.abc import Callable

INTERVAL_S = 0.02


def wait_until(
    holds: Callable[[], object], what: str, timeout_s: float = 120.0, interval_s: float = INTERVAL_S
) -> None:
    """Return once `holds()`; fail the test, naming `what`, if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what}")
        time.sleep(interval_s)
