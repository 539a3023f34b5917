"""Rows for a model's inputs: converts arrays, Arrow columns, texts and image files to the inputs' types.

Nulls are sent separately: with input `age` goes a BOOL input `age.null`, true where the row is null. Numbers are parsed
from texts as `millrace data import` parses a CSV. Dates and times are converted to the types that the columns had in
training, because on the wire they are numbers without a unit. A Millrace server reports these types. For other servers,
a column's own unit is sent, and texts as dates and microseconds.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from inference import grpc_service_pb2 as pb
from inference import model_config_pb2
from millrace_client.inference import DTYPES

if TYPE_CHECKING:
    from PIL import Image


# --- Types of inputs ---

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
        return _floats_of(values, dtype) if dtype.kind == "f" else _exactly(values, dtype)
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


def _floats_of(values: Array, dtype: np.dtype[Any]) -> Array:
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


# --- Columns ---

NULLS = ".null"
MAX_SHOWN_VALUE = 40


@dataclass(frozen=True)
class Place:
    """The origin of rows, for error messages: `source`, and the number of its first row."""

    source: str
    first: int = 1

    def row(self, index: int) -> str:
        return f"{self.source}, row {self.first + index}"


def inputs_of_table(
    inputs: Sequence[Tensor], types: ColumnTypes, table: pa.Table, place: Place, names: Collection[str]
) -> Mapping[str, Array]:
    """Return the arrays to send for a table that has a column for each of `inputs`.

    `names` are those of all inputs of the model, and `types` those of its times. Raises `BadInput`, naming the row and
    the column that do not fit.
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
    """Return an array (rows, *shape) of the input's type, and whether rows are null, bool (rows), or None without
    nulls.

    Values of null rows are arbitrary. Raises `BadInput`.
    """
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
    """Return whether values are bytes of any length, usually encoded images."""
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
    """Return the column in one chunk, without a dictionary."""
    if kinds.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # has no rows, or more than fit into one chunk
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    return array


def _elements(tensor: Tensor, array: pa.Array, place: Place, per_row: int = 1) -> Array:
    """Return every value, `per_row` of them per row; zeros or empty bytes for nulls."""
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
    """Return the numbers to send; times in the column's own unit."""
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
    # Nulls of floats become NaN, which is no integer.
    return np.where(numbers.is_null().to_numpy(zero_copy_only=False), found.dtype.type(0), found)


def _naming_rows(
    tensor: Tensor, array: pa.Array, make: Callable[[pa.Array], Array], place: Place, per_row: int
) -> Array:
    """Return `make(array)`. After a failure, convert value by value to name the faulty one."""
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
    # For a time, show its number if Python has no such date or does not know the zone.
    try:
        text = repr(value.as_py())
    except (ValueError, OverflowError):
        text = repr(value.value)
    return text if len(text) <= MAX_SHOWN_VALUE else text[:MAX_SHOWN_VALUE] + "…"


def _tensors(tensor: Tensor, array: pa.Array, shape: tuple[int, ...], place: Place) -> Array:
    """Return (rows, *shape) of at least one row, none of them null."""
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
        if kind.byte_width == size * dtype.itemsize:  # row-major and little-endian, as versions store it
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
    """Decode images. Bytes that are no image are taken as pixels if their number fits."""
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
    """Return all values of nested lists, and the shape of every row.

    Raises `BadInput` if a row has another shape or holds a null.
    """
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
    """Return each list's length; one number for fixed-size lists."""
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


# --- Numbers out of texts ---

# Texts that mean null in a CSV besides the empty field, also in quotes.
NULL_VALUES = ("NA", "N/A", "null", "NULL", "NaN", "nan")

_Reader = Callable[[pa.Array], pa.Array]


def numbers_of_texts(texts: pa.Array, dtype: np.dtype[Any]) -> pa.Array:
    """Parse numbers, which may still be too large for `dtype` or have a fraction; nulls stay null.

    ISO 8601 dates become days since 1970 if `dtype` is int32, and times without a zone become microseconds if it is
    int64, because models' date and time columns are sent so. Raises `ValueError` for any other text.
    """
    readers = _readers(dtype)
    for read in readers[:-1]:
        try:
            return read(texts)
        except pa.ArrowInvalid:
            continue
    return readers[-1](texts)


def _readers(dtype: np.dtype[Any]) -> list[_Reader]:
    """Return the parsers to try, the likeliest first."""
    if dtype.kind == "b":
        return [lambda texts: texts.cast(pa.bool_())]
    if dtype.kind == "f":
        # Arrow cannot cast text to half floats, and going through single floats would round some twice.
        return [lambda texts: _floats(texts, pa.float32() if dtype.itemsize == 4 else pa.float64())]
    readers: list[_Reader] = [
        lambda texts: texts.cast(pa.from_numpy_dtype(dtype)),
        # pandas writes whole numbers in a column with nulls as 3.0.
        _whole_floats,
    ]
    if dtype == np.int32:
        readers.append(lambda texts: texts.cast(pa.date32()).view(pa.int32()))
    if dtype == np.int64:
        readers.append(lambda texts: texts.cast(pa.timestamp("us")).view(pa.int64()))
    return readers


