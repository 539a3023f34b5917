"""The sketches that statistics use: stable hashes, exact sums, a sample of rows, frequent values, and quantiles.

None depends on the order in which values were seen or on how they were grouped, so parts can be merged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as kinds
import xxhash
from PIL import Image

# --- Hashing ---
# Hashes that are the same on every machine and in every run.
#
# They determine which rows a sample takes and how many distinct values a column has, so they may never change: two
# versions of the same rows would then differ in their reports.

Hashes = npt.NDArray[np.uint64]

_DECIMAL_BYTES = 16
_ROW_SALT = np.uint64(0x6D696C6C72616365)


def mix(words: npt.NDArray[Any]) -> Hashes:
    """A bijection of 64-bit words whose result looks random.

    Source: the finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    """
    z = words.view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def row_hashes(row_ids: npt.NDArray[np.int64]) -> Hashes:
    """Return one hash a row; different rows never share one."""
    return mix(row_ids.view(np.uint64) ^ _ROW_SALT)


def float_words(values: npt.NDArray[Any]) -> Hashes:
    """Return floats as 64-bit words, equal for equal values: -0.0 as 0.0, and every NaN alike."""
    doubles = values.astype(np.float64) + 0.0
    doubles[np.isnan(doubles)] = np.nan
    return doubles.view(np.uint64)


def words_of(array: pa.Array) -> npt.NDArray[np.uint64]:
    """Return values without nulls as words that are equal if and only if the values are.

    The shape is (N,), or (N, 2) for decimals. For numbers, booleans, dates, times, timestamps and decimals of 128 bits.
    """
    arrow_type = array.type
    if kinds.is_floating(arrow_type):
        return float_words(array.to_numpy(zero_copy_only=False))
    if kinds.is_boolean(arrow_type):
        return np.asarray(array.to_numpy(zero_copy_only=False), np.uint64)
    if kinds.is_decimal(arrow_type):
        data = np.frombuffer(array.buffers()[1], np.uint64)
        first = array.offset * _DECIMAL_BYTES // 8
        words: npt.NDArray[np.uint64] = data[first : first + 2 * len(array)].reshape(-1, 2)
        return words
    return integers_of(array).view(np.uint64)


def integers_of(array: pa.Array) -> npt.NDArray[Any]:
    """Return integers, dates, times and timestamps without nulls as int64 in their own unit; uint64 stays uint64."""
    if kinds.is_temporal(array.type):
        array = array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values if values.dtype == np.uint64 else values.astype(np.int64, copy=False)


def hash_words(words: npt.NDArray[np.uint64]) -> Hashes:
    """Hash (N,) or (N, 2) words to N hashes."""
    if words.ndim == 1:
        return mix(words)
    return mix(np.ascontiguousarray(words[:, 0]) ^ mix(np.ascontiguousarray(words[:, 1])))


def hash_bytes(values: Iterable[bytes | memoryview]) -> Hashes:
    """Return XXH3 of each value's bytes."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, values), np.uint64)


# The values' mean size up to which they are copied to be hashed.
_COPIED_BYTES = 4096


def byte_slices(array: pa.Array) -> Iterator[memoryview]:
    """Yield the values of strings, bytes, and fixed-size bytes, without nulls."""
    if not len(array):
        return
    if kinds.is_fixed_size_binary(array.type):
        width = array.type.byte_width
        data = memoryview(array.buffers()[1])
        for start in range(array.offset * width, (array.offset + len(array)) * width, width):
            yield data[start : start + width]
        return
    is_large = kinds.is_large_string(array.type) or kinds.is_large_binary(array.type)
    _, offsets, values = array.buffers()
    places = np.frombuffer(offsets, np.int64 if is_large else np.int32)
    ends = places[array.offset : array.offset + len(array) + 1].tolist()
    data = memoryview(values if values is not None else b"")
    for start, end in pairwise(ends):
        yield data[start:end]


def value_hashes(array: pa.Array) -> Hashes:
    """Hash the values of strings, bytes, and fixed-size bytes, without nulls."""
    # Arrow makes `bytes` of small values in half the time that views of them take.
    if array.nbytes > _COPIED_BYTES * len(array):
        return hash_bytes(byte_slices(array))
    is_text = kinds.is_string(array.type) or kinds.is_large_string(array.type)
    large = pa.large_binary() if kinds.is_large_string(array.type) else pa.binary()
    return hash_bytes((array.cast(large) if is_text else array).to_pylist())


