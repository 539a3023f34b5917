"""Fills nulls with a given value or with a learned one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from millrace.common.v1 import transform_pb2
from shared.dataset_version.manifest import refuse_beyond_milliseconds
from shared.errors import shown
from shared.transforms.batch import Column, ColumnType, RowProblem, ScalarType, StepError, StepKeys, float64_of
from shared.transforms.exact import ExactMoments, ValueCounts
from shared.transforms.steps.columns import Cast, numeric
from shared.transforms.steps.step import ColumnStep, FitAccumulator, scalar
from shared.value_texts import value_of_text, value_text

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


class _MeanAccumulator:
    def __init__(self, step: FillNulls) -> None:
        self._step = step
        self._moments = ExactMoments()

    def update(self, column: Column) -> None:
        values, valid = float64_of(column)
        refuse_non_finite(self._step.column, values)
        self._moments.add(values[valid])

    def merge(self, other: _MeanAccumulator) -> None:
        self._moments.merge(other._moments)

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
