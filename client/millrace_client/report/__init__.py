"""Reports for people: a preview's columns, checks and rows as texts, with histograms as bars.

The terminal and the page show the same texts. `report.pages` makes the HTML.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from millrace.common.v1 import transform_pb2
from millrace.data.v1 import data_service_pb2, quality_pb2, resources_pb2

if TYPE_CHECKING:
    import pyarrow as pa


# --- Profile ---

# The preview's first column, which has the split of each row.
SPLIT = "split"
MAX_VALUE_TEXT = 120
# Ranges of fewer days show times with hours.
DAYS_WITH_CLOCK = 20


@dataclass(frozen=True)
class Value:
    """A frequent value: its text, its number of rows, and their share of the rows that are not null."""

    text: str
    row_count: int
    share: str


@dataclass(frozen=True, kw_only=True)
class Part:
    """A column in one split. `least`, `middle` and `most` are values, moments or lengths, by the column's kind."""

    split: str
    row_count: int
    null_text: str
    has_nulls: bool
    nan_count: int
    least: str
    middle: str
    most: str
    distinct: str
    quantiles: Sequence[str]
    histogram: Sequence[int]
    values: Sequence[Value]


@dataclass(frozen=True)
class Column:
    """A column in all splits.

    `parts` is empty for a version without a report. `kind` is numbers, times, texts or values. Values that have names
    are classes, which say more than a histogram of their numbers.
    """

    name: str
    type_text: str
    kind: str
    has_names: bool
    parts: Sequence[Part]


@dataclass(frozen=True)
class CheckLine:
    passed: bool
    text: str
    observed: str
    quarantined: int


@dataclass(frozen=True)
class Profile:
    version: resources_pb2.DatasetVersion
    columns: Sequence[Column]
    checks: Sequence[CheckLine]
    quarantine: Sequence[quality_pb2.QuarantineReason]
    quarantined_row_count: int
    steps: Sequence[str]
    rows: Sequence[dict[str, str]]
    contact_sheet_png: bytes

    @property
    def state(self) -> str:
        name = resources_pb2.DatasetVersion.State.Name(self.version.state)
        return name.removeprefix("STATE_").lower()

    @property
    def contact_sheet_uri(self) -> str:
        """The contact sheet as a data URI, so that the page needs no other file; empty without one."""
        png = self.contact_sheet_png
        return f"data:image/png;base64,{base64.b64encode(png).decode()}" if png else ""


def profile_of(preview: data_service_pb2.PreviewVersionResponse) -> Profile:
    version, report = preview.version, preview.report
    names = {column.name: column.value_names for column in version.columns}
    return Profile(
        version=version,
        columns=[_column(column, report) for column in version.columns],
        checks=[
            CheckLine(not check.violations, check_text(check.check), check.observed, check.quarantined)
            for check in report.checks
        ],
        quarantine=list(report.quarantine),
        quarantined_row_count=report.quarantined_row_count or version.quarantined_row_count,
        steps=[step_text(step) for step in version.transform.steps],
        rows=[
            {name: _value_text(value, names.get(name, ())) for name, value in row.items()} for row in rows_of(preview)
        ],
        contact_sheet_png=preview.contact_sheet_png,
    )


def rows_of(preview: data_service_pb2.PreviewVersionResponse) -> list[dict[str, Any]]:
    """Return the first rows. Tensors show their shape, and bytes their length.

    The split of a row is `split`, or `_split` if the version has a column of that name.
    """
    if not preview.arrow_ipc:
        return []
    import pyarrow as pa

    table = pa.ipc.open_stream(preview.arrow_ipc).read_all()
    shapes = {column.name: shape_text(column) for column in preview.version.columns if column.shape}
    # By position, because the split is always first, whatever the other columns' names are.
    own = table.column_names[1:]
    names = [_free_name(SPLIT, own), *own]
    columns = [_values(table.column(0))]
    for place, name in enumerate(own, 1):
        constant = f"<{shapes[name]}>" if name in shapes else None
        columns.append([constant] * table.num_rows if constant else _values(table.column(place)))
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _free_name(name: str, taken: Sequence[str]) -> str:
    while name in taken:
        name = f"_{name}"
    return name


def _values(column: pa.ChunkedArray) -> list[Any]:
    try:
        return [_brief(value) for value in column.to_pylist()]
    except (OverflowError, ValueError):
        return [_value(value) for value in column]


