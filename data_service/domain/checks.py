"""Quality checks: conditions on rows, and on a whole version, that gate its publication.

Also parses them from proto JSON, and checks a whole version, which is the last gate before its publication and includes
drift from another version. `checks_rows` has the checks of rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from data_service.domain.statistics import (
    ColumnStatistics,
    NumberStatistics,
    SplitStatistics,
    Value,
    camel_case,
    number_from_json,
    number_json,
    scalar_from_json,
    scalar_json,
)
from shared.errors import FailedPrecondition, first_line, invalid_field, invalid_fields

# --- Checks ---

CHECK_FAILED = "QUALITY_CHECK_FAILED"


@dataclass(frozen=True)
class NotNull:
    kind: ClassVar[str] = "not_null"
    json_name: ClassVar[str] = "notNull"

    def to_json(self) -> dict[str, Any]:
        return {}

    def broken(self) -> str:
        """Describe a value that fails the check, for people."""
        return "is null"


@dataclass(frozen=True)
class Unique:
    kind: ClassVar[str] = "unique"
    json_name: ClassVar[str] = "unique"

    def to_json(self) -> dict[str, Any]:
        return {}

    def broken(self) -> str:
        return "repeats the value of an earlier row"


@dataclass(frozen=True)
class Range:
    """Inclusive limits of numbers; None is no limit."""

    kind: ClassVar[str] = "range"
    json_name: ClassVar[str] = "range"

    min: float | None
    max: float | None

    def to_json(self) -> dict[str, Any]:
        limits = (("min", self.min), ("max", self.max))
        return {name: number_json(value) for name, value in limits if value is not None}

    def broken(self) -> str:
        if self.max is None:
            return f"is not {self.min:g} or more"
        return f"is not {self.max:g} or less" if self.min is None else f"is not from {self.min:g} to {self.max:g}"


@dataclass(frozen=True)
class OneOf:
    kind: ClassVar[str] = "one_of"
    json_name: ClassVar[str] = "oneOf"

    values: tuple[Value, ...]

    def to_json(self) -> dict[str, Any]:
        return {"values": [scalar_json(value) for value in self.values]}

    def broken(self) -> str:
        shown = ", ".join(repr(value) for value in self.values[:10])
        return f"is none of {shown}{', …' if len(self.values) > 10 else ''}"


@dataclass(frozen=True)
class Pattern:
    """An RE2 expression that the whole string must match."""

    kind: ClassVar[str] = "pattern"
    json_name: ClassVar[str] = "pattern"

    regex: str

    @property
    def anchored(self) -> str:
        return rf"\A(?:{self.regex})\z"

    def to_json(self) -> dict[str, Any]:
        return {"regex": self.regex}

    def broken(self) -> str:
        return f"does not match {self.regex[:100]}{'…' if len(self.regex) > 100 else ''}"


@dataclass(frozen=True)
class RowCount:
    """The number of rows of one split, or of all if `split` is empty.

    A `max` of 0 is no limit.
    """

    kind: ClassVar[str] = "row_count"
    json_name: ClassVar[str] = "rowCount"

    split: str
    min: int
    max: int

    def to_json(self) -> dict[str, Any]:
        return {"split": self.split, "min": self.min, "max": self.max}


@dataclass(frozen=True)
class ClassBalance:
    """The share of each class in a column.

    A `max_share` of 0 is no limit.
    """

    kind: ClassVar[str] = "class_balance"
    json_name: ClassVar[str] = "classBalance"

    min_share: float
    max_share: float

    def to_json(self) -> dict[str, Any]:
        return {"minShare": self.min_share, "maxShare": self.max_share}


@dataclass(frozen=True)
class Drift:
    kind: ClassVar[str] = "drift"
    json_name: ClassVar[str] = "drift"

    max_population_stability_index: float

    def to_json(self) -> dict[str, Any]:
        return {"maxPopulationStabilityIndex": self.max_population_stability_index}


RowCondition = NotNull | Unique | Range | OneOf | Pattern
VersionCondition = RowCount | ClassBalance | Drift
Condition = RowCondition | VersionCondition
CONDITIONS: Sequence[type[Condition]] = (NotNull, Unique, Range, OneOf, Pattern, RowCount, ClassBalance, Drift)


@dataclass(frozen=True)
class Check:
    """A check.

    A row that fails is left out if `quarantines`, else it ends the job.
    """

    column: str
    condition: Condition
    quarantines: bool = False

    @property
    def is_of_rows(self) -> bool:
        return isinstance(self.condition, RowCondition)

    def to_json(self) -> dict[str, Any]:
        """Return the check in the shape of the proto's JSON."""
        return {
            "column": self.column,
            "action": "ACTION_QUARANTINE" if self.quarantines else "ACTION_FAIL",
            self.condition.json_name: self.condition.to_json(),
        }

    def reason(self) -> str:
        """Return why a row fails, for people: `age is null`; only for row checks."""
        if not isinstance(self.condition, RowCondition):
            raise TypeError(f"{self.condition.kind} is no check of rows")
        return f"{self.column} {self.condition.broken()}"


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of a check.

    `violations` is the number of rows that failed; for checks of the whole version 0 or 1.
    """

    check: Check
    violations: int = 0
    quarantined: int = 0
    observed: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "check": self.check.to_json(),
            "violations": self.violations,
            "quarantined": self.quarantined,
            "observed": self.observed,
        }


# --- Parsing ---
# Parses quality checks from proto JSON, and checks them against the columns that they name.

MAX_CHECKS = 100
MAX_REGEX_LENGTH = 1024

_QUARANTINES = {
    0: False,
    1: False,
    2: True,
    "ACTION_UNSPECIFIED": False,
    "ACTION_FAIL": False,
    "ACTION_QUARANTINE": True,
}
# An invalid field: its path, the value, and the remedy.
Problem = tuple[str, object, str]


def parse_checks(records: Sequence[Mapping[str, Any]], field: str = "checks") -> list[Check]:
    """Parse checks from proto JSON, in either spelling of field names.

    Raises `InvalidArgument` naming all malformed fields by their paths, e.g. `checks[3].range.min`.
    """
    if len(records) > MAX_CHECKS:
        raise invalid_field(field, len(records), f"use at most {MAX_CHECKS} checks")
    problems: list[Problem] = []
    checks = [_check(camel_case(record), f"{field}[{index}]", problems) for index, record in enumerate(records)]
    if problems:
        raise invalid_fields(problems)
    return [check for check in checks if check is not None]


def fits(
    checks: Sequence[Check],
    schema: pa.Schema,
    has_parent: bool,
    splits: Collection[str] | None = None,
    field: str = "checks",
) -> None:
    """Raise `InvalidArgument` naming all checks that do not fit these logical columns.

    Without `splits` the names of splits are not checked.
    """
    problems: list[Problem] = []
    for index, check in enumerate(checks):
        path, condition = f"{field}[{index}]", check.condition
        if isinstance(condition, RowCount):
            if splits is not None and condition.split and condition.split not in splits:
                remedy = f"there is no such split; use one of {', '.join(splits)}"
                problems.append((f"{path}.row_count.split", condition.split, remedy))
            continue
        if check.column not in schema.names:
            remedy = f"there is no such column; use one of {', '.join(schema.names[:20])}"
            problems.append((f"{path}.column", check.column, remedy))
            continue
        remedy = _unfit(condition, schema.field(check.column).type)
        if remedy:
            problems.append((f"{path}.{condition.kind}", check.column, remedy))
        if isinstance(condition, Drift) and not has_parent:
            problems.append((f"{path}.drift", check.column, "needs a parent to compare with: a base, or a source"))
    if problems:
        raise invalid_fields(problems)


def _check(record: Mapping[str, Any], path: str, problems: list[Problem]) -> Check | None:
    given = [kind for kind in CONDITIONS if kind.json_name in record]
    if len(given) != 1:
        names = ", ".join(kind.kind for kind in CONDITIONS)
        problems.append((path, [kind.kind for kind in given], f"set exactly one of {names}"))
        return None
    kind, action = given[0], record.get("action", 0)
    column = record.get("column", "")
    if action not in _QUARANTINES:
        problems.append((f"{path}.action", action, "use ACTION_FAIL or ACTION_QUARANTINE"))
    quarantines = _QUARANTINES.get(action, False)
    if quarantines and kind in (RowCount, ClassBalance, Drift):
        problems.append((f"{path}.action", action, f"{kind.kind} looks at all rows and can only fail"))
    if kind is RowCount and column:
        problems.append((f"{path}.column", column, "row_count looks at no column; leave it empty"))
    if kind is not RowCount and not column:
        problems.append((f"{path}.column", column, "name the column that it looks at"))
    condition = _READERS[kind](record[kind.json_name], f"{path}.{kind.kind}", problems)
    return Check(column, condition, quarantines)


def _range(record: Mapping[str, Any], path: str, problems: list[Problem]) -> Range:
    limits = {name: _number(record[name], f"{path}.{name}", problems) for name in ("min", "max") if name in record}
    least, most = limits.get("min"), limits.get("max")
    if not limits:
        problems.append((path, dict(record), "set min, max or both"))
    if least is not None and most is not None and least > most:
        problems.append((f"{path}.max", most, f"use at least min, {least:g}"))
    return Range(least, most)


def _one_of(record: Mapping[str, Any], path: str, problems: list[Problem]) -> OneOf:
    values = []
    for index, one in enumerate(record.get("values", ())):
        try:
            values.append(scalar_from_json(one))
        except (ValueError, TypeError):
            problems.append((f"{path}.values[{index}]", one, "set one of integer, number, text and boolean"))
    if not record.get("values"):
        problems.append((f"{path}.values", [], "name at least one value"))
    return OneOf(tuple(values))


def _pattern(record: Mapping[str, Any], path: str, problems: list[Problem]) -> Pattern:
    pattern = Pattern(str(record.get("regex", "")))
    if not 1 <= len(pattern.regex) <= MAX_REGEX_LENGTH:
        problems.append((f"{path}.regex", pattern.regex, f"use 1 to {MAX_REGEX_LENGTH:,} characters"))
        return pattern
    try:
        # Tested unanchored, too: `a)|(b` is well-formed only within the group that anchors it.
        for regex in (pattern.regex, pattern.anchored):
            pc.match_substring_regex(pa.array([""]), pattern=regex)
    except pa.ArrowInvalid as error:
        problems.append((f"{path}.regex", pattern.regex, f"is no RE2 expression: {first_line(error)}"))
    return pattern


def _row_count(record: Mapping[str, Any], path: str, problems: list[Problem]) -> RowCount:
    limits = {}
    for name in ("min", "max"):
        limits[name] = int(record.get(name, 0))
        if limits[name] < 0:
            problems.append((f"{path}.{name}", limits[name], "use 0 or more"))
    least, most = limits["min"], limits["max"]
    if least == most == 0:
        problems.append((path, dict(record), "set min, max or both above 0"))
    if 0 < most < least:
        problems.append((f"{path}.max", most, f"use at least min, {least}"))
    return RowCount(str(record.get("split", "")), least, most)


def _class_balance(record: Mapping[str, Any], path: str, problems: list[Problem]) -> ClassBalance:
    shares = {}
    for name, spelt in (("minShare", "min_share"), ("maxShare", "max_share")):
        shares[name] = _number(record.get(name, 0.0), f"{path}.{spelt}", problems) or 0.0
        if not 0 <= shares[name] <= 1:
            problems.append((f"{path}.{spelt}", shares[name], "use a share from 0 to 1"))
    least, most = shares["minShare"], shares["maxShare"]
    if least == most == 0:
        problems.append((path, dict(record), "set min_share, max_share or both above 0"))
    if 0 < most < least:
        problems.append((f"{path}.max_share", most, f"use at least min_share, {least:g}"))
    return ClassBalance(least, most)


def _drift(record: Mapping[str, Any], path: str, problems: list[Problem]) -> Drift:
    path = f"{path}.max_population_stability_index"
    most = _number(record.get("maxPopulationStabilityIndex", 0.0), path, problems)
    if most is not None and most <= 0:
        problems.append((path, most, "use a number above 0: 0.1 is a slight drift, 0.25 a strong one"))
    return Drift(most or 0.0)


_READERS: dict[type[Condition], Callable[[Mapping[str, Any], str, list[Problem]], Condition]] = {
    NotNull: lambda *_: NotNull(),
    Unique: lambda *_: Unique(),
    Range: _range,
    OneOf: _one_of,
    Pattern: _pattern,
    RowCount: _row_count,
    ClassBalance: _class_balance,
    Drift: _drift,
}


def _number(value: Any, path: str, problems: list[Problem]) -> float | None:
    try:
        number = number_from_json(value)
    except (ValueError, TypeError):
        number = math.nan
    if math.isfinite(number):
        return number
    problems.append((path, value, "use a finite number"))
    return None


def _unfit(condition: Condition, arrow_type: pa.DataType) -> str:
    """Return why a check does not support values of this type; empty if it does."""
    is_number = kinds.is_integer(arrow_type) or kinds.is_floating(arrow_type) or kinds.is_decimal(arrow_type)
    is_text = kinds.is_string(arrow_type) or kinds.is_large_string(arrow_type)
    is_boolean = kinds.is_boolean(arrow_type)
    is_tensor = isinstance(arrow_type, pa.FixedShapeTensorType)
    match condition:
        case Range() if not is_number:
            return f"needs numbers; the column has {arrow_type}"
        case Pattern() if not is_text:
            return f"needs strings; the column has {arrow_type}"
        case OneOf() if not (is_text or is_boolean or kinds.is_integer(arrow_type)):
            return f"needs strings, integers or booleans; the column has {arrow_type}"
        case OneOf():
            needed: type = str if is_text else bool if is_boolean else int
            strangers = [value for value in condition.values if type(value) is not needed]
            kind = {str: "texts", bool: "booleans", int: "integers"}[needed]
            return (
                f"the column has {arrow_type}: all values must be {kind}, {strangers[0]!r} is not" if strangers else ""
            )
        case ClassBalance() if is_tensor or kinds.is_binary(arrow_type) or kinds.is_fixed_size_binary(arrow_type):
            return f"needs scalars that a report can distinguish; the column has {arrow_type}"
        case Drift() if not (is_number or is_text or is_boolean):
            return f"needs numbers, strings or booleans; the column has {arrow_type}"
    return ""


# --- The gate ---

Splits = Mapping[str, SplitStatistics]


def gate(checks: Sequence[Check], splits: Splits, parent_report: Mapping[str, Any] | None) -> dict[int, CheckResult]:
    """Evaluate the checks of the whole version, by their index; row checks are not included.

    `splits` are the statistics of the whole splits; `parent_report` is the first parent's QualityReport as proto JSON.
    Raises `FailedPrecondition` listing all failed checks.
    """
    judged = {index: _judge(check, splits, parent_report) for index, check in enumerate(checks) if not check.is_of_rows}
    failed = [index for index, result in judged.items() if result.violations]
    if not failed:
        return judged
    first = checks[failed[0]]
    raise FailedPrecondition(
        "; ".join(f"checks[{index}]: {_sentence(judged[index])}" for index in failed),
        reason=CHECK_FAILED,
        metadata={
            "check_index": ",".join(map(str, failed)),
            "kind": first.condition.kind,
            "column": first.column,
        },
    )


def _judge(check: Check, splits: Splits, parent_report: Mapping[str, Any] | None) -> CheckResult:
    match check.condition:
        case RowCount():
            passes, observed = _judge_row_count(check.condition, splits)
        case ClassBalance():
            passes, observed = _judge_class_balance(check.condition, _counts(check.column, splits))
        case Drift():
            passes, observed = _judge_drift(check.condition, check.column, splits, parent_report)
        case _:
            raise TypeError(f"{check.condition.kind} is a check of rows")
    return CheckResult(check=check, violations=0 if passes else 1, observed=observed)


def _judge_row_count(condition: RowCount, splits: Splits) -> tuple[bool, str]:
    if condition.split:
        rows = splits[condition.split].row_count if condition.split in splits else 0
    else:
        rows = sum(split.row_count for split in splits.values())
    return rows >= condition.min and (not condition.max or rows <= condition.max), f"{rows:,} rows"


def _judge_class_balance(condition: ClassBalance, counts: Mapping[Any, int] | None) -> tuple[bool, str]:
    if counts is None:
        return False, "more than 1,000 different values"
    if not counts:
        return False, "no values"
    total = sum(counts.values())
    rarest = min(counts, key=lambda value: (counts[value], value))
    commonest = min(counts, key=lambda value: (-counts[value], value))
    least, most = counts[rarest] / total, counts[commonest] / total
    observed = f"rarest share {least:.3g} (class {rarest}), largest {most:.3g} (class {commonest})"
    return least >= condition.min_share and (not condition.max_share or most <= condition.max_share), observed


def _judge_drift(
    condition: Drift, column: str, splits: Splits, parent_report: Mapping[str, Any] | None
) -> tuple[bool, str]:
    if parent_report is None:
        return False, "the parent has no report to compare with"
    records = [one for one in camel_case(parent_report).get("columns", ()) if one.get("column") == column]
    if not records:
        return False, "the parent has no such column"
    new = [found for split in splits.values() for found in split.result() if found.column == column]
    found = compare([ColumnStatistics.from_json(record) for record in records], new, _counts(column, splits))
    missing = f", {found.missing}" if found.missing else ""
    if found.psi is None:
        return False, f"not comparable: no values, or too many different ones{missing}"
    return found.psi <= condition.max_population_stability_index, f"psi {found.psi:.2g}{missing}"


def _counts(column: str, splits: Splits) -> dict[Any, int] | None:
    """Return the counts over all splits; None if a split's are unknown."""
    total: dict[Any, int] = {}
    for split in splits.values():
        counts = split.value_counts(column)
        if counts is None:
            return None
        for value, count in counts.items():
            total[value] = total.get(value, 0) + count
    return total


