"""The statistics of one column in one split: the values of the proto's `ColumnStatistics`, and their JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Value = int | float | str | bool

_NAMED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, kw_only=True)
class NumberStatistics:
    """Statistics of the numbers that are neither null nor NaN.

    Infinities count as values: they are the minimum or maximum, the mean follows IEEE 754 (infinite, or NaN if both
    occur), the deviation is NaN, and there is no histogram.
    """

    min: float
    max: float
    mean: float
    deviation: float
    quantiles: Sequence[float]
    histogram: Sequence[int]

    def to_json(self) -> dict[str, Any]:
        return {
            "min": number_json(self.min),
            "max": number_json(self.max),
            "mean": number_json(self.mean),
            "deviation": number_json(self.deviation),
            "quantiles": [number_json(quantile) for quantile in self.quantiles],
            "histogram": list(self.histogram),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> NumberStatistics:
        numbers = {name: number_from_json(record.get(name, 0.0)) for name in ("min", "max", "mean", "deviation")}
        return cls(
            **numbers,
            quantiles=[number_from_json(one) for one in record.get("quantiles", ())],
            histogram=[int(one) for one in record.get("histogram", ())],
        )


@dataclass(frozen=True, kw_only=True)
class TimeStatistics:
    """Statistics of dates and timestamps.

    `min` and `max` are RFC 3339 texts. Without a zone they are taken as UTC; years are clipped to 1 and 9999.
    """

    min: str
    max: str
    histogram: Sequence[int]

    def to_json(self) -> dict[str, Any]:
        return {"min": self.min, "max": self.max, "histogram": list(self.histogram)}


@dataclass(frozen=True, kw_only=True)
class TextStatistics:
    """Statistics of text lengths, in bytes."""

    min_bytes: int
    max_bytes: int
    mean_bytes: float

    def to_json(self) -> dict[str, Any]:
        return {"minBytes": self.min_bytes, "maxBytes": self.max_bytes, "meanBytes": self.mean_bytes}


@dataclass(frozen=True, kw_only=True)
class ColumnStatistics:
    """Statistics of one column.

    `values` are the frequent ones with their counts, the most frequent first; empty if one is a long text. NaN is not a
    value: it is neither in `distinct_count` nor in `values`. Values of dates, times, timestamps and decimals are texts.
    """

    split: str
    column: str
    row_count: int
    null_count: int = 0
    nan_count: int = 0
    numbers: NumberStatistics | None = None
    times: TimeStatistics | None = None
    texts: TextStatistics | None = None
    distinct_count: int = 0
    distinct_is_exact: bool = False
    values: Sequence[tuple[Value, int]] = field(default_factory=tuple)

    def to_json(self) -> dict[str, Any]:
        """Returns the statistics in the shape of the proto's JSON."""
        record: dict[str, Any] = {
            "split": self.split,
            "column": self.column,
            "rowCount": self.row_count,
            "nullCount": self.null_count,
            "nanCount": self.nan_count,
            "distinctCount": self.distinct_count,
            "distinctIsExact": self.distinct_is_exact,
            "values": [{"value": scalar_json(value), "rowCount": count} for value, count in self.values],
        }
        for name in ("numbers", "times", "texts"):
            part = getattr(self, name)
            if part is not None:
                record[name] = part.to_json()
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> ColumnStatistics:
        """Parses proto JSON in either spelling of field names; `times` and `texts` are ignored."""
        given = camel_case(record)
        return cls(
            split=given.get("split", ""),
            column=given.get("column", ""),
            row_count=int(given.get("rowCount", 0)),
            null_count=int(given.get("nullCount", 0)),
            nan_count=int(given.get("nanCount", 0)),
            numbers=NumberStatistics.from_json(given["numbers"]) if "numbers" in given else None,
            distinct_count=int(given.get("distinctCount", 0)),
            distinct_is_exact=bool(given.get("distinctIsExact", False)),
            values=[(scalar_from_json(one["value"]), int(one["rowCount"])) for one in given.get("values", ())],
        )


def camel_case(record: Any) -> Any:
    """Returns proto JSON with field names in the default spelling."""
    if isinstance(record, Mapping):
        return {_camel(name): camel_case(value) for name, value in record.items()}
    return [camel_case(one) for one in record] if isinstance(record, list | tuple) else record


def number_json(value: float) -> float | str:
    """Returns a number for proto JSON, which has names for NaN and infinities."""
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def number_from_json(value: Any) -> float:
    """Parses a number of proto JSON; raises `ValueError` or `TypeError`."""
    return _NAMED[value] if isinstance(value, str) and value in _NAMED else float(value)


def scalar_json(value: Value) -> dict[str, Any]:
    """Returns the proto's `Scalar`; an integer beyond int64 becomes a number."""
    if isinstance(value, bool):
        return {"boolean": value}
    if isinstance(value, int):
        return {"integer": str(value)} if -(2**63) <= value < 2**63 else {"number": float(value)}
    return {"number": number_json(value)} if isinstance(value, float) else {"text": value}


def scalar_from_json(record: Mapping[str, Any]) -> Value:
    """Parses a `Scalar`; raises `ValueError` if no kind is set, or its value is of another kind."""
    if "integer" in record:
        return int(record["integer"])
    if "number" in record:
        return number_from_json(record["number"])
    if "boolean" in record:
        return bool(record["boolean"])
    if "text" in record:
        return str(record["text"])
    raise ValueError("no kind is set")


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.title() for part in rest)
