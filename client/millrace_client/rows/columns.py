"""Arrow columns as what a model's inputs take.

Null is said beside the values: with input `age` goes a BOOL input `age.null`, true where the row is null.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds

from millrace_client.rows.pictures import pixels_of, takes_pixels
from millrace_client.rows.texts import numbers_of_texts
from millrace_client.rows.times import ColumnTypes, as_type
from millrace_client.rows.typed import Array, BadInput, Tensor, dtype_of, typed

NULLS = ".null"
MAX_SHOWN_VALUE = 40


@dataclass(frozen=True)
class Place:
    """Where rows are from, for who reads of an error: `source`, in which the first of them has the number `first`."""

    source: str
    first: int = 1

    def row(self, index: int) -> str:
        return f"{self.source}, row {self.first + index}"


def inputs_of_table(
    inputs: Sequence[Tensor], types: ColumnTypes, table: pa.Table, place: Place, names: Collection[str]
) -> Mapping[str, Array]:
    """What to send of a table that has a column for each of `inputs`; `names` are those of all inputs of the model, and
    `types` those of its times.

    Raises `BadInput` naming the row and the column that do not fit.
    """
    sent: dict[str, Array] = {}
    for tensor in inputs:
        column = table.column(tensor.name)
        if tensor.name in types:
            column = _times(tensor.name, types[tensor.name], column, place)
        values, nulls = values_of_column(tensor, column, place)
        sent[tensor.name] = values
        if nulls is not None:
            if tensor.name + NULLS in names:
                raise _null(tensor, nulls, place, f"{tensor.name + NULLS!r} is an input of its own")
            sent[tensor.name + NULLS] = nulls
    return sent


def values_of_column(tensor: Tensor, column: pa.ChunkedArray, place: Place) -> tuple[Array, Array | None]:
    """(rows, *shape) in the type that the input takes, and bool (rows): where they are null; None where none is. What
    the former holds there means nothing. Raises `BadInput`."""
    array, shape = _plain(column), tuple(tensor.shape[1:])
    nulls = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    tensors = isinstance(array.type, pa.FixedShapeTensorType) or _is_list(array.type)
    if not shape or (all(size == 1 for size in shape) and not tensors):
        return _elements(tensor, array, place).reshape(len(array), *shape), nulls
    if nulls is not None:
        raise _null(tensor, nulls, place, "a tensor has no place for it")
    if not len(array):
        return np.zeros((0, *shape), object if tensor.datatype == "BYTES" else dtype_of(tensor)), None
    return _tensors(tensor, array, shape, place), None


def is_text(kind: pa.DataType) -> bool:
    return bool(kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind))


def is_binary(kind: pa.DataType) -> bool:
    """Of any length: encoded images, most often."""
    return bool(kinds.is_binary(kind) or kinds.is_large_binary(kind) or kinds.is_binary_view(kind))


def _times(name: str, kind: pa.DataType, column: pa.ChunkedArray, place: Place) -> pa.ChunkedArray:
    try:
        return as_type(column, kind)
    except pa.ArrowInvalid:
        for index in range(len(column)):
            try:
                as_type(column.slice(index, 1), kind)
            except pa.ArrowInvalid:
                raise BadInput(
                    f"{place.row(index)}, column {name!r}: {_shown(column[index])} is no {kind}, which the model was "
                    "trained on",
                    remedy="write it as ISO 8601 has it, with no more digits than that; with a zone where it has one",
                ) from None
        raise


def _plain(column: pa.ChunkedArray) -> pa.Array:
    """In one chunk, and no dictionary."""
    if kinds.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # of no rows, or of more than fit into one
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    return array


def _elements(tensor: Tensor, array: pa.Array, place: Place, per_row: int = 1) -> Array:
    """Every value, `per_row` of them a row; zeros and no bytes for nulls."""
    if tensor.datatype == "BYTES":
        return _byte_strings(tensor, array, place)
    dtype = dtype_of(tensor)
    if kinds.is_null(array.type):
        return np.zeros(len(array), dtype)

    def numbers(values: pa.Array) -> Array:
        found = numbers_of_texts(values.cast(pa.string()), dtype) if is_text(array.type) else values
        return typed(tensor, _filled(found))

    given = array if is_text(array.type) else _sent_as(tensor, array, dtype, place)
    return _naming_rows(tensor, given, numbers, place, per_row)


def _byte_strings(tensor: Tensor, array: pa.Array, place: Place) -> Array:
    kind = array.type
    if not (is_text(kind) or is_binary(kind) or kinds.is_fixed_size_binary(kind) or kinds.is_null(kind)):
        raise BadInput(
            f"column {tensor.name!r} of {place.source} is {kind}, and the model takes text or bytes there",
            remedy="write the column as text",
        )
    return np.array([b"" if item is None else item for item in array.to_pylist()], object)


def _sent_as(tensor: Tensor, array: pa.Array, dtype: np.dtype[Any], place: Place) -> pa.Array:
    """The numbers that stand for the values; times in the column's own unit."""
    kind = array.type
    if kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_boolean(kind):
        return array
    if kinds.is_decimal(kind) and dtype.kind == "f":
        return array.cast(pa.float64())
    if (kinds.is_date32(kind) or kinds.is_time32(kind)) and dtype == np.int32:
        return array.view(pa.int32())
    if (kinds.is_timestamp(kind) or kinds.is_time64(kind)) and dtype == np.int64:
        return array.view(pa.int64())
    raise BadInput(
        f"column {tensor.name!r} of {place.source} is {kind}, and the model takes {tensor.datatype} there",
        remedy="cast the column to what the model was trained on",
    )


