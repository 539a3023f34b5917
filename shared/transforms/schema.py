"""What the columns of a batch are, known before any row is read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from shared.dataset_version.columns import is_tensor, tensor_field
from shared.dataset_version.manifest import Column

_TENSOR = re.compile(r"fixed_shape_tensor\[value_type=(\w+)")
# Any zone: which ones a version keeps, `scalar_remedy` says.
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns), tz=(.+)\]", re.DOTALL)
_DECIMAL = re.compile(r"decimal(?:128)?\((\d+), ?(-?\d+)\)")
_FIXED_BINARY = re.compile(r"fixed_size_binary\[(\d+)\]")


@dataclass(frozen=True)
class ScalarType:
    """One value a row."""

    arrow_type: pa.DataType
    nullable: bool = True

    def __str__(self) -> str:
        return str(self.arrow_type)


@dataclass(frozen=True)
class TensorType:
    """An array a row: its numpy dtype name and shape without B; None is a length that is not fixed, or not yet."""

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
    """Of logical columns."""
    schema: Schema = {}
    for field in arrow:
        if is_tensor(field.type):
            schema[field.name] = TensorType(_dtype_name(field.type.value_type), tuple(field.type.shape))
        else:
            schema[field.name] = ScalarType(field.type, field.nullable)
    return schema


def arrow_schema(schema: Schema) -> pa.Schema:
    """The logical columns. Raises `ValueError` naming a column whose shape is not fixed."""
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
    """Of a manifest's columns."""
    schema: Schema = {}
    for column in columns:
        tensor = _TENSOR.search(column.arrow_type)
        if tensor is not None:
            schema[column.name] = TensorType(_dtype_name(arrow_type_of(tensor.group(1))), tuple(column.shape))
        else:
            schema[column.name] = ScalarType(arrow_type_of(column.arrow_type))
    return schema


def arrow_type_of(spelling: str) -> pa.DataType:
    """The inverse of `str` of the scalar types that a version may keep, and Arrow's aliases for them.

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
