"""Casts a scalar column: exactly, or with an error that names the row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from millrace.common.v1 import transform_pb2
from shared.dataset_version.columns import refuse_beyond_milliseconds, scalar_remedy
from shared.errors import shown
from shared.transforms.batch import Column, StepKeys
from shared.transforms.schema import ColumnType, RowProblem, ScalarType, Schema, StepError, arrow_type_of
from shared.transforms.steps.step import ColumnStep, first_failing_row, scalar
from shared.value_texts import halves_of_texts, times_of_day, value_shown, zone_hint, zone_problem


@dataclass(frozen=True)
class Cast(ColumnStep):
    """Casts to another scalar type.

    Text is parsed, to the nearest float for float types. Every other cast must be exact: casting back gives the value
    again. So 0.1 of `double` cannot become `float`, and 0.5 can.
    """

    op: ClassVar[str] = "cast"
    arrow_type: pa.DataType

    @classmethod
    def from_message(cls, message: transform_pb2.Cast, column: str) -> Self:
        try:
            target = arrow_type_of(message.arrow_type)
        except (ValueError, pa.ArrowException):
            remedy = "use an Arrow type such as int64, double, string, bool, timestamp[us] or date32[day]"
            raise StepError(f"{shown(message.arrow_type)}: {remedy}", "cast.arrow_type") from None
        if wanted := scalar_remedy(target):
            raise StepError(f"a version cannot keep {target}; {wanted}", "cast.arrow_type")
        return cls(column, target)

    def message(self) -> transform_pb2.Cast:
        return transform_pb2.Cast(arrow_type=str(self.arrow_type))

    def output_type(self, column_type: ColumnType) -> ColumnType:
        source = scalar(column_type, "cast needs a column of scalars")
        try:
            cast_exactly(pa.array([], source.arrow_type), self.arrow_type)
        except pa.ArrowException:
            raise StepError(f"{source} cannot be cast to {self.arrow_type}") from None
        return ScalarType(self.arrow_type, source.nullable)

    def check_request(self, schema: Schema) -> None:
        source = schema[self.column]
        problem = zone_problem(source.arrow_type, self.arrow_type) if isinstance(source, ScalarType) else None
        if problem:
            raise StepError(problem, "cast.arrow_type")

    def work(self, column: Column, keys: StepKeys | None) -> Column:
        if kinds.is_float16(column.type) and not kinds.is_float16(self.arrow_type):
            column = column.cast(pa.float32())  # float32 holds all of them, and Arrow can compare it
        try:
            made = cast_exactly(column, self.arrow_type)
            exact = _is_exact(column, made)
            if exact.all():
                return made
            row = int(np.flatnonzero(~exact)[0])
        except pa.ArrowException:
            row = first_failing_row(len(column), lambda start, end: self._casts(column[start:end]))
        value = value_shown(column[row])
        hint = zone_hint(self.arrow_type) if kinds.is_string(column.type) else ""
        raise RowProblem(row, f"{self.column!r} is {value}, which {self.arrow_type} cannot hold exactly{hint}")

    def _casts(self, column: pa.Array) -> bool:
        try:
            return bool(_is_exact(column, cast_exactly(column, self.arrow_type)).all())
        except pa.ArrowException:
            return False


def cast_exactly(column: pa.Array, target: pa.DataType) -> pa.Array:
    """Cast as Arrow does, and texts to times of day.

    Raises `pa.ArrowException` for most values that `target` cannot hold, but not for all.
    """
    # Arrow refuses all integers beyond the 53 bits of a double, even those that a double holds.
    safe = not (kinds.is_integer(column.type) and kinds.is_floating(target))
    if kinds.is_boolean(column.type) and kinds.is_decimal(target):
        column = column.cast(pa.int8())
    if kinds.is_integer(column.type) and kinds.is_decimal(target):
        # Otherwise Arrow refuses every decimal with fewer digits than the greatest integer needs.
        column = pc.cast(column, pa.decimal128(38, max(target.scale, 0)))
    if kinds.is_string(column.type) and kinds.is_time(target):
        made = times_of_day(column, target)
    elif kinds.is_string(column.type) and kinds.is_float16(target):
        made = halves_of_texts(column)
    else:
        made = pc.cast(column, target, safe=safe)
    refuse_beyond_milliseconds(made)
    return made


def _is_exact(column: pa.Array, made: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return for each row, (B), whether `made` holds the same value as `column`, which it was cast from."""
    if kinds.is_string(column.type) or kinds.is_string(made.type) or column.type == made.type:
        return _text_is_finite(column, made)
    if kinds.is_integer(column.type) and kinds.is_floating(made.type):
        # The nearest float of the greatest integers lies beyond them, and does not cast back.
        widest = pa.decimal128(38, 0)
        back, column = pc.cast(pc.cast(made, pa.float64()), widest), pc.cast(column, widest)
    else:
        back = pc.cast(made, column.type, safe=False)
    if kinds.is_float16(column.type):
        # Arrow cannot compare half floats; as floats they are the same.
        back, column = pc.cast(back, pa.float32()), pc.cast(column, pa.float32())
    same = pc.equal(back, column)
    if kinds.is_floating(column.type):
        same = pc.or_(same, pc.and_(pc.is_nan(column), pc.is_nan(back)) if kinds.is_floating(made.type) else same)
    exact: np.ndarray[tuple[int], np.dtype[np.bool_]] = same.fill_null(True).to_numpy(zero_copy_only=False)
    return exact


def _text_is_finite(column: pa.Array, made: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Refuse texts that parse as infinity because their digits exceed the float type."""
    if not kinds.is_string(column.type) or not kinds.is_floating(made.type):
        return np.ones(len(column), np.bool_)
    infinite = pc.is_inf(made)
    says_so = pc.match_substring(column, "inf", ignore_case=True)
    fine: np.ndarray[tuple[int], np.dtype[np.bool_]] = (
        pc.or_(pc.invert(infinite), says_so).fill_null(True).to_numpy(zero_copy_only=False)
    )
    return fine
