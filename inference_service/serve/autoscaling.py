"""The rule by which Ray Serve's controller scales a version: by its waiting and computing rows, as the frontends
report.

Serve's own rule counts the calls at a replica. Batches are formed before that, so these calls never exceed the
frontends' windows, whether one row waits or a thousand: they show that a replica is busy, not that it is overloaded.

The controller receives this module by value and imports no other module of ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext


# The names under which replicas record the metrics.
ROWS, REFUSED = "millrace_rows", "millrace_refused"


def by_rows(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return the wanted number of replicas.

    Serve applies limits and delays. `target_ongoing_requests` is in rows.
    """
    rows, refused = _newest(context, ROWS), _newest(context, REFUSED)
    if rows is None or context.config is None:  # no report yet
        return context.target_num_replicas, {}
    wanted = rows / context.config.get_target_ongoing_requests()
    if refused:
        wanted = max(wanted, context.current_num_replicas + 1)
    return wanted, {}


def _newest(context: AutoscalingContext, metric: str) -> float | None:
    """Return the maximum of the replicas' last records.

    All get the same reports, but one may have missed the last.
    """
    recorded = (context.raw_metrics or {}).get(metric, {}).values()
    return max((series[-1].value for series in recorded if series), default=None)
