"""Hashes of rows' keys that stay the same for ever: on any machine, in any release, whatever the width of the integers.

A key is one value of each key column, written as canonical bytes (a type tag, then the value; texts and bytes with
their length in front, so that ("ab", "c") and ("a", "bc") differ) and hashed with 64-bit XXH3 (Collet, xxHash 0.8),
whose output is frozen.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds
import xxhash
from numpy.typing import NDArray

_NULL = b"\0"
_BOOL, _INT, _FLOAT, _TEXT, _BYTES, _DATE, _TIMESTAMP, _TIME, _DECIMAL = (bytes([tag]) for tag in range(1, 10))
_NS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}


def can_be_key(arrow_type: pa.DataType) -> bool:
    """Scalars of any kind that a version keeps; tensors are no keys."""
    return _encoder(arrow_type) is not None


def key_hashes(columns: Sequence[pa.ChunkedArray], seed: int) -> NDArray[np.uint64]:
    """One hash a row; `columns` are of equal length, at least one. Nulls are a value of their own."""
    if len(columns) == 1:
        values, codes = _distinct(columns[0])
        return np.fromiter((_hash(value, seed) for value in values), np.uint64, len(values))[codes]
    encoded = []
    for column in columns:
        values, codes = _distinct(column)
        encoded.append([values[code] for code in codes.tolist()])
    keys = (b"".join(parts) for parts in zip(*encoded, strict=True))
    return np.fromiter((_hash(key, seed) for key in keys), np.uint64, len(columns[0]))


def _hash(key: bytes, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(key, seed)


def _distinct(column: pa.ChunkedArray) -> tuple[list[bytes], NDArray[np.int64]]:
    """The column's different values as canonical bytes, and each row's place among them."""
    encode = _encoder(column.type)
    if encode is None:
        raise ValueError(f"values of type {column.type} are no keys")
    encoded = _plain(column).combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.chunk(0) if encoded.num_chunks else pa.array([], encoded.type)
    values = [_NULL, *(_NULL if value is None else encode(value) for value in encoded.dictionary.to_pylist())]
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return values, codes + 1


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Times as their integers: Python's own have no nanoseconds."""
    if kinds.is_timestamp(column.type) or kinds.is_time64(column.type):
        return column.cast(pa.int64())
    if kinds.is_time32(column.type) or kinds.is_date32(column.type):
        return column.cast(pa.int32()).cast(pa.int64())
    return column


def _encoder(arrow_type: pa.DataType) -> Callable[[Any], bytes] | None:
    if kinds.is_boolean(arrow_type):
        return lambda value: _BOOL + bytes([value])
    if kinds.is_integer(arrow_type):
        return lambda value: _INT + _integer(value)
    if kinds.is_floating(arrow_type):
        return lambda value: _FLOAT + _double(value)
    if kinds.is_string(arrow_type):
        return lambda value: _TEXT + _sized(value.encode())
    if kinds.is_binary(arrow_type) or kinds.is_fixed_size_binary(arrow_type):
        return lambda value: _BYTES + _sized(value)
    if kinds.is_date32(arrow_type):
        return lambda value: _DATE + _integer(value)
    if kinds.is_timestamp(arrow_type):
        return lambda value: _TIMESTAMP + _integer(value * _NS[arrow_type.unit])
    if kinds.is_time(arrow_type):
        return lambda value: _TIME + _integer(value * _NS[arrow_type.unit])
    if kinds.is_decimal128(arrow_type):
        return lambda value: _DECIMAL + _sized(_decimal(value))
    return None


def _integer(value: int) -> bytes:
    return value.to_bytes(16, "little", signed=True)


def _double(value: float) -> bytes:
    if math.isnan(value):
        value = math.nan  # of all its bit patterns one
    return struct.pack("<d", value + 0.0)  # which makes -0.0 the same as 0.0


def _sized(value: bytes) -> bytes:
    return len(value).to_bytes(8, "little") + value


def _decimal(value: Decimal) -> bytes:
    """The value alone: 1.50 and 1.5 are equal. `normalize` would round to the context's precision."""
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    unscaled = int("".join(map(str, digits)))
    while unscaled and unscaled % 10 == 0:
        unscaled, exponent = unscaled // 10, exponent + 1
    return f"{'-' if sign and unscaled else ''}{unscaled}e{exponent if unscaled else 0}".encode()
