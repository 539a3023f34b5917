"""Maps numbers to numbers: scaled by statistics of the training rows, or counted against boundaries."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds
from numpy.typing import NDArray

from millrace.common.v1 import transform_pb2
from shared.transforms.batch import Column, ColumnType, ScalarType, StepError, StepKeys, float64_of
from shared.transforms.exact import ExactMoments
from shared.transforms.steps.columns import numeric
from shared.transforms.steps.filling import refuse_nan, refuse_non_finite
from shared.transforms.steps.step import ColumnStep, FitAccumulator, scalar


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


class _MomentsAccumulator:
    def __init__(self, step: Standardize) -> None:
        self._step = step
        self._moments = ExactMoments()

    def update(self, column: Column) -> None:
        values, valid = float64_of(column)
        refuse_non_finite(self._step.column, values)
        self._moments.add(values[valid])

    def merge(self, other: _MomentsAccumulator) -> None:
        self._moments.merge(other._moments)

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
