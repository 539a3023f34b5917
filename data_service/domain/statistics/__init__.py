"""Column statistics of a split: their values, and how they are computed.

The values are those of the proto's `ColumnStatistics`, and their JSON. There is one accumulator class for each kind of
column, and `SplitStatistics`, which has an accumulator for each column. None depends on the order in which values were
seen.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from data_service.domain.statistics.sketches import (
    BYTE_VALUES,
    MAX_FREQUENT,
    DistinctCount,
    ExactMoments,
    FrequentValues,
    Hashes,
    Sample,
    Weighted,
    byte_counts,
    hash_words,
    integers_of,
    mix,
    row_hashes,
    value_hashes,
    words_of,
)
from shared.dataset_version.manifest import is_tensor
from shared.value_texts import moment_text, value_text, whole_seconds

__all__ = ["ColumnStatistics", "NumberStatistics", "SplitStatistics", "TextStatistics", "TimeStatistics"]


# --- Statistics of a column ---

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
        """Return the statistics in the shape of the proto's JSON."""
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
        """Parse proto JSON in either spelling of field names; `times` and `texts` are ignored."""
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
    """Return proto JSON with field names in the default spelling."""
    if isinstance(record, Mapping):
        return {_camel(name): camel_case(value) for name, value in record.items()}
    return [camel_case(one) for one in record] if isinstance(record, list | tuple) else record


def number_json(value: float) -> float | str:
    """Return a number for proto JSON, which has names for NaN and infinities."""
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def number_from_json(value: Any) -> float:
    """Parse a number of proto JSON; raise `ValueError` or `TypeError`."""
    return _NAMED[value] if isinstance(value, str) and value in _NAMED else float(value)


def scalar_json(value: Value) -> dict[str, Any]:
    """Return the proto's `Scalar`; an integer beyond int64 becomes a number."""
    if isinstance(value, bool):
        return {"boolean": value}
    if isinstance(value, int):
        return {"integer": str(value)} if -(2**63) <= value < 2**63 else {"number": float(value)}
    return {"number": number_json(value)} if isinstance(value, float) else {"text": value}


def scalar_from_json(record: Mapping[str, Any]) -> Value:
    """Parse a `Scalar`; raise `ValueError` if no kind is set, or its value is of another kind."""
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


# --- Every column ---
# The statistics that all columns share.

MAX_REPORTED_VALUES = 100
# The limit of one text: a report is a single message, and is kept with the version for ever.
MAX_REPORTED_BYTES = 200


class Column(ABC):
    """Accumulates the values of one column.

    Accumulators of one type can be merged in any order.
    """

    def __init__(self) -> None:
        self.row_count = 0
        self.null_count = 0

    def update(self, array: pa.Array, hashes: Hashes) -> None:
        """Add one chunk, with the hashes of its row ids."""
        self.row_count += len(array)
        if array.null_count:
            self.null_count += array.null_count
            hashes = hashes[np.asarray(array.is_valid())]
            array = array.drop_null()
        if len(array):
            self._update(array, hashes)

    def merge(self, other: Column) -> None:
        self.row_count += other.row_count
        self.null_count += other.null_count
        self._merge(other)

    def result(self, split: str, column: str) -> ColumnStatistics:
        return ColumnStatistics(
            split=split, column=column, row_count=self.row_count, null_count=self.null_count, **self._result()
        )

    def value_counts(self) -> Mapping[Any, int] | None:
        """Return exact counts of all values that are neither null nor NaN.

        None if there are too many values, or values of an unsupported kind.
        """
        return None

    @abstractmethod
    def _update(self, array: pa.Array, hashes: Hashes) -> None:
        """Add values without nulls, at least one."""

    @abstractmethod
    def _merge(self, other: Any) -> None: ...

    @abstractmethod
    def _result(self) -> dict[str, Any]:
        """Return the fields of `ColumnStatistics` that only this kind of column has."""


class Bounds:
    """The minimum and maximum value; None without values."""

    def __init__(self) -> None:
        self.min: Any = None
        self.max: Any = None

    def add(self, least: Any, most: Any) -> None:
        self.min = least if self.min is None else min(self.min, least)
        self.max = most if self.max is None else max(self.max, most)

    def merge(self, other: Bounds) -> None:
        if other.min is not None:
            self.add(other.min, other.max)


