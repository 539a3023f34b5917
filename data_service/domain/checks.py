"""Quality checks: conditions on rows, and on a whole version, that gate its publication.

Also parses them from proto JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from data_service.domain.statistics.result import (
    Value,
    camel_case,
    number_from_json,
    number_json,
    scalar_from_json,
    scalar_json,
)
from shared.errors import first_line, invalid_field, invalid_fields

# --- Checks ---

CHECK_FAILED = "QUALITY_CHECK_FAILED"


@dataclass(frozen=True)
class NotNull:
    kind: ClassVar[str] = "not_null"
    json_name: ClassVar[str] = "notNull"

    def to_json(self) -> dict[str, Any]:
        return {}

    def broken(self) -> str:
        """Describes a value that fails the check, for people."""
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
        """Returns the check in the shape of the proto's JSON."""
        return {
            "column": self.column,
            "action": "ACTION_QUARANTINE" if self.quarantines else "ACTION_FAIL",
            self.condition.json_name: self.condition.to_json(),
        }

    def reason(self) -> str:
        """Returns why a row fails, for people: `age is null`; only for row checks."""
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
    """Parses checks from proto JSON, in either spelling of field names.

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
    """Raises `InvalidArgument` naming all checks that do not fit these logical columns.

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
    """Returns why a check does not support values of this type; empty if it does."""
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
