"""Tensors of the Open Inference Protocol.

Their datatypes, and the conversion between their two wire forms and numpy, which refuses malformed tensors.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import InvalidArgument, invalid_field

# --- Datatypes ---
# The datatypes of the Open Inference Protocol and their numpy counterparts.


@dataclass(frozen=True)
class Datatype:
    """A datatype of the protocol.

    `dtype` is the little-endian dtype of its arrays in memory; `item_bytes` the size of an element on the wire, 0 if it
    varies; `contents_field` the typed field of InferTensorContents, "" if only raw is defined.
    """

    name: str
    dtype: np.dtype[np.generic]
    item_bytes: int
    contents_field: str

    @property
    def is_integer(self) -> bool:
        return self.dtype.kind in "iu"


def _datatype(name: str, dtype: str, item_bytes: int, contents_field: str) -> Datatype:
    return Datatype(name, np.dtype(dtype), item_bytes, contents_field)


DATATYPES: dict[str, Datatype] = {
    datatype.name: datatype
    for datatype in (
        _datatype("BOOL", "?", 1, "bool_contents"),
        _datatype("UINT8", "u1", 1, "uint_contents"),
        _datatype("UINT16", "<u2", 2, "uint_contents"),
        _datatype("UINT32", "<u4", 4, "uint_contents"),
        _datatype("UINT64", "<u8", 8, "uint64_contents"),
        _datatype("INT8", "i1", 1, "int_contents"),
        _datatype("INT16", "<i2", 2, "int_contents"),
        _datatype("INT32", "<i4", 4, "int_contents"),
        _datatype("INT64", "<i8", 8, "int64_contents"),
        _datatype("FP16", "<f2", 2, ""),
        _datatype("FP32", "<f4", 4, "fp32_contents"),
        _datatype("FP64", "<f8", 8, "fp64_contents"),
        # numpy has no bfloat16: such tensors are float32 in memory, which holds every bfloat16 exactly.
        _datatype("BF16", "<f4", 2, ""),
        _datatype("BYTES", "O", 0, "bytes_contents"),
    )
}


def datatype_of(dtype: np.dtype[Any]) -> str | None:
    """Returns the datatype of these numbers; None if the protocol has none."""
    little = dtype.newbyteorder("<")
    exact = (name for name, one in DATATYPES.items() if one.dtype == little and name not in ("BF16", "BYTES"))
    return next(exact, None)


def bfloat16_to_float32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Converts bfloat16 bit patterns, any shape, to float32, exactly."""
    return (bits.astype("<u4") << np.uint32(16)).view("<f4")