def _value(value: pa.Scalar) -> Any:
    """Return a Python value, or Arrow's text if Python has none.

    Python's dates end with the year 9999, and it may not know the zone.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        return _brief(value.as_py())
    except (OverflowError, ValueError):
        pass
    try:
        return pc.cast(value, pa.string()).as_py()
    except pa.ArrowException:
        return f"{pc.cast(pc.cast(value, pa.timestamp(value.type.unit)), pa.string()).as_py()}Z"


def shape_text(column: resources_pb2.Column) -> str:
    """Format a shape, e.g. `28 × 28`; empty for a scalar."""
    return " × ".join(map(str, column.shape))


def type_text(column: resources_pb2.Column) -> str:
    """Format a type, e.g. `uint8 28 × 28` for a tensor, else the Arrow type."""
    if not column.shape:
        return column.arrow_type
    value_type = column.arrow_type.partition("value_type=")[2].partition(",")[0]
    return f"{value_type} {shape_text(column)}".strip()


def _brief(value: Any) -> Any:
    return f"<{len(value):,} bytes>" if isinstance(value, bytes) else value


def _value_text(value: Any, names: Sequence[str]) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and 0 <= value < len(names):
        return f"{value} ({names[value]})"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= MAX_VALUE_TEXT else text[: MAX_VALUE_TEXT - 1] + "…"


def _column(column: resources_pb2.Column, report: quality_pb2.QualityReport) -> Column:
    found = [one for one in report.columns if one.column == column.name]
    kinds = [kind for kind in ("numbers", "times", "texts") if any(one.HasField(kind) for one in found)]
    parts = [_part(one, column.value_names) for one in found]
    return Column(column.name, type_text(column), kinds[0] if kinds else "values", bool(column.value_names), parts)


def _part(column_statistics: quality_pb2.ColumnStatistics, names: Sequence[str]) -> Part:
    least, middle, most = _ends(column_statistics)
    there = column_statistics.row_count - column_statistics.null_count
    distinct = (
        f"{'' if column_statistics.distinct_is_exact else '≈ '}{column_statistics.distinct_count:,}"
        if column_statistics.distinct_count
        else "–"
    )
    return Part(
        split=column_statistics.split,
        row_count=column_statistics.row_count,
        null_text=share_text(column_statistics.null_count, column_statistics.row_count),
        has_nulls=column_statistics.null_count > 0,
        nan_count=column_statistics.nan_count,
        least=least,
        middle=middle,
        most=most,
        distinct=distinct,
        quantiles=[number_text(value) for value in column_statistics.numbers.quantiles],
        histogram=list(column_statistics.numbers.histogram or column_statistics.times.histogram),
        values=[
            Value(scalar_text(value.value, names), value.row_count, share_text(value.row_count, there))
            for value in column_statistics.values
        ],
    )


def _ends(column_statistics: quality_pb2.ColumnStatistics) -> tuple[str, str, str]:
    if column_statistics.HasField("numbers"):
        numbers = column_statistics.numbers
        middle = f"{number_text(numbers.mean)} ± {number_text(numbers.deviation)}"
        return number_text(numbers.min), middle, number_text(numbers.max)
    if column_statistics.HasField("times"):
        first, last = column_statistics.times.min.seconds, column_statistics.times.max.seconds
        with_clock = last - first < DAYS_WITH_CLOCK * 86_400 and (first % 86_400 or last % 86_400) != 0
        return moment_text(first, with_clock=with_clock), "–", moment_text(last, with_clock=with_clock)
    if column_statistics.HasField("texts"):
        texts = column_statistics.texts
        return f"{texts.min_bytes:,} B", f"{number_text(round(texts.mean_bytes, 1))} B", f"{texts.max_bytes:,} B"
    return "–", "–", "–"


# --- Histograms as bars ---

_BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH, HEIGHT = 240, 56
_GAP = 1.5


@dataclass(frozen=True)
class Bar:
    """A bar in a box of `WIDTH` by `HEIGHT`, the origin at the upper left."""

    x: float
    y: float
    width: float
    height: float
    count: int


def block_bars(counts: Sequence[int]) -> str:
    """Return a character per count: a space for 0, and a visible bar for every other count."""
    most = max(counts, default=0)
    return "".join(_BLOCKS[math.ceil(count / most * len(_BLOCKS)) - 1] if count else " " for count in counts)


def box_bars(counts: Sequence[int]) -> list[Bar]:
    """Return bars on the lower edge. The tallest is as high as the box, and small counts stay visible."""
    most = max(counts, default=0)
    if not most:
        return []
    step = WIDTH / len(counts)
    gap = min(_GAP, step / 4)
    bars = []
    for index, count in enumerate(counts):
        height = max(1.5, count / most * HEIGHT) if count else 0.0
        bars.append(
            Bar(round(index * step, 2), round(HEIGHT - height, 2), round(step - gap, 2), round(height, 2), count)
        )
    return bars


# --- Numbers, checks and steps as text ---

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
