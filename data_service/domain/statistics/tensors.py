"""Statistics of tensor columns: of all values together. B = rows, K = values of one row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from PIL import Image

from data_service.domain.statistics.column import Bounds, Column
from data_service.domain.statistics.distribution import Weighted
from data_service.domain.statistics.hashing import Hashes
from data_service.domain.statistics.moments import ExactMoments
from data_service.domain.statistics.result import NumberStatistics
from data_service.domain.statistics.sampling import Sample

_BYTES = 256
# What is counted at a time: Pillow lets no other thread run meanwhile.
_COUNT_BLOCK_BYTES = 400_000
_FLOAT_BLOCK_VALUES = 32_768


def tensor_rows(array: pa.ExtensionArray) -> npt.NDArray[Any]:
    """(B, K), without a copy."""
    values: npt.NDArray[Any] = array.storage.flatten().to_numpy(zero_copy_only=True)
    return values.reshape(len(array), math.prod(array.type.shape))


class ByteTensorColumn(Column):
    """uint8: how often each byte occurs tells all, exactly."""

    def __init__(self) -> None:
        super().__init__()
        self._counts = np.zeros(_BYTES, np.int64)

    def _update(self, array: pa.ExtensionArray, hashes: Hashes) -> None:  # noqa: ARG002
        flat = tensor_rows(array).reshape(-1)
        for start in range(0, len(flat), _COUNT_BLOCK_BYTES):
            self._counts += _byte_counts(flat[start : start + _COUNT_BLOCK_BYTES])

    def _merge(self, other: ByteTensorColumn) -> None:
        self._counts += other._counts

    def _result(self) -> dict[str, Any]:
        there = np.flatnonzero(self._counts)
        if not len(there):
            return {}
        counts = self._counts[there]
        moments = ExactMoments()
        moments.add_integers(there, counts)
        weighted, least, most = Weighted(there, counts), int(there[0]), int(there[-1])
        numbers = NumberStatistics(
            min=float(least),
            max=float(most),
            mean=moments.mean,
            deviation=moments.deviation,
            quantiles=[float(value) for value in weighted.quantiles()],
            histogram=weighted.histogram(least, most, moments.count, is_integer=True),
        )
        return {"numbers": numbers}


class TensorColumn(Column):
    """All other tensors.

    Each row sums its own values and squares in float64, in an order that depends on K alone; the rows' sums are then
    added exactly. A row whose own sums are not finite is added value by value.
    """

    def __init__(self, value_type: pa.DataType) -> None:
        super().__init__()
        self._is_integer = pa.types.is_integer(value_type)
        self._nan_count = 0
        self._bounds = Bounds()
        self._moments = ExactMoments()
        self._sample = Sample(np.float64)

    def _update(self, array: pa.ExtensionArray, hashes: Hashes) -> None:
        rows = tensor_rows(array)
        self._sample.add_rows(hashes, rows)
        step = max(1, _FLOAT_BLOCK_VALUES // rows.shape[1])
        sums, squares = np.empty(len(rows)), np.empty(len(rows))
        doubles = np.empty((min(step, len(rows)), rows.shape[1]))
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, len(rows), step):
                block = doubles[: min(step, len(rows) - start)]
                block[...] = rows[start : start + step]
                np.add.reduce(block, axis=1, out=sums[start : start + step])
                np.multiply(block, block, out=block)
                np.add.reduce(block, axis=1, out=squares[start : start + step])
        finite = np.isfinite(sums) & np.isfinite(squares)
        if not finite.all():
            self._add_values(rows[~finite])
            rows, sums, squares = rows[finite], sums[finite], squares[finite]
        if len(rows):
            self._bounds.add(float(rows.min()) + 0.0, float(rows.max()) + 0.0)
            self._moments.add_rows(rows.size, sums, squares)

    def _add_values(self, rows: npt.NDArray[Any]) -> None:
        values = rows.reshape(-1).astype(np.float64) + 0.0
        there = values[~np.isnan(values)]
        self._nan_count += len(values) - len(there)
        if len(there):
            self._bounds.add(float(there.min()), float(there.max()))
            self._moments.add_floats(there)

    def _merge(self, other: TensorColumn) -> None:
        self._nan_count += other._nan_count
        self._bounds.merge(other._bounds)
        self._moments.merge(other._moments)
        self._sample.merge(other._sample)

    def _result(self) -> dict[str, Any]:
        if not self._moments.count:
            return {"nan_count": self._nan_count}
        weighted, least, most = Weighted(self._sample.values), self._bounds.min, self._bounds.max
        numbers = NumberStatistics(
            min=least,
            max=most,
            mean=self._moments.mean,
            deviation=0.0 if least == most else self._moments.deviation,
            quantiles=[value + 0.0 for value in weighted.quantiles()],
            histogram=weighted.histogram(least, most, self._moments.count, is_integer=self._is_integer),
        )
        return {"nan_count": self._nan_count, "numbers": numbers}


def _byte_counts(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Pillow counts the four bytes of a pixel apart, so that no count waits for the one before it where neighbours are
    alike; bincount would make an index of 64 bits of each byte first."""
    whole = len(values) // 4 * 4
    counts: npt.NDArray[np.int64] = np.bincount(values[whole:], minlength=_BYTES).astype(np.int64)
    if whole:
        pixels = Image.frombuffer("RGBA", (whole // 4, 1), values[:whole], "raw", "RGBA", 0, 1)
        counts += np.array(pixels.histogram(), np.int64).reshape(4, _BYTES).sum(axis=0)
    return counts
