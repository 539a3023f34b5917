"""The scaling of a regression's target: what the model learns is (target - mean) / deviation, output by output.

Training fits it on the training split, a checkpoint keeps it, and whoever answers with the model undoes it, by
`shared.models.scaled_target`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

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
