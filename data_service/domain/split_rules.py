"""How rows are divided into splits: by a stable hash of keys, by a column's values, by time, or at random.

Each rule is a function of a row alone (its key, its value, its row id), so any part of a version can be divided by
itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
from numpy.typing import NDArray

from data_service.domain.key_hashes import can_be_key, key_hashes
from data_service.domain.random_order import hashes_of_rank, row_hashes
from shared.errors import InvalidArgument, shown
from shared.names import SPLIT, SPLIT_REMEDY

# Values of a column that names splits: more than so many is some other column.
MAX_SPLITS = 256
FILL_REMEDY = "fill or filter nulls before dividing"

_NS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
_DAY_NS = 86_400 * _NS["s"]

Problem = tuple[str, object, str]


@dataclass(frozen=True, kw_only=True)
class Share:
    """A share is `weight` of the sum of all weights."""

    split: str
    weight: float


@dataclass(frozen=True, kw_only=True)
class Period:
    """`before_ns` is in nanoseconds since 1970 (UTC), exclusive; None takes the rest."""

    split: str
    before_ns: int | None


@dataclass(frozen=True)
class Assignment:
    """Row i goes to `splits[choice[i]]`."""

    splits: list[str]
    choice: NDArray[np.intp]


class Divider(Protocol):
    """Divides rows that it gets a table at a time."""

    @property
    def columns(self) -> list[str]:
        """What `assign` reads."""

    def assign(self, rows: pa.Table, row_ids: NDArray[np.int64]) -> Assignment:
        """Raises `InvalidArgument` naming the row that has no split."""


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
            # The first whole unit that is not before: exact, where the time in nanoseconds might overflow.
            bound = -(-period.before_ns // unit_ns)
            choice += np.array([time >= bound for time in times]) if abs(bound) >= 2**63 else times >= bound
        return Assignment([period.split for period in self.periods], choice)


@dataclass(frozen=True, kw_only=True)
class RatioSplit:
    """Divides only once the number of all rows is known: see `divider`."""

    field: ClassVar[str] = "splits.ratio"
    shares: list[Share]
    seed: int

    @property
    def columns(self) -> list[str]:
        return []


SplitRule = HashSplit | ColumnSplit | TimeSplit | RatioSplit


@dataclass(frozen=True)
class RatioDivider:
    """The rows with the smallest hashes of (seed, row id) go to the first split, those from `bounds[0]` on to the
    second, and so on."""

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
    """`row_count` is that of the whole version, whose row ids go from 0 to `row_count`."""
    if not isinstance(rule, RatioSplit):
        return rule
    counts = share_counts(rule.shares, row_count)
    bounds = hashes_of_rank(rule.seed, row_count, list(itertools.accumulate(counts))[:-1])
    return RatioDivider(rule.shares, rule.seed, bounds, counts)


def split_order(rule: SplitRule, found: Sequence[str]) -> list[str]:
    """The splits in the order of their row ids: as the rule gives them, or those found, by the bytes of their names."""
    if isinstance(rule, ColumnSplit):
        return sorted(found)
    return [one.split for one in (rule.periods if isinstance(rule, TimeSplit) else rule.shares)]


def taken_away(rule: SplitRule | None) -> list[str]:
    """Columns that the new version does not have."""
    return [rule.column] if isinstance(rule, ColumnSplit) else []


def column_problems(rule: SplitRule, schema: pa.Schema) -> Iterator[Problem]:
    """What is wrong with the columns that the rule names, as (field, value, remedy)."""
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
    """Whole numbers nearest to each share that add up to all rows: what rounding down leaves goes to those that lost
    most by it (Hamilton's method), of equal ones to the first."""
    weights = _weights(shares)
    exact = [row_count * weight / sum(weights) for weight in weights]
    counts = [int(one) for one in exact]
    by_loss = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_loss[: row_count - sum(counts)]:
        counts[i] += 1
    return counts


def _weights(shares: Sequence[Share]) -> list[Fraction]:
    """Exact: every double is a fraction."""
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
