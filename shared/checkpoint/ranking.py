"""What is known of one committed checkpoint, and which of several is the newest or the best: by one metric, in one
direction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from shared.durable import Durable, as_state, fields_of

# --- Ranking ---


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


# --- Entry of the registry ---


@dataclass(frozen=True, kw_only=True)
class CheckpointEntry(Durable):
    """`name` is `trainingJobs/{j}/checkpoints/{c}`; `create_time` in seconds since the epoch; `final`: it is of the
    run's last step; `code_bundle`: `codeBundles/{sha256}` of the program that reported it, or of the code that makes
    the model, whose `model_entry` it then has; empty for other models. `fit`: the number of the run of its script that
    reported it, from 1, and 0 where there is no script."""

    name: str
    folder: str
    manifest_sha256: str
    step: int
    epoch: int
    attempt: int
    size_bytes: int
    create_time: float
    metrics: dict[str, float] = field(default_factory=dict)
    final: bool = False
    code_bundle: str = ""
    model_entry: str = ""
    fit: int = 0

    @property
    def is_of_program(self) -> bool:
        """Whether only the program that reported it can read it."""
        return bool(self.code_bundle) and not self.model_entry

    def as_state(self) -> dict[str, Any]:
        state: dict[str, Any] = as_state(self)
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> CheckpointEntry:
        return cls(**fields_of(cls, state))


def latest(entries: Sequence[CheckpointEntry]) -> CheckpointEntry | None:
    """The one furthest on."""
    return max(entries, key=lambda entry: entry.step, default=None)


def best(entries: Sequence[CheckpointEntry], ranking: Ranking = DEFAULT_RANKING) -> CheckpointEntry | None:
    """The first by `ranking`, of equals the later; without any measured, the one furthest on."""
    return next(iter(ranking.best_first(entries)), latest(entries))
