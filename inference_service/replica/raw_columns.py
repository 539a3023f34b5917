"""Columns as they were ingested, as tensors of the Open Inference Protocol, and back.

    column                            tensor
    tensors, integers, floats, bool   their own datatype
    string                            BYTES, in UTF-8
    binary (encoded images, too)      BYTES
    date32, time32                    INT32 in the column's unit
    timestamp, time64                 INT64 in the column's unit, timestamps since 1970-01-01 (UTC, where zoned)

A decimal has no datatype. B = rows.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds

from inference_service.domain.datatypes import datatype_of
from inference_service.domain.signature import FREE, TensorSpec
from inference_service.domain.tensors import Array
from shared.errors import FailedPrecondition, InvalidArgument
from shared.transforms import Column, ScalarType, TensorType
from shared.transforms.schema import ColumnType


def tensor_of_column(name: str, given: ColumnType) -> TensorSpec:
    """How a column is sent. Raises `FailedPrecondition` naming a column that the protocol has no datatype for."""
    if isinstance(given, TensorType):
        return TensorSpec(name, _datatype(name, given, np.dtype(given.dtype)), (FREE, *map(_fixed, given.shape)))
    if _is_bytes(given.arrow_type):
        return TensorSpec(name, "BYTES", (FREE,), nullable=True)
    number = _sent_as(given.arrow_type)
    if number is None:
        raise _unsendable(name, given)
    datatype = _datatype(name, given, np.dtype(number.to_pandas_dtype()))
    times = str(given.arrow_type) if kinds.is_temporal(given.arrow_type) else ""
    return TensorSpec(name, datatype, (FREE,), nullable=True, column_type=times)


def column_of_tensor(name: str, given: ColumnType, values: Array, nulls: Array | None) -> Column:
    """The column whose rows are `values`, (B) or (B, *shape), and null where `nulls`, bool (B).

    Raises `InvalidArgument` naming the tensor for bytes that are no UTF-8, or not as many as the column's width.
    """
    if isinstance(given, TensorType):
        return values
    if _is_bytes(given.arrow_type):
        items = [None if null else item for item, null in zip(values, _flags(nulls, len(values)), strict=True)]
        try:
            return pa.array(items, pa.binary()).cast(given.arrow_type)
        except pa.ArrowInvalid as error:
            raise InvalidArgument(f"tensor {name!r} holds bytes that are no {given}: {error}") from None
    sent = pa.array(values, _sent_as(given.arrow_type), mask=nulls)
    return sent.view(given.arrow_type)


def values_of_column(given: ColumnType, column: Column) -> tuple[Array, Array]:
    """The other way round: what stands for the column's rows in its tensor, (B) or (B, *shape), and where they are
    null, bool (B)."""
    if isinstance(given, TensorType):
        return column, np.zeros(len(column), np.bool_)
    nulls = column.is_null().to_numpy(zero_copy_only=False)
    if _is_bytes(given.arrow_type):
        items = [item or b"" for item in column.cast(pa.binary()).to_pylist()]
        values = np.empty(len(items), np.object_)
        values[:] = items
        return values, nulls
    sent = column.view(_sent_as(given.arrow_type))
    filled = sent.fill_null(pa.scalar(0).cast(sent.type)) if sent.null_count else sent
    return filled.to_numpy(zero_copy_only=False), nulls


def _is_bytes(arrow_type: pa.DataType) -> bool:
    return bool(kinds.is_string(arrow_type) or kinds.is_binary(arrow_type) or kinds.is_fixed_size_binary(arrow_type))


def _sent_as(arrow_type: pa.DataType) -> pa.DataType | None:
    """The type of the numbers that stand for the column's values, bit by bit."""
    if kinds.is_integer(arrow_type) or kinds.is_floating(arrow_type) or kinds.is_boolean(arrow_type):
        return arrow_type
    if kinds.is_timestamp(arrow_type) or kinds.is_time64(arrow_type):
        return pa.int64()
    if kinds.is_date32(arrow_type) or kinds.is_time32(arrow_type):
        return pa.int32()
    return None


def _datatype(name: str, given: ColumnType, dtype: np.dtype[np.generic]) -> str:
    found = datatype_of(dtype)
    if found is None:
        raise _unsendable(name, given)
    return found


def _fixed(length: int | None) -> int:
    assert length is not None, "a version's tensors have fixed shapes"
    return length


def _flags(nulls: Array | None, rows: int) -> Array:
    return np.zeros(rows, np.bool_) if nulls is None else nulls


def _unsendable(name: str, given: ColumnType) -> FailedPrecondition:
    kind = given.arrow_type if isinstance(given, ScalarType) else given
    return FailedPrecondition(
        f"column {name!r} is {kind}, for which the Open Inference Protocol has no datatype; cast it to a float or to "
        "a string before it is imported, and train again",
        reason="COLUMN_NOT_SERVABLE",
        metadata={"column": name},
    )
