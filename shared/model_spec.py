"""What a model is built from: plain values, which a job's record and a checkpoint keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shared.durable import fields_of

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
