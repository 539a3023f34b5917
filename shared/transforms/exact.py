"""Learns exact statistics from rows: mean and deviation, and value counts.

The results do not depend on the order or the cut of the rows. Mean and deviation of float64 values are correctly
rounded. Every finite float64 is a whole number times 2**-1126, if its mantissa is always taken as 53 bits. The sums are
kept as such whole numbers of any length, so nothing is rounded before the result.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shared.transforms.batch import StepError

# --- Mean and deviation ---

# numpy.frexp gives exponents from -1073 on.
MIN_EXPONENT = -1073
UNIT_BITS = 53 - MIN_EXPONENT
_HALF_BITS = 27
_LOW_WORD = np.int64(0xFFFFFFFF)


class ExactMoments:
    """Count, sum and sum of squares of finite values."""

    def __init__(self) -> None:
        self.count = 0
        # In units of 2**-UNIT_BITS, and of its square.
        self._sum = 0
        self._squares = 0

    def add(self, values: NDArray[np.float64]) -> None:
        """Add values of shape (N), all finite; N is at most 2**31."""
        if not len(values):
            return
        self.count += len(values)
        fraction, exponent = np.frexp(values)
        order = np.argsort(exponent.astype(np.int16), kind="stable")
        exponent = exponent[order]
        mantissa = np.ldexp(fraction[order], 53).astype(np.int64)
        starts = np.flatnonzero(np.r_[True, exponent[1:] != exponent[:-1]])
        shifts = (exponent[starts] - MIN_EXPONENT).tolist()
        high = np.abs(mantissa) >> _HALF_BITS
        low = np.abs(mantissa) & ((1 << _HALF_BITS) - 1)
        sums = zip(
            shifts,
            _sums(mantissa, starts),
            _sums(high * high, starts),
            _sums(high * low, starts),
            _sums(low * low, starts),
            strict=True,
        )
        for shift, total, high_high, high_low, low_low in sums:
            self._sum += total << shift
            square = (high_high << 2 * _HALF_BITS) + (high_low << _HALF_BITS + 1) + low_low
            self._squares += square << 2 * shift

    def merge(self, other: ExactMoments) -> None:
        self.count += other.count
        self._sum += other._sum
        self._squares += other._squares

    @property
    def mean(self) -> float:
        """The float64 nearest to the exact mean. There must be a value."""
        return self._sum / (self.count << UNIT_BITS)  # Python divides whole numbers of any length with one rounding

    @property
    def deviation(self) -> float:
        """Return the standard deviation of the population.

        It is the root of the exact variance, to the last bit, and exactly 0 for equal values.
        """
        spread = self.count * self._squares - self._sum * self._sum
        return _root(spread, self.count * self.count << 2 * UNIT_BITS)


def _sums(words: NDArray[np.int64], starts: NDArray[np.intp]) -> list[int]:
    """Return the exact sum of each range that begins at `starts`.

    Words are summed in halves, because int64 holds those sums.
    """
    high = np.add.reduceat(words >> 32, starts).tolist()
    low = np.add.reduceat(words & _LOW_WORD, starts).tolist()
    return [(upper << 32) + lower for upper, lower in zip(high, low, strict=True)]


def _root(numerator: int, denominator: int) -> float:
    """Return the square root of the fraction, with at least 64 bits before its rounding to float64."""
    shift = max(0, (denominator.bit_length() - numerator.bit_length()) // 2 + 66)
    return math.isqrt((numerator << 2 * shift) // denominator) / (1 << shift)


# --- Value counts ---

# New values are counted together once this many rows wait, because each count is a pass over all known values.
ROWS_TO_WAIT_FOR = 1 << 16


class ValueCounts:
    """Counts every distinct value, up to `limit`. `name` is the step's, for the error beyond it."""

    def __init__(self, arrow_type: pa.DataType, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        # Arrow cannot count float16.
        self._type = pa.float32() if arrow_type == pa.float16() else arrow_type
        self._known = pa.table({"value": pa.array([], self._type), "count": pa.array([], pa.int64())})
        self._waiting: list[pa.Table] = []
        self._rows_waiting = 0

    def add(self, values: pa.Array) -> None:
        """Count values, none of them null. Raises `StepError` beyond the limit."""
        values = values.cast(self._type)
        if pa.types.is_floating(values.type):
            values = pc.add(values, pa.scalar(0.0, values.type))  # -0.0 is the same value as 0.0
        counted = values.value_counts()
        self._wait(pa.table({"value": counted.field("values"), "count": counted.field("counts")}))

    def merge(self, other: ValueCounts) -> None:
        """Add another's counts. Raises `StepError` beyond the limit."""
        for table in (other._known, *other._waiting):
            self._wait(table)

    def ordered(self) -> tuple[pa.Array, NDArray[np.int64]]:
        """Return the distinct values in ascending order (numbers, or UTF-8 bytes), and the count of each."""
        self._count_waiting()
        self._check()
        values = self._known["value"].combine_chunks()
        order = pc.sort_indices(values)
        return values.take(order), self._known["count"].to_numpy()[order.to_numpy()]

    def __getstate__(self) -> dict[str, Any]:
        self._count_waiting()
        return self.__dict__

    def _wait(self, table: pa.Table) -> None:
        self._waiting.append(table)
        self._rows_waiting += len(table)
        if self._rows_waiting > max(ROWS_TO_WAIT_FOR, len(self._known)):
            self._count_waiting()
            self._check()

    def _count_waiting(self) -> None:
        if self._waiting:
            together = pa.concat_tables([self._known, *self._waiting])
            counted = together.group_by("value", use_threads=False).aggregate([("count", "sum")])
            self._known = pa.table({"value": counted["value"], "count": counted["count_sum"]}).combine_chunks()
            self._waiting, self._rows_waiting = [], 0

    def _check(self) -> None:
        if len(self._known) > self._limit:
            raise StepError(
                f"{self._name} learns from at most {self._limit:,} distinct values, and the training rows have more"
            )