def _sentence(result: CheckResult) -> str:
    match result.check.condition:
        case RowCount(split, least, most):
            wanted = f"{split or 'the version'} needs {least:,} rows" + (f" to {most:,}" if most else " or more")
        case ClassBalance(min_share, max_share):
            upper = f" and at most {max_share:g}" if max_share else ""
            wanted = f"each value of {result.check.column} needs a share of at least {min_share:g}{upper}"
        case Drift(max_psi):
            wanted = f"{result.check.column} may drift from its parent by a psi of {max_psi:g} at most"
        case _:
            raise TypeError(f"{result.check.condition.kind} is a check of rows")
    return f"{wanted}; found {result.observed}"


# --- Drift ---
# The drift of a column's values between two versions: the population stability index.
#
# PSI = Σ (a - e) ln(a / e) over bins, where e is the parent's share of a bin and a the new version's. Source: Siddiqi,
# Credit Risk Scorecards, 2006; customary limits are 0.1 and 0.25.
#
# A column's index is that of its values plus that of the three bins value, null and NaN. If nulls were another bin of
# the values, drift of the values would be hidden in a column with few of them.

DECILES = np.arange(1, 10) / 10
# The share assumed for an empty bin, whose logarithm would be infinite.
MIN_SHARE = 1e-4

