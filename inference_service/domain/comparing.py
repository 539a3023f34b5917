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
    the greatest absolute difference between numbers of outputs that are floats. `refused` and `refused_by_one` are
    those of `Compared`."""

    rows: int = 0
    agreeing: int | None = None
    greatest: float = 0.0
    refused: int = 0
    refused_by_one: int = 0

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

    def add_refused(self, specs: Sequence[TensorSpec], *, by_both: bool) -> None:
        """One more row, to which one version gives the outputs of `specs`, or none does."""
        if by_both:
            self.refused += 1
            return
        self.rows += 1
        self.refused_by_one += 1
        self.greatest = float("inf")
        if any(spec.name == LABEL for spec in specs):
            self.agreeing = self.agreeing or 0

    def told(self) -> Compared:
        agreement = None if self.agreeing is None or not self.rows else self.agreeing / self.rows
        return Compared(self.rows, agreement, self.greatest, self.refused, self.refused_by_one)


def falls_short(wanted: Comparison, seen: Compared) -> str:
    """What of the comparison is not as wanted, in words; empty: nothing."""
    if wanted.min_agreement is not None:
        if seen.agreement is None:
            return "its outputs have no label, so that there is no agreement to compare; use max_difference"
        if seen.agreement < wanted.min_agreement:
            return (
                f"{seen.agreement:.2%} of {seen.rows} held rows have the label that the old version gives, at least "
                f"{wanted.min_agreement:.2%} must{_of_them_refused(seen)}"
            )
    if wanted.max_difference is not None and seen.difference > wanted.max_difference:
        return (
            f"its outputs for {seen.rows} held rows differ from the old version's by up to {seen.difference:.4g}, at "
            f"most {wanted.max_difference:.4g} is allowed{_of_them_refused(seen)}"
        )
    return ""


def _of_them_refused(seen: Compared) -> str:
    return f"; {seen.refused_by_one} of them only one of the versions takes" if seen.refused_by_one else ""
