"""What a model is built from: plain values, which a job's record and a checkpoint keep.

The scaling of a regression's target is one of them: what the model learns is (target - mean) / deviation, output by
output. Training fits it on the training split, a checkpoint keeps it, and whoever answers with the model undoes it, by
`shared.models.loaded`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shared.durable import fields_of

# --- Model spec ---

CLASSIFICATION, REGRESSION = "CLASSIFICATION", "REGRESSION"


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """`builder` is `torchvision.` and the name of a builder of `torchvision.models`, `mlp`, or an entry point of
    `millrace.models`. It is empty of a model of a user's own, which `entry`, `module:name`, of `code_bundle`,
    `codeBundles/{sha256}`, makes of `kwargs`.

    `task` says what the outputs mean; a checkpoint's always does, a `TrainingSpec` has a task of its own.
    """

    builder: str
    in_channels: int
    num_classes: int
    kwargs: dict[str, Any] = field(default_factory=dict)
    task: str = CLASSIFICATION
    code_bundle: str = ""
    entry: str = ""
    # Of a user's own: whether it has a training step, and what goes with it.
    is_step: bool = False

    @property
    def is_own(self) -> bool:
        """Whether a user's own code makes it."""
        return bool(self.entry)

    def as_config(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        return cls(**fields_of(cls, config))


# --- Scaling of the target ---

NONE, STANDARD = "NONE", "STANDARD"


@dataclass(frozen=True, kw_only=True)
class TargetScaling:
    """One number for each of the K outputs, in the target's own unit. A deviation is above 0: of a target that is
    constant it is 1."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def as_config(self) -> dict[str, Sequence[float]]:
        return asdict(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Sequence[float]] | None) -> TargetScaling | None:
        """None where there is none."""
        return None if config is None else cls(mean=tuple(config["mean"]), deviation=tuple(config["deviation"]))
