"""The rule by which Ray Serve's controller scales a version: by the rows that the fronts say wait or are at work.

Serve's own rule counts the calls that are at a replica. Batches are made in front of it, so those are never more than
the fronts' windows, whether a row waits or a thousand: they tell when a replica is busy, not when it is too little.

The controller gets this module by value and imports nothing of ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext


# As replicas record them.
ROWS, REFUSED = "millrace_rows", "millrace_refused"


def by_rows(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """How many replicas there should be; Serve applies bounds and delays. `target_ongoing_requests` are rows."""
    rows, refused = _newest(context, ROWS), _newest(context, REFUSED)
    if rows is None or context.config is None:  # nobody has told anything yet
        return context.target_num_replicas, {}
    wanted = rows / context.config.get_target_ongoing_requests()
    if refused:
        wanted = max(wanted, context.current_num_replicas + 1)
    return wanted, {}


def _newest(context: AutoscalingContext, metric: str) -> float | None:
    """The greatest of what the replicas recorded last: all are told the same, and one may have missed it."""
    recorded = (context.raw_metrics or {}).get(metric, {}).values()
    return max((series[-1].value for series in recorded if series), default=None)