def _filled(numbers: pa.Array) -> Array:
    if numbers.null_count and not kinds.is_floating(numbers.type):
        numbers = numbers.fill_null(pa.scalar(0).cast(numbers.type))
    found: Array = numbers.to_numpy(zero_copy_only=False)
    if not numbers.null_count:
        return found
    # Nulls of floats come as NaN, which is no integer.
    return np.where(numbers.is_null().to_numpy(zero_copy_only=False), found.dtype.type(0), found)


def _naming_rows(
    tensor: Tensor, array: pa.Array, make: Callable[[pa.Array], Array], place: Place, per_row: int
) -> Array:
    """`make(array)`; where that fails, value by value, so that the one at fault is named."""
    try:
        return make(array)
    except ValueError:
        made = []
    for index in range(len(array)):
        try:
            made.append(make(array.slice(index, 1)))
        except ValueError:
            raise BadInput(
                f"{place.row(index // per_row)}, column {tensor.name!r}: {_shown(array[index])} is no "
                f"{tensor.datatype}",
                remedy=f"write a value that {tensor.datatype} holds, or none where it is not known",
            ) from None
    return np.concatenate(made)


def _shown(value: pa.Scalar) -> str:
    # Of a time its number where Python has no such date, or does not know the zone.
    try:
        text = repr(value.as_py())
    except (ValueError, OverflowError):
        text = repr(value.value)
    return text if len(text) <= MAX_SHOWN_VALUE else text[:MAX_SHOWN_VALUE] + "…"


def _tensors(tensor: Tensor, array: pa.Array, shape: tuple[int, ...], place: Place) -> Array:
    """(rows, *shape) of at least one row, none of them null."""
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        found = array.to_numpy_ndarray()
        _check_shape(tensor, found.shape[1:], shape, place)
        return _typed_tensors(tensor, found, place)
    if is_binary(kind) and takes_pixels(tensor):
        return _pictures(array.to_pylist(), shape, place)
    fixed, size = min(shape) > 0, math.prod(shape)
    if kinds.is_fixed_size_binary(kind) and fixed and tensor.datatype != "BYTES":
        dtype = dtype_of(tensor)
        if kind.byte_width == size * dtype.itemsize:  # row-major and little-endian, as versions are stored
            return np.frombuffer(b"".join(array.to_pylist()), dtype).reshape(len(array), *shape)
    if _is_list(kind):
        values, given = _flat(tensor, array, place)
        if not fixed or given != (size,):
            _check_shape(tensor, given, shape, place)
        elements = _elements(tensor, values, place, math.prod(given))
        return elements.reshape(len(array), *(shape if fixed else given))
    raise BadInput(
        f"column {tensor.name!r} of {place.source} is {kind}, and the model takes rows of shape {list(shape)} there",
        remedy="give a Parquet file with lists of a fixed size, or tensors",
    )


def _typed_tensors(tensor: Tensor, values: Array, place: Place) -> Array:
    try:
        return typed(tensor, values)
    except BadInput as error:
        for index in range(len(values)):
            try:
                typed(tensor, values[index : index + 1])
            except BadInput:
                raise BadInput(f"{place.row(index)}: {error}") from None
        raise


def _pictures(items: Sequence[bytes], shape: tuple[int, ...], place: Place) -> Array:
    """Of encoded images; of pixels where the bytes are no image, and as many as there are pixels."""
    images = []
    for index, item in enumerate(items):
        try:
            images.append(pixels_of(io.BytesIO(item), shape, place.row(index)))
        except BadInput:
            if min(shape) < 1 or len(item) != math.prod(shape):
                raise
            images.append(np.frombuffer(item, np.uint8).reshape(shape))
    if len({image.shape for image in images}) > 1:
        raise BadInput(f"{place.row(0)} to {place.first + len(items) - 1} have images of different sizes")
    return np.stack(images)


def _is_list(kind: pa.DataType) -> bool:
    return bool(kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind))


def _flat(tensor: Tensor, lists: pa.Array, place: Place) -> tuple[pa.Array, tuple[int, ...]]:
    """All values of lists that may hold lists again, and the shape that every row has. Raises `BadInput` where one has
    another, or holds a null."""
    rows, shape = len(lists), tuple[int, ...]()
    while _is_list(lists.type):
        lengths = _lengths(lists)
        odd = np.flatnonzero(lengths != lengths[:1])
        if len(odd):
            row = int(odd[0]) * rows // len(lists)
            raise BadInput(f"{place.row(row)}, column {tensor.name!r} has another shape than the rows before it")
        shape += (int(lengths[0]) if len(lengths) else 0,)
        lists = lists.flatten()
        if lists.null_count:
            row = int(np.flatnonzero(lists.is_null().to_numpy(zero_copy_only=False))[0]) * rows // len(lists)
            raise BadInput(f"{place.row(row)}, column {tensor.name!r} holds a null, and a tensor has no place for it")
    return lists, shape


def _lengths(lists: pa.Array) -> Array:
    """Of each list; of fixed-size ones once for all."""
    if kinds.is_fixed_size_list(lists.type):
        return np.array([lists.type.list_size])
    return np.diff(lists.offsets.to_numpy())


def _check_shape(tensor: Tensor, given: Sequence[int], wanted: Sequence[int], place: Place) -> None:
    if len(given) != len(wanted) or any(want not in (-1, size) for want, size in zip(wanted, given, strict=True)):
        raise BadInput(
            f"column {tensor.name!r} of {place.source} has rows of shape {list(given)}, and the model takes "
            f"{list(wanted)} there"
        )


def _null(tensor: Tensor, nulls: Array, place: Place, why: str) -> BadInput:
    row = int(np.flatnonzero(nulls)[0])
    return BadInput(
        f"{place.row(row)}, column {tensor.name!r} is null, and {why}", remedy="leave out the rows with nulls there"
    )
