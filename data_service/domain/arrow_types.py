"""Arrow types as a request names them: in Arrow's own spelling, as the columns of a version are described."""

from __future__ import annotations

import math
import re

import pyarrow as pa

from shared.dataset_version.columns import scalar_remedy

MAX_FIXED_BYTES = 16 * 1024 * 1024

_PLAIN = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint8": pa.uint8(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "halffloat": pa.float16(),
    "float16": pa.float16(),
    "float": pa.float32(),
    "float32": pa.float32(),
    "double": pa.float64(),
    "float64": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date32": pa.date32(),
    "date32[day]": pa.date32(),
    "time32[s]": pa.time32("s"),
    "time32[ms]": pa.time32("ms"),
    "time64[us]": pa.time64("us"),
    "time64[ns]": pa.time64("ns"),
}
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:, ?tz=(.+))?\]")
_DECIMAL = re.compile(r"decimal128\((\d{1,2}), ?(-?\d{1,2})\)")
_FIXED_BINARY = re.compile(r"fixed_size_binary\[(\d{1,9})\]")
_TENSOR = re.compile(
    r"(?:extension<arrow\.)?"
    r"fixed_shape_tensor\[value_type=(\w+), ?shape=\[(\d{1,9}(?:, ?\d{1,9}){0,7})\](?:, ?[^<>]*)?\]>?"
)


class TypeRefused(ValueError):
    """No column of a version has that type; the text is the remedy."""


def parse_type(text: str) -> pa.DataType:
    """The type that `text` names, such as `int64`, `timestamp[us, tz=UTC]`, `decimal128(10, 2)` or
    `fixed_shape_tensor[value_type=uint8, shape=[28,28]]`. Raises `TypeRefused`."""
    if text in _PLAIN:
        return _PLAIN[text]
    if match := _TIMESTAMP.fullmatch(text):
        return _kept(pa.timestamp(match[1], tz=match[2]))
    if match := _DECIMAL.fullmatch(text):
        return _decimal(int(match[1]), int(match[2]))
    if match := _FIXED_BINARY.fullmatch(text):
        if not 1 <= int(match[1]) <= MAX_FIXED_BYTES:
            raise TypeRefused(f"use 1 to {MAX_FIXED_BYTES} bytes")
        return pa.binary(int(match[1]))
    if match := _TENSOR.fullmatch(text):
        return _tensor(match[1], [int(side) for side in match[2].split(",")])
    raise TypeRefused(
        "use an Arrow type such as int64, double, bool, string, binary, date32, timestamp[us], decimal128(10, 2) or "
        "fixed_shape_tensor[value_type=float, shape=[28,28]]"
    )


def _decimal(precision: int, scale: int) -> pa.DataType:
    if not (1 <= precision <= 38 and 0 <= scale <= precision):
        raise TypeRefused("use a precision of 1 to 38 and a scale of 0 to the precision")
    return pa.decimal128(precision, scale)


def _kept(scalar: pa.DataType) -> pa.DataType:
    if remedy := scalar_remedy(scalar):
        raise TypeRefused(remedy)
    return scalar


def _tensor(value_name: str, shape: list[int]) -> pa.DataType:
    value_type = _PLAIN.get(value_name)
    if value_type is None or not (pa.types.is_integer(value_type) or pa.types.is_floating(value_type)):
        raise TypeRefused("use a tensor of integers or floats")
    if not 0 < math.prod(shape) * value_type.bit_width // 8 <= MAX_FIXED_BYTES:
        raise TypeRefused(f"use a shape of 1 to {MAX_FIXED_BYTES} bytes")
    return pa.fixed_shape_tensor(value_type, shape)
