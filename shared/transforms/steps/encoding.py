"""Encodes categories as numbers: strings, integers and booleans by their index among the fitted values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
from numpy.typing import NDArray

from millrace.common.v1 import transform_pb2
from shared.transforms.batch import Column, ColumnType, RowProblem, ScalarType, StepError, StepKeys, TensorType
from shared.transforms.exact import ValueCounts
from shared.transforms.steps.step import ColumnStep, FitAccumulator, scalar
from shared.value_texts import value_shown

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
