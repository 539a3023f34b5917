"""The types of a batch's columns, known before any row is read, and the errors of steps.

An error concerns the step itself, the columns given to it, or one row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from shared.dataset_version.columns import is_tensor, tensor_field
from shared.dataset_version.manifest import Column
from shared.errors import InvalidArgument

# --- Schema ---

_TENSOR = re.compile(r"fixed_shape_tensor\[value_type=(\w+)")
# Any zone; `scalar_remedy` decides which zones a version keeps.
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns), tz=(.+)\]", re.DOTALL)
_DECIMAL = re.compile(r"decimal(?:128)?\((\d+), ?(-?\d+)\)")
_FIXED_BINARY = re.compile(r"fixed_size_binary\[(\d+)\]")


@dataclass(frozen=True)
class ScalarType:
    """One value per row."""

    arrow_type: pa.DataType
    nullable: bool = True

    def __str__(self) -> str:
        return str(self.arrow_type)


@dataclass(frozen=True)
class TensorType:
    """An array per row: its numpy dtype name, and its shape without B.

    None is a length that is not fixed, or not yet known.
    """

    dtype: str
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        lengths = ", ".join("?" if length is None else str(length) for length in self.shape)
        return f"{self.dtype} of shape ({lengths})"


ColumnType = ScalarType | TensorType
# In the order of the columns.
Schema = dict[str, ColumnType]


@dataclass(frozen=True)
class TensorSpec:
    """One row of a tensor: its name, numpy dtype name and shape without the batch axis."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def schema_of(arrow: pa.Schema) -> Schema:
    """Return the schema of logical columns."""
    schema: Schema = {}
    for field in arrow:
        if is_tensor(field.type):
            schema[field.name] = TensorType(_dtype_name(field.type.value_type), tuple(field.type.shape))
        else:
            schema[field.name] = ScalarType(field.type, field.nullable)
    return schema


def arrow_schema(schema: Schema) -> pa.Schema:
    """Return the logical columns. Raises `ValueError`, naming a column whose shape is not fixed."""
    fields = []
    for name, given in schema.items():
        if isinstance(given, ScalarType):
            fields.append(pa.field(name, given.arrow_type, nullable=given.nullable))
            continue
        shape = tuple(length for length in given.shape if length is not None)
        if len(shape) < len(given.shape):
            raise ValueError(f"column {name!r} is {given}; fix its shape, images by resize, center_crop or random_crop")
        fields.append(tensor_field(name, pa.from_numpy_dtype(np.dtype(given.dtype)), shape))
    return pa.schema(fields)


def schema_of_columns(columns: Iterable[Column]) -> Schema:
    """Return the schema of a manifest's columns."""
    schema: Schema = {}
    for column in columns:
        tensor = _TENSOR.search(column.arrow_type)
        if tensor is not None:
            schema[column.name] = TensorType(_dtype_name(arrow_type_of(tensor.group(1))), tuple(column.shape))
        else:
            schema[column.name] = ScalarType(arrow_type_of(column.arrow_type))
    return schema


def arrow_type_of(spelling: str) -> pa.DataType:
    """Invert `str` of the scalar types that a version may keep; Arrow's aliases are accepted, too.

    Raises `ValueError` for any other spelling.
    """
    if match := _TIMESTAMP.fullmatch(spelling):
        return pa.timestamp(match.group(1), match.group(2))
    if match := _DECIMAL.fullmatch(spelling):
        return pa.decimal128(int(match.group(1)), int(match.group(2)))
    if match := _FIXED_BINARY.fullmatch(spelling):
        return pa.binary(int(match.group(1)))
    return pa.type_for_alias(spelling)


def _dtype_name(value_type: pa.DataType) -> str:
    # Arrow's `float` is numpy's float32.
    return str(np.dtype(value_type.to_pandas_dtype()).name)


# --- Problems of steps ---


class StepError(ValueError):
    """The step is invalid, or does not fit its columns.

    `at` is the path below the step of the faulty field, e.g. `resize.height`; empty: the whole step.
    """

    def __init__(self, message: str, at: str = "") -> None:
        super().__init__(message)
        self.at = at


class RowProblem(ValueError):
    """The step cannot process one row. `row` is its index in the step's batch."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


class RowError(InvalidArgument):
    """A row that a step cannot process.

    `row` is its index in the pipeline's batch, `path` is the step's, e.g. `transform.steps[2]`. `problem` omits both,
    so that the error can be reported again with the row's id.
    """

    def __init__(self, path: str, row: int, problem: str) -> None:
        super().__init__(
            f"{path}: row {row} of the batch: {problem}",
            reason="BAD_ROW",
            metadata={"field": path, "row": str(row)},
            fields=[(path, problem)],
        )
        self.path = path
        self.row = row
        self.problem = problem

    def __reduce__(self) -> tuple[Any, ...]:
        return (RowError, (self.path, self.row, self.problem))

    def as_record(self) -> dict[str, Any]:
        return {**super().as_record(), "kind": InvalidArgument.__name__}


def step_error(path: str, error: StepError) -> InvalidArgument:
    """Make the error that callers see for a step at `path`, e.g. `transform.steps[2]`."""
    where = f"{path}.{error.at}" if error.at else path
    return InvalidArgument(
        f"{where}: {error}", reason="INVALID_FIELD", metadata={"field": where}, fields=[(where, str(error))]
    )
