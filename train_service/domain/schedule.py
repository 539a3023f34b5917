"""The learning rate as a pure function of the step, so that a resumed run has nothing to restore."""

from __future__ import annotations

import math

WARMUP_SHARE = 0.1

CONSTANT = "CONSTANT"
COSINE_WITH_WARMUP = "COSINE_WITH_WARMUP"


def learning_rate(schedule: str, base: float, step: int, total_steps: int) -> float:
    """The rate for the step numbered `step`, from 0."""
    if schedule == CONSTANT:
        return base
    warmup = max(1, round(total_steps * WARMUP_SHARE))
    if step < warmup:
        return base * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    return base * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
