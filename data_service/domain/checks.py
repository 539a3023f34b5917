"""Quality checks: conditions on rows, and on a version as a whole, that gate its publication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from data_service.domain.statistics.result import Value, number_json, scalar_json

CHECK_FAILED = "QUALITY_CHECK_FAILED"


@dataclass(frozen=True)
class NotNull:
    kind: ClassVar[str] = "not_null"
    json_name: ClassVar[str] = "notNull"

    def to_json(self) -> dict[str, Any]:
        return {}

    def broken(self) -> str:
        """What is wrong with a value that does not pass, for people."""
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
    """Both are inclusive; None is no limit."""

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
    """RE2; the whole string must match."""

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
    """Of one split, or of all where `split` is empty. `max` 0 is no limit."""

    kind: ClassVar[str] = "row_count"
    json_name: ClassVar[str] = "rowCount"

    split: str
    min: int
    max: int

    def to_json(self) -> dict[str, Any]:
        return {"split": self.split, "min": self.min, "max": self.max}


@dataclass(frozen=True)
class ClassBalance:
    """`max_share` 0 is no limit."""

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
    """A row that does not pass is left out where `quarantines`, else it ends the making of the version."""

    column: str
    condition: Condition
    quarantines: bool = False

    @property
    def is_of_rows(self) -> bool:
        return isinstance(self.condition, RowCondition)

    def to_json(self) -> dict[str, Any]:
        """In the shape of the proto's JSON."""
        return {
            "column": self.column,
            "action": "ACTION_QUARANTINE" if self.quarantines else "ACTION_FAIL",
            self.condition.json_name: self.condition.to_json(),
        }

    def reason(self) -> str:
        """Why a row does not pass, for people: `age is null`. For checks of rows."""
        if not isinstance(self.condition, RowCondition):
            raise TypeError(f"{self.condition.kind} is no check of rows")
        return f"{self.column} {self.condition.broken()}"


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What became of a check. `violations`: rows that did not pass; for checks of the whole version 0 or 1."""

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
