"""Which of a job's checkpoints is the best: by one metric, in one direction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from shared.durable import Durable


class Ranked(Protocol):
    @property
    def step(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...


T = TypeVar("T", bound=Ranked)


@dataclass(frozen=True)
class Ranking(Durable):
    """By `metric`, the highest first where `maximize`. Without a metric nothing counts as measured."""

    metric: str = "validation_accuracy"
    maximize: bool = True

    def best_first(self, checkpoints: Iterable[T]) -> list[T]:
        """Those that were measured, of equals the later first. What diverged is never among the best."""
        # A run that diverged may have measured NaN.
        measured = [one for one in checkpoints if math.isfinite(one.metrics.get(self.metric, math.nan))]
        sign = 1 if self.maximize else -1
        return sorted(measured, key=lambda one: (sign * one.metrics[self.metric], one.step), reverse=True)


DEFAULT_RANKING = Ranking()
