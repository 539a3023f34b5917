"""The entry of one committed checkpoint, and the choice of the newest or the best of several, by one metric."""

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
    """An order by `metric`, the highest first if `maximize`. Without a metric no checkpoint counts as measured."""

    metric: str = "validation_accuracy"
    maximize: bool = True

    def best_first(self, checkpoints: Iterable[T]) -> list[T]:
        """Return the measured checkpoints, best first, and of equals the later first. Diverged ones are left out."""
        # A run that diverged may have measured NaN.
        measured = [
            checkpoint for checkpoint in checkpoints if math.isfinite(checkpoint.metrics.get(self.metric, math.nan))
        ]
        sign = 1 if self.maximize else -1
        return sorted(measured, key=lambda one: (sign * one.metrics[self.metric], one.step), reverse=True)


DEFAULT_RANKING = Ranking()


# --- Entry of the registry ---


@dataclass(frozen=True, kw_only=True)
class CheckpointEntry(Durable):
    """A committed checkpoint."""

    # `trainingJobs/{j}/checkpoints/{c}`
    name: str
    folder: str
    manifest_sha256: str
    step: int
    epoch: int
    attempt: int
    size_bytes: int
    # In seconds since the epoch.
    create_time: float
    metrics: dict[str, float] = field(default_factory=dict)
    # Whether it is from the run's last step.
    final: bool = False
    # `codeBundles/{sha256}` of the program that reported it, or of the code that builds the model, whose `model_entry`
    # is then set; empty for other models.
    code_bundle: str = ""
    model_entry: str = ""
    # The number of the script's run that reported it, from 1; 0 without a script.
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
    """Return the checkpoint with the highest step."""
    return max(entries, key=lambda entry: entry.step, default=None)


def best(entries: Sequence[CheckpointEntry], ranking: Ranking = DEFAULT_RANKING) -> CheckpointEntry | None:
    """Return the best by `ranking`, of equals the later. If none was measured, the one with the highest step."""
    return next(iter(ranking.best_first(entries)), latest(entries))
