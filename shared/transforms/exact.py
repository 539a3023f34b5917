"""Mean and deviation of float64 values, correctly rounded, whatever the order and the cut of the rows.

Every finite float64 is a whole number times 2**-1126, if its mantissa is always taken as 53 bits; the sums are kept as
such whole numbers, of any length, so nothing is ever rounded before the result.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

# numpy.frexp gives exponents from -1073 on.
LEAST_EXPONENT = -1073
UNIT_BITS = 53 - LEAST_EXPONENT
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
        """Values of shape (N), all finite; N at most 2**31."""
        if not len(values):
            return
        self.count += len(values)
        fraction, exponent = np.frexp(values)
        order = np.argsort(exponent.astype(np.int16), kind="stable")
        exponent = exponent[order]
        mantissa = np.ldexp(fraction[order], 53).astype(np.int64)
        starts = np.flatnonzero(np.r_[True, exponent[1:] != exponent[:-1]])
        shifts = (exponent[starts] - LEAST_EXPONENT).tolist()
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
        """The float64 next to the exact mean; there must be a value."""
        return self._sum / (self.count << UNIT_BITS)  # Python divides whole numbers of any length with one rounding

    @property
    def deviation(self) -> float:
        """Of the population: the root of the exact variance, to the last bit; exactly 0 where all values are equal."""
        spread = self.count * self._squares - self._sum * self._sum
        return _root(spread, self.count * self.count << 2 * UNIT_BITS)


def _sums(words: NDArray[np.int64], starts: NDArray[np.intp]) -> list[int]:
    """The exact sum of each stretch that begins at `starts`: halves of words, whose sums int64 holds."""
    high = np.add.reduceat(words >> 32, starts).tolist()
    low = np.add.reduceat(words & _LOW_WORD, starts).tolist()
    return [(upper << 32) + lower for upper, lower in zip(high, low, strict=True)]


def _root(numerator: int, denominator: int) -> float:
    """The square root of the fraction, by 64 bits or more before its rounding to float64."""
    shift = max(0, (denominator.bit_length() - numerator.bit_length()) // 2 + 66)
    return math.isqrt((numerator << 2 * shift) // denominator) / (1 << shift)
