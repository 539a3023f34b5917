"""The specification of a model, in plain values, which a job's record and a checkpoint store.

It includes the scaling of a regression's target: the model learns (target - mean) / deviation, output by output.
Training fits the scaling on the training split and a checkpoint stores it. `shared.models.loaded` undoes it for every
answer of the model.
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
    """A model's builder and its arguments.

    `builder` is `torchvision.` and the name of a builder of `torchvision.models`, `mlp`, or an entry point of
    `millrace.models`. It is empty for a user's own model: `entry`, `module:name`, of `code_bundle`,
    `codeBundles/{sha256}`, builds that from `kwargs`.

    `task` is the meaning of the outputs. It is always set in a checkpoint; a `TrainingSpec` has its own task.
    """

    builder: str
    in_channels: int
    num_classes: int
    kwargs: dict[str, Any] = field(default_factory=dict)
    task: str = CLASSIFICATION
    code_bundle: str = ""
    entry: str = ""
    # For a user's own model: whether it has a training step and the methods around it.
    is_step: bool = False

    @property
    def is_own(self) -> bool:
        """Whether a user's own code builds the model."""
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
    """One number per output, K in all, in the target's own unit.

    A deviation is above 0; for a constant target it is 1.
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def as_config(self) -> dict[str, Sequence[float]]:
        return asdict(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Sequence[float]] | None) -> TargetScaling | None:
        """Return the scaling, or None if there is none."""
        return None if config is None else cls(mean=tuple(config["mean"]), deviation=tuple(config["deviation"]))
