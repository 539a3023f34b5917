"""Casts of columns that tell which rows do not fit, instead of failing as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
from numpy.typing import NDArray

from data_service.domain.text_values import from_text
from shared.dataset_version.columns import refuse_beyond_milliseconds
from shared.value_texts import zone_hint, zone_problem

# True for each row that fits; None where all do.
Fits = NDArray[np.bool_] | None
Cast = Callable[[pa.Array], pa.Array]


class CastRefused(ValueError):
    """No value of the one type can be had as the other; the text says why."""


def cast_rows(values: pa.Array, cast: Cast) -> tuple[pa.Array, Fits]:
    """`cast(values)`, with null and False where it raises for a row: found by halving, so that good rows stay fast."""
    try:
        return cast(values), None
    except pa.ArrowInvalid:
        if len(values) <= 1:
            empty = cast(values.slice(0, 0))
            return pa.nulls(len(values), empty.type), np.zeros(len(values), np.bool_)
    middle = len(values) // 2
    parts = [cast_rows(values.slice(0, middle), cast), cast_rows(values.slice(middle), cast)]
    fits = np.concatenate([np.ones(len(part), np.bool_) if fit is None else fit for part, fit in parts])
    return pa.concat_arrays([part for part, _ in parts]), fits


def cast_between(given: pa.DataType, wanted: pa.DataType) -> Cast | None:
    """How values of a logical type become another's; None where they are already. Raises `CastRefused`."""
    if given == wanted:
        return None
    if problem := zone_problem(given, wanted):
        raise CastRefused(problem)
    cast = _chosen(given, wanted)
    try:
        cast(_empty(given))
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        raise CastRefused(f"{given} cannot be cast to {wanted}") from None
    return cast


def misfit(value: str, wanted: pa.DataType) -> str:
    """The reason of a bad row, whose `value` does not fit."""
    return f"{value} does not fit {wanted}{zone_hint(wanted)}"


def _chosen(given: pa.DataType, wanted: pa.DataType) -> Cast:
    def from_texts(values: pa.Array) -> pa.Array:
        return from_text(values, wanted)

    def plain(values: pa.Array) -> pa.Array:
        return _checked(values, values.cast(wanted))

    if _is_tensor(given) or _is_tensor(wanted):
        return _tensor_cast(given, wanted)
    return from_texts if kinds.is_string(given) else plain


def _empty(arrow_type: pa.DataType) -> pa.Array:
    if _is_tensor(arrow_type):
        return pa.ExtensionArray.from_storage(arrow_type, pa.array([], arrow_type.storage_type))
    return pa.array([], arrow_type)


def _is_tensor(arrow_type: pa.DataType) -> bool:
    return isinstance(arrow_type, pa.FixedShapeTensorType)


def _tensor_cast(given: pa.DataType, wanted: pa.DataType) -> Cast:
    if not (_is_tensor(given) and _is_tensor(wanted)):
        raise CastRefused(f"{given} cannot be cast to {wanted}: a tensor stays a tensor")
    size = int(np.prod(wanted.shape))
    if int(np.prod(given.shape)) != size:
        raise CastRefused(f"rows of shape {given.shape} cannot have the shape {wanted.shape}")

    def cast(tensors: pa.Array) -> pa.Array:
        flat = tensors.storage.flatten()
        values = _checked(flat, flat.cast(wanted.value_type))
        return pa.ExtensionArray.from_storage(wanted, pa.FixedSizeListArray.from_arrays(values, size))

    return cast


def _checked(given: pa.Array, cast: pa.Array) -> pa.Array:
    """Refuses what Arrow lets pass: a finite number that became infinite in a narrower float, and seconds that a
    version's files do not hold."""
    if kinds.is_floating(cast.type) and (kinds.is_floating(given.type) or kinds.is_decimal(given.type)):
        wide = given.cast(pa.float64())
        if pc.any(pc.and_(pc.is_finite(wide), pc.is_inf(cast.cast(pa.float64())))).as_py():
            raise pa.ArrowInvalid("beyond the range of the float")
    refuse_beyond_milliseconds(cast)
    return cast


def rows_without_nulls(lists: pa.FixedSizeListArray) -> tuple[pa.Array, Fits]:
    """The lists' values as one array, and which lists are neither null nor hold one; values of others are zeros."""
    size = lists.type.list_size
    values = lists.values.slice(lists.offset * size, len(lists) * size)
    if not lists.null_count and not values.null_count:
        return values, None
    fits: NDArray[Any] = ~lists.is_null().to_numpy(zero_copy_only=False)
    if values.null_count:
        fits &= ~values.is_null().to_numpy(zero_copy_only=False).reshape(len(lists), size).any(axis=1)
        values = values.fill_null(pa.scalar(0, pa.int8()).cast(values.type))
    return values, fits