Counts = Mapping[Any, int]


@dataclass(frozen=True)
class Comparison:
    """The drift of one column.

    `psi` is None if one of the two has no values, or too many distinct ones. Shares are of all rows, 0 to 1: the
    parent's, then the new version's.
    """

    psi: float | None
    null_shares: tuple[float, float]
    nan_shares: tuple[float, float]

    @property
    def missing(self) -> str:
        """The shares of rows without a value, for people: `nulls 0 % before, 95 % now`.

        Empty if all rows have a value.
        """
        shares = (("nulls", self.null_shares), ("NaN", self.nan_shares))
        return "; ".join(
            f"{name} {100 * before:.3g} % before, {100 * now:.3g} % now"
            for name, (before, now) in shares
            if before or now
        )


def compare(
    parent: Sequence[ColumnStatistics], new: Sequence[ColumnStatistics], new_counts: Counts | None
) -> Comparison:
    """Compare one column.

    Each sequence has one statistics for each split; `new_counts` covers all splits, if known.
    """
    null_shares = (_share(parent, "null_count"), _share(new, "null_count"))
    nan_shares = (_share(parent, "nan_count"), _share(new, "nan_count"))
    values = population_stability_index(parent, new, new_counts)
    if values is None:
        return Comparison(None, null_shares, nan_shares)
    expected, found = ([1 - nulls - nan, nulls, nan] for nulls, nan in zip(null_shares, nan_shares, strict=True))
    return Comparison(values + _psi(expected, found), null_shares, nan_shares)


