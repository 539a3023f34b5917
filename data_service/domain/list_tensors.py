"""Columns of lists, nested or not, as tensors: where a shape says how long each list has to be.

In the comments R = rows, and L0, L1, … = the lengths that lists must have, level by level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
from numpy.typing import NDArray

from data_service.domain.row_casts import CastRefused, Fits, cast_between, cast_rows


def is_list(arrow_type: pa.DataType) -> bool:
    return bool(kinds.is_list(arrow_type) or kinds.is_large_list(arrow_type) or kinds.is_fixed_size_list(arrow_type))


def fits_lists(lists: pa.DataType, tensor: pa.FixedShapeTensorType) -> bool:
    """Whether rows of `lists` may be such tensors: numbers, in lists of as many levels as the tensor has dimensions, or
    of one level that has them all, row-major."""
    levels, value_type = _unnested(lists)
    if levels not in (1, len(tensor.shape)) or not _is_number(value_type):
        return False
    try:
        cast_between(pa.fixed_shape_tensor(value_type, tensor.shape), tensor)
    except CastRefused:
        return False
    return True


def example_tensor(lists: pa.DataType) -> str | None:
    """The spelling of a tensor's type that has the values of `lists`, of some shape; None where no tensor has them."""
    levels, value_type = _unnested(lists)
    if not levels or not _is_number(value_type):
        return None
    return str(pa.fixed_shape_tensor(value_type, [3] * levels)).removeprefix("extension<arrow.").removesuffix(">")


def tensors_of_lists(lists: pa.Array, wanted: pa.FixedShapeTensorType) -> tuple[pa.Array, Fits]:
    """Rows whose lists have other lengths, or a null anywhere, do not fit, nor do those with numbers that the tensor
    cannot hold. What stands in their places says nothing."""
    levels, value_type = _unnested(lists.type)
    lengths = wanted.shape if levels == len(wanted.shape) else [math.prod(wanted.shape)]
    values, fits = _values(lists, lengths)
    size = math.prod(wanted.shape)
    if not fits.all():
        placed: NDArray[Any] = np.zeros((len(lists), size), value_type.to_pandas_dtype())
        placed[fits] = values.to_numpy().reshape(-1, size)
        values = pa.array(placed.reshape(-1), value_type)
    given = pa.fixed_shape_tensor(value_type, wanted.shape)
    tensors = pa.ExtensionArray.from_storage(given, pa.FixedSizeListArray.from_arrays(values, size))
    cast = cast_between(given, wanted)
    made, in_range = (tensors, None) if cast is None else cast_rows(tensors, cast)
    if in_range is not None:
        fits &= in_range
    return made, None if fits.all() else fits


def _values(lists: pa.Array, lengths: Sequence[int]) -> tuple[pa.Array, NDArray[np.bool_]]:
    """The values of the rows that fit, one after the other, and which those are: (R,)."""
    fits = np.ones(len(lists), np.bool_)
    each = 1  # entries that a row has on this level
    for length in lengths:
        right = pc.equal(pc.list_value_length(lists), length).fill_null(False)
        lists, each = _of_fitting(lists, right, each, fits).flatten(), each * length
    return _of_fitting(lists, lists.is_valid(), each, fits), fits


def _of_fitting(entries: pa.Array, right: pa.Array, each: int, fits: NDArray[np.bool_]) -> pa.Array:
    """Those of the rows of which all entries are right; other rows are taken out of `fits`."""
    good = right.to_numpy(zero_copy_only=False).reshape(-1, each).all(axis=1)
    fits[fits] = good
    return entries if good.all() else entries.filter(pa.array(np.repeat(good, each)))


def _unnested(arrow_type: pa.DataType) -> tuple[int, pa.DataType]:
    """How many levels of lists there are, and the type of what is in them."""
    levels = 0
    while is_list(arrow_type):
        levels, arrow_type = levels + 1, arrow_type.value_type
    return levels, arrow_type


def _is_number(value_type: pa.DataType) -> bool:
    return bool(kinds.is_integer(value_type) or kinds.is_floating(value_type))
