"""Formats numbers, checks and transform steps as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from millrace.common.v1 import transform_pb2
from millrace.data.v1 import quality_pb2

MAX_LISTED = 3
MAX_STEP_TEXT = 100


def number_text(value: float) -> str:
    """Format a number with as many digits as are useful: `12,345`, `0.1307`, `1.235e+12`."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if 1000 <= abs(value) < 1e9 or (value == int(value) and abs(value) < 1000):
        return f"{round(value):,}".replace("-", "−")
    return f"{value:.4g}".replace("e-", "e−").replace("-", "−")


def share_text(part: int, whole: int) -> str:
    """Format a share in percent. Only 0 reads as 0, and only a full share as 100."""
    if not part or not whole:
        return "0 %"
    percent = 100 * part / whole
    if part < whole and percent >= 99.95:
        return "> 99.9 %"
    return "< 0.1 %" if percent < 0.05 else f"{percent:.1f} %".replace(".0 %", " %")


def moment_text(seconds: int, *, with_clock: bool) -> str:
    """Format a moment in UTC."""
    from datetime import UTC, datetime, timedelta

    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    return f"{moment:%Y-%m-%d %H:%M}" if with_clock else f"{moment:%Y-%m-%d}"


def scalar_text(scalar: transform_pb2.Scalar, names: Sequence[str] = ()) -> str:
    """Format a scalar. `names` are those of the values 0, 1, …"""
    kind = scalar.WhichOneof("kind")
    value: Any = getattr(scalar, kind) if kind else ""
    if kind == "integer" and 0 <= value < len(names):
        return str(names[value])
    if kind == "number":
        return number_text(value)
    return str(value).lower() if kind == "boolean" else str(value)


def cause_text(cause: int) -> str:
    """Describe why an attempt ended, by its `AttemptEnded.Cause`."""
    return {
        1: "lost to a failure",
        2: "lost: a rank stood still",
        3: "its node was taken away",
        4: "made room for another number of workers",
        5: "suspended",
        6: "cancelled",
    }.get(cause, "ended")


def check_text(check: quality_pb2.QualityCheck) -> str:
    """Describe a check: `age is from 0 to 120`."""
    kind = check.WhichOneof("check")
    column = check.column
    match kind:
        case "not_null":
            return f"{column} is not null"
        case "unique":
            return f"{column} is unique"
        case "range":
            return f"{column} is {_range_text(check.range)}"
        case "one_of":
            values = [scalar_text(value) for value in check.one_of.values]
            return f"{column} is one of {_listed(values)}"
        case "pattern":
            return f"{column} matches {check.pattern.regex}"
        case "row_count":
            return f"{check.row_count.split or 'the version'} has {_count_text(check.row_count)} rows"
        case "class_balance":
            return f"each {column} has {_balance_text(check.class_balance)} of the rows"
        case "drift":
            return f"{column} drifts by a psi of at most {check.drift.max_population_stability_index:g}"
    return f"a check of {column} that this program does not know"


def step_text(step: transform_pb2.TransformStep) -> str:
    """Describe a step: `resize(image, height=32, width=32)`."""
    kind = step.WhichOneof("op")
    if kind is None:
        return "a step that this program does not know"
    arguments = [step.column] if step.column else []
    for field, value in getattr(step, kind).ListFields():
        arguments.append(f"{field.name}={_check_value_text(field, value)}")
    text = f"{kind}({', '.join(arguments)})"
    return text if len(text) <= MAX_STEP_TEXT else f"{text[: MAX_STEP_TEXT - 2]}…)"


def _range_text(limits: quality_pb2.Range) -> str:
    if not limits.HasField("max"):
        return f"{number_text(limits.min)} or more"
    if not limits.HasField("min"):
        return f"{number_text(limits.max)} or less"
    return f"from {number_text(limits.min)} to {number_text(limits.max)}"


def _count_text(limits: quality_pb2.RowCount) -> str:
    if not limits.max:
        return f"{limits.min:,} or more"
    return f"{limits.min:,} to {limits.max:,}" if limits.min else f"at most {limits.max:,}"


def _balance_text(limits: quality_pb2.ClassBalance) -> str:
    least = f"at least {100 * limits.min_share:g} %" if limits.min_share else ""
    most = f"at most {100 * limits.max_share:g} %" if limits.max_share else ""
    return " and ".join(part for part in (least, most) if part)


def _check_value_text(field: Any, value: Any) -> str:
    if isinstance(value, transform_pb2.Scalar):
        return scalar_text(value)
    if isinstance(value, Message):
        return "…"
    if field.enum_type is not None:
        return str(field.enum_type.values_by_number[value].name).rpartition("_")[2].lower()
    if isinstance(value, str):
        return repr(value)
    if hasattr(value, "items"):
        return _listed([f"{old}→{new}" for old, new in sorted(value.items())])
    if hasattr(value, "__len__"):
        return f"[{_listed([one if isinstance(one, str) else f'{one:.4g}' for one in value])}]"
    return str(value).lower() if isinstance(value, bool) else f"{value:.6g}"


def _listed(values: Sequence[str]) -> str:
    more = len(values) - MAX_LISTED
    return ", ".join(values[:MAX_LISTED]) + (f", … {more} more" if more > 0 else "")
