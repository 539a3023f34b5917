"""How two versions of a model differ on the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inference_service.domain.roll_out import Compared, Comparison
from inference_service.domain.signature import TensorSpec
from inference_service.domain.tensors import Array

LABEL = "label"


@dataclass
class Difference:
    """Gathered part by part. `agreeing` counts rows with equal labels, None where the model gives none; `greatest` is
    the greatest absolute difference between numbers of outputs that are floats."""

    rows: int = 0
    agreeing: int | None = None
    greatest: float = 0.0

    def add(self, specs: Sequence[TensorSpec], old: Sequence[Array], new: Sequence[Array]) -> None:
        """The outputs of both versions for some more rows, in the order of `specs`."""
        self.rows += len(old[0])
        for spec, one, other in zip(specs, old, new, strict=True):
            if spec.name == LABEL:
                self.agreeing = (self.agreeing or 0) + int(np.count_nonzero(one == other))
            elif one.size and np.issubdtype(one.dtype, np.floating):
                greatest = np.abs(one.astype(np.float64) - other.astype(np.float64)).max()
                # One that is no number differs from everything.
                self.greatest = max(self.greatest, float("inf") if np.isnan(greatest) else float(greatest))

    def told(self) -> Compared:
        agreement = None if self.agreeing is None or not self.rows else self.agreeing / self.rows
        return Compared(self.rows, agreement, self.greatest)


def falls_short(wanted: Comparison, seen: Compared) -> str:
    """What of the comparison is not as wanted, in words; empty: nothing."""
    if wanted.min_agreement is not None:
        if seen.agreement is None:
            return "its outputs have no label, so that there is no agreement to compare; use max_difference"
        if seen.agreement < wanted.min_agreement:
            return (
                f"{seen.agreement:.2%} of {seen.rows} held rows have the label that the old version gives, at least "
                f"{wanted.min_agreement:.2%} must"
            )
    if wanted.max_difference is not None and seen.difference > wanted.max_difference:
        return (
            f"its outputs for {seen.rows} held rows differ from the old version's by up to {seen.difference:.4g}, at "
            f"most {wanted.max_difference:.4g} is allowed"
        )
    return ""
