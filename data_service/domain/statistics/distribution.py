"""Quantiles and histograms of values that each stand for a number of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

QUANTILE_PERCENTS = (1, 5, 25, 50, 75, 95, 99)
BARS = 20


@dataclass(frozen=True)
class Weighted:
    """`values` without NaN, in any order; value i stands for `weights[i]` of them (each for one where None)."""

    values: npt.NDArray[Any]
    weights: npt.NDArray[np.int64] | None = None

    def quantiles(self) -> list[Any]:
        """At `QUANTILE_PERCENTS`: the least value at or below which so many lie. Always a value that occurs."""
        order = np.argsort(self.values, kind="stable")
        reached = np.cumsum(self._weights()[order])
        if not len(reached):
            return []
        total = int(reached[-1])
        ranks = [max(1, -(-percent * total // 100)) for percent in QUANTILE_PERCENTS]
        values: list[Any] = self.values[order][np.searchsorted(reached, ranks)].tolist()
        return values

    def histogram(self, least: Any, most: Any, total: int, *, is_integer: bool) -> list[int]:
        """Counts in bars from `least` to `most`, scaled so that together they are `total`.

        A bar for each integer where they are at most `BARS`, else `BARS` of equal width. None where an end is infinite.
        """
        if not len(self.values) or not (math.isfinite(least) and math.isfinite(most)):
            return []
        if is_integer and most - least < BARS:
            bars = int(most - least) + 1
            places = (self.values - self.values.dtype.type(least)).astype(np.int64)
        elif least == most:
            bars, places = 1, np.zeros(len(self.values), np.int64)
        else:
            bars, places = BARS, _places(self.values, least, most)
        counted = np.zeros(bars, np.int64)
        np.add.at(counted, np.clip(places, 0, bars - 1), self._weights())
        return scaled(counted.tolist(), total)

    def _weights(self) -> npt.NDArray[np.int64]:
        return np.ones(len(self.values), np.int64) if self.weights is None else self.weights


def scaled(counts: list[int], total: int) -> list[int]:
    """Counts in the same proportions that add up to `total`: the largest remainders are rounded up."""
    given = sum(counts)
    if not given:
        return counts
    parts = [divmod(count * total, given) for count in counts]
    missing = total - sum(whole for whole, _ in parts)
    raised = set(sorted(range(len(parts)), key=lambda index: (-parts[index][1], index))[:missing])
    return [whole + (index in raised) for index, (whole, _) in enumerate(parts)]


def _places(values: npt.NDArray[Any], least: Any, most: Any) -> npt.NDArray[np.int64]:
    if values.dtype.kind in "iu":  # large integers are close to each other only before they become floats
        share = (values.astype(np.uint64) - np.uint64(int(least) % 2**64)) / (int(most) - int(least))
    elif math.isinf(most - least):  # halves of the two still have a difference
        share = (values / 2 - least / 2) / (most / 2 - least / 2)
    else:
        share = (values - least) / (most - least)
    places: npt.NDArray[np.int64] = np.floor(share * BARS).astype(np.int64)
    return places