def most_frequent(counts: Mapping[Any, int] | None) -> list[tuple[Any, int]]:
    """Return at most `MAX_REPORTED_VALUES` values by descending frequency, then by value.

    Return nothing if one of them is a text of more than `MAX_REPORTED_BYTES`: a truncated text would be another value,
    and without it the list would not have the most frequent ones.
    """
    ordered = sorted((counts or {}).items(), key=lambda item: (-item[1], item[0]))[:MAX_REPORTED_VALUES]
    is_long = any(isinstance(value, str) and len(value.encode()) > MAX_REPORTED_BYTES for value, _ in ordered)
    return [] if is_long else ordered


# --- Dates and times ---
# Dates and timestamps in the form of reports.

# The range of google.protobuf.Timestamp, in seconds since 1970: 0001-01-01 to the end of 9999-12-31.
_FIRST_SECOND, _LAST_SECOND = -62_135_596_800, 253_402_300_799


def rfc3339(value: int, arrow_type: pa.DataType) -> str:
    """Format a date or timestamp like google.protobuf.Timestamp in JSON, clipped to the years 1 to 9999."""
    seconds, rest = whole_seconds(value, arrow_type)
    if seconds < _FIRST_SECOND:
        seconds, rest = _FIRST_SECOND, 0
    if seconds > _LAST_SECOND:
        seconds, rest = _LAST_SECOND, 0
    return moment_text(seconds, rest)


# --- Scalars ---
# Statistics of integers, booleans, floats, decimals, dates, times and timestamps.


