"""Tells deadlines of cancelled calls apart from cancellations by clients."""

from __future__ import annotations

# The server counts the deadline from when the request arrived. The client cancels at its own deadline, which is earlier
# by the time that the request took longer on its way than the cancellation. gRPC also rounds the remaining time up to
# two or three digits on the wire. So a call that is cancelled within this last share of its time has met its deadline.
LAST_SHARE = 0.1
# The timers of client, gRPC and server differ by up to this time.
TIMERS_DIFFER_S = 0.005


def is_deadline(remaining_s: float | None, passed_s: float) -> bool:
    """Return whether a call was cancelled because of its deadline.

    The call had `remaining_s` when it began and was cancelled after `passed_s`.
    """
    return remaining_s is not None and passed_s + TIMERS_DIFFER_S >= remaining_s * (1 - LAST_SHARE)
