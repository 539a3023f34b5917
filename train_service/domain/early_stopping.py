"""When a run has not got better for a while: a function of what its epochs measured, so there is no state to keep."""

from __future__ import annotations

import math
from collections.abc import Sequence

from train_service.domain.spec import EarlyStopping


def should_stop(rule: EarlyStopping | None, history: Sequence[tuple[int, float]]) -> bool:
    """Whether the run ends after the last epoch of `history`, or should have before it.

    `history` has (epoch, value of `rule.metric`) of each epoch measured so far, in any order; an epoch measured again
    by a later attempt counts once, with its last value. The first finite value is the best at first, and what is better
    by at least `min_delta` takes its place; NaN never does.
    """
    if rule is None:
        return False
    values = dict(history)
    best, since = math.nan, 0
    for epoch in sorted(values):
        gain = (values[epoch] - best) * (1 if rule.maximize else -1)
        if math.isfinite(values[epoch]) and (math.isnan(best) or (gain > 0 and gain >= rule.min_delta)):
            best, since = values[epoch], 0
        else:
            since += 1
        if since >= rule.patience:
            return True
    return False