def _share(splits: Sequence[ColumnStatistics], count: str) -> float:
    rows = sum(split.row_count for split in splits)
    return sum(getattr(one, count) for one in splits) / rows if rows else 0.0


def population_stability_index(
    parent: Sequence[ColumnStatistics], new: Sequence[ColumnStatistics], new_counts: Counts | None
) -> float | None:
    """Return the index of the values that are neither null nor NaN.

    Numbers are compared over the parent's deciles, other values over the parent's frequent values, with bins for the
    rest. None if one of the two has no values, or too many distinct ones.
    """
    if not (_present(parent) and _present(new)):
        return None
    if all(one.numbers is None or _has_booleans(one) for one in parent):
        listed = _Listed.from_statistics(parent)
        return None if listed is None or new_counts is None else _over_values(listed, new_counts)
    parent_counts = _complete_counts(parent)
    if parent_counts is not None and new_counts is not None:
        expected, found = _Steps(parent_counts), _Steps(new_counts)
        return _over_deciles(expected.edges(), expected.reached, found.reached)
    # Both from the data of reports, so that equal values give 0.
    line, other = _Line(parent), _Line(new)
    return _over_deciles(line.edges(), line.reached, other.reached)


class _Steps:
    """The distribution of values whose counts are all known."""

    def __init__(self, counts: Counts) -> None:
        numbers = sorted((float(value), count) for value, count in counts.items())
        self._values = np.array([value for value, _ in numbers])
        self._shares = np.cumsum([count for _, count in numbers]) / sum(counts.values())

    def reached(self, edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the share of values at or below each edge."""
        places = np.searchsorted(self._values, edges, side="right")
        return np.concatenate([[0.0], self._shares])[places]

    def edges(self) -> npt.NDArray[np.float64]:
        return np.unique(self._values[np.searchsorted(self._shares, DECILES - 1e-12)])


class _Line:
    """The distribution from quantiles and histograms of the splits, interpolated linearly."""

    def __init__(self, splits: Sequence[ColumnStatistics]) -> None:
        self._parts = [(_present([split]), _points(split.numbers)) for split in splits if split.numbers]

    def reached(self, edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        shares = [np.interp(edges, values, reached, left=0.0) * rows for rows, (values, reached) in self._parts]
        total: npt.NDArray[np.float64] = np.sum(shares, axis=0) / sum(rows for rows, _ in self._parts)
        return total

    def edges(self) -> npt.NDArray[np.float64]:
        knots = np.unique(np.concatenate([values for _, (values, _) in self._parts]))
        reached = np.maximum.accumulate(self.reached(knots))
        steps = np.concatenate([[True], np.diff(reached) > 0])
        return np.unique(np.interp(DECILES, reached[steps], knots[steps]))


def _points(numbers: NumberStatistics) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    percents = np.array([0, 1, 5, 25, 50, 75, 95, 99, 100]) / 100
    values = np.array([numbers.min, *numbers.quantiles, numbers.max])
    if len(numbers.histogram) > 1:
        ends = np.linspace(numbers.min, numbers.max, len(numbers.histogram) + 1)[1:-1]
        bars = np.cumsum(numbers.histogram)[:-1] / sum(numbers.histogram)
        values, percents = np.concatenate([values, ends]), np.concatenate([percents, bars])
    order = np.lexsort((percents, values))
    values, percents = values[order], np.maximum.accumulate(percents[order])
    last_of_equals = np.concatenate([values[1:] != values[:-1], [True]])
    return values[last_of_equals], percents[last_of_equals]


def _over_deciles(edges: npt.NDArray[np.float64], expected: Any, found: Any) -> float:
    shares = [np.diff(np.concatenate([[0.0], reached(edges), [1.0]])) for reached in (expected, found)]
    return _psi(shares[0].tolist(), shares[1].tolist())


@dataclass(frozen=True)
class _Listed:
    """The counts of values, as far as reports that list each split's frequent values determine them.

    A value that no split lists occurs at most `unlisted` times, since in each split it is no more frequent than those
    listed.
    """

    total: int
    least: Mapping[Any, int]
    most: Mapping[Any, int]
    unlisted: int

    @classmethod
    def from_statistics(cls, splits: Sequence[ColumnStatistics]) -> _Listed | None:
        """Return the counts; None if a split has values but lists none."""
        least: Counter[Any] = Counter()
        known: Counter[Any] = Counter()  # the part of `unlisted` from splits that list the value
        total = unlisted = 0
        for split in splits:
            if not (there := _present([split])):
                continue
            if not split.values:
                return None
            counts = dict(split.values)
            rarest = min(*counts.values(), there - sum(counts.values()))
            least.update(counts)
            known.update(dict.fromkeys(counts, rarest))
            total, unlisted = total + there, unlisted + rarest
        most = {value: count + unlisted - known[value] for value, count in least.items()}
        return cls(total, least, most, unlisted)


def _over_values(parent: _Listed, found: Counts) -> float:
    """Compare over values; an uncertain count of the parent is taken closest to the found one.

    So equal values give 0, even if the reports omit some. The last two bins have the values that the parent does not
    list: those that are now more frequent than they can have been, and the others.
    """
    total = sum(found.values())
    shares = [found.get(value, 0) / total for value in parent.least]
    expected = [
        min(max(share, parent.least[value] / parent.total), parent.most[value] / parent.total)
        for value, share in zip(parent.least, shares, strict=True)
    ]
    limit = parent.unlisted / parent.total
    risen = [count / total for value, count in found.items() if value not in parent.least and count / total > limit]
    rest = max(0.0, 1 - math.fsum(expected))
    expected_risen = min(rest, limit * len(risen))
    others = max(0.0, 1 - math.fsum(shares) - math.fsum(risen))
    return _psi([*expected, expected_risen, rest - expected_risen], [*shares, math.fsum(risen), others])


def _psi(expected: Sequence[float], found: Sequence[float]) -> float:
    total = 0.0
    for e, a in zip(expected, found, strict=True):
        if e or a:
            e, a = max(e, MIN_SHARE), max(a, MIN_SHARE)
            total += (a - e) * math.log(a / e)
    return total


def _present(splits: Sequence[ColumnStatistics]) -> int:
    return sum(split.row_count - split.null_count - split.nan_count for split in splits)


def _has_booleans(column_statistics: ColumnStatistics) -> bool:
    return bool(column_statistics.values) and all(isinstance(value, bool) for value, _ in column_statistics.values)


def _complete_counts(splits: Sequence[ColumnStatistics]) -> dict[Any, int] | None:
    """Return the counts over all splits, if their reports have every value."""
    counts: dict[Any, int] = {}
    for split in splits:
        for value, count in split.values:
            counts[value] = counts.get(value, 0) + count
    return counts if sum(counts.values()) == _present(splits) else None
