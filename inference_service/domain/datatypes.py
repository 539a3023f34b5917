"""The datatypes of the Open Inference Protocol and their numpy counterparts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Datatype:
    """`dtype` is what arrays of it have in memory, always little-endian; `item_bytes` what one element takes on the
    wire, 0 where that varies; `contents_field` the typed field of InferTensorContents, "" where only raw is defined."""

    name: str
    dtype: np.dtype[np.generic]
    item_bytes: int
    contents_field: str

    @property
    def is_integer(self) -> bool:
        return self.dtype.kind in "iu"


def _of(name: str, dtype: str, item_bytes: int, contents_field: str) -> Datatype:
    return Datatype(name, np.dtype(dtype), item_bytes, contents_field)


DATATYPES: dict[str, Datatype] = {
    datatype.name: datatype
    for datatype in (
        _of("BOOL", "?", 1, "bool_contents"),
        _of("UINT8", "u1", 1, "uint_contents"),
        _of("UINT16", "<u2", 2, "uint_contents"),
        _of("UINT32", "<u4", 4, "uint_contents"),
        _of("UINT64", "<u8", 8, "uint64_contents"),
        _of("INT8", "i1", 1, "int_contents"),
        _of("INT16", "<i2", 2, "int_contents"),
        _of("INT32", "<i4", 4, "int_contents"),
        _of("INT64", "<i8", 8, "int64_contents"),
        _of("FP16", "<f2", 2, ""),
        _of("FP32", "<f4", 4, "fp32_contents"),
        _of("FP64", "<f8", 8, "fp64_contents"),
        # numpy has no bfloat16: such tensors are float32 in memory, which holds every bfloat16 exactly.
        _of("BF16", "<f4", 2, ""),
        _of("BYTES", "O", 0, "bytes_contents"),
    )
}


def datatype_of(dtype: np.dtype[Any]) -> str | None:
    """The datatype whose elements are such numbers; None where the protocol has none."""
    little = dtype.newbyteorder("<")
    exact = (name for name, one in DATATYPES.items() if one.dtype == little and name not in ("BF16", "BYTES"))
    return next(exact, None)


def bfloat16_to_float32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """bfloat16 bit patterns, any shape, to the same numbers in float32 (exact)."""
    return (bits.astype("<u4") << np.uint32(16)).view("<f4")


def float32_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """float32 to bfloat16 bit patterns, rounding halves to even. A NaN stays a NaN and keeps its upper bits."""
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype("<u2")
    upper = (bits >> np.uint32(16)).astype("<u2")
    # Cutting a NaN whose payload is all in the lower bits would leave an infinity.
    quiet = np.where(upper & np.uint16(0x7F), upper, upper | np.uint16(0x40))
    return np.where(np.isnan(values), quiet, rounded).astype("<u2")
