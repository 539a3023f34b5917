"""A sample of a column that depends on the row ids alone.

Every value has a priority: its level (0 for the first value taken of a row, 1 for the second, …) and then its row's
hash. The sample is the `SAMPLE` values of the least priority, which is the same whatever the order in which rows come
and however they are divided: bottom-k sampling (Cohen, Kaplan: Summarizing data using bottom-k sketches, 2007).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from data_service.domain.statistics.hashing import Hashes, mix

SAMPLE = 4096


class Sample:
    """At most `SAMPLE` values: all of them where there are no more. `values` have `dtype`."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._levels = np.empty(0, np.uint16)
        self._hashes = np.empty(0, np.uint64)
        self._values = np.empty(0, dtype)

    @property
    def values(self) -> npt.NDArray[Any]:
        return self._values

    def add(self, hashes: Hashes, values: npt.NDArray[Any]) -> None:
        """One value of each row."""
        self._add_level(0, hashes, values)

    def add_rows(self, hashes: Hashes, rows: npt.NDArray[Any]) -> None:
        """Rows of K values each, of shape (B, K); NaN is left out."""
        per_row = rows.shape[1]
        stride = _coprime_stride(per_row)
        first = mix(hashes) % np.uint64(max(per_row, 1))
        for level in range(min(per_row, SAMPLE)):
            if self._is_full and level > self._levels[-1]:
                break
            places = (first.astype(np.int64) + level * stride) % per_row
            self._add_level(level, hashes, rows[np.arange(len(rows)), places])

    def merge(self, other: Sample) -> None:
        self._keep_least(other._levels, other._hashes, other._values)

    @property
    def _is_full(self) -> bool:
        return len(self._values) == SAMPLE

    def _add_level(self, level: int, hashes: Hashes, values: npt.NDArray[Any]) -> None:
        if self._is_full and level == self._levels[-1]:
            lower = hashes < self._hashes[-1]
            hashes, values = hashes[lower], values[lower]
        if values.dtype.kind == "f":
            there = ~np.isnan(values)
            hashes, values = hashes[there], values[there]
        if len(values):
            self._keep_least(np.full(len(values), level, np.uint16), hashes, values)

    def _keep_least(self, levels: npt.NDArray[np.uint16], hashes: Hashes, values: npt.NDArray[Any]) -> None:
        levels = np.concatenate([self._levels, levels])
        hashes = np.concatenate([self._hashes, hashes])
        values = np.concatenate([self._values, values.astype(self._values.dtype, copy=False)])
        order = np.lexsort((hashes, levels))[:SAMPLE]
        self._levels, self._hashes, self._values = levels[order], hashes[order], values[order]


def _coprime_stride(length: int) -> int:
    """A step that visits all of `length` places, far apart: next to the golden section of it."""
    stride = max(1, round(length * 0.618))
    while math.gcd(stride, length) != 1:
        stride += 1
    return stride
