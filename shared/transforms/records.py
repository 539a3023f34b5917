"""The input of a model as one array, also for a model that reads several columns.

A model of one input reads a tensor column, float32 (B, *shape). A model of several inputs reads records: a structured
array of numpy, (B,), with a field for each column. Slicing, joining, splitting and clearing rows works on both alike,
so the code between the steps and the model needs no second path.

B = rows of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.types as kinds
from numpy.typing import NDArray

from shared.transforms.batch import Batch, Column, ColumnType, RowError, Schema, TensorSpec, TensorType

Array = NDArray[Any]
# What models compute with: numbers with a fraction, whole numbers such as the ids of tokens, and flags.
FLOATS, WHOLE, FLAGS = "float32", "int64", "bool"


@dataclass(frozen=True)
class RecordSpec:
    """One row of a model's several inputs: a tensor for each column, in the order of the specification."""

    tensors: tuple[TensorSpec, ...]

    @property
    def shape(self) -> RecordSpec:
        """The record itself: it takes the place of a single tensor's shape."""
        return self

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the records. Its fields are aligned, so that each can be read in place."""
        return np.dtype([(one.name, one.dtype, one.shape) for one in self.tensors], align=True)

    def records(self, batch: Batch, path: str) -> Array:
        """Return the records of the batch's rows, (B,).

        Raises `RowError`, at `path`, for a row with a null.
        """
        made = np.zeros(len(batch[self.tensors[0].name]), self.dtype)
        with np.errstate(over="ignore"):  # a double beyond float32 becomes an infinity, which is refused later
            for one in self.tensors:
                made[one.name] = _values(batch[one.name], one.name, path)
        return made

    def as_config(self) -> dict[str, Any]:
        return {"tensors": [{"name": one.name, "dtype": one.dtype, "shape": list(one.shape)} for one in self.tensors]}


# One row of a model's input, and what stands for its shape.
ModelInput = TensorSpec | RecordSpec
RowShape = Sequence[int] | RecordSpec


def record_of_columns(schema: Schema, columns: Sequence[str], path: str) -> RecordSpec:
    """Return the record that these columns make.

    Raises `ValueError` with the index in `columns` and the problem, for a column that no model computes with.
    """
    tensors = []
    for index, name in enumerate(columns):
        dtype, shape = _dtype_of(schema[name]), _shape_of(schema[name])
        if dtype is None or shape is None:
            raise UnusableColumn(f"{path}[{index}]", name, schema[name])
        tensors.append(TensorSpec(name, dtype, shape))
    return RecordSpec(tuple(tensors))


class UnusableColumn(ValueError):
    """A column that cannot be an input. `path` names it in the specification, `name` is its own, `problem` the rest."""

    def __init__(self, path: str, name: str, column_type: ColumnType) -> None:
        self.path = path
        self.name = name
        self.problem = (
            f"it is {column_type}; an input is a number, a flag or a tensor of a fixed shape: add steps such as cast, "
            "tokenize, ordinal_encode or resize"
        )
        super().__init__(f"{path}: {name!r}: {self.problem}")


def only_tensor(row: ModelInput) -> TensorSpec:
    """Return the one tensor of a model of one input. Models of Millrace's own have no other."""
    assert isinstance(row, TensorSpec)
    return row


def lengths_of(row_shape: RowShape) -> tuple[int, ...]:
    """Return the shape of one row of a single tensor; records have none of their own."""
    return () if isinstance(row_shape, RecordSpec) else tuple(row_shape)


def row_shape_to_config(row_shape: RowShape) -> Any:
    """Return the row's shape as JSON values."""
    return row_shape.as_config() if isinstance(row_shape, RecordSpec) else list(row_shape)


def row_shape_from_config(config: Any) -> RowShape:
    """Invert `row_shape_to_config`."""
    if not isinstance(config, Mapping):
        return tuple(config)
    return RecordSpec(tuple(TensorSpec(one["name"], one["dtype"], tuple(one["shape"])) for one in config["tensors"]))


def model_input(batch: Batch, row: ModelInput, path: str) -> Array:
    """Return the input of the batch's rows as `row` describes it. Raises `RowError`, at `path`, for a null."""
    if isinstance(row, RecordSpec):
        return row.records(batch, path)
    values: Array = batch[row.name]
    return values


def dtype_of_input(row: ModelInput) -> np.dtype[Any]:
    """Return the dtype of an array of such inputs."""
    return row.dtype if isinstance(row, RecordSpec) else np.dtype(row.dtype)


def bytes_of_input(row: ModelInput) -> int:
    return dtype_of_input(row).itemsize * math.prod(lengths_of(row.shape))


def zero_rows(row: ModelInput, rows: int) -> Array:
    """Return an array of such inputs that are all zero."""
    return np.zeros((rows, *lengths_of(row.shape)), dtype_of_input(row))


def _dtype_of(column_type: ColumnType) -> str | None:
    """Return the dtype that a model gets, or None if the column has no numbers."""
    if isinstance(column_type, TensorType):
        dtype = np.dtype(column_type.dtype)
        return None if dtype == np.uint64 else {"f": FLOATS, "i": WHOLE, "u": WHOLE, "b": FLAGS}.get(dtype.kind)
    arrow_type = column_type.arrow_type
    if kinds.is_floating(arrow_type):
        return FLOATS
    if kinds.is_integer(arrow_type):
        return None if kinds.is_uint64(arrow_type) else WHOLE  # the largest have no int64
    return FLAGS if kinds.is_boolean(arrow_type) else None


def _shape_of(column_type: ColumnType) -> tuple[int, ...] | None:
    """Return the shape of one row, () for a scalar; None if a length is not fixed."""
    if not isinstance(column_type, TensorType):
        return ()
    lengths = tuple(length for length in column_type.shape if length is not None)
    return lengths if len(lengths) == len(column_type.shape) else None


def _values(column: Column, name: str, path: str) -> Array:
    if isinstance(column, np.ndarray):
        return column
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise RowError(path, row, f"column {name!r} is null, and no step fills it; use fill_nulls")
    values: Array = column.to_numpy(zero_copy_only=False)
    return values
