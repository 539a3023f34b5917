"""The rules that divide rows into splits: by a stable hash of keys, by a column's values, by time, or at random.

An import assigns its rows to splits in order, and row ids to rows.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
import xxhash
from numpy.typing import NDArray

from data_service.domain.import_spec import HoldOut
from data_service.domain.statistics.sketches import mix
from shared.errors import InvalidArgument, shown
from shared.names import SPLIT, SPLIT_REMEDY

# --- Key hashes ---
# Hashes of rows' keys that never change: on any machine, in any release, whatever the width of the integers.
#
# A key is one value of each key column, written as canonical bytes (a type tag, then the value; texts and bytes with
# their length in front, so that ("ab", "c") and ("a", "bc") differ) and hashed with 64-bit XXH3 (Collet, xxHash 0.8),
# whose output is frozen.

_NULL = b"\0"
_BOOL, _INT, _FLOAT, _TEXT, _BYTES, _DATE, _TIMESTAMP, _TIME, _DECIMAL = (bytes([tag]) for tag in range(1, 10))
_NS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}


def can_be_key(arrow_type: pa.DataType) -> bool:
    """Return whether values of this type can be keys: all scalars, but no tensors."""
    return _encoder(arrow_type) is not None


def key_hashes(columns: Sequence[pa.ChunkedArray], seed: int) -> NDArray[np.uint64]:
    """Return one hash a row; nulls are a separate value.

    `columns` are of equal length, at least one.
    """
    if len(columns) == 1:
        values, codes = _distinct(columns[0])
        return np.fromiter((_hash(value, seed) for value in values), np.uint64, len(values))[codes]
    encoded = []
    for column in columns:
        values, codes = _distinct(column)
        encoded.append([values[code] for code in codes.tolist()])
    keys = (b"".join(parts) for parts in zip(*encoded, strict=True))
    return np.fromiter((_hash(key, seed) for key in keys), np.uint64, len(columns[0]))


def _hash(key: bytes, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(key, seed)


def _distinct(column: pa.ChunkedArray) -> tuple[list[bytes], NDArray[np.int64]]:
    """Return the column's distinct values as canonical bytes, and each row's index among them."""
    encode = _encoder(column.type)
    if encode is None:
        raise ValueError(f"values of type {column.type} are no keys")
    encoded = _plain(column).combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.chunk(0) if encoded.num_chunks else pa.array([], encoded.type)
    values = [_NULL, *(_NULL if value is None else encode(value) for value in encoded.dictionary.to_pylist())]
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return values, codes + 1


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert times to their integers, since Python's own have no nanoseconds."""
    if kinds.is_timestamp(column.type) or kinds.is_time64(column.type):
        return column.cast(pa.int64())
    if kinds.is_time32(column.type) or kinds.is_date32(column.type):
        return column.cast(pa.int32()).cast(pa.int64())
    return column


def _encoder(arrow_type: pa.DataType) -> Callable[[Any], bytes] | None:
    if kinds.is_boolean(arrow_type):
        return lambda value: _BOOL + bytes([value])
    if kinds.is_integer(arrow_type):
        return lambda value: _INT + _integer(value)
    if kinds.is_floating(arrow_type):
        return lambda value: _FLOAT + _double(value)
    if kinds.is_string(arrow_type):
        return lambda value: _TEXT + _sized(value.encode())
    if kinds.is_binary(arrow_type) or kinds.is_fixed_size_binary(arrow_type):
        return lambda value: _BYTES + _sized(value)
    if kinds.is_date32(arrow_type):
        return lambda value: _DATE + _integer(value)
    if kinds.is_timestamp(arrow_type):
        return lambda value: _TIMESTAMP + _integer(value * _NS[arrow_type.unit])
    if kinds.is_time(arrow_type):
        return lambda value: _TIME + _integer(value * _NS[arrow_type.unit])
    if kinds.is_decimal128(arrow_type):
        return lambda value: _DECIMAL + _sized(_decimal(value))
    return None


