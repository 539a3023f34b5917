"""Steps on columns that learn nothing.

They select, drop and rename; cast to another type; and make or process float tensors.

A cast is exact, or an error names the row.

B = rows of the batch, H = height, W = width, C = channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
from numpy.typing import NDArray

from millrace.common.v1 import transform_pb2
from shared.dataset_version.manifest import refuse_beyond_milliseconds, repeated, scalar_remedy
from shared.errors import shown
from shared.transforms.batch import (
    Array,
    Batch,
    Column,
    ColumnStep,
    ColumnType,
    Names,
    RaggedImages,
    RowProblem,
    ScalarType,
    Schema,
    Step,
    StepError,
    StepKeys,
    TensorType,
    arrow_type_of,
    first_failing_row,
    known,
    scalar,
)
from shared.value_texts import halves_of_texts, times_of_day, value_shown, zone_hint, zone_problem

# --- Select, drop and rename ---


@dataclass(frozen=True)
class Select(Step):
    """Keeps these columns, in this order."""

    op: ClassVar[str] = "select"
    columns: tuple[str, ...]

    @classmethod
    def from_message(cls, message: transform_pb2.Select, column: str) -> Self:
        return cls(named(message.columns, "select.columns"))

    def to_proto(self) -> transform_pb2.TransformStep:
        return transform_pb2.TransformStep(select=transform_pb2.Select(columns=self.columns))

    @property
    def reads(self) -> tuple[str, ...]:
        return self.columns

    def output(self, schema: Schema) -> Schema:
        known(schema, self.columns, "select.columns")
        return {name: schema[name] for name in self.columns}

    def apply(self, batch: Batch, keys: StepKeys | None) -> Batch:
        return {name: batch[name] for name in self.columns}

    def sources(self, needed: Names, schema: Schema) -> Names:
        return needed

    def narrowed(self, needed: Names, schema: Schema) -> Step | None:
        return None  # slicing drops columns that are not needed


@dataclass(frozen=True)
class Drop(Step):
    """Removes these columns."""

    op: ClassVar[str] = "drop"
    columns: tuple[str, ...]

    @classmethod
    def from_message(cls, message: transform_pb2.Drop, column: str) -> Self:
        return cls(named(message.columns, "drop.columns"))

    def to_proto(self) -> transform_pb2.TransformStep:
        return transform_pb2.TransformStep(drop=transform_pb2.Drop(columns=self.columns))

    @property
    def reads(self) -> tuple[str, ...]:
        return ()

    def output(self, schema: Schema) -> Schema:
        known(schema, self.columns, "drop.columns")
        return self._left(schema)

    def apply(self, batch: Batch, keys: StepKeys | None) -> Batch:
        return self._left(batch)

    def sources(self, needed: Names, schema: Schema) -> Names:
        return needed

    def narrowed(self, needed: Names, schema: Schema) -> Step | None:
        return None  # as in `Select`

    def _left(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        dropped = frozenset(self.columns)
        return {name: column for name, column in columns.items() if name not in dropped}


@dataclass(frozen=True)
class Rename(Step):
    """Renames columns, all at once, so two columns may swap names.

    `columns` are (old name, new name).
    """

    op: ClassVar[str] = "rename"
    columns: tuple[tuple[str, str], ...]

    @classmethod
    def from_message(cls, message: transform_pb2.Rename, column: str) -> Self:
        if not message.columns:
            raise StepError("name at least one column", "rename.columns")
        return cls(tuple(sorted(message.columns.items())))

    def to_proto(self) -> transform_pb2.TransformStep:
        return transform_pb2.TransformStep(rename=transform_pb2.Rename(columns=dict(self.columns)))

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(old for old, _ in self.columns)

    def output(self, schema: Schema) -> Schema:
        for old, _ in self.columns:
            if old not in schema:
                raise StepError(f"there is no column {shown(old)}; there are {', '.join(schema)}", "rename.columns")
        renamed = self._renamed(schema)
        if len(renamed) < len(schema):
            new_of = dict(self.columns)
            names = [new_of.get(name, name) for name in schema]
            twice = shown(names[next(repeated(names))])
            raise StepError(f"two columns would be named {twice}; choose another name for one", "rename.columns")
        return renamed

    def apply(self, batch: Batch, keys: StepKeys | None) -> Batch:
        return self._renamed(batch)

    def sources(self, needed: Names, schema: Schema) -> Names:
        old_of = {new: old for old, new in self.columns}
        return frozenset(old_of.get(name, name) for name in needed)

    def narrowed(self, needed: Names, schema: Schema) -> Step | None:
        columns = tuple((old, new) for old, new in self.columns if new in needed)
        return Rename(columns) if columns else None

    def _renamed(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        new_of = dict(self.columns)
        return {new_of.get(name, name): column for name, column in columns.items()}


def named(columns: Sequence[str], at: str) -> tuple[str, ...]:
    """Check the names of a step's columns; `at` is the field's path.

    Raises `StepError` unless there is at least one name, and no name twice.
    """
    if not columns:
        raise StepError("name at least one column", at)
    for index in repeated(columns):
        raise StepError(f"name {shown(columns[index])} once only", f"{at}[{index}]")
    return tuple(columns)


# --- Cast ---


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


# --- Float tensors ---

# The greatest magnitude of a mean or a std.
LARGEST = 1e30


@dataclass(frozen=True)
class ToFloat(ColumnStep):
    """Converts uint8 (B, H, W) to float32 (B, 1, H, W), and (B, H, W, C) to (B, C, H, W); 0..255 becomes 0..1."""

    op: ClassVar[str] = "to_float"

    @classmethod
    def from_message(cls, message: Any, column: str) -> Self:
        return cls(column)

    def output_type(self, column_type: ColumnType) -> ColumnType:
        if (
            not isinstance(column_type, TensorType)
            or column_type.dtype != "uint8"
            or len(column_type.shape) not in (2, 3)
        ):
            raise StepError(f"to_float needs uint8 images of shape (H, W) or (H, W, C), not {column_type}")
        if None in column_type.shape:
            raise StepError(f"to_float needs images of one size, not {column_type}; resize or crop them first")
        shape = (
            (1, *column_type.shape) if len(column_type.shape) == 2 else (column_type.shape[2], *column_type.shape[:2])
        )
        return TensorType("float32", shape)

    def work(self, column: Column, keys: StepKeys | None) -> Column:
        channels_first = column[:, None] if column.ndim == 3 else column.transpose(0, 3, 1, 2)
        return np.divide(channels_first, np.float32(255), dtype=np.float32, order="C")


@dataclass(frozen=True)
class Normalize(ColumnStep):
    """Computes (x - mean) / std in float32 on (B, C, H, W), with one mean and std per channel or one for all."""

    op: ClassVar[str] = "normalize"
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.mean or len(self.mean) != len(self.std):
            raise StepError("normalize needs as many values of std as of mean, at least one each")
        # A checkpoint keeps them as JSON, and the shortest JSON form of the greatest float32 does not read back.
        if not (np.abs([*self.mean, *self.std]) <= LARGEST).all() or min(self.std) <= 0:
            raise StepError(f"normalize needs finite values, up to {LARGEST:g}, and every std above 0")

    @classmethod
    def from_message(cls, message: transform_pb2.Normalize, column: str) -> Self:
        return cls(column, tuple(message.mean), tuple(message.std))

    def message(self) -> transform_pb2.Normalize:
        return transform_pb2.Normalize(mean=self.mean, std=self.std)

    def output_type(self, column_type: ColumnType) -> ColumnType:
        if not isinstance(column_type, TensorType) or column_type.dtype != "float32" or len(column_type.shape) != 3:
            raise StepError(f"normalize needs float32 images of shape (C, H, W), not {column_type}")
        if len(self.mean) not in (1, column_type.shape[0]):
            raise StepError(f"normalize has {len(self.mean)} values of mean for {column_type.shape[0]} channels")
        return column_type

    def work(self, column: Column, keys: StepKeys | None) -> Column:
        mean = np.asarray(self.mean, np.float32).reshape(1, -1, 1, 1)
        std = np.asarray(self.std, np.float32).reshape(1, -1, 1, 1)
        centred = column - mean
        return np.divide(centred, std, out=centred)


@dataclass(frozen=True)
class Concat(Step):
    """Joins numeric columns and tensors into one float32 tensor named `into`: (B, all values of a row)."""

    op: ClassVar[str] = "concat"
    columns: tuple[str, ...]
    into: str
    keep: bool

    @classmethod
    def from_message(cls, message: transform_pb2.Concat, column: str) -> Self:
        if not message.into:
            raise StepError("name the new column", "concat.into")
        return cls(named(message.columns, "concat.columns"), message.into, message.keep)

    def to_proto(self) -> transform_pb2.TransformStep:
        message = transform_pb2.Concat(columns=self.columns, into=self.into, keep=self.keep)
        return transform_pb2.TransformStep(concat=message)

    @property
    def reads(self) -> tuple[str, ...]:
        return self.columns

    def output(self, schema: Schema) -> Schema:
        known(schema, self.columns, "concat.columns")
        widths = [self._width(index, schema[name]) for index, name in enumerate(self.columns)]
        kept = self._kept(schema)
        if self.into in kept:
            raise StepError(f"there is a column {self.into!r} already; choose another name", "concat.into")
        width = None if None in widths else sum(width for width in widths if width is not None)
        return {**kept, self.into: TensorType("float32", (width,))}

    def apply(self, batch: Batch, keys: StepKeys | None) -> Batch:
        parts = [_float_values(name, batch[name]) for name in self.columns]
        return {**self._kept(batch), self.into: np.concatenate(parts, axis=1)}

    def sources(self, needed: Names, schema: Schema) -> Names:
        return (needed - {self.into}) | frozenset(self.columns) if self.into in needed else needed

    def narrowed(self, needed: Names, schema: Schema) -> Step | None:
        return self if self.into in needed else None

    def _kept(self, columns: dict[str, Any]) -> dict[str, Any]:
        taken = frozenset(() if self.keep else self.columns)
        return {name: column for name, column in columns.items() if name not in taken}

    def _width(self, index: int, column_type: ColumnType) -> int | None:
        if isinstance(column_type, ScalarType):
            number = column_type.arrow_type
            if kinds.is_integer(number) or kinds.is_floating(number) or kinds.is_boolean(number):
                return 1
            raise StepError(
                f"concat needs numbers, not {column_type}; cast or encode them first", f"concat.columns[{index}]"
            )
        if len(column_type.shape) > 1 and None in column_type.shape:
            raise StepError(f"concat needs a fixed shape, not {column_type}", f"concat.columns[{index}]")
        lengths = [length for length in column_type.shape if length is not None]
        return math.prod(lengths) if len(lengths) == len(column_type.shape) else None


def _float_values(name: str, column: Column) -> NDArray[np.float32]:
    """Return a column as (B, values of a row)."""
    if isinstance(column, RaggedImages):
        raise StepError(f"column {name!r} has images of unequal sizes; resize or crop them first")
    with np.errstate(over="ignore"):  # values beyond float32 become infinite
        if isinstance(column, np.ndarray):
            return column.reshape(len(column), math.prod(column.shape[1:])).astype(np.float32)
        if column.null_count:
            row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise RowProblem(row, f"column {name!r} is null; fill its nulls before concat")
        numbers: Array = column.to_numpy(zero_copy_only=False).astype(np.float32)
    return numbers.reshape(-1, 1)


def numeric(arrow_type: pa.DataType) -> bool:
    """Return whether the type is an integer or a binary float."""
    return bool(kinds.is_integer(arrow_type) or kinds.is_floating(arrow_type))