# --- Moments ---
# Exact sums, which neither the order nor the grouping of values can change.
#
# The values of a block are cut into limbs: each is rounded to a grid, what that leaves over to a grid that is finer by
# _LIMB_BITS, and so on until nothing is left, after three or four limbs in ordinary columns. Sums of limbs, and of
# products of two limbs, are integers that a float64 holds exactly, in whatever order they are added. They are added to
# one Python integer in units of the smallest float64. (Rounding to a grid by an added constant: Demmel and Nguyen, Fast
# Reproducible Floating-Point Summation, 2013.)

# Every float64 is a multiple of 2**-_UNIT_BITS. All sums are in these units, all sums of squares in their square.
_UNIT_BITS = 1126
# Products of limbs have 38 bits, and the sum of _BLOCK of them 52: below the 53 bits of a float64.
_LIMB_BITS = 19
_BLOCK = 1 << 13
# Values that are smaller than the largest one by more bits are summed on their own: the number of limbs stays small.
_SPREAD_BITS = 60
# Beyond these bits a scale itself would overflow or lose bits, so that values are brought nearer to 1 first.
_PLAIN_BITS, _STEP_BITS = 900, 600
# Integers are squared in int64 as long as no sum of a block can overflow. Larger ones are cut into three limbs.
_SAFE_BITS = 62
_INTEGER_LIMB_BITS = 22


