"""Converts arrays to the types of a model's inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from inference import grpc_service_pb2 as pb
from millrace_client.inference import DTYPES

# From here on some whole numbers are no doubles.
EXACT_BELOW = 2.0**53

Array = npt.NDArray[Any]
Tensor = pb.ModelMetadataResponse.TensorMetadata


class BadInput(ValueError):
    """Rows that cannot be sent to this model. The text says why, and `remedy` what to do."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


def typed(tensor: Tensor, values: Array) -> Array:
    """Convert values to the model's type if that does not change them.

    A narrower float may lose digits of a double, but a float never replaces a whole number that a double does not hold.
    Raises `BadInput` if a value would change.
    """
    try:
        if tensor.datatype == "BYTES":
            return _texts(values)
        dtype = dtype_of(tensor)
        return _floats(values, dtype) if dtype.kind == "f" else _exactly(values, dtype)
    except (TypeError, OverflowError):
        raise BadInput(f"input {tensor.name!r} is {tensor.datatype}, and the file has {values.dtype}") from None


def dtype_of(tensor: Tensor) -> np.dtype[Any]:
    """Return the numpy type, except for BYTES. Raises `BadInput` for a type that numpy lacks."""
    found = DTYPES.get(tensor.datatype)
    if found is None:
        raise BadInput(f"input {tensor.name!r} is {tensor.datatype}, which numpy does not have; load another model")
    return found


def _texts(values: Array) -> Array:
    if values.dtype.kind not in "OSU":
        raise TypeError("neither text nor bytes")
    return values.astype(object)


def _floats(values: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore"):
        cast = values.astype(dtype, casting="same_kind")
    if (np.isinf(cast) & np.isfinite(values)).any():
        raise OverflowError(f"values beyond {dtype}")
    if values.dtype.kind in "iu" and values.dtype.itemsize == 8:
        large = values[np.abs(values.astype(np.float64)) >= EXACT_BELOW]
        if any(int(float(one)) != one for one in large.tolist()):
            raise OverflowError(f"values beyond {dtype}")
    return cast


def _exactly(values: Array, dtype: np.dtype[Any]) -> Array:
    if values.dtype.kind not in "biuf":
        raise TypeError("no numbers")
    if values.dtype.kind == "f" and dtype.kind in "iu" and not _within(values.astype(np.float64), np.iinfo(dtype)):
        raise OverflowError(f"values beyond {dtype}")
    cast = values.astype(dtype)
    if not np.array_equal(cast, values):
        raise OverflowError(f"values beyond {dtype}")
    return cast


def _within(values: npt.NDArray[np.float64], info: np.iinfo[Any]) -> bool:
    """Return whether all values are in the integer's range, because out-of-range casts differ between processors.

    A NaN is out of range.
    """
    return bool(((values >= float(info.min)) & (values < float(info.max) + 1.0)).all())
