"""Quality checks of rows: which pass, and what becomes of the others.

Each check looks at a row by itself, but for `unique`, which is judged last, among the rows that pass everything else:
so a row that is left out for another reason never makes a good one a repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data_service.domain.checks import CHECK_FAILED, Check, CheckResult, Unique
from data_service.domain.checks_conditions import violating
from data_service.domain.checks_unique import KeySet, Mask, Ordinals, UniqueKeys, keys_of
from shared.errors import FailedPrecondition
from shared.value_texts import value_shown

PASSES = -1


class RepeatFinder(Protocol):
    """Knows which rows repeat the value of an earlier one: `Repeats` (from a pass before), or `KeepFirst`."""

    def find(self, check: int, array: pa.Array, ordinals: Ordinals) -> Mask: ...


@dataclass(frozen=True)
class Failure:
    """The first row that a failing check does not let pass."""

    ordinal: int
    check: int
    value: str


@dataclass(frozen=True)
class RowVerdict:
    """Of a table's rows. `first_failed`: the index of the first check that a row does not pass, -1 where it passes all.

    `violations`: by check, how many rows do not pass it. `failure` is set where a check that fails met a bad row.
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
        """(row's index in the table, reason) of each row that is left out."""
        for row in np.flatnonzero(self.first_failed != PASSES).tolist():
            check = self.checks[self.first_failed[row]]
            if check.quarantines:
                yield row, check.reason()


class RowChecks:
    """The checks of rows among `checks`; knows nothing of the rows that it saw. Picklable.

    Ordinals order the rows of a version and name them: a row's id, or its place in the source. An int is that of the
    table's first row, others follow; an array has one for each row.
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
        """Whether parallel parts need a pass of their own for `keys`."""
        return bool(self._unique)

    @property
    def are_none(self) -> bool:
        return not (self._local or self._unique)

    def apply(self, table: pa.Table, first_ordinal: int | Ordinals, repeats: RepeatFinder | None = None) -> RowVerdict:
        """Raises `ValueError` where a check is `unique` and there are no `repeats`."""
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
        """The keys of the rows that pass all other checks, for a pass ahead of `apply`."""
        ordinals = _ordinals(table, first_ordinal)
        found = UniqueKeys({index: self.checks[index].quarantines for index in self._unique})
        first_failed, _ = self._apply_local(table)
        for index in self._unique:
            array, rows = _passing(table, self.checks[index].column, self._goes_on(first_failed))
            found.add(index, array, ordinals[rows])
        return found

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
        """Rows that are not left out: a failing check ends everything, whatever else is found of its row."""
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
    """Judges rows as they stream by once, in the order of their ordinals. Keeps 16 bytes a row for each `unique`."""

    def __init__(self, rows: RowChecks) -> None:
        self._rows = rows
        self._seen: dict[int, KeySet] = {}

    def apply(self, table: pa.Table, first_ordinal: int | Ordinals) -> RowVerdict:
        return self._rows.apply(table, first_ordinal, self)

    def find(self, check: int, array: pa.Array, ordinals: Ordinals) -> Mask:  # noqa: ARG002
        return self._seen.setdefault(check, KeySet()).add_new(keys_of(array))


class CheckCounts:
    """What the checks of rows found in all tables. Parts can be merged in any order. Picklable."""

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
        """By the index of the check; those of the whole version are not among them."""
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
        """Raises `FailedPrecondition` for the first row (by its ordinal) that a failing check does not let pass."""
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
    """The column's values in the rows that go on and have one, and those rows' indices."""
    values = table.column(column)
    rows = np.flatnonzero(goes_on & np.asarray(values.is_valid()))
    if len(rows) < table.num_rows:
        values = values.take(pa.array(rows))
    array = values.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # what `combine_chunks` gives for no rows, and for extension types
        array = (
            array.chunk(0) if array.num_chunks == 1 else pa.concat_arrays(array.chunks or [pa.array([], array.type)])
        )
    return array, rows


def _shown_value(value: pa.Scalar) -> str:
    """Empty for a null, of which all is said by its name."""
    if not value.is_valid:
        return ""
    if isinstance(value.type, pa.FixedShapeTensorType) or pa.types.is_binary(value.type):
        return str(value.type)
    return value_shown(value)