class _ScalarColumn(Column):
    """Statistics of scalar values: moments, bounds, a sample, the distinct count and the frequent values."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        super().__init__()
        self.moments = ExactMoments()
        self.bounds = Bounds()
        self.sample = Sample(dtype)
        self.distinct = DistinctCount()
        self.frequent = FrequentValues()

    def _merge(self, other: Any) -> None:
        self.moments.merge(other.moments)
        self.bounds.merge(other.bounds)
        self.sample.merge(other.sample)
        self.distinct.merge(other.distinct)
        self.frequent.merge(other.frequent)

    def _result(self) -> dict[str, Any]:
        return {
            "distinct_count": self.distinct.count,
            "distinct_is_exact": self.distinct.is_exact,
            "values": most_frequent(self.value_counts()),
        }

    @abstractmethod
    def _weighted(self) -> Weighted:
        """Return all values if their counts are known, else the sample."""

    def _numbers(self, *, is_integer: bool) -> dict[str, Any]:
        if not self.moments.count:
            return {}
        weighted, least, most = self._weighted(), self.bounds.min, self.bounds.max
        numbers = NumberStatistics(
            min=float(least),
            max=float(most),
            mean=self.moments.mean,
            deviation=self.moments.deviation,
            quantiles=[float(value) for value in weighted.quantiles()],
            histogram=weighted.histogram(least, most, self.moments.count, is_integer=is_integer),
        )
        return {"numbers": numbers}


class IntegerColumn(_ScalarColumn):
    """Statistics of integers.

    Booleans are 0 and 1; dates, times and timestamps are in their own unit.
    """

    def __init__(self, arrow_type: pa.DataType) -> None:
        super().__init__(np.uint64 if kinds.is_uint64(arrow_type) else np.int64)
        self._type = arrow_type

    @property
    def _has_mean(self) -> bool:
        return not kinds.is_temporal(self._type)

    def value_counts(self) -> Mapping[Any, int] | None:
        counts = self.frequent.counts
        if counts is None or kinds.is_integer(self._type):
            return counts
        if kinds.is_boolean(self._type):
            return {bool(value): count for value, count in counts.items()}
        return {value_text(value, self._type): count for value, count in counts.items()}

    def _update(self, array: pa.Array, hashes: Hashes) -> None:
        values = words_of(array).astype(np.int64) if kinds.is_boolean(array.type) else integers_of(array)
        self.sample.add(hashes, values)
        different, counts = values, None
        if self.frequent.counts is not None:
            different, counts = self._count(values)
        self.bounds.add(int(different.min()), int(different.max()))
        if self._has_mean:
            self.moments.add_integers(different, counts)
        else:
            self.moments.count += len(values)
        self.distinct.add(mix(different))

    def _count(self, values: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        counted = pc.value_counts(pa.array(values))
        different, counts = counted.field("values").to_numpy(), counted.field("counts").to_numpy()
        if len(different) > MAX_FREQUENT:
            self.frequent.close()
        else:
            self.frequent.add(different.tolist(), counts.tolist())
        return different, counts

    def _weighted(self) -> Weighted:
        if self.frequent.counts is None:
            return Weighted(self.sample.values)
        values, counts = self.frequent.counts.keys(), self.frequent.counts.values()
        return Weighted(np.array(list(values), self.sample.values.dtype), np.array(list(counts), np.int64))

    def _result(self) -> dict[str, Any]:
        common = super()._result()
        if kinds.is_date(self._type) or kinds.is_timestamp(self._type):
            return {**common, **self._times()}
        return common if kinds.is_time(self._type) else {**common, **self._numbers(is_integer=True)}

    def _times(self) -> dict[str, Any]:
        if not self.moments.count:
            return {}
        least, most = self.bounds.min, self.bounds.max
        bars = self._weighted().histogram(least, most, self.moments.count, is_integer=False)
        return {"times": TimeStatistics(min=rfc3339(least, self._type), max=rfc3339(most, self._type), histogram=bars)}


class FloatColumn(_ScalarColumn):
    """Statistics of floats of any width and decimals.

    Decimals are distinguished exactly, and summed as the nearest float64.
    """

    def __init__(self, arrow_type: pa.DataType) -> None:
        super().__init__(np.float64)
        self._is_decimal = kinds.is_decimal(arrow_type)
        self._nan_count = 0

    def value_counts(self) -> Mapping[Any, int] | None:
        counts = self.frequent.counts
        if counts is None or not self._is_decimal:
            return counts
        return {str(value): count for value, count in counts.items()}

    def _update(self, array: pa.Array, hashes: Hashes) -> None:
        if self._is_decimal:
            values = array.cast(pa.float64()).to_numpy()
            words, countable = words_of(array), array
        else:
            values = array.to_numpy(zero_copy_only=False).astype(np.float64) + 0.0  # turns -0.0 into 0.0
            there = ~np.isnan(values)
            if not there.all():
                self._nan_count += int((~there).sum())
                values, hashes = values[there], hashes[there]
            if not len(values):
                return
            words, countable = values.view(np.uint64), pa.array(values)
        self.bounds.add(float(values.min()), float(values.max()))
        self.moments.add_floats(values)
        self.sample.add(hashes, values)
        self.distinct.add(hash_words(words))
        if self.frequent.counts is not None:
            self._count(countable)

    def _count(self, values: pa.Array) -> None:
        counted = pc.value_counts(values)
        if len(counted) > MAX_FREQUENT:
            self.frequent.close()
        else:
            self.frequent.add(counted.field("values").to_pylist(), counted.field("counts").to_pylist())

    def _merge(self, other: Any) -> None:
        super()._merge(other)
        self._nan_count += other._nan_count

    def _weighted(self) -> Weighted:
        if self.frequent.counts is None:
            return Weighted(self.sample.values)
        values = np.array([float(value) for value in self.frequent.counts], np.float64)
        return Weighted(values, np.array(list(self.frequent.counts.values()), np.int64))

    def _result(self) -> dict[str, Any]:
        return {**super()._result(), "nan_count": self._nan_count, **self._numbers(is_integer=False)}


# --- Texts ---
# Statistics of strings and bytes.


class TextColumn(Column):
    """Statistics of strings and bytes.

    Bytes have no frequent values, since a report should not contain them.
    """

    def __init__(self, arrow_type: pa.DataType) -> None:
        super().__init__()
        self._is_text = kinds.is_string(arrow_type) or kinds.is_large_string(arrow_type)
        self._total_bytes = 0
        self._lengths = Bounds()
        self._distinct = DistinctCount()
        self._frequent = FrequentValues()
        if not self._is_text:
            self._frequent.close()

    def value_counts(self) -> Mapping[Any, int] | None:
        return self._frequent.counts

    def _update(self, array: pa.Array, hashes: Hashes) -> None:  # noqa: ARG002
        lengths = _lengths(array)
        self._total_bytes += int(lengths.sum())
        self._lengths.add(int(lengths.min()), int(lengths.max()))
        if not self._is_text:  # bytes are mostly large and seldom equal, so a hash table of them does not pay
            self._distinct.add(value_hashes(array))
        elif self._frequent.counts is None:
            self._distinct.add(value_hashes(pc.unique(array)))
        else:
            self._count(pc.value_counts(array))

    def _count(self, counted: pa.StructArray) -> None:
        different = counted.field("values")
        self._distinct.add(value_hashes(different))
        if len(different) > MAX_FREQUENT:
            self._frequent.close()
        else:
            self._frequent.add(different.to_pylist(), counted.field("counts").to_pylist())

    def _merge(self, other: TextColumn) -> None:
        self._total_bytes += other._total_bytes
        self._lengths.merge(other._lengths)
        self._distinct.merge(other._distinct)
        self._frequent.merge(other._frequent)

    def _result(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "distinct_count": self._distinct.count,
            "distinct_is_exact": self._distinct.is_exact,
            "values": most_frequent(self._frequent.counts),
        }
        there = self.row_count - self.null_count
        if there:
            least, most = self._lengths.min, self._lengths.max
            mean = self._total_bytes / there
            found["texts"] = TextStatistics(min_bytes=least, max_bytes=most, mean_bytes=mean)
        return found


def _lengths(array: pa.Array) -> np.ndarray[Any, Any]:
    if kinds.is_fixed_size_binary(array.type):
        return np.full(len(array), array.type.byte_width, np.int64)
    lengths: np.ndarray[Any, Any] = pc.binary_length(array).to_numpy().astype(np.int64)
    return lengths


# --- Tensors ---
# Statistics of tensor columns: over all values together. B = rows, K = values of one row.

# The bytes that are counted at a time: Pillow holds the GIL meanwhile.
_COUNT_BLOCK_BYTES = 400_000
_FLOAT_BLOCK_VALUES = 32_768


def tensor_rows(array: pa.ExtensionArray) -> npt.NDArray[Any]:
    """Return the values as (B, K), without a copy."""
    values: npt.NDArray[Any] = array.storage.flatten().to_numpy(zero_copy_only=True)
    return values.reshape(len(array), math.prod(array.type.shape))


class ByteTensorColumn(Column):
    """Exact statistics of uint8 tensors, from the counts of each byte value."""

    def __init__(self) -> None:
        super().__init__()
        self._counts = np.zeros(BYTE_VALUES, np.int64)

    def _update(self, array: pa.ExtensionArray, hashes: Hashes) -> None:  # noqa: ARG002
        flat = tensor_rows(array).reshape(-1)
        for start in range(0, len(flat), _COUNT_BLOCK_BYTES):
            self._counts += byte_counts(flat[start : start + _COUNT_BLOCK_BYTES])

    def _merge(self, other: ByteTensorColumn) -> None:
        self._counts += other._counts

    def _result(self) -> dict[str, Any]:
        there = np.flatnonzero(self._counts)
        if not len(there):
            return {}
        counts = self._counts[there]
        moments = ExactMoments()
        moments.add_integers(there, counts)
        weighted, least, most = Weighted(there, counts), int(there[0]), int(there[-1])
        numbers = NumberStatistics(
            min=float(least),
            max=float(most),
            mean=moments.mean,
            deviation=moments.deviation,
            quantiles=[float(value) for value in weighted.quantiles()],
            histogram=weighted.histogram(least, most, moments.count, is_integer=True),
        )
        return {"numbers": numbers}


class TensorColumn(Column):
    """Statistics of all other tensors.

    Each row sums its own values and squares in float64, in an order that depends on K alone; the rows' sums are then
    added exactly. A row whose sums are not finite is added value by value.
    """

    def __init__(self, value_type: pa.DataType) -> None:
        super().__init__()
        self._is_integer = pa.types.is_integer(value_type)
        self._nan_count = 0
        self._bounds = Bounds()
        self._moments = ExactMoments()
        self._sample = Sample(np.float64)

    def _update(self, array: pa.ExtensionArray, hashes: Hashes) -> None:
        rows = tensor_rows(array)
        self._sample.add_rows(hashes, rows)
        step = max(1, _FLOAT_BLOCK_VALUES // rows.shape[1])
        sums, squares = np.empty(len(rows)), np.empty(len(rows))
        doubles = np.empty((min(step, len(rows)), rows.shape[1]))
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, len(rows), step):
                block = doubles[: min(step, len(rows) - start)]
                block[...] = rows[start : start + step]
                np.add.reduce(block, axis=1, out=sums[start : start + step])
                np.multiply(block, block, out=block)
                np.add.reduce(block, axis=1, out=squares[start : start + step])
        finite = np.isfinite(sums) & np.isfinite(squares)
        if not finite.all():
            self._add_values(rows[~finite])
            rows, sums, squares = rows[finite], sums[finite], squares[finite]
        if len(rows):
            self._bounds.add(float(rows.min()) + 0.0, float(rows.max()) + 0.0)
            self._moments.add_rows(rows.size, sums, squares)

    def _add_values(self, rows: npt.NDArray[Any]) -> None:
        values = rows.reshape(-1).astype(np.float64) + 0.0
        there = values[~np.isnan(values)]
        self._nan_count += len(values) - len(there)
        if len(there):
            self._bounds.add(float(there.min()), float(there.max()))
            self._moments.add_floats(there)

    def _merge(self, other: TensorColumn) -> None:
        self._nan_count += other._nan_count
        self._bounds.merge(other._bounds)
        self._moments.merge(other._moments)
        self._sample.merge(other._sample)

    def _result(self) -> dict[str, Any]:
        if not self._moments.count:
            return {"nan_count": self._nan_count}
        weighted, least, most = Weighted(self._sample.values), self._bounds.min, self._bounds.max
        numbers = NumberStatistics(
            min=least,
            max=most,
            mean=self._moments.mean,
            deviation=0.0 if least == most else self._moments.deviation,
            quantiles=[value + 0.0 for value in weighted.quantiles()],
            histogram=weighted.histogram(least, most, self._moments.count, is_integer=self._is_integer),
        )
        return {"nan_count": self._nan_count, "numbers": numbers}


# --- All columns of a split ---
# Statistics of all columns of one split.


# Tables wait until they have this many rows or bytes together. With a thousand values, calls of NumPy and Arrow take
# longer than their work.
_BATCH_ROWS = 16_384
_BATCH_BYTES = 4 * 1024 * 1024


class SplitStatistics:
    """Accumulates rows of the logical columns of `schema`.

    Small and picklable, at most a few 100 KB a column. The result depends on the rows and their ids alone, to the last
    bit. Neither the order of the rows nor their division into parts that are merged later changes it.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.row_count = 0
        self._columns = {field.name: _column(field.type) for field in schema}
        self._waiting: list[tuple[pa.Table, npt.NDArray[np.int64]]] = []
        self._waiting_rows = self._waiting_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return {"row_count": self.row_count, "_columns": self._columns}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state, _waiting=[], _waiting_rows=0, _waiting_bytes=0)

    def update(self, table: pa.Table, first_row_id: int | npt.NDArray[np.int64]) -> None:
        """Add rows with consecutive ids from `first_row_id`, or with one id each.

        No id may occur twice. Columns of the table that the schema lacks are ignored.
        """
        if not table.num_rows:
            return  # a table that waits without rows would count in no limit
        if isinstance(first_row_id, int | np.integer):
            row_ids = np.arange(first_row_id, first_row_id + table.num_rows, dtype=np.int64)
        else:
            row_ids = np.ascontiguousarray(first_row_id, np.int64)
        self.row_count += table.num_rows
        columns = table.select(list(self._columns))
        self._waiting.append((columns, row_ids))
        self._waiting_rows += table.num_rows
        self._waiting_bytes += columns.nbytes
        if self._waiting_rows >= _BATCH_ROWS or self._waiting_bytes >= _BATCH_BYTES:
            self._settle()

    def _settle(self) -> None:
        """Add the waiting rows to their columns."""
        if not self._waiting:
            return
        tables, ids = zip(*self._waiting, strict=True)
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0
        hashes = row_hashes(np.concatenate(ids))
        for name, column in self._columns.items():
            start = 0
            # Column by column, because the tables may differ in whether a column may have nulls. Tensors are read where
            # they are; a copy would cost as much as their statistics.
            chunked = pa.chunked_array([chunk for table in tables for chunk in table.column(name).chunks])
            for chunk in chunked.chunks if is_tensor(chunked.type) else [_in_one(chunked)]:
                column.update(chunk, hashes[start : start + len(chunk)])
                start += len(chunk)

    def merge(self, other: SplitStatistics) -> None:
        """Add the rows of another part of the same split."""
        self._settle()
        other._settle()
        self.row_count += other.row_count
        for name, column in self._columns.items():
            column.merge(other._columns[name])

    def result(self, split: str = "") -> list[ColumnStatistics]:
        """Return the statistics in the order of the columns."""
        self._settle()
        return [column.result(split, name) for name, column in self._columns.items()]

    def value_counts(self, column: str) -> Mapping[Any, int] | None:
        """Return the count of each distinct value; None if there are more than 1,000."""
        self._settle()
        return self._columns[column].value_counts()


def _in_one(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _column(arrow_type: pa.DataType) -> Column:
    if isinstance(arrow_type, pa.FixedShapeTensorType):
        value_type = arrow_type.value_type
        return ByteTensorColumn() if kinds.is_uint8(value_type) else TensorColumn(value_type)
    if kinds.is_floating(arrow_type) or kinds.is_decimal(arrow_type):
        return FloatColumn(arrow_type)
    if kinds.is_integer(arrow_type) or kinds.is_boolean(arrow_type) or kinds.is_temporal(arrow_type):
        return IntegerColumn(arrow_type)
    return TextColumn(arrow_type)
