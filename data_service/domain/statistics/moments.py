"""Sums that are exact, so that neither the order nor the grouping of values can change them.

A float64 is an integer times a power of two. Grouped by that power, the integers of a block are summed in limbs that
cannot overflow, and the sums go into one Python integer in units of the smallest number there is. (The idea of a long
accumulator: Kulisch, Computer Arithmetic and Validity.)
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

# frexp gives x = fraction * 2**exponent; fraction * 2**53 is an integer, and no exponent is below this.
_MANTISSA_BITS, _LOWEST_EXPONENT = 53, -1073
# All sums are kept in units of 2**-_UNIT_BITS, all sums of squares in units of its square.
_UNIT_BITS = _MANTISSA_BITS - _LOWEST_EXPONENT
_LIMB_BITS = 18
_LIMB_MASK = (1 << _LIMB_BITS) - 1
# Products of limbs have 36 bits and are added up to threes: so many of them stay below 2**53, where floats are exact.
_BLOCK = 1 << 14
# Integers are squared in int64 while no sum of a block can leave it.
_SAFE_BITS = 62


class ExactMoments:
    """Count, sum and sum of squares. `mean` and `deviation` are the nearest float64 to the exact result.

    Infinities are counted apart: they make mean and deviation what IEEE 754 says (inf or NaN).
    """

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0
        self._squares = 0
        self._infinite = [0, 0]

    def add_floats(self, values: npt.NDArray[np.float64]) -> None:
        """Values without NaN."""
        self.count += len(values)
        finite = np.isfinite(values)
        if not finite.all():
            self._infinite[0] += int((values == -np.inf).sum())
            self._infinite[1] += int((values == np.inf).sum())
            values = values[finite]
        for start in range(0, len(values), _BLOCK):
            total, squares = _block_sums(values[start : start + _BLOCK])
            self._sum += total
            self._squares += squares

    def add_integers(self, values: npt.NDArray[Any], weights: npt.NDArray[np.int64] | None = None) -> None:
        """Integers of any dtype; value i occurs `weights[i]` times."""
        total, squares = _integer_sums(values, weights)
        self.count += len(values) if weights is None else int(weights.sum())
        self._sum += total << _UNIT_BITS
        self._squares += squares << 2 * _UNIT_BITS

    def add_rows(self, count: int, sums: npt.NDArray[np.float64], squares: npt.NDArray[np.float64]) -> None:
        """Rows of which each has summed its own values; all sums are finite."""
        self.count += count
        for start in range(0, len(sums), _BLOCK):
            self._sum += _block_sums(sums[start : start + _BLOCK])[0]
            self._squares += _block_sums(squares[start : start + _BLOCK])[0] << _UNIT_BITS

    def merge(self, other: ExactMoments) -> None:
        self.count += other.count
        self._sum += other._sum
        self._squares += other._squares
        self._infinite = [mine + its for mine, its in zip(self._infinite, other._infinite, strict=True)]

    @property
    def mean(self) -> float:
        """NaN of no values."""
        if not self.count or any(self._infinite):
            return self._mean_of_infinities()
        return float(Fraction(self._sum, self.count << _UNIT_BITS))

    @property
    def deviation(self) -> float:
        """Of the population. NaN of no values, and where a value is infinite."""
        if not self.count or any(self._infinite):
            return math.nan
        scaled = max(0, self.count * self._squares - self._sum * self._sum)
        return _root(scaled, self.count)

    def _mean_of_infinities(self) -> float:
        below, above = self._infinite
        if not self.count or (below and above):
            return math.nan
        return -math.inf if below else math.inf


def _root(scaled: int, count: int) -> float:
    """sqrt(scaled) / count in units, without a float that could overflow on the way."""
    if not scaled:
        return 0.0
    # 128 bits before the root are 64 after it: more than a float64 keeps.
    shift = max(0, 128 - scaled.bit_length() + 1)
    shift += shift % 2
    return float(Fraction(math.isqrt(scaled << shift), count << (_UNIT_BITS + shift // 2)))


def _block_sums(values: npt.NDArray[np.float64]) -> tuple[int, int]:
    """Exact sum and sum of squares of at most `_BLOCK` finite values, in units."""
    fractions, exponents = np.frexp(values)
    mantissas = np.ldexp(np.abs(fractions), _MANTISSA_BITS).astype(np.int64)
    signs = np.where(fractions < 0, -1.0, 1.0)
    lowest = int(exponents.min(initial=0))
    places = exponents - lowest
    limbs = [(mantissas >> (_LIMB_BITS * place) & _LIMB_MASK).astype(np.float64) for place in range(3)]
    low, middle, high = limbs
    total = _weighed(places, lowest, [signs * limb for limb in limbs], 1)
    products = [low * low, 2 * low * middle, 2 * low * high + middle * middle, 2 * middle * high, high * high]
    return total, _weighed(places, lowest, products, 2)


def _weighed(places: npt.NDArray[Any], lowest: int, limbs: list[npt.NDArray[np.float64]], power: int) -> int:
    """The sum over all limbs, each shifted by its place and by `power` times its value's exponent."""
    sums = [np.bincount(places, weights=limb) for limb in limbs]
    total = 0
    for place in np.unique(places).tolist():
        part = sum(int(one[place]) << (_LIMB_BITS * index) for index, one in enumerate(sums))
        total += part << power * (place + lowest - _LOWEST_EXPONENT)
    return total


def _integer_sums(values: npt.NDArray[Any], weights: npt.NDArray[np.int64] | None) -> tuple[int, int]:
    if not len(values):
        return 0, 0
    most = max(abs(int(values.min())), abs(int(values.max())))
    count = len(values) if weights is None else int(weights.sum())
    if 2 * most.bit_length() + count.bit_length() > _SAFE_BITS:
        exact = values.astype(object)
        weighed = exact if weights is None else exact * weights.astype(object)
        return int(weighed.sum()), int(np.dot(weighed, exact))
    plain = values.astype(np.int64)
    weighed = plain if weights is None else plain * weights
    return int(weighed.sum()), int(np.dot(weighed, plain))
