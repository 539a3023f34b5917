"""Random numbers that are a pure function of (seed, epoch, row id, place of the step): nothing to carry along.

SplitMix64 (Steele, Lea and Flood 2014) used as a hash: each part is mixed into the state in its turn, so streams of
neighbouring rows, epochs and steps have nothing to do with each other. Overflow of uint64 is meant.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LARGEST = 2**64 - 1


@dataclass(frozen=True, eq=False)
class RowKeys:
    """Which rows a batch of training has; `row_ids` has shape (B). The seed counts modulo 2**64."""

    seed: int
    epoch: int
    row_ids: NDArray[np.int64]

    def take(self, kept: NDArray[np.bool_]) -> RowKeys:
        return RowKeys(self.seed, self.epoch, self.row_ids[kept])

    def at(self, place: int) -> StepKeys:
        return StepKeys(self, place)


@dataclass(frozen=True, eq=False)
class StepKeys:
    """The rows of a batch as the step at `place` of the pipeline draws for them."""

    rows: RowKeys
    place: int

    def uniform(self, count: int) -> NDArray[np.float64]:
        """(B, count) numbers drawn evenly from [0, 1), each a multiple of 2**-53."""
        state = np.zeros(1, np.uint64)
        for part in (self.rows.seed, self.rows.epoch, self.place):
            state = _mix((state ^ np.array([part & _LARGEST], np.uint64)) + _GOLDEN)
        of_row = _mix((state ^ self.rows.row_ids.astype(np.uint64)) + _GOLDEN)
        draws = _mix(of_row[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)
        return (draws >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
