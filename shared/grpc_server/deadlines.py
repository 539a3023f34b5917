"""Tells deadlines of cancelled calls apart from cancellations by clients."""

from __future__ import annotations

# gRPC sends the remaining time to the server in two or three digits, rounded up; clients keep the exact time.
ROUNDED_UP = 0.01
# The timers of client, gRPC and server differ by up to this time.
TIMERS_DIFFER_S = 0.005


def is_deadline(remaining_s: float | None, passed_s: float) -> bool:
    """Return whether a call was cancelled because of its deadline.

    The call had `remaining_s` when it began and was cancelled after `passed_s`. The timers of gRPC and of the client
    fire a moment before the deadline that the server knows.
    """
    return remaining_s is not None and passed_s + TIMERS_DIFFER_S >= remaining_s * (1 - ROUNDED_UP)
