"""Quality checks of rows.

Conditions on single values, uniqueness over all rows, and the handling of rows that fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
import xxhash

from data_service.domain.checks import (
    CHECK_FAILED,
    Check,
    CheckResult,
    Condition,
    NotNull,
    OneOf,
    Pattern,
    Range,
    Unique,
)
from data_service.domain.statistics import tensor_rows
from data_service.domain.statistics.sketches import byte_slices, hash_words, words_of
from shared.errors import FailedPrecondition
from shared.value_texts import value_shown

# --- Checks of rows ---
# Quality checks of rows: which rows pass, and the handling of the others.
#
# Each check evaluates a row by itself, except for `unique`, which is evaluated last, among the rows that pass
# everything else: so a row that is left out for another reason never makes a good one a repeat.

PASSES = -1


class RepeatFinder(Protocol):
    """Finds rows that repeat the value of an earlier one.

    Implemented by `Repeats` (from an earlier pass) and `KeepFirst`.
    """

    def find(self, check: int, array: pa.Array, ordinals: Ordinals) -> Mask: ...


@dataclass(frozen=True)
class Failure:
    """The first row that violates a failing check."""

    ordinal: int
    check: int
    value: str


@dataclass(frozen=True)
class RowVerdict:
    """The verdict on a table's rows.

    `first_failed` is the index of the first check that a row fails, -1 if it passes all. `violations` counts the rows
    that fail each check. `failure` is set if a row violates a failing check.
    """

    checks: Sequence[Check]
    first_failed: npt.NDArray[np.int16]
    violations: npt.NDArray[np.int64]
    failure: Failure | None

    @property
    def keep(self) -> Mask:
        kept: Mask = self.first_failed == PASSES
        return kept

    def quarantined(self) -> Iterator[tuple[int, str]]:
        """Yield (row's index in the table, reason) for each row that is left out."""
        for row in np.flatnonzero(self.first_failed != PASSES).tolist():
            check = self.checks[self.first_failed[row]]
            if check.quarantines:
                yield row, check.reason()


class RowChecks:
    """The row checks among `checks`; keeps no state about rows.

    Picklable. Ordinals order the rows of a version and identify them: a row's id, or its position in the source. An int
    is the ordinal of the table's first row, with consecutive ones following; an array has one for each row.
    """

    def __init__(self, checks: Sequence[Check], schema: pa.Schema) -> None:
        self.checks = tuple(checks)
        self._local = [index for index, check in self._of_rows() if not isinstance(check.condition, Unique)]
        self._unique = [index for index, check in self._of_rows() if isinstance(check.condition, Unique)]
        missing = [check.column for _, check in self._of_rows() if check.column not in schema.names]
        if missing:
            raise ValueError(f"no column {missing[0]!r}: the checks were not held against this schema")

    @property
    def needs_keys(self) -> bool:
        """Whether parallel parts need a separate pass for `keys`."""
        return bool(self._unique)

    @property
    def are_none(self) -> bool:
        return not (self._local or self._unique)

    def apply(self, table: pa.Table, first_ordinal: int | Ordinals, repeats: RepeatFinder | None = None) -> RowVerdict:
        """Evaluate the checks; raise `ValueError` for `unique` checks without `repeats`."""
        ordinals = _ordinals(table, first_ordinal)
        first_failed, violations = self._apply_local(table)
        for index in self._unique:
            if repeats is None:
                raise ValueError("unique needs to know of the rows of other tables: give repeats")
            array, rows = _passing(table, self.checks[index].column, self._goes_on(first_failed))
            found = rows[repeats.find(index, array, ordinals[rows])]
            violations[index] = len(found)
            first_failed[found] = np.where(first_failed[found] == PASSES, index, first_failed[found])
        return RowVerdict(self.checks, first_failed, violations, self._failure(table, first_failed, ordinals))

    def keys(self, table: pa.Table, first_ordinal: int | Ordinals) -> UniqueKeys:
        """Return the keys of the rows that pass all other checks, for a pass before `apply`."""
        ordinals = _ordinals(table, first_ordinal)
        found = self.empty_keys()
        first_failed, _ = self._apply_local(table)
        for index in self._unique:
            array, rows = _passing(table, self.checks[index].column, self._goes_on(first_failed))
            found.add(index, array, ordinals[rows])
        return found

    def empty_keys(self) -> UniqueKeys:
        """Return the keys of no rows."""
        return UniqueKeys({index: self.checks[index].quarantines for index in self._unique})

    def _of_rows(self) -> Iterator[tuple[int, Check]]:
        return ((index, check) for index, check in enumerate(self.checks) if check.is_of_rows)

    def _apply_local(self, table: pa.Table) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
        first_failed = np.full(table.num_rows, PASSES, np.int16)
        violations = np.zeros(len(self.checks), np.int64)
        for index in self._local:
            bad = violating(self.checks[index].condition, table.column(self.checks[index].column))
            violations[index] = int(bad.sum())
            first_failed[bad & (first_failed == PASSES)] = index
        return first_failed, violations

    def _goes_on(self, first_failed: npt.NDArray[np.int16]) -> Mask:
        """Return the rows that are not left out.

        A row that violates a failing check counts, too, because it ends the job anyway.
        """
        leaves_out = np.array([check.quarantines for check in self.checks], np.bool_)
        goes_on: Mask = (first_failed == PASSES) | ~leaves_out[first_failed]
        return goes_on

    def _failure(self, table: pa.Table, first_failed: npt.NDArray[np.int16], ordinals: Ordinals) -> Failure | None:
        fails = np.array([not check.quarantines for check in self.checks], np.bool_)
        rows = np.flatnonzero((first_failed != PASSES) & (fails[first_failed] if len(fails) else False))
        if not len(rows):
            return None
        row = int(rows[np.argmin(ordinals[rows])])
        index = int(first_failed[row])
        return Failure(int(ordinals[row]), index, _shown_value(table.column(self.checks[index].column)[row]))


class KeepFirst:
    """Checks rows in one streaming pass, in the order of their ordinals.

    Keeps 16 bytes a row for each `unique`.
    """

    def __init__(self, rows: RowChecks) -> None:
        self._rows = rows
        self._seen: dict[int, KeySet] = {}

    def apply(self, table: pa.Table, first_ordinal: int | Ordinals) -> RowVerdict:
        return self._rows.apply(table, first_ordinal, self)

    def find(self, check: int, array: pa.Array, ordinals: Ordinals) -> Mask:  # noqa: ARG002
        return self._seen.setdefault(check, KeySet()).add_new(keys_of(array))


class CheckCounts:
    """The results of the row checks over all tables.

    Parts can be merged in any order. Picklable.
    """

    def __init__(self, checks: Sequence[Check]) -> None:
        self._checks = tuple(checks)
        self._violations = np.zeros(len(checks), np.int64)
        self._quarantined = np.zeros(len(checks), np.int64)
        self.failure: Failure | None = None

    def add(self, verdict: RowVerdict) -> None:
        self._violations += verdict.violations
        failed = verdict.first_failed[~verdict.keep]
        counted = np.bincount(failed, minlength=len(self._checks))
        leaves_out = np.array([check.quarantines for check in self._checks], np.bool_)
        self._quarantined += np.where(leaves_out, counted, 0)
        self._note(verdict.failure)

    def merge(self, other: CheckCounts) -> None:
        self._violations += other._violations
        self._quarantined += other._quarantined
        self._note(other.failure)

    @property
    def quarantined(self) -> int:
        return int(self._quarantined.sum())

    def results(self) -> dict[int, CheckResult]:
        """Return the results by the index of the check; row checks only."""
        found = {}
        for index, check in enumerate(self._checks):
            if check.is_of_rows:
                violations, quarantined = int(self._violations[index]), int(self._quarantined[index])
                observed = f"{violations:,} row{'' if violations == 1 else 's'}" if violations else "none"
                found[index] = CheckResult(
                    check=check, violations=violations, quarantined=quarantined, observed=observed
                )
        return found

    def refuse(self, place: Callable[[int], str] = lambda ordinal: f"row {ordinal}") -> None:
        """Raise `FailedPrecondition` for the first row, by ordinal, that violates a failing check."""
        failure = self.failure
        if failure is None:
            return
        check = self._checks[failure.check]
        value = f" ({failure.value})" if failure.value else ""
        raise FailedPrecondition(
            f"checks[{failure.check}]: in {place(failure.ordinal)}, {check.reason()}{value}; mend the "
            "source, or let such rows be quarantined",
            reason=CHECK_FAILED,
            metadata={
                "check_index": str(failure.check),
                "kind": check.condition.kind,
                "column": check.column,
                "row": str(failure.ordinal),
            },
        )

    def _note(self, failure: Failure | None) -> None:
        if failure is not None and (self.failure is None or failure.ordinal < self.failure.ordinal):
            self.failure = failure


def _ordinals(table: pa.Table, first_ordinal: int | Ordinals) -> Ordinals:
    if isinstance(first_ordinal, int | np.integer):
        return np.arange(first_ordinal, first_ordinal + table.num_rows, dtype=np.int64)
    return first_ordinal


def _passing(table: pa.Table, column: str, goes_on: Mask) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Return the column's non-null values in the rows that go on, and those rows' indices."""
    values = table.column(column)
    rows = np.flatnonzero(goes_on & np.asarray(values.is_valid()))
    if len(rows) < table.num_rows:
        values = values.take(pa.array(rows))
    array = values.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # `combine_chunks` returns this for no rows, and for extension types
        array = (
            array.chunk(0) if array.num_chunks == 1 else pa.concat_arrays(array.chunks or [pa.array([], array.type)])
        )
    return array, rows


def _shown_value(value: pa.Scalar) -> str:
    """Return the value for an error; empty for a null, which the reason names already."""
    if not value.is_valid:
        return ""
    if isinstance(value.type, pa.FixedShapeTensorType) or pa.types.is_binary(value.type):
        return str(value.type)
    return value_shown(value)


# --- Conditions ---
# The conditions on single rows, evaluated a column at a time.


def violating(condition: Condition, column: pa.ChunkedArray) -> Mask:
    """Return True for the rows whose value fails.

    Raises `TypeError` for conditions on more than one row.
    """
    match condition:
        case NotNull():
            return _mask(column.is_null())
        case Range():
            return _out_of_range(condition, column)
        case OneOf():
            return _mask(column.is_valid()) & ~_mask(pc.is_in(column, value_set=_value_set(condition, column.type)))
        case Pattern():
            passes = pc.match_substring_regex(column, pattern=condition.anchored)
            return ~_mask(passes.fill_null(True))
    raise TypeError(f"{condition.kind} does not look at single rows")


def _out_of_range(condition: Range, column: pa.ChunkedArray) -> Mask:
    least, most = condition.min, condition.max
    low: float
    high: float
    if kinds.is_integer(column.type):
        # Integer limits: compared as floats, integers from 2**53 on would equal their neighbours.
        limits = np.iinfo(column.type.to_pandas_dtype())
        low = limits.min if least is None else math.ceil(least)
        high = limits.max if most is None else math.floor(most)
        if low > limits.max or high < limits.min:
            return _mask(column.is_valid())
        low, high = max(low, int(limits.min)), min(high, int(limits.max))
        numbers, kind = column, column.type
    else:
        low, high = -math.inf if least is None else least, math.inf if most is None else most
        numbers, kind = column.cast(pa.float64()), pa.float64()
    passes = pc.and_(pc.greater_equal(numbers, pa.scalar(low, kind)), pc.less_equal(numbers, pa.scalar(high, kind)))
    return ~_mask(passes.fill_null(True))


def _value_set(condition: OneOf, arrow_type: pa.DataType) -> pa.Array:
    values: Any = condition.values
    if kinds.is_integer(arrow_type):  # values that the column's type cannot hold occur in no row
        limits = np.iinfo(arrow_type.to_pandas_dtype())
        values = [value for value in values if limits.min <= value <= limits.max]
    return pa.array(values, arrow_type)


def _mask(values: pa.ChunkedArray) -> Mask:
    found: Mask = values.to_numpy().astype(np.bool_)
    return found


# --- Uniqueness ---
# Finds rows that repeat the value of an earlier one, for columns of any number of rows.
#
# A value becomes a key of 128 bits: numbers exactly, everything else by XXH3-128 of its bytes (two of 10^12 values
# share a key with a probability of 10^-15).

Mask = npt.NDArray[np.bool_]
Ordinals = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Keys:
    """Keys of two words each.

    The high word looks random, so values seldom share it.
    """

    high: npt.NDArray[np.uint64]
    low: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.high)

    def at(self, rows: Any) -> Keys:
        return Keys(self.high[rows], self.low[rows])

    @classmethod
    def joined(cls, parts: Sequence[Keys]) -> Keys:
        empty = [np.empty(0, np.uint64)]
        return cls(
            np.concatenate(empty + [part.high for part in parts]), np.concatenate(empty + [part.low for part in parts])
        )


def keys_of(array: pa.Array) -> Keys:
    """Return the keys of values without nulls; -0.0 equals 0.0, and NaN equals NaN."""
    if isinstance(array.type, pa.FixedShapeTensorType):
        rows = tensor_rows(array)
        if rows.dtype.kind == "f":
            rows = rows + rows.dtype.type(0)
            rows[np.isnan(rows)] = np.nan
        return _digests(np.ascontiguousarray(row).data.cast("B") for row in rows)
    if _is_bytes(array.type):
        return _digests(byte_slices(array))
    words = words_of(array)
    return Keys(hash_words(words), words if words.ndim == 1 else np.ascontiguousarray(words[:, 0]))


class KeySet:
    """A growing set of keys of 16 bytes each.

    It has sorted runs, each at most half as long as the one before. A run is in the order of the high words; keys with
    the same high word are adjacent, in any order.
    """

    def __init__(self) -> None:
        self._runs: list[Keys] = []

    def add_new(self, keys: Keys) -> Mask:
        """Add the keys; return True for those already present, or earlier among these."""
        order = np.lexsort((keys.low, keys.high))  # stable: of equal keys the earlier row comes first
        ordered = keys.at(order)
        repeats = np.empty(len(keys), np.bool_)
        repeats[order] = _equals_previous(ordered) | self._contains(ordered)
        self._append(ordered.at(~repeats[order]))
        return repeats

    def _contains(self, keys: Keys) -> Mask:
        found = np.zeros(len(keys), np.bool_)
        for run in self._runs:
            places = np.searchsorted(run.high, keys.high)
            while True:
                alike = (places < len(run)) & (run.high[np.minimum(places, len(run) - 1)] == keys.high)
                if not alike.any():
                    break
                found |= alike & (run.low[np.minimum(places, len(run) - 1)] == keys.low)
                places = np.where(alike, places + 1, len(run))
        return found

    def _append(self, run: Keys) -> None:
        if not len(run):
            return
        while self._runs and len(self._runs[-1]) < 2 * len(run):
            run = _merged(self._runs.pop(), run)
        self._runs.append(run)


@dataclass(frozen=True)
class Repeats:
    """The ascending ordinals of the rows that repeat an earlier value, by check."""

    ordinals: Mapping[int, Ordinals]

    def find(self, check: int, array: pa.Array, ordinals: Ordinals) -> Mask:  # noqa: ARG002
        """Return which of these rows are repeats; they passed everything so far and are not null."""
        return _are_among(ordinals, self.ordinals.get(check, np.empty(0, np.int64)))


class UniqueKeys:
    """The keys of a part's rows with the rows' ordinals: 24 bytes a row and check.

    Picklable. `quarantines` says for each check, by its index, whether repeats are left out: the next check then does
    not see them.
    """

    def __init__(self, quarantines: Mapping[int, bool]) -> None:
        self._quarantines = dict(quarantines)
        self._parts: dict[int, list[tuple[Keys, Ordinals]]] = {check: [] for check in quarantines}

    def add(self, check: int, array: pa.Array, ordinals: Ordinals) -> None:
        """Add values without nulls."""
        self._parts[check].append((keys_of(array), ordinals))

    def merge(self, other: UniqueKeys) -> None:
        """Add the keys of another part.

        A part without rows has no checks, and fits any other.
        """
        for check, parts in other._parts.items():
            self._quarantines.setdefault(check, other._quarantines[check])
            self._parts.setdefault(check, []).extend(parts)

    @property
    def quarantines(self) -> Mapping[int, bool]:
        return self._quarantines

    @property
    def row_count(self) -> int:
        """The number of keys of all checks."""
        return sum(len(ordinals) for parts in self._parts.values() for _, ordinals in parts)

    def take(self) -> dict[int, tuple[Keys, Ordinals]]:
        """Return the keys and ordinals by check, and forget them."""
        taken = {check: _joined(parts) for check, parts in self._parts.items()}
        self._parts = {check: [] for check in self._parts}
        return taken

    def repeats(self) -> Repeats:
        """Return the repeats; of equal values the one with the lowest ordinal stays."""
        found: dict[int, Ordinals] = {}
        left_out = np.empty(0, np.int64)
        for check, parts in sorted(self._parts.items()):
            found[check] = np.sort(repeats_among(*_joined(parts), left_out))
            if self._quarantines[check]:
                left_out = np.union1d(left_out, found[check])
        return Repeats(found)


def repeats_among(keys: Keys, ordinals: Ordinals, left_out: Ordinals) -> Ordinals:
    """Return the ordinals of the repeats, in no order, among the rows that are not left out.

    `left_out` ascends. It is only searched: it may have most of all rows, and `keys` those of a small bucket.
    """
    if len(left_out):
        there = ~_are_among(ordinals, left_out)
        keys, ordinals = keys.at(there), ordinals[there]
    order = np.lexsort((ordinals, keys.low, keys.high))
    repeats: Ordinals = ordinals[order][_equals_previous(keys.at(order))]
    return repeats


def _are_among(ordinals: Ordinals, ascending: Ordinals) -> Mask:
    if not len(ascending):
        return np.zeros(len(ordinals), np.bool_)
    places = np.searchsorted(ascending, ordinals)
    found: Mask = ascending[np.minimum(places, len(ascending) - 1)] == ordinals
    return found


def _joined(parts: Sequence[tuple[Keys, Ordinals]]) -> tuple[Keys, Ordinals]:
    ordinals = np.concatenate([np.empty(0, np.int64), *(ordinals for _, ordinals in parts)])
    return Keys.joined([keys for keys, _ in parts]), ordinals


def _equals_previous(ordered: Keys) -> Mask:
    equal = np.zeros(len(ordered), np.bool_)
    equal[1:] = (ordered.high[1:] == ordered.high[:-1]) & (ordered.low[1:] == ordered.low[:-1])
    return equal


def _merged(long: Keys, short: Keys) -> Keys:
    places = np.searchsorted(long.high, short.high)
    return Keys(np.insert(long.high, places, short.high), np.insert(long.low, places, short.low))


def _digests(values: Any) -> Keys:
    words = np.frombuffer(b"".join(xxhash.xxh3_128_digest(value) for value in values), np.uint64).reshape(-1, 2)
    return Keys(np.ascontiguousarray(words[:, 0]), np.ascontiguousarray(words[:, 1]))


def _is_bytes(arrow_type: pa.DataType) -> bool:
    return bool(
        kinds.is_string(arrow_type)
        or kinds.is_large_string(arrow_type)
        or kinds.is_binary(arrow_type)
        or kinds.is_large_binary(arrow_type)
        or kinds.is_fixed_size_binary(arrow_type)
    )
