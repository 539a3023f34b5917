"""Steps that learn from the training rows: they fill nulls, scale numbers, or encode categories.

They learn mean and deviation, extremes and value counts. The results do not depend on the order or the cut of the rows.
Mean and deviation of float64 values are correctly rounded. Every finite float64 is a whole number times 2**-1126, if
its mantissa is always taken as 53 bits. The sums are kept as such whole numbers of any length, so nothing is rounded
before the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
from numpy.typing import NDArray

from millrace.common.v1 import transform_pb2
from shared.dataset_version.manifest import refuse_beyond_milliseconds
from shared.errors import shown
from shared.transforms.batch import (
    Column,
    ColumnStep,
    ColumnType,
    FitAccumulator,
    RowProblem,
    ScalarType,
    StepError,
    StepKeys,
    TensorType,
    float64_of,
    scalar,
)
from shared.transforms.steps.columns import Cast, numeric
from shared.value_texts import value_of_text, value_shown, value_text

# --- Mean and deviation ---

# numpy.frexp gives exponents from -1073 on.
MIN_EXPONENT = -1073
UNIT_BITS = 53 - MIN_EXPONENT
_HALF_BITS = 27
_LOW_WORD = np.int64(0xFFFFFFFF)


class ExactMoments:
    """Count, sum and sum of squares of finite values."""

    def __init__(self) -> None:
        self.count = 0
        # In units of 2**-UNIT_BITS, and of its square.
        self._sum = 0
        self._squares = 0

    def add(self, values: NDArray[np.float64]) -> None:
        """Add values of shape (N), all finite; N is at most 2**31."""
        if not len(values):
            return
        self.count += len(values)
        fraction, exponent = np.frexp(values)
        order = np.argsort(exponent.astype(np.int16), kind="stable")
        exponent = exponent[order]
        mantissa = np.ldexp(fraction[order], 53).astype(np.int64)
        starts = np.flatnonzero(np.r_[True, exponent[1:] != exponent[:-1]])
        shifts = (exponent[starts] - MIN_EXPONENT).tolist()
        high = np.abs(mantissa) >> _HALF_BITS
        low = np.abs(mantissa) & ((1 << _HALF_BITS) - 1)
        sums = zip(
            shifts,
            _sums(mantissa, starts),
            _sums(high * high, starts),
            _sums(high * low, starts),
            _sums(low * low, starts),
            strict=True,
        )
        for shift, total, high_high, high_low, low_low in sums:
            self._sum += total << shift
            square = (high_high << 2 * _HALF_BITS) + (high_low << _HALF_BITS + 1) + low_low
            self._squares += square << 2 * shift

    def merge(self, other: ExactMoments) -> None:
        self.count += other.count
        self._sum += other._sum
        self._squares += other._squares

    @property
    def mean(self) -> float:
        """The float64 nearest to the exact mean. There must be a value."""
        return self._sum / (self.count << UNIT_BITS)  # Python divides whole numbers of any length with one rounding

    @property
    def deviation(self) -> float:
        """Return the standard deviation of the population.

        It is the root of the exact variance, to the last bit, and exactly 0 for equal values.
        """
        spread = self.count * self._squares - self._sum * self._sum
        return _root(spread, self.count * self.count << 2 * UNIT_BITS)


def _sums(words: NDArray[np.int64], starts: NDArray[np.intp]) -> list[int]:
    """Return the exact sum of each range that begins at `starts`.

    Words are summed in halves, because int64 holds those sums.
    """
    high = np.add.reduceat(words >> 32, starts).tolist()
    low = np.add.reduceat(words & _LOW_WORD, starts).tolist()
    return [(upper << 32) + lower for upper, lower in zip(high, low, strict=True)]


def _root(numerator: int, denominator: int) -> float:
    """Return the square root of the fraction, with at least 64 bits before its rounding to float64."""
    shift = max(0, (denominator.bit_length() - numerator.bit_length()) // 2 + 66)
    return math.isqrt((numerator << 2 * shift) // denominator) / (1 << shift)


# --- Value counts ---

# New values are counted together once this many rows wait, because each count is a pass over all known values.
ROWS_TO_WAIT_FOR = 1 << 16


class ValueCounts:
    """Counts every distinct value, up to `limit`. `name` is the step's, for the error beyond it."""

    def __init__(self, arrow_type: pa.DataType, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        # Arrow cannot count float16.
        self._type = pa.float32() if arrow_type == pa.float16() else arrow_type
        self._known = pa.table({"value": pa.array([], self._type), "count": pa.array([], pa.int64())})
        self._waiting: list[pa.Table] = []
        self._rows_waiting = 0

    def add(self, values: pa.Array) -> None:
        """Count values, none of them null. Raises `StepError` beyond the limit."""
        values = values.cast(self._type)
        if pa.types.is_floating(values.type):
            values = pc.add(values, pa.scalar(0.0, values.type))  # -0.0 is the same value as 0.0
        counted = values.value_counts()
        self._wait(pa.table({"value": counted.field("values"), "count": counted.field("counts")}))

    def merge(self, other: ValueCounts) -> None:
        """Add another's counts. Raises `StepError` beyond the limit."""
        for table in (other._known, *other._waiting):
            self._wait(table)

    def ordered(self) -> tuple[pa.Array, NDArray[np.int64]]:
        """Return the distinct values in ascending order (numbers, or UTF-8 bytes), and the count of each."""
        self._count_waiting()
        self._check()
        values = self._known["value"].combine_chunks()
        order = pc.sort_indices(values)
        return values.take(order), self._known["count"].to_numpy()[order.to_numpy()]

    def __getstate__(self) -> dict[str, Any]:
        self._count_waiting()
        return self.__dict__

    def _wait(self, table: pa.Table) -> None:
        self._waiting.append(table)
        self._rows_waiting += len(table)
        if self._rows_waiting > max(ROWS_TO_WAIT_FOR, len(self._known)):
            self._count_waiting()
            self._check()

    def _count_waiting(self) -> None:
        if self._waiting:
            together = pa.concat_tables([self._known, *self._waiting])
            counted = together.group_by("value", use_threads=False).aggregate([("count", "sum")])
            self._known = pa.table({"value": counted["value"], "count": counted["count_sum"]}).combine_chunks()
            self._waiting, self._rows_waiting = [], 0

    def _check(self) -> None:
        if len(self._known) > self._limit:
            raise StepError(
                f"{self._name} learns from at most {self._limit:,} distinct values, and the training rows have more"
            )


# --- Fill nulls ---

# Median and mode are exact, because every distinct value is kept and counted.
MAX_DISTINCT = 5_000_000

Value = int | float | str | bool
_Statistic = transform_pb2.FillNulls.Statistic
_NAMES = {
    _Statistic.STATISTIC_MEAN: "mean",
    _Statistic.STATISTIC_MEDIAN: "median",
    _Statistic.STATISTIC_MODE: "mode",
}
_STATISTICS = {name: number for number, name in _NAMES.items()}


@dataclass(frozen=True)
class FillNulls(ColumnStep):
    """Replaces nulls by `value`; dates, times and decimals are texts.

    `statistic` is mean, median, mode or empty.
    """

    op: ClassVar[str] = "fill_nulls"
    value: Value | None
    statistic: str

    @classmethod
    def from_message(cls, message: transform_pb2.FillNulls, column: str) -> Self:
        kind = message.value.WhichOneof("kind")
        if message.HasField("value") and kind is None:
            raise StepError("set one of integer, number, text, boolean", "fill_nulls.value")
        if kind is None and message.statistic not in _NAMES:
            raise StepError("give a value, or a statistic to learn it by", "fill_nulls")
        if message.statistic and message.statistic not in _NAMES:
            raise StepError(f"{message.statistic}: use mean, median or mode", "fill_nulls.statistic")
        value = getattr(message.value, kind) if kind else None
        return cls(column, value, _NAMES.get(message.statistic, ""))

    def message(self) -> transform_pb2.FillNulls:
        message = transform_pb2.FillNulls()
        if self.statistic:
            message.statistic = _STATISTICS[self.statistic]
        match self.value:
            case bool():
                message.value.boolean = self.value
            case int():
                message.value.integer = self.value
            case float():
                message.value.number = self.value
            case str():
                message.value.text = self.value
        return message

    @property
    def fitted(self) -> bool:
        return self.value is not None

    def accumulator(self, column_type: ColumnType) -> FitAccumulator:
        arrow_type = scalar(column_type, "fill_nulls needs a column of scalars").arrow_type
        return _MeanAccumulator(self) if self.statistic == "mean" else _CountsAccumulator(self, arrow_type)

    def output_type(self, column_type: ColumnType) -> ColumnType:
        arrow_type = scalar(column_type, "fill_nulls needs a column of scalars").arrow_type
        if self.value is not None:
            _as_scalar(self.value, arrow_type)
        elif self.statistic == "mean" and not kinds.is_floating(arrow_type):
            remedy = "cast it to double first, or use median or mode"
            raise StepError(f"the mean of {arrow_type} may be between two values; {remedy}", "fill_nulls.statistic")
        elif kinds.is_binary(arrow_type) or kinds.is_fixed_size_binary(arrow_type):
            raise StepError(f"there is no {self.statistic} of {arrow_type}", "fill_nulls.statistic")
        return ScalarType(arrow_type, nullable=False)

    def work(self, column: Column, keys: StepKeys | None) -> Column:
        if not column.null_count:
            return column
        assert self.value is not None
        return column.fill_null(_as_scalar(self.value, column.type))


def _as_scalar(value: Value, arrow_type: pa.DataType) -> pa.Scalar:
    """Convert the value to the type; floats are rounded to the type's nearest.

    Raises `StepError` for a value that the type cannot hold.
    """
    wanted = f"{arrow_type} cannot hold {shown(value)}"
    if kinds.is_floating(arrow_type) and isinstance(value, int | float) and not isinstance(value, bool):
        with np.errstate(over="ignore"):
            nearest = float(arrow_type.to_pandas_dtype()(value))
        if math.isinf(nearest) and not math.isinf(value):
            raise StepError(wanted, "fill_nulls.value")
        return pa.scalar(nearest, arrow_type)
    if kinds.is_boolean(arrow_type) or isinstance(value, bool):
        if not (kinds.is_boolean(arrow_type) and isinstance(value, bool)):
            raise StepError(f"{wanted}; give a value of its kind", "fill_nulls.value")
        return pa.scalar(value)
    if kinds.is_integer(arrow_type) != isinstance(value, int | float):
        raise StepError(f"{wanted}; give a value of its kind", "fill_nulls.value")
    try:
        if kinds.is_temporal(arrow_type) and isinstance(value, str):
            made = value_of_text(value, arrow_type)
            refuse_beyond_milliseconds(pa.array([made]))
            return made
        return Cast("", arrow_type).work(pa.array([value]), None)[0]
    except (RowProblem, pa.ArrowException):
        raise StepError(wanted, "fill_nulls.value") from None


class _ColumnMoments:
    """The exact moments of the valid values of a step's column, for steps that learn from them."""

    def __init__(self, column: str) -> None:
        self._column = column
        self._moments = ExactMoments()

    def update(self, column: Column) -> None:
        values, valid = float64_of(column)
        refuse_non_finite(self._column, values)
        self._moments.add(values[valid])

    def merge(self, other: Self) -> None:
        self._moments.merge(other._moments)


class _MeanAccumulator(_ColumnMoments):
    def __init__(self, step: FillNulls) -> None:
        super().__init__(step.column)
        self._step = step

    def fitted_step(self) -> FillNulls:
        if not self._moments.count:
            raise StepError(f"{self._step.column!r} has no value in the training rows to learn the mean of")
        return replace(self._step, value=self._moments.mean)


class _CountsAccumulator:
    def __init__(self, step: FillNulls, arrow_type: pa.DataType) -> None:
        self._step = step
        self._counts = ValueCounts(arrow_type, MAX_DISTINCT, f"fill_nulls with a {step.statistic}")

    def update(self, column: Column) -> None:
        if kinds.is_floating(column.type):
            refuse_nan(self._step.column, *float64_of(column))
        self._counts.add(column.drop_null())

    def merge(self, other: _CountsAccumulator) -> None:
        self._counts.merge(other._counts)

    def fitted_step(self) -> FillNulls:
        values, counts = self._counts.ordered()
        if not len(values):
            raise StepError(f"{self._step.column!r} has no value in the training rows to learn the value of")
        if self._step.statistic == "mode":
            return replace(self._step, value=_frozen(values[int(counts.argmax())]))
        middle = (int(counts.sum()) - 1) // 2
        return replace(self._step, value=_frozen(values[int(np.searchsorted(counts.cumsum(), middle, side="right"))]))


def _frozen(found: pa.Scalar) -> Value:
    """Return the value as the step keeps it: numbers and booleans unchanged, others as text."""
    if kinds.is_temporal(found.type):
        text = value_text(found.value, found.type)
        _as_scalar(text, found.type)  # fails if a file has times beyond a day
        return text
    kept = numeric(found.type) or kinds.is_boolean(found.type)
    value: Value = (found if kept else pc.cast(found, pa.string())).as_py()
    if isinstance(value, int) and value > np.iinfo(np.int64).max:
        raise StepError(f"it learnt {value}, and keeps integers of 64 bits with a sign alone; cast to double first")
    return value


def refuse_non_finite(column: str, values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    """Raise `RowProblem` for the first infinite value or NaN of (B)."""
    finite = np.isfinite(values)
    if not finite.all():
        row = int(np.flatnonzero(~finite)[0])
        raise RowProblem(row, f"{column!r} is {values[row]}, and nothing can be learnt from it; filter such rows out")


def refuse_nan(
    column: str, values: np.ndarray[tuple[int], np.dtype[np.float64]], valid: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> None:
    """Raise `RowProblem` for the first NaN of (B) that is `valid`."""
    bad = np.isnan(values) & valid
    if bad.any():
        raise RowProblem(int(np.flatnonzero(bad)[0]), f"{column!r} is NaN, which has no place in an order; filter it")


# --- Scale and bucketize ---


@dataclass(frozen=True)
class Standardize(ColumnStep):
    """Computes (x - mean) / deviation in float64 and returns float32.

    With a deviation of 0 every number becomes 0.
    """

    op: ClassVar[str] = "standardize"
    mean: float | None = None
    deviation: float | None = None

    def __post_init__(self) -> None:
        if (self.mean is None) != (self.deviation is None):
            raise StepError("give both mean and deviation, or neither to learn them", "standardize")
        if self.mean is not None and not math.isfinite(self.mean):
            raise StepError("use a finite number", "standardize.mean")
        if self.deviation is not None and not 0 <= self.deviation < math.inf:
            raise StepError("use a finite number that is not negative", "standardize.deviation")

    @classmethod
    def from_message(cls, message: transform_pb2.Standardize, column: str) -> Self:
        return cls(column, _optional(message, "mean"), _optional(message, "deviation"))

    def message(self) -> transform_pb2.Standardize:
        return transform_pb2.Standardize(mean=self.mean, deviation=self.deviation)

    @property
    def fitted(self) -> bool:
        return self.mean is not None

    def accumulator(self, column_type: ColumnType) -> FitAccumulator:
        return _MomentsAccumulator(self)

    def output_type(self, column_type: ColumnType) -> ColumnType:
        return ScalarType(pa.float32(), _numbers(column_type, self.op).nullable)

    def work(self, column: Column, keys: StepKeys | None) -> Column:
        mean, deviation = self.mean, self.deviation
        assert mean is not None
        assert deviation is not None
        return _scaled(column, lambda values: _quotient(values - mean, deviation))


@dataclass(frozen=True)
class MinMaxScale(ColumnStep):
    """Computes (x - min) / (max - min) in float64 and returns float32.

    With equal bounds every number becomes 0.
    """

    op: ClassVar[str] = "min_max_scale"
    min: float | None = None
    max: float | None = None
    clip: bool = False

    def __post_init__(self) -> None:
        if (self.min is None) != (self.max is None):
            raise StepError("give both min and max, or neither to learn them", "min_max_scale")
        if self.min is not None and self.max is not None:
            if not self.min <= self.max:
                raise StepError("min must be at most max", "min_max_scale.max")
            if not math.isfinite(self.max - self.min):
                raise StepError("min and max must be finite, and their difference too", "min_max_scale.max")

    @classmethod
    def from_message(cls, message: transform_pb2.MinMaxScale, column: str) -> Self:
        return cls(column, _optional(message, "min"), _optional(message, "max"), message.clip)

    def message(self) -> transform_pb2.MinMaxScale:
        return transform_pb2.MinMaxScale(min=self.min, max=self.max, clip=self.clip)

    @property
    def fitted(self) -> bool:
        return self.min is not None

    def accumulator(self, column_type: ColumnType) -> FitAccumulator:
        return _BoundsAccumulator(self)

    def output_type(self, column_type: ColumnType) -> ColumnType:
        return ScalarType(pa.float32(), _numbers(column_type, self.op).nullable)

    def work(self, column: Column, keys: StepKeys | None) -> Column:
        least, greatest = self.min, self.max
        assert least is not None
        assert greatest is not None

        def scale(values: NDArray[np.float64]) -> NDArray[np.float64]:
            scaled = _quotient(values - least, greatest - least)
            return np.clip(scaled, 0, 1) if self.clip else scaled

        return _scaled(column, scale)


@dataclass(frozen=True)
class Bucketize(ColumnStep):
    """Counts the boundaries at or below each number, as int64."""

    op: ClassVar[str] = "bucketize"
    boundaries: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.boundaries:
            raise StepError("give at least one boundary", "bucketize.boundaries")
        for index, boundary in enumerate(self.boundaries):
            if not math.isfinite(boundary):
                raise StepError("use a finite number", f"bucketize.boundaries[{index}]")
        for index, (before, boundary) in enumerate(pairwise(self.boundaries), start=1):
            if boundary <= before:
                raise StepError("must be above the one before", f"bucketize.boundaries[{index}]")

    @classmethod
    def from_message(cls, message: transform_pb2.Bucketize, column: str) -> Self:
        return cls(column, tuple(message.boundaries))

    def message(self) -> transform_pb2.Bucketize:
        return transform_pb2.Bucketize(boundaries=self.boundaries)

    def output_type(self, column_type: ColumnType) -> ColumnType:
        return ScalarType(pa.int64(), _numbers(column_type, self.op).nullable)

    def work(self, column: Column, keys: StepKeys | None) -> Column:
        if kinds.is_integer(column.type):
            valid = column.is_valid().to_numpy(zero_copy_only=False)
            whole = column.fill_null(0).to_numpy(zero_copy_only=False)
            buckets = np.searchsorted(self._whole_boundaries(whole.dtype), whole, side="right")
        else:
            values, valid = float64_of(column)
            refuse_nan(self.column, values, valid)
            buckets = np.searchsorted(np.array(self.boundaries), values, side="right")
        return pa.array(buckets.astype(np.int64), mask=~valid)

    def _whole_boundaries(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return the boundaries for integers, because float64 cannot distinguish the greatest integers.

        No integer reaches a boundary above the type's range; every integer is above a boundary below it.
        """
        limits = np.iinfo(dtype)
        ceilings = (math.ceil(boundary) for boundary in self.boundaries)
        return np.array([max(ceiling, limits.min) for ceiling in ceilings if ceiling <= limits.max], dtype)


def _optional(message: Any, field: str) -> float | None:
    return getattr(message, field) if message.HasField(field) else None


def _numbers(column_type: ColumnType, op: str) -> ScalarType:
    column = scalar(column_type, f"{op} needs a column of numbers")
    if not numeric(column.arrow_type):
        raise StepError(f"{op} needs integers or floats, not {column}; cast the column first")
    return column


def _quotient(values: NDArray[np.float64], divisor: float) -> NDArray[np.float64]:
    if divisor == 0:
        return np.where(np.isnan(values), values, 0.0)
    return values / divisor


def _scaled(column: pa.Array, scale: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> pa.Array:
    values, valid = float64_of(column)
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # values beyond float32 become infinite; infinity by infinity is NaN
        scaled = scale(values).astype(np.float32)
    return pa.array(scaled, mask=~valid if column.null_count else None)


class _MomentsAccumulator(_ColumnMoments):
    def __init__(self, step: Standardize) -> None:
        super().__init__(step.column)
        self._step = step

    def fitted_step(self) -> Standardize:
        if not self._moments.count:
            raise StepError(f"{self._step.column!r} has no value in the training rows to learn from")
        return replace(self._step, mean=self._moments.mean, deviation=self._moments.deviation)


class _BoundsAccumulator:
    def __init__(self, step: MinMaxScale) -> None:
        self._step = step
        self._least = math.inf
        self._greatest = -math.inf

    def update(self, column: Column) -> None:
        values, valid = float64_of(column)
        refuse_non_finite(self._step.column, values)
        if valid.any():
            seen = values[valid]
            self._take(float(seen.min()), float(seen.max()))

    def merge(self, other: _BoundsAccumulator) -> None:
        self._take(other._least, other._greatest)

    def fitted_step(self) -> MinMaxScale:
        if self._least > self._greatest:
            raise StepError(f"{self._step.column!r} has no value in the training rows to learn from")
        return replace(self._step, min=self._least, max=self._greatest)

    def _take(self, least: float, greatest: float) -> None:
        # -0.0 + 0.0 is 0.0, so the order of the two zeros does not affect the result.
        self._least = min(self._least, least) + 0.0
        self._greatest = max(self._greatest, greatest) + 0.0


# --- Encode categories ---

MAX_ORDINAL_CATEGORIES = 100_000
MAX_ONE_HOT_CATEGORIES = 10_000

_ABSENT = -1  # the index of a null
_UNKNOWN = -2


@dataclass(frozen=True)
class _Encode(ColumnStep):
    """Base of the encoders.

    `categories` are texts in the order of the column's type; empty: not learned yet.
    """

    limit: ClassVar[int]
    categories: tuple[str, ...] = ()
    unknown: transform_pb2.UnknownValue = transform_pb2.UNKNOWN_VALUE_UNSPECIFIED

    @classmethod
    def from_message(cls, message: Any, column: str) -> Self:
        if len(message.categories) > cls.limit:
            raise StepError(
                f"{len(message.categories)} are too many; use at most {cls.limit:,}", f"{cls.op}.categories"
            )
        if len(set(message.categories)) < len(message.categories):
            raise StepError("name each category once", f"{cls.op}.categories")
        if message.unknown not in transform_pb2.UnknownValue.values():
            raise StepError(f"{message.unknown} is no such value", f"{cls.op}.unknown")
        return cls(column, tuple(message.categories), message.unknown)

    @property
    def fitted(self) -> bool:
        return bool(self.categories)

    def accumulator(self, column_type: ColumnType) -> FitAccumulator:
        return _CategoriesAccumulator(self, scalar(column_type, "").arrow_type)

    def check(self, column_type: ColumnType) -> ScalarType:
        """Raise `StepError` unless the column has categories, and `categories` are of its type."""
        column = scalar(column_type, f"{self.op} needs strings, integers or booleans")
        arrow_type = column.arrow_type
        if not (kinds.is_string(arrow_type) or kinds.is_integer(arrow_type) or kinds.is_boolean(arrow_type)):
            raise StepError(f"{self.op} needs strings, integers or booleans, not {column}; cast or bucketize it first")
        try:
            values = _typed(self.categories, arrow_type)
        except pa.ArrowException as error:
            raise StepError(f"not all are of the type {column}: {error}", f"{self.op}.categories") from None
        if len(values.unique()) < len(values):
            raise StepError(f"as {column}, two are the same", f"{self.op}.categories")
        return column

    def places(self, column: pa.Array) -> NDArray[np.int64]:
        """Return the (B) indices among the categories: `_ABSENT` for nulls, `_UNKNOWN` for values that fitting did not
        see.

        Raises `RowProblem` for unknown values if they are errors.
        """
        # Arrow rebuilds its table of the categories for each call, so for few rows a cached table is faster. Python
        # lacks some of Arrow's dates and times.
        if len(column) * 8 < len(self.categories) and not kinds.is_temporal(column.type):
            table = self._tables.get(column.type) or self._tables.setdefault(column.type, self._table(column.type))
            found = [_ABSENT if value is None else table.get(value, _UNKNOWN) for value in column.to_pylist()]
            places = np.array(found, np.int64)
        else:
            index = pc.index_in(column, value_set=_typed(self.categories, column.type), skip_nulls=True)
            places = index.fill_null(_UNKNOWN).to_numpy(zero_copy_only=False).astype(np.int64)
            places[column.is_null().to_numpy(zero_copy_only=False)] = _ABSENT
        unknown = np.flatnonzero(places == _UNKNOWN)
        if len(unknown) and self.unknown != transform_pb2.UNKNOWN_VALUE_ENCODE:
            row = int(unknown[0])
            value = value_shown(column[row])
            raise RowProblem(row, f"{self.column!r} is {value}, which is none of the {len(self.categories)} categories")
        return places

    @cached_property
    def _tables(self) -> dict[pa.DataType, dict[Any, int]]:
        return {}

    def _table(self, arrow_type: pa.DataType) -> dict[Any, int]:
        return {value: place for place, value in enumerate(_typed(self.categories, arrow_type).to_pylist())}


@dataclass(frozen=True)
class OrdinalEncode(_Encode):
    """Encodes each value as its index, int64. Nulls stay null."""

    op: ClassVar[str] = "ordinal_encode"
    limit: ClassVar[int] = MAX_ORDINAL_CATEGORIES

    def message(self) -> transform_pb2.OrdinalEncode:
        return transform_pb2.OrdinalEncode(categories=self.categories, unknown=self.unknown)

    def output_type(self, column_type: ColumnType) -> ColumnType:
        return ScalarType(pa.int64(), self.check(column_type).nullable)

    def work(self, column: Column, keys: StepKeys | None) -> Column:
        places = self.places(column)
        return pa.array(np.maximum(places, -1), mask=places == _ABSENT)


@dataclass(frozen=True)
class OneHotEncode(_Encode):
    """Encodes each value as float32 (B, categories) with 1 at its index. Nulls become all zeros."""

    op: ClassVar[str] = "one_hot_encode"
    limit: ClassVar[int] = MAX_ONE_HOT_CATEGORIES

    def message(self) -> transform_pb2.OneHotEncode:
        return transform_pb2.OneHotEncode(categories=self.categories, unknown=self.unknown)

    def output_type(self, column_type: ColumnType) -> ColumnType:
        self.check(column_type)
        return TensorType("float32", (len(self.categories) or None,))

    def work(self, column: Column, keys: StepKeys | None) -> Column:
        places = self.places(column)
        rows = np.flatnonzero(places >= 0)
        encoded = np.zeros((len(places), len(self.categories)), np.float32)
        encoded[rows, places[rows]] = 1
        return encoded


def _typed(categories: tuple[str, ...], arrow_type: pa.DataType) -> pa.Array:
    return pc.cast(pa.array(categories, pa.string()), arrow_type)


class _CategoriesAccumulator:
    def __init__(self, step: _Encode, arrow_type: pa.DataType) -> None:
        self._step = step
        self._counts = ValueCounts(arrow_type, step.limit, step.op)

    def update(self, column: Column) -> None:
        self._counts.add(column.drop_null())

    def merge(self, other: _CategoriesAccumulator) -> None:
        self._counts.merge(other._counts)

    def fitted_step(self) -> _Encode:
        values, _ = self._counts.ordered()
        if not len(values):
            raise StepError(f"{self._step.column!r} has no value in the training rows to learn categories from")
        return replace(self._step, categories=tuple(pc.cast(values, pa.string()).to_pylist()))