def _integer(value: int) -> bytes:
    return value.to_bytes(16, "little", signed=True)


def _double(value: float) -> bytes:
    if math.isnan(value):
        value = math.nan  # one bit pattern for all NaN
    return struct.pack("<d", value + 0.0)  # turns -0.0 into 0.0


def _sized(value: bytes) -> bytes:
    return len(value).to_bytes(8, "little") + value


def _decimal(value: Decimal) -> bytes:
    """Encode the value alone: 1.50 and 1.5 are equal.

    `normalize` would round to the context's precision.
    """
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    unscaled = int("".join(map(str, digits)))
    while unscaled and unscaled % 10 == 0:
        unscaled, exponent = unscaled // 10, exponent + 1
    return f"{'-' if sign and unscaled else ''}{unscaled}e{exponent if unscaled else 0}".encode()


# --- Random order ---
# A random order of row ids that is the same for the same seed.

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_CHUNK_ROWS = 1 << 18
_RADIX_BITS = 16


def row_hashes(seed: int, row_ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return SplitMix64 (Steele, Lea and Flood 2014) of each row id, in the stream of the seed.

    It is a bijection of the row ids, so there are no ties. Overflow is intended.
    """
    return mix(mix(np.array([seed], np.uint64)) + row_ids.astype(np.uint64) * _GOLDEN)


def hashes_of_rank(seed: int, row_count: int, ranks: Sequence[int]) -> NDArray[np.uint64]:
    """Return for each rank r the hash above exactly r rows' hashes.

    Memory hardly grows with the rows: a first pass counts the hashes by their upper bits, a second one sorts only those
    around the ranks.
    """

    def upper_bits() -> Iterator[tuple[NDArray[np.uint64], NDArray[np.int64]]]:
        for first in range(0, row_count, _CHUNK_ROWS):
            hashes = row_hashes(seed, np.arange(first, min(first + _CHUNK_ROWS, row_count), dtype=np.int64))
            yield hashes, (hashes >> np.uint64(64 - _RADIX_BITS)).astype(np.int64)

    counts = np.zeros(1 << _RADIX_BITS, np.int64)
    for _, buckets in upper_bits():
        counts += np.bincount(buckets, minlength=len(counts))
    upto = np.cumsum(counts)
    wanted = [int(np.searchsorted(upto, rank, side="right")) for rank in ranks]
    found: dict[int, list[NDArray[np.uint64]]] = {bucket: [] for bucket in wanted}
    for hashes, buckets in upper_bits():
        for bucket, pieces in found.items():
            pieces.append(hashes[buckets == bucket])
    bounds = []
    for rank, bucket in zip(ranks, wanted, strict=True):
        if bucket == len(counts):  # no row is left for the later shares
            bounds.append(np.iinfo(np.uint64).max)
            continue
        rows_before = int(upto[bucket] - counts[bucket])
        bounds.append(int(np.sort(np.concatenate(found[bucket]))[rank - rows_before]))
    return np.array(bounds, np.uint64)


# --- Split rules ---
# Each rule is a function of a single row (its key, its value, its row id), so any part of a version can be divided by
# itself.

# The maximum values of a column that names splits: with more, it is probably another column.
MAX_SPLITS = 256
FILL_REMEDY = "fill or filter nulls before dividing"

_DAY_NS = 86_400 * _NS["s"]

Problem = tuple[str, object, str]


@dataclass(frozen=True, kw_only=True)
class Share:
    """The share of a split: `weight` of the sum of all weights."""

    split: str
    weight: float


@dataclass(frozen=True, kw_only=True)
class Period:
    """A period of time.

    `before_ns` is in nanoseconds since 1970 (UTC), exclusive; None takes the rest.
    """

    split: str
    before_ns: int | None


@dataclass(frozen=True)
class Assignment:
    """The splits of rows: row i goes to `splits[choice[i]]`."""

    splits: list[str]
    choice: NDArray[np.intp]


class Divider(Protocol):
    """Divides rows, a table at a time."""

    @property
    def columns(self) -> list[str]:
        """The columns that `assign` reads."""

    def assign(self, rows: pa.Table, row_ids: NDArray[np.int64]) -> Assignment:
        """Assign each row to a split; raise `InvalidArgument` naming a row without a split."""


@dataclass(frozen=True, kw_only=True)
class HashSplit:
    field: ClassVar[str] = "splits.hash"
    key_columns: list[str]
    shares: list[Share]
    seed: int

    @property
    def columns(self) -> list[str]:
        return self.key_columns

    def assign(self, rows: pa.Table, row_ids: NDArray[np.int64]) -> Assignment:  # noqa: ARG002
        hashes = key_hashes([rows[name] for name in self.key_columns], self.seed)
        total = sum(_weights(self.shares))
        bounds = [int(upto * 2**64 / total) for upto in itertools.accumulate(_weights(self.shares))][:-1]
        return _by_bounds(self.shares, np.array(bounds, np.uint64), hashes)


@dataclass(frozen=True, kw_only=True)
class ColumnSplit:
    field: ClassVar[str] = "splits.column"
    column: str

    @property
    def columns(self) -> list[str]:
        return [self.column]

    def assign(self, rows: pa.Table, row_ids: NDArray[np.int64]) -> Assignment:
        encoded = rows[self.column].combine_chunks().dictionary_encode()
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.chunk(0) if encoded.num_chunks else pa.array([], encoded.type)
        names = encoded.dictionary.to_pylist()
        codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.intp)
        for code, name in [(-1, None), *enumerate(names)]:
            if (name is None or not SPLIT.fullmatch(name)) and (codes == code).any():
                row_id = row_ids[np.argmax(codes == code)]
                remedy = FILL_REMEDY if name is None else SPLIT_REMEDY
                raise _refused("splits.column.column", self.column, row_id, name, remedy)
        return Assignment(names, codes)


@dataclass(frozen=True, kw_only=True)
class TimeSplit:
    field: ClassVar[str] = "splits.time"
    column: str
    periods: list[Period]

    @property
    def columns(self) -> list[str]:
        return [self.column]

    def assign(self, rows: pa.Table, row_ids: NDArray[np.int64]) -> Assignment:
        column = rows[self.column]
        if column.null_count:
            row_id = row_ids[pc.index(column.is_null(), True).as_py()]
            raise _refused("splits.time.column", self.column, row_id, None, FILL_REMEDY)
        unit_ns = _DAY_NS if kinds.is_date32(column.type) else _NS[column.type.unit]
        integers = column.cast(pa.int32()) if kinds.is_date32(column.type) else column
        times = integers.cast(pa.int64()).to_numpy()
        choice = np.zeros(len(times), np.intp)
        for period in self.periods[:-1]:
            assert period.before_ns is not None
            # The first whole unit that is not before: exact, even if the time in nanoseconds might overflow.
            bound = -(-period.before_ns // unit_ns)
            choice += np.array([time >= bound for time in times]) if abs(bound) >= 2**63 else times >= bound
        return Assignment([period.split for period in self.periods], choice)


@dataclass(frozen=True, kw_only=True)
class RatioSplit:
    """Divides at random; needs the number of all rows: see `divider`."""

    field: ClassVar[str] = "splits.ratio"
    shares: list[Share]
    seed: int

    @property
    def columns(self) -> list[str]:
        return []


SplitRule = HashSplit | ColumnSplit | TimeSplit | RatioSplit


@dataclass(frozen=True)
class RatioDivider:
    """Divides by the hashes of (seed, row id).

    The rows with the smallest hashes go to the first split, those from `bounds[0]` on to the second, and so on.
    """

    shares: list[Share]
    seed: int
    bounds: NDArray[np.uint64]
    counts: list[int]

    @property
    def columns(self) -> list[str]:
        return []

    def assign(self, rows: pa.Table | None, row_ids: NDArray[np.int64]) -> Assignment:  # noqa: ARG002
        return _by_bounds(self.shares, self.bounds, row_hashes(self.seed, row_ids))


def divider(rule: SplitRule, row_count: int) -> Divider:
    """Return the divider of a rule.

    `row_count` is that of the whole version, with row ids from 0 to `row_count`.
    """
    if not isinstance(rule, RatioSplit):
        return rule
    counts = share_counts(rule.shares, row_count)
    bounds = hashes_of_rank(rule.seed, row_count, list(itertools.accumulate(counts))[:-1])
    return RatioDivider(rule.shares, rule.seed, bounds, counts)


def split_order(rule: SplitRule, found: Sequence[str]) -> list[str]:
    """Return the splits in the order of their row ids.

    The order is that of the rule, or for splits found in a column the byte order of their names.
    """
    if isinstance(rule, ColumnSplit):
        return sorted(found)
    return [one.split for one in (rule.periods if isinstance(rule, TimeSplit) else rule.shares)]


def taken_away(rule: SplitRule | None) -> list[str]:
    """Return the columns that the new version does not have."""
    return [rule.column] if isinstance(rule, ColumnSplit) else []


def column_problems(rule: SplitRule, schema: pa.Schema) -> Iterator[Problem]:
    """Yield the problems of the rule's columns, as (field, value, remedy)."""
    if isinstance(rule, HashSplit):
        for index, name in enumerate(rule.key_columns):
            field = f"splits.hash.key_columns[{index}]"
            yield from _column_problem(schema, field, name, can_be_key, "name a column of scalars")
    elif isinstance(rule, ColumnSplit):
        yield from _column_problem(
            schema, "splits.column.column", rule.column, kinds.is_string, "name a column of strings"
        )
    elif isinstance(rule, TimeSplit):
        yield from _column_problem(
            schema, "splits.time.column", rule.column, _is_time, "name a column of dates or timestamps"
        )


def share_counts(shares: Sequence[Share], row_count: int) -> list[int]:
    """Return whole numbers nearest to the shares that add up to all rows.

    The remainder of rounding down goes to those that lost most by it (Hamilton's method), of equal ones to the first.
    """
    weights = _weights(shares)
    exact = [row_count * weight / sum(weights) for weight in weights]
    counts = [int(one) for one in exact]
    by_loss = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_loss[: row_count - sum(counts)]:
        counts[i] += 1
    return counts


def _weights(shares: Sequence[Share]) -> list[Fraction]:
    """Return the exact weights; every double is a fraction."""
    return [Fraction(share.weight) for share in shares]


def _by_bounds(shares: Sequence[Share], bounds: NDArray[np.uint64], hashes: NDArray[np.uint64]) -> Assignment:
    return Assignment([share.split for share in shares], np.searchsorted(bounds, hashes, side="right"))


def _column_problem(schema: pa.Schema, field: str, name: str, fits: Any, remedy: str) -> Iterator[Problem]:
    if name not in schema.names:
        yield field, name, f"use one of {', '.join(schema.names)}"
    elif not fits(schema.field(name).type):
        yield field, name, f"it is of type {schema.field(name).type}; {remedy}"


def _is_time(arrow_type: pa.DataType) -> bool:
    return bool(kinds.is_timestamp(arrow_type) or kinds.is_date32(arrow_type))


def _refused(field: str, column: str, row_id: int, value: object, remedy: str) -> InvalidArgument:
    why = f"row {row_id} has {'a null' if value is None else shown(value)} in column {column!r}: {remedy}"
    return InvalidArgument(
        f"{field}: {why}",
        reason="ROW_WITHOUT_SPLIT",
        metadata={"field": field, "column": column, "row_id": str(row_id)},
        fields=[(field, why)],
    )


# --- Ranges and row ids ---

# The rows that are hashed at once.
CHUNK_ROWS = 1 << 20
# One byte a row.
REMEMBERED_ROWS = 1 << 26
# 65,536 counts: of a billion rows, some 15,000 share these bits.
_HIGH_BITS = 16

Hashes = npt.NDArray[np.uint64]
Choice = npt.NDArray[np.uint8]


class LayoutError(ValueError):
    """The splits cannot be divided as requested; the text says why.

    `hold_out` is the index of the one at fault, or None.
    """

    def __init__(self, message: str, hold_out: int | None = None) -> None:
        super().__init__(message)
        self.hold_out = hold_out


class EmptySplit(LayoutError):
    """The split has no rows."""

    def __init__(self, split: str) -> None:
        super().__init__(f"the split {split!r} has no rows")
        self.split = split


@dataclass(frozen=True)
class SplitRange:
    """The row ids of a split: `row_count` ids from `first_row_id`."""

    name: str
    first_row_id: int
    row_count: int


@dataclass(frozen=True)
class Routing:
    """The targets of an imported split's rows; targets[0] is the split itself.

    Target k from 1 on takes the rows whose hash in the stream of `seeds[k - 1]` is at most `limits[k - 1]`, unless an
    earlier target took them. `counts` has the rows of each target. Small and picklable, however many rows there are.
    """

    targets: list[str]
    counts: list[int]
    seeds: tuple[int, ...] = ()
    limits: tuple[int, ...] = ()

    def choice(self, first: int, count: int) -> Choice | None:
        """Return the index of the target of each of `count` rows from row `first` of the split on: (count,).

        None if all rows stay.
        """
        if not self.seeds:
            return None
        choice = np.zeros(count, np.uint8)
        for target, (seed, limit) in enumerate(zip(self.seeds, self.limits, strict=True), start=1):
            taken = ordinal_hashes(seed, count, first) <= np.uint64(limit)
            choice[taken & (choice == 0)] = target
        return choice

    def counts_of(self, first: int, count: int) -> list[int]:
        """Return how many of `count` rows from row `first` on each target has."""
        if not self.seeds:
            return [count]
        counts = np.zeros(len(self.targets), np.int64)
        for begin, rows in _chunks(first, count):
            choice = self.choice(begin, rows)
            assert choice is not None  # as there are seeds
            counts += np.bincount(choice, minlength=len(self.targets))
        return [int(rows) for rows in counts]


def held_out_count(row_count: int, fraction: float) -> int:
    """Return the nearest whole number of at least 1; a half is rounded up."""
    return max(1, math.floor(row_count * fraction + 0.5))


def route(split: str, row_count: int, hold_outs: Sequence[HoldOut]) -> Routing:
    """Divide `hold_outs`, in order, from an imported split of `row_count` rows.

    Each fraction is of the split as it was imported. A hold-out takes the remaining rows with the smallest hash of (its
    seed, the row's ordinal), instead of a random generator whose stream a new release may change. Memory stays bounded:
    a hold-out is described by its largest hash. Raises `LayoutError` unless at least one row remains, `EmptySplit` if
    there was none.
    """
    own = [(index, out) for index, out in enumerate(hold_outs) if out.from_split == split]
    if not own:
        return Routing([split], [row_count])
    if not row_count:
        raise EmptySplit(split)
    routing = Routing([split], [row_count])
    free = _FreeRows(row_count)
    for index, hold_out in own:
        wanted, left = held_out_count(row_count, hold_out.fraction), routing.counts[0]
        if wanted >= left:
            raise LayoutError(
                f"the hold-out {hold_out.to_split!r} takes {wanted} rows of {split!r}, which has {left} left; at least "
                "one must stay",
                index,
            )
        # The hash is a bijection of the ordinal, so no two rows tie.
        limit = _smallest(free, routing, hold_out.seed, wanted)
        free.take(hold_out.seed, limit)
        routing = Routing(
            [*routing.targets, hold_out.to_split],
            [left - wanted, *routing.counts[1:], wanted],
            (*routing.seeds, hold_out.seed),
            (*routing.limits, limit),
        )
    return routing


class _FreeRows:
    """The rows of a split that no hold-out took yet.

    Remembers them for a split of at most `REMEMBERED_ROWS`; those of a larger one are computed again and again.
    """

    def __init__(self, row_count: int) -> None:
        self.row_count = row_count
        self._free = np.ones(row_count, np.bool_) if row_count <= REMEMBERED_ROWS else None

    def hashes(self, routing: Routing, seed: int) -> Iterator[Hashes]:
        """Yield the hashes of the free rows, some at a time; `routing` has the hold-outs so far."""
        for first, count in _chunks(0, self.row_count):
            hashes = ordinal_hashes(seed, count, first)
            if self._free is not None:
                yield hashes[self._free[first : first + count]]
            else:
                choice = routing.choice(first, count)
                yield hashes if choice is None else hashes[choice == 0]

    def take(self, seed: int, limit: int) -> None:
        """Take the rows whose hash is at most `limit`."""
        if self._free is not None:
            for first, count in _chunks(0, self.row_count):
                self._free[first : first + count] &= ordinal_hashes(seed, count, first) > np.uint64(limit)


def _smallest(free: _FreeRows, routing: Routing, seed: int, wanted: int) -> int:
    """Return the hash at place `wanted`, from 1 on, among the ascending hashes of the free rows.

    Counts the hashes by their high bits first, and then looks only at those that share the wanted one's.
    """
    by_high_bits = np.zeros(1 << _HIGH_BITS, np.int64)
    for hashes in free.hashes(routing, seed):
        by_high_bits += np.bincount(_high_bits(hashes), minlength=1 << _HIGH_BITS)
    ends = np.cumsum(by_high_bits)
    high = int(np.searchsorted(ends, wanted))
    place = wanted - 1 - int(ends[high] - by_high_bits[high])
    alike = [hashes[_high_bits(hashes) == high] for hashes in free.hashes(routing, seed)]
    return int(np.partition(np.concatenate(alike), place)[place])


def _high_bits(hashes: Hashes) -> npt.NDArray[np.int64]:
    return (hashes >> np.uint64(64 - _HIGH_BITS)).astype(np.int64)


def _chunks(first: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of consecutive runs of at most `CHUNK_ROWS` rows."""
    for begin in range(first, first + count, CHUNK_ROWS):
        yield begin, min(CHUNK_ROWS, first + count - begin)


def lay_out(routings: Iterable[Routing], order: Sequence[str]) -> list[SplitRange]:
    """Assign contiguous row ids: the imported splits in order, then the hold-outs in theirs.

    `order` names all of them. Raises `EmptySplit` for a split without rows.
    """
    counts: dict[str, int] = {}
    for routing in routings:
        counts.update(zip(routing.targets, routing.counts, strict=True))
    ranges = []
    first = 0
    for name in order:
        if not counts[name]:
            raise EmptySplit(name)
        ranges.append(SplitRange(name, first, counts[name]))
        first += counts[name]
    return ranges


def ordinal_hashes(seed: int, row_count: int, first: int = 0) -> Hashes:
    """Return SplitMix64 (Steele, Lea and Flood 2014) of the ordinals from `first` on, in the stream of the seed.

    Overflow is intended.
    """
    begin = _mix(np.array([seed], np.uint64) + _GOLDEN)
    return _mix(begin + np.arange(first + 1, first + row_count + 1, dtype=np.uint64) * _GOLDEN)


def _mix(z: Hashes) -> Hashes:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = z ^ (z >> np.uint64(31))
    return mixed