def float32_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Converts float32 to bfloat16 bit patterns, rounding half to even.

    A NaN stays a NaN and keeps its upper bits.
    """
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype("<u2")
    upper = (bits >> np.uint32(16)).astype("<u2")
    # Truncating a NaN whose payload is all in the lower bits would give an infinity.
    quiet = np.where(upper & np.uint16(0x7F), upper, upper | np.uint16(0x40))
    return np.where(np.isnan(values), quiet, rounded).astype("<u2")


# --- Tensors ---
# Converts tensors of the Open Inference Protocol between their two wire forms and numpy, refusing malformed ones.
#
# A tensor is sent either *raw* (row-major little-endian bytes; each BYTES element behind its 4-byte length) or *typed*
# (a repeated field of its own kind). Raw numbers become arrays that view the message's own bytes, without a copy.

Array = npt.NDArray[Any]

MAX_DIMENSIONS = 32  # numpy allows 64
MAX_ELEMENTS = 2**40  # far above any message, far below where sizes would overflow
MAX_SHOWN_SHAPE = 8


@dataclass(frozen=True)
class WireTensor:
    """One tensor as it was received.

    `raw` has its bytes or None. `typed` has its non-empty typed fields, each a repeated field, or already an array of
    64-bit integers or of the field's own kind. `field` is its path in the request, for errors. `decoded` is the result
    of `decode`, array or error, if it is already known.
    """

    field: str
    name: str
    datatype: str
    shape: Sequence[int]
    raw: bytes | None
    typed: Mapping[str, Sequence[Any] | Array]
    decoded: Array | InvalidArgument | None = None


def decode_ahead(tensor: WireTensor) -> WireTensor:
    """Returns the same tensor, `decoded`.

    Raises nothing: the later caller of `decode` may find another error first.
    """
    try:
        return replace(tensor, decoded=decode(tensor))
    except InvalidArgument as error:
        return replace(tensor, decoded=error)


def decode(tensor: WireTensor) -> Array:
    """Returns the tensor as an array of its shape; read-only if it views the message.

    BOOL is bool, BF16 float32, BYTES an object array of bytes. Raises `InvalidArgument`, naming the tensor, for an
    unknown datatype, dimensions below zero or overflowing, both contents at once, contents of another kind, too few or
    too many elements, numbers out of the datatype's range, and BYTES lengths that do not fit the bytes.
    """
    if tensor.decoded is not None:
        if isinstance(tensor.decoded, InvalidArgument):
            raise tensor.decoded
        return tensor.decoded
    datatype = DATATYPES.get(tensor.datatype)
    if datatype is None:
        raise _bad(tensor, "datatype", tensor.datatype, f"use one of {', '.join(DATATYPES)}")
    elements = check_shape(tensor)
    if tensor.raw is not None:
        if tensor.typed:
            raise _bad(tensor, "contents", sorted(tensor.typed), "send contents or raw_input_contents, not both")
        flat = _decode_raw(tensor, datatype, elements, tensor.raw)
    else:
        flat = _decode_typed(tensor, datatype, elements)
    return flat.reshape(tuple(tensor.shape))


def encode_raw(datatype: str, values: Array) -> bytes:
    """Returns the array in raw form.

    `values` has the datatype's own dtype: float32 for BF16, bytes objects for BYTES.
    """
    kind = DATATYPES[datatype]
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(item)) + item for item in values.ravel())
    if datatype == "BF16":
        return float32_to_bfloat16(values).tobytes()
    return np.ascontiguousarray(values, kind.dtype).tobytes()


def encode_typed(datatype: str, values: Array) -> tuple[str, list[Any]]:
    """Returns (field of InferTensorContents, elements in row-major order).

    FP16 and BF16 have no typed form.
    """
    kind = DATATYPES[datatype]
    if not kind.contents_field:
        raise ValueError(f"{datatype} has only a raw form")
    return kind.contents_field, values.ravel().tolist()


def has_typed_form(datatype: str) -> bool:
    return bool(DATATYPES[datatype].contents_field)


def check_shape(tensor: WireTensor) -> int:
    """Returns the number of elements.

    Raises `InvalidArgument` for dimensions that are below zero, overflow, or are too many.
    """
    shape = tensor.shape
    shown = list(shape[:MAX_SHOWN_SHAPE])
    if len(shape) > MAX_DIMENSIONS:
        raise _bad(tensor, "shape", shown, f"there are more than {MAX_DIMENSIONS} dimensions")
    if any(size < 0 for size in shape):
        raise _bad(tensor, "shape", shown, "every dimension must be 0 or more")
    # Zeros count as ones: numpy refuses a shape whose other dimensions overflow, even for an empty array.
    if math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        raise _bad(tensor, "shape", shown, f"it names more than {MAX_ELEMENTS} elements")
    return math.prod(shape)


def _decode_raw(tensor: WireTensor, datatype: Datatype, elements: int, raw: bytes) -> Array:
    if datatype.name == "BYTES":
        return _objects(_split_bytes(tensor, raw, elements))
    wanted = elements * datatype.item_bytes
    if len(raw) != wanted:
        raise _bad(
            tensor,
            "raw_input_contents",
            f"{len(raw)} bytes",
            f"shape {list(tensor.shape)} of {datatype.name} takes {wanted} bytes",
        )
    if datatype.name == "BF16":
        return bfloat16_to_float32(np.frombuffer(raw, "<u2"))
    if datatype.name == "BOOL":
        # A byte other than 0 and 1 would give a bool that equals neither.
        flags = np.frombuffer(raw, "u1")
        if flags.size and flags.max() > 1:
            raise _bad(tensor, "raw_input_contents", int(flags.max()), "a BOOL is the byte 0 or 1")
    return np.frombuffer(raw, datatype.dtype)


def _split_bytes(tensor: WireTensor, raw: bytes, elements: int) -> list[bytes]:
    items: list[bytes] = []
    offset = 0
    while offset < len(raw):
        if offset + 4 > len(raw):
            raise _bad(tensor, "raw_input_contents", f"{len(raw)} bytes", "they end inside the length of an element")
        (length,) = struct.unpack_from("<I", raw, offset)
        offset += 4
        if offset + length > len(raw):
            raise _bad(
                tensor,
                "raw_input_contents",
                f"length {length}",
                f"element {len(items)} reaches beyond the {len(raw)} bytes that were sent",
            )
        if len(items) == elements:
            raise _bad(tensor, "raw_input_contents", f"{len(raw)} bytes", f"there are more than {elements} elements")
        items.append(raw[offset : offset + length])
        offset += length
    if len(items) != elements:
        raise _bad(
            tensor, "raw_input_contents", f"{len(items)} elements", f"shape {list(tensor.shape)} takes {elements}"
        )
    return items


def _decode_typed(tensor: WireTensor, datatype: Datatype, elements: int) -> Array:
    field = datatype.contents_field
    if not field:
        raise _bad(tensor, "contents", datatype.name, "this datatype has no typed contents: use raw_input_contents")
    strangers = sorted(set(tensor.typed) - {field})
    if strangers:
        raise _bad(tensor, "contents", strangers, f"{datatype.name} goes into {field}")
    values = tensor.typed.get(field, ())
    if len(values) != elements:
        raise _bad(
            tensor, f"contents.{field}", f"{len(values)} elements", f"shape {list(tensor.shape)} takes {elements}"
        )
    if datatype.name == "BYTES":
        return _objects([bytes(value) for value in values])
    if not datatype.is_integer:
        return _numbers(values, datatype.dtype).astype(datatype.dtype, copy=False)
    wide = _numbers(values, np.dtype("<u8" if datatype.dtype.kind == "u" else "<i8"))
    limits = np.iinfo(np.dtype(datatype.dtype.str))
    if elements and (wide.min() < limits.min or wide.max() > limits.max):
        outlier = wide.min() if wide.min() < limits.min else wide.max()
        raise _bad(tensor, f"contents.{field}", int(outlier), f"{datatype.name} holds {limits.min} to {limits.max}")
    return wide.astype(datatype.dtype)


def _numbers(values: Sequence[Any] | Array, dtype: np.dtype[Any]) -> Array:
    return values if isinstance(values, np.ndarray) else np.fromiter(values, dtype, len(values))


def _objects(items: list[bytes]) -> Array:
    array = np.empty(len(items), object)
    array[:] = items
    return array


def _bad(tensor: WireTensor, part: str, value: object, remedy: str) -> InvalidArgument:
    return invalid_field(f"{tensor.field}.{part}", value, f"tensor {tensor.name[:100]!r}: {remedy}")
