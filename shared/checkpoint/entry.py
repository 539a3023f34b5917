"""What the registry knows of one committed checkpoint, and which of several is the newest or the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.checkpoint.ranking import DEFAULT_RANKING, Ranking
from shared.durable import Durable, as_state, fields_of


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