def _whole_floats(texts: pa.Array) -> pa.Array:
    values = _floats(texts, pa.float64())
    if pc.any(pc.greater_equal(pc.abs(values), EXACT_BELOW)).as_py():
        raise pa.ArrowInvalid("a whole number has more digits than a double holds")
    return values


def _floats(texts: pa.Array, target: pa.DataType) -> pa.Array:
    values = texts.cast(target)
    infinite = pc.is_inf(values)
    if pc.any(infinite).as_py():
        said = pc.match_substring_regex(texts.filter(infinite), "^[+-]?inf(inity)?$", ignore_case=True)
        if not pc.all(said).as_py():
            raise pa.ArrowInvalid(f"a number is beyond the range of {target}")
    large = texts.filter(pc.greater_equal(pc.abs(values), EXACT_BELOW))
    for text in large.filter(pc.match_substring_regex(large, "^[+-]?[0-9]+$")).to_pylist():
        if int(float(text)) != int(
            Decimal(text)
        ):  # int() itself refuses thousands of digits, even if they are leading zeros
            raise pa.ArrowInvalid("a whole number has more digits than a double holds")
    return values


# --- Dates and times ---

ColumnTypes = Mapping[str, pa.DataType]

# The prefix of the model parameters that hold the types of date and time inputs.
PARAMETER = "column_type."
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:, tz=(.+))?\]")
_OTHERS = {str(one): one for one in (pa.date32(), pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"))}


def column_types(config: model_config_pb2.ModelConfig) -> ColumnTypes:
    """Return the types of the inputs that are dates or times, by name."""
    types = {
        name.removeprefix(PARAMETER): _type(value.string_value)
        for name, value in config.parameters.items()
        if name.startswith(PARAMETER)
    }
    return {name: kind for name, kind in types.items() if kind is not None}


def as_type(values: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Convert texts, dates and times to `kind`; other values stay, including numbers, which are in its unit already.

    Texts of numbers are refused, as an import refuses them. Raises `pa.ArrowInvalid` if a value does not fit, would
    lose digits, its day, its time of day or its zone, or would gain a zone.
    """
    if kinds.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if kinds.is_string(values.type) or kinds.is_large_string(values.type) or kinds.is_string_view(values.type):
        texts = values.cast(pa.string())
        return _times_of_day(texts, kind) if kinds.is_time(kind) else texts.cast(kind)
    if not kinds.is_temporal(values.type):
        return values
    if values.null_count == len(values):
        return pa.chunked_array([pa.nulls(len(values), kind)])
    if _has_zone(values.type) != _has_zone(kind):
        raise pa.ArrowInvalid(f"one of {values.type} and {kind} has a zone")
    try:
        found = values.cast(kind)
        if found.cast(values.type).equals(values):
            return found
    except pa.ArrowNotImplementedError:  # for example a time of day for a date input
        pass
    raise pa.ArrowInvalid(f"a value of {values.type} is no {kind}")


def _has_zone(kind: pa.DataType) -> bool:
    return bool(kinds.is_timestamp(kind) and kind.tz)


def _times_of_day(texts: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Parse times of day. Arrow has no cast from text to them."""
    on_a_day = pc.binary_join_element_wise(pa.scalar("1970-01-01T"), texts, pa.scalar(""))
    return on_a_day.cast(pa.timestamp("ns")).cast(kind)


def _type(text: str) -> pa.DataType | None:
    found = _TIMESTAMP.fullmatch(text)
    return pa.timestamp(found[1], found[2]) if found else _OTHERS.get(text)


# --- Image files ---

# Pillow's mode by the shape of a pixel's channels; () has none.
_MODES: dict[tuple[int, ...], str] = {(): "L", (1,): "L", (3,): "RGB", (4,): "RGBA", (-1,): "RGB"}


def takes_pixels(tensor: Tensor) -> bool:
    """Return whether its rows are uint8 of shape (H, W) or (H, W, channels)."""
    return tensor.datatype == "UINT8" and len(tensor.shape) in (3, 4) and tuple(tensor.shape[3:]) in _MODES


def pixels_of(image: Path | BinaryIO, shape: Sequence[int], name: str) -> npt.NDArray[np.uint8]:
    """Read an image as uint8 of `shape`, that of one row; other sizes are resized.

    Raises `BadInput`, which calls the image `name`.
    """
    from PIL import Image

    height, width, *channels = shape
    try:
        with Image.open(image) as opened:
            converted = opened.convert(_MODES[tuple(channels)])
            if height > 0 and width > 0 and converted.size != (width, height):
                converted = converted.resize((width, height), Image.Resampling.BILINEAR)
    # The decoders raise almost anything for broken bytes: struct.error, TypeError, zlib.error, …
    except Exception as error:
        raise BadInput(f"{name} is no image that can be read: {error}", remedy="use a PNG or a JPEG") from None
    return _array(converted, one_channel=channels == [1])


def is_picture(path: Path) -> bool:
    """Detect an image by its first bytes. Raises `OSError` for an unreadable file."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path):
            return True
    except UnidentifiedImageError:
        return False
    except OSError:
        raise
    except Exception:
        return True  # reading it reports the problem


def _array(image: Image.Image, *, one_channel: bool) -> npt.NDArray[np.uint8]:
    pixels = np.asarray(image, dtype=np.uint8)
    return pixels[..., None] if one_channel else pixels