class ExactMoments:
    """Count, sum and sum of squares.

    `mean` and `deviation` are the nearest float64 to the exact result. Infinities are counted separately: they make
    mean and deviation as in IEEE 754 (inf or NaN).
    """

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0
        self._squares = 0
        self._infinite = [0, 0]

    def add_floats(self, values: npt.NDArray[np.float64]) -> None:
        """Add values without NaN."""
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
        """Add integers of any dtype; value i occurs `weights[i]` times."""
        total, squares = _integer_sums(values, weights)
        self.count += len(values) if weights is None else int(weights.sum())
        self._sum += total << _UNIT_BITS
        self._squares += squares << 2 * _UNIT_BITS

    def add_rows(self, count: int, sums: npt.NDArray[np.float64], squares: npt.NDArray[np.float64]) -> None:
        """Add rows that have each summed their own values; all sums are finite."""
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
        """The mean; NaN without values."""
        if not self.count or any(self._infinite):
            return self._mean_of_infinities()
        return float(Fraction(self._sum, self.count << _UNIT_BITS))

    @property
    def deviation(self) -> float:
        """The population's standard deviation; NaN without values, or if a value is infinite."""
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
    """Return sqrt(scaled) / count in units, without a float that could overflow on the way."""
    if not scaled:
        return 0.0
    # 128 bits before the root are 64 after it: more than a float64 has.
    shift = max(0, 128 - scaled.bit_length() + 1)
    shift += shift % 2
    return float(Fraction(math.isqrt(scaled << shift), count << (_UNIT_BITS + shift // 2)))


def _block_sums(values: npt.NDArray[np.float64]) -> tuple[int, int]:
    """Return the exact sum and sum of squares of at most `_BLOCK` finite values, in units."""
    total = squares = 0
    while len(values):
        sizes = np.abs(values)
        most = float(sizes.max())
        if most == 0:
            break
        bits = math.frexp(most)[1]
        far = math.ldexp(1.0, bits - _SPREAD_BITS)
        later = values[:0]
        if float(sizes.min()) < far:
            later = values[(sizes < far) & (sizes > 0)]
            values = values[sizes >= far]
        limbs = _limbs(_scaled(values, -bits))
        for place, limb in enumerate(limbs, start=1):
            total += _in_units(float(limb.sum()), place, bits + _UNIT_BITS)
            for other_place, other in enumerate(limbs[:place], start=1):
                product = _in_units(float(np.dot(limb, other)), place + other_place, 2 * (bits + _UNIT_BITS))
                squares += product if other is limb else 2 * product
        values = later
    return total, squares


def _limbs(values: npt.NDArray[np.float64]) -> list[npt.NDArray[np.float64]]:
    """Return arrays whose sum is `values`, which are below 1.

    Those of the array at place k, from 1 on, are multiples of 2**(-k * _LIMB_BITS), and at most 2**_LIMB_BITS times it.
    """
    limbs: list[npt.NDArray[np.float64]] = []
    left = values
    while float(left.max()) > 0 or float(left.min()) < 0:
        # A sum with this constant has no bits below those of the grid.
        constant = math.ldexp(1.5, 52 - _LIMB_BITS * (len(limbs) + 1))
        limb = left + constant
        limb -= constant
        limbs.append(limb)
        left = left - limb
    return limbs


def _scaled(values: npt.NDArray[np.float64], bits: int) -> npt.NDArray[np.float64]:
    """Return the values times 2**bits, which moves the largest one to between 1/2 and 1."""
    if bits > _PLAIN_BITS:
        return _scaled(values * math.ldexp(1.0, _STEP_BITS), bits - _STEP_BITS)
    if bits < -_PLAIN_BITS:
        return _scaled(values * math.ldexp(1.0, -_STEP_BITS), bits + _STEP_BITS)
    return values * math.ldexp(1.0, bits)


def _in_units(limb_sum: float, places: int, bits: int) -> int:
    """Return a multiple of 2**(-places * _LIMB_BITS), times 2**bits, which together are whole."""
    whole, shift = int(math.ldexp(limb_sum, places * _LIMB_BITS)), bits - places * _LIMB_BITS
    return whole << shift if shift >= 0 else whole >> -shift


def _integer_sums(values: npt.NDArray[Any], weights: npt.NDArray[np.int64] | None) -> tuple[int, int]:
    if not len(values):
        return 0, 0
    most = max(abs(int(values.min())), abs(int(values.max())))
    count = len(values) if weights is None else int(weights.sum())
    if 2 * most.bit_length() + count.bit_length() <= _SAFE_BITS:
        limbs = [values.astype(np.int64)]
    elif 2 * _INTEGER_LIMB_BITS + count.bit_length() <= _SAFE_BITS:
        limbs = _integer_limbs(values)
    else:
        limbs = [values.astype(object)]
        weights = None if weights is None else weights.astype(object)
    total = squares = 0
    for place, limb in enumerate(limbs):
        weighed = limb if weights is None else limb * weights
        total += int(weighed.sum()) << place * _INTEGER_LIMB_BITS
        for other_place, other in enumerate(limbs[: place + 1]):
            product = int(np.dot(weighed, other)) << (place + other_place) * _INTEGER_LIMB_BITS
            squares += product if other is limb else 2 * product
    return total, squares


def _integer_limbs(values: npt.NDArray[Any]) -> list[npt.NDArray[np.int64]]:
    """Return int64 arrays of at most 22 bits; that at place k, from 0 on, counts 2**(22 * k)."""
    bits, mask = _INTEGER_LIMB_BITS, values.dtype.type(2**_INTEGER_LIMB_BITS - 1)
    parts = (values & mask, values >> bits & mask, values >> 2 * bits)
    return [part.astype(np.int64) for part in parts]


# --- Sampling ---
# A sample of a column that depends on the row ids alone.
#
# Every value has a priority: its level (0 for the first value taken from a row, 1 for the second, …) and then its row's
# hash. The sample is the `SAMPLE` values with the lowest priority, which is the same whatever the order of the rows and
# however they are divided: bottom-k sampling (Cohen, Kaplan: Summarizing data using bottom-k sketches, 2007).

SAMPLE = 4096


class Sample:
    """At most `SAMPLE` values, or all if there are no more; `values` have `dtype`.

    Once it is full, candidates wait until there are as many as it holds: it is sorted a few times, not for each chunk.
    """

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._levels = np.empty(0, np.uint16)
        self._hashes = np.empty(0, np.uint64)
        self._values = np.empty(0, dtype)
        self._waiting: list[tuple[npt.NDArray[np.uint16], Hashes, npt.NDArray[Any]]] = []

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return {name: value for name, value in vars(self).items() if name != "_waiting"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state, _waiting=[])

    @property
    def values(self) -> npt.NDArray[Any]:
        self._settle()
        return self._values

    def add(self, hashes: Hashes, values: npt.NDArray[Any]) -> None:
        """Add one value of each row."""
        self._add_level(0, hashes, values)

    def add_rows(self, hashes: Hashes, rows: npt.NDArray[Any]) -> None:
        """Add rows of K values each, of shape (B, K); NaN is ignored."""
        per_row = rows.shape[1]
        stride = _coprime_stride(per_row)
        first = mix(hashes) % np.uint64(max(per_row, 1))
        for level in range(min(per_row, SAMPLE)):
            if self._is_full and level > self._levels[-1]:
                break
            places = (first.astype(np.int64) + level * stride) % per_row
            self._add_level(level, hashes, rows[np.arange(len(rows)), places])

    def merge(self, other: Sample) -> None:
        other._settle()
        self._add_candidates(other._levels, other._hashes, other._values)

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
            self._add_candidates(np.full(len(values), level, np.uint16), hashes, values)

    def _add_candidates(self, levels: npt.NDArray[np.uint16], hashes: Hashes, values: npt.NDArray[Any]) -> None:
        self._waiting.append((levels, hashes, values.astype(self._values.dtype, copy=False)))
        if not self._is_full or sum(len(waiting) for waiting, _, _ in self._waiting) >= SAMPLE:
            self._settle()

    def _settle(self) -> None:
        """Take the waiting candidates into the sample."""
        if not self._waiting:
            return
        columns = zip((self._levels, self._hashes, self._values), *self._waiting, strict=True)
        levels, hashes, values = (np.concatenate(column) for column in columns)
        self._waiting = []
        # Within a level no two rows share a hash.
        order = (np.lexsort((hashes, levels)) if levels.any() else np.argsort(hashes))[:SAMPLE]
        self._levels, self._hashes, self._values = levels[order], hashes[order], values[order]


def _coprime_stride(length: int) -> int:
    """Return a step that visits all of `length` places, far apart: close to the golden section."""
    stride = max(1, round(length * 0.618))
    while math.gcd(stride, length) != 1:
        stride += 1
    return stride


# --- Values ---
# The number of distinct values of a column, and its frequent values.

EXACT_DISTINCT = 4096
MAX_FREQUENT = 1000
# The limit of all distinct texts together: a column of long texts would make a report of megabytes.
MAX_FREQUENT_BYTES = 256 * 1024


class DistinctCount:
    """Counts distinct values by their lowest `EXACT_DISTINCT + 1` hashes.

    The count is exact while there are no more. Beyond that, the k-th lowest hash estimates their density; the standard
    error is 1 / sqrt(k - 2), 1.6 %. Source: Bar-Yossef and others, Counting distinct elements in a data stream, 2002.

    New hashes wait until there are `EXACT_DISTINCT`: they are sorted together.
    """

    def __init__(self) -> None:
        self._least: Hashes = np.empty(0, np.uint64)
        self._waiting: list[Hashes] = []

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return {"_least": self._least}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state, _waiting=[])

    def add(self, hashes: Hashes) -> None:
        if len(self._least) > EXACT_DISTINCT:
            hashes = hashes[hashes < self._least[-1]]
        if len(hashes):
            self._waiting.append(hashes)
            if sum(map(len, self._waiting)) >= EXACT_DISTINCT:
                self._settle()

    def merge(self, other: DistinctCount) -> None:
        other._settle()
        self.add(other._least)

    def _settle(self) -> None:
        """Take the waiting hashes into account."""
        if not self._waiting:
            return
        # np.unique of these versions of numpy takes 25 times as long as the sort.
        together = np.sort(np.concatenate([self._least, *self._waiting]))
        self._waiting = []
        first = np.append(True, together[1:] != together[:-1])
        self._least = together[first][: EXACT_DISTINCT + 1]

    @property
    def is_exact(self) -> bool:
        self._settle()
        return len(self._least) <= EXACT_DISTINCT

    @property
    def count(self) -> int:
        if self.is_exact:
            return len(self._least)
        density = (int(self._least[-1]) + 1) / 2**64
        return round((len(self._least) - 1) / density)


class FrequentValues:
    """Exact counts for at most `MAX_FREQUENT` distinct values; `None` after that, for good.

    That does not depend on the order: a part with too many values makes the whole have too many.
    """

    def __init__(self) -> None:
        self.counts: dict[Any, int] | None = {}
        self._bytes = 0

    def add(self, values: Iterable[Any], counts: Iterable[int]) -> None:
        """Add distinct values with their counts."""
        mine = self.counts
        if mine is None:
            return
        for value, count in zip(values, counts, strict=True):
            if value in mine:
                mine[value] += count
                continue
            mine[value] = count
            self._bytes += len(value.encode()) if isinstance(value, str) else 0
            if len(mine) > MAX_FREQUENT or self._bytes > MAX_FREQUENT_BYTES:
                self.close()
                return

    def close(self) -> None:
        """Stop counting, because there are too many values."""
        self.counts = None

    def merge(self, other: FrequentValues) -> None:
        theirs: Mapping[Any, int] | None = other.counts
        if theirs is None:
            self.close()
        else:
            self.add(theirs.keys(), theirs.values())


# The number of values of a byte.
BYTE_VALUES = 256


def byte_counts(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Return the counts of the 256 byte values.

    Pillow counts the four bytes of a pixel separately, so equal neighbours cause no dependency between counts. bincount
    would first convert each byte to a 64-bit index.
    """
    whole = len(values) // 4 * 4
    counts: npt.NDArray[np.int64] = np.bincount(values[whole:], minlength=BYTE_VALUES).astype(np.int64)
    if whole:
        pixels = Image.frombuffer("RGBA", (whole // 4, 1), values[:whole], "raw", "RGBA", 0, 1)
        counts += np.array(pixels.histogram(), np.int64).reshape(4, BYTE_VALUES).sum(axis=0)
    return counts


# --- Distribution ---
# Quantiles and histograms of values that each stand for a number of rows.

QUANTILE_PERCENTS = (1, 5, 25, 50, 75, 95, 99)
BARS = 20


@dataclass(frozen=True)
class Weighted:
    """Weighted values.

    `values` are without NaN, in any order; value i counts `weights[i]` times (once if None).
    """

    values: npt.NDArray[Any]
    weights: npt.NDArray[np.int64] | None = None

    def quantiles(self) -> list[Any]:
        """Return the values at `QUANTILE_PERCENTS`.

        Each is the lowest value at or below which that share lies, so it always occurs in the data.
        """
        order = np.argsort(self.values, kind="stable")
        reached = np.cumsum(self._weights()[order])
        if not len(reached):
            return []
        total = int(reached[-1])
        ranks = [max(1, -(-percent * total // 100)) for percent in QUANTILE_PERCENTS]
        values: list[Any] = self.values[order][np.searchsorted(reached, ranks)].tolist()
        return values

    def histogram(self, least: Any, most: Any, total: int, *, is_integer: bool) -> list[int]:
        """Return counts in bars from `least` to `most`, scaled to the sum `total`.

        There is a bar for each integer if at most `BARS` are possible, else `BARS` of equal width. Empty if an end is
        infinite.
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
    """Scale the counts to the sum `total`; the largest remainders are rounded up."""
    given = sum(counts)
    if not given:
        return counts
    parts = [divmod(count * total, given) for count in counts]
    missing = total - sum(whole for whole, _ in parts)
    raised = set(sorted(range(len(parts)), key=lambda index: (-parts[index][1], index))[:missing])
    return [whole + (index in raised) for index, (whole, _) in enumerate(parts)]


def _places(values: npt.NDArray[Any], least: Any, most: Any) -> npt.NDArray[np.int64]:
    if values.dtype.kind in "iu":  # subtracts as integers, since close large ones are equal as floats
        share = (values.astype(np.uint64) - np.uint64(int(least) % 2**64)) / (int(most) - int(least))
    elif math.isinf(most - least):  # half of each avoids the overflow of the difference
        share = (values / 2 - least / 2) / (most / 2 - least / 2)
    else:
        share = (values - least) / (most - least)
    places: npt.NDArray[np.int64] = np.floor(share * BARS).astype(np.int64)
    return places
