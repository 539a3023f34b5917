"""Steps that make or process float tensors.

B = rows of the batch, H = height, W = width, C = channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds
from numpy.typing import NDArray

from millrace.common.v1 import transform_pb2
from shared.transforms.batch import Array, Batch, Column, RaggedImages, StepKeys
from shared.transforms.schema import ColumnType, RowProblem, ScalarType, Schema, StepError, TensorType
from shared.transforms.steps.columns import named
from shared.transforms.steps.step import ColumnStep, Names, Step, known

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
