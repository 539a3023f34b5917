"""Whether a cancelled call was ended by its deadline or by its client."""

from __future__ import annotations

# gRPC tells a server the time that is left in two or three digits, rounded up, while clients keep to it exactly.
ROUNDED_UP = 0.01
# By so much the timers of client, gRPC and server differ.
TIMERS_DIFFER_S = 0.005


def is_deadline(remaining_s: float | None, passed_s: float) -> bool:
    """Whether a call that had `remaining_s` when it began, and is cancelled `passed_s` later, is cancelled because of
    its deadline. gRPC's own timer and the client's come a moment before the deadline that the server was given."""
    return remaining_s is not None and passed_s + TIMERS_DIFFER_S >= remaining_s * (1 - ROUNDED_UP)
