"""Converts a file's columns to a version's logical ones.

Lists become tensors, foreign types become known ones, and `column_types` overrides the file's types. Rows that do not
fit go to the sink.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
from numpy.typing import NDArray

from data_service.domain.import_spec import TypeRefused, parse_type
from data_service.formats.casts import Cast, CastRefused, Fits, cast_between, cast_rows, misfit, rows_without_nulls
from data_service.formats.interface import BadRowSink, RowSource, excerpt_of, is_text
from data_service.storage.source_files import SourceFile
from shared.dataset_version.manifest import MAX_COLUMNS, is_tensor, logical_field, name_problem, scalar_remedy
from shared.errors import InvalidArgument, invalid_field
from shared.value_texts import zone_problem

# --- List tensors ---
# Converts columns of lists, nested or not, to tensors, if a shape gives the required length of each list.
#
# In the comments R = rows, and L0, L1, … = the required lengths of lists, level by level.


def is_list(arrow_type: pa.DataType) -> bool:
    return bool(kinds.is_list(arrow_type) or kinds.is_large_list(arrow_type) or kinds.is_fixed_size_list(arrow_type))


def fits_lists(lists: pa.DataType, tensor: pa.FixedShapeTensorType) -> bool:
    """Return whether rows of `lists` may be such tensors.

    They must be numbers, in lists with one level for each dimension of the tensor, or in lists of one level with all
    values, row-major.
    """
    levels, value_type = _unnested(lists)
    if levels not in (1, len(tensor.shape)) or not _is_number(value_type):
        return False
    try:
        cast_between(pa.fixed_shape_tensor(value_type, tensor.shape), tensor)
    except CastRefused:
        return False
    return True


def example_tensor(lists: pa.DataType) -> str | None:
    """Return the spelling of a tensor type for the values of `lists`, with some shape.

    None if no tensor has such values.
    """
    levels, value_type = _unnested(lists)
    if not levels or not _is_number(value_type):
        return None
    return str(pa.fixed_shape_tensor(value_type, [3] * levels)).removeprefix("extension<arrow.").removesuffix(">")


def tensors_of_lists(lists: pa.Array, fixed_shape_tensor_type: pa.FixedShapeTensorType) -> tuple[pa.Array, Fits]:
    """Convert lists to tensors.

    Rows do not fit if a list has another length, if a value is null, or if the tensor cannot hold a number. The values
    in their places are undefined.
    """
    levels, value_type = _unnested(lists.type)
    lengths = (
        fixed_shape_tensor_type.shape
        if levels == len(fixed_shape_tensor_type.shape)
        else [math.prod(fixed_shape_tensor_type.shape)]
    )
    values, fits = _values(lists, lengths)
    size = math.prod(fixed_shape_tensor_type.shape)
    if not fits.all():
        placed: NDArray[Any] = np.zeros((len(lists), size), value_type.to_pandas_dtype())
        placed[fits] = values.to_numpy().reshape(-1, size)
        values = pa.array(placed.reshape(-1), value_type)
    given = pa.fixed_shape_tensor(value_type, fixed_shape_tensor_type.shape)
    tensors = pa.ExtensionArray.from_storage(given, pa.FixedSizeListArray.from_arrays(values, size))
    cast = cast_between(given, fixed_shape_tensor_type)
    made, in_range = (tensors, None) if cast is None else cast_rows(tensors, cast)
    if in_range is not None:
        fits &= in_range
    return made, None if fits.all() else fits


def _values(lists: pa.Array, lengths: Sequence[int]) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Return the values of the rows that fit, concatenated, and which rows fit: (R,)."""
    fits = np.ones(len(lists), np.bool_)
    each = 1  # the entries of a row on this level
    for length in lengths:
        right = pc.equal(pc.list_value_length(lists), length).fill_null(False)
        lists, each = _of_fitting(lists, right, each, fits).flatten(), each * length
    return _of_fitting(lists, lists.is_valid(), each, fits), fits


def _of_fitting(entries: pa.Array, right: pa.Array, each: int, fits: NDArray[np.bool_]) -> pa.Array:
    """Return the entries of rows whose entries are all right.

    Other rows are removed from `fits`.
    """
    good = right.to_numpy(zero_copy_only=False).reshape(-1, each).all(axis=1)
    fits[fits] = good
    return entries if good.all() else entries.filter(pa.array(np.repeat(good, each)))


def _unnested(arrow_type: pa.DataType) -> tuple[int, pa.DataType]:
    """Return the number of list levels, and the type of the innermost values."""
    levels = 0
    while is_list(arrow_type):
        levels, arrow_type = levels + 1, arrow_type.value_type
    return levels, arrow_type


def _is_number(value_type: pa.DataType) -> bool:
    return bool(kinds.is_integer(value_type) or kinds.is_floating(value_type))


# --- Foreign types ---
# Types of typed files that no version has, and which of them `column_types` can convert.
#
# An all-null column has type `null`, as pandas writes it. It has a cast, as have days in whole milliseconds, durations,
# and decimals of other widths. Lists of numbers become tensors of a given shape. Other nested types have no cast.


def plain_type(data_type: pa.DataType) -> pa.DataType:
    """Return the type of the values themselves, inside of a dictionary or an extension."""
    if isinstance(data_type, pa.BaseExtensionType):
        return plain_type(data_type.storage_type)
    return plain_type(data_type.value_type) if kinds.is_dictionary(data_type) else data_type


def is_foreign(plain: pa.DataType) -> bool:
    """Return whether a version has no column for values of this `plain_type`, not even under another name."""
    simply_others = (
        kinds.is_large_string,
        kinds.is_large_binary,
        kinds.is_string_view,
        kinds.is_binary_view,
        kinds.is_nested,
    )
    return not any(check(plain) for check in simply_others) and scalar_remedy(plain) is not None


def has_cast(data_type: pa.DataType) -> bool:
    """Return whether a column of this type needs `column_types`.

    That is the case if its values are foreign, or if an extension gives them another meaning.
    """
    extended = isinstance(data_type, pa.BaseExtensionType) and not is_tensor(data_type)
    return extended or is_foreign(plain_type(data_type))


def kept_type(plain: pa.DataType) -> pa.DataType:
    """Return the column type that a version uses for such values; foreign types are returned as they are."""
    try:
        return logical_field(pa.field("", plain)).type
    except InvalidArgument:
        return plain


def is_castable(plain: pa.DataType, data_type: pa.DataType) -> bool:
    """Return whether `column_types` may convert such values to `data_type`; those of lists are not."""
    if kinds.is_nested(plain):
        return False
    try:
        cast_between(kept_type(plain), data_type)
    except CastRefused:
        return False
    return True


def lists_within(data_type: pa.DataType) -> pa.DataType | None:
    """Return the lists that a column holds, itself or as an extension; else None."""
    storage = (
        data_type.storage_type
        if isinstance(data_type, pa.BaseExtensionType) and not is_tensor(data_type)
        else data_type
    )
    return storage if is_list(storage) else None


def suggested_type(plain: pa.DataType) -> pa.DataType | None:
    """Return a type of a version that can hold the values; None if there is none."""
    candidates = [pa.timestamp("ms"), pa.int64(), pa.string()]
    if kinds.is_null(plain):
        candidates = [pa.string()]
    elif kinds.is_timestamp(plain):
        candidates = [pa.timestamp(plain.unit, "UTC")]
    elif kinds.is_decimal(plain):
        candidates = [pa.decimal128(38, plain.scale)] if 0 <= plain.scale <= 38 else [pa.string()]
    elif scalar_remedy(plain) is None:
        candidates = [plain]
    return next((candidate for candidate in candidates if is_castable(plain, candidate)), None)


# --- Typed columns ---
# Converts the columns of a typed file (Parquet, Arrow) to a version's logical ones; rows that do not fit go to the
# sink.

MAX_ROW_BYTES = 64 * 1024 * 1024


def logical_schema_of(file: SourceFile, schema: pa.Schema, types: Mapping[str, pa.DataType]) -> pa.Schema:
    """Return the columns as a version keeps them.

    Columns with an unsupported type get that of `types`. Raises `InvalidArgument` naming the file, and the column at
    fault.
    """
    if len(schema) > MAX_COLUMNS:
        raise file.corrupt(f"it has {len(schema)} columns; at most {MAX_COLUMNS} are read")
    check_names(file, schema.names)
    for field in schema:
        if kinds.is_fixed_size_binary(field.type) and field.type.byte_width < 1:
            raise file.corrupt(f"column {field.name!r} has values of no bytes")
    return pa.schema([_logical_field(file, field, types.get(field.name)) for field in schema])


def _logical_field(file: SourceFile, field: pa.Field, data_type: pa.DataType | None) -> pa.Field:
    try:
        return logical_field(field)
    except InvalidArgument as error:
        plain, lists = plain_type(field.type), lists_within(field.type)
        if data_type is not None and is_tensor(data_type) and lists is not None and fits_lists(lists, data_type):
            return pa.field(field.name, data_type, nullable=False)
        if data_type is not None and (problem := zone_problem(plain, data_type)):
            raise file.corrupt(f"column {field.name!r}: {problem}") from None
        if data_type is not None and is_castable(plain, data_type):
            return pa.field(field.name, data_type, field.nullable)
        failed = f"; it cannot be cast to {data_type}" if data_type is not None else ""
        raise file.corrupt(f"{error.message}{_remedy(plain, lists)}{failed}") from None


def _remedy(plain: pa.DataType, lists: pa.DataType | None) -> str:
    """Return what the request or the file can change."""
    if lists is not None and (tensor := example_tensor(lists)):
        return f", or give it a type by column_types, such as {tensor} where all rows have that shape"
    if kinds.is_struct(plain):
        return "; write each of its fields as a column of its own"
    suggested = suggested_type(plain)
    return f", or give it another type by column_types, such as {suggested}" if suggested is not None else ""


def check_names(file: SourceFile, names: Sequence[str]) -> None:
    """Raise `InvalidArgument` for names that no version can have."""
    if not names or len(set(names)) < len(names) or "" in names:
        raise file.corrupt("it needs columns, each with a name of its own")
    for name in names:
        if problem := name_problem(name):
            raise file.corrupt(problem)


@dataclass(frozen=True)
class _Misfit:
    fits: NDArray[np.bool_]
    reason: str


class TypedColumns:
    """Converts batches of one file to tables of `schema`, its logical columns.

    The first batch begins at row `first_row` of the file, counted from 0.
    """

    def __init__(self, file: SourceFile, schema: pa.Schema, first_row: int = 0) -> None:
        self._file = file
        self._schema = schema
        self._row = first_row

    def table(self, batch: pa.RecordBatch, bad: BadRowSink) -> pa.Table:
        """Return the good rows of the next batch.

        Rows are counted, to name the places of bad ones.
        """
        columns, misfits = [], []
        for field, given in zip(self._schema, batch.columns, strict=True):
            column, fits = _logical(given, field.type)
            if len(column) != batch.num_rows:
                raise self._file.corrupt(f"column {field.name!r} has {len(column)} values for {batch.num_rows} rows")
            columns.append(column)
            if fits is not None:
                misfits.append(_Misfit(fits, _reason(field, cast=_is_cast(given.type, field.type))))
            if not field.nullable and column.null_count:
                # Writers do not check a schema's nullability, and neither does pyarrow.
                reason = f"column {field.name!r} is null, and its schema says that it never is; declare it nullable"
                misfits.append(_Misfit(column.is_valid().to_numpy(zero_copy_only=False), reason))
        table = pa.Table.from_arrays([_chunked(column) for column in columns], schema=self._schema)
        if misfits:
            table = table.filter(pa.array(self._reported(batch, misfits, bad)))
        self._row += batch.num_rows
        return table

    def _reported(self, batch: pa.RecordBatch, misfits: Sequence[_Misfit], bad: BadRowSink) -> NDArray[np.bool_]:
        good: NDArray[np.bool_] = np.logical_and.reduce([one.fits for one in misfits])
        for row in np.flatnonzero(~good).tolist():
            reason = next(one.reason for one in misfits if not one.fits[row])
            bad.add(self._file.uri, _place_of(self._row + row), reason, shown_row(batch, row))
        return good


_PLACE = re.compile("row ([0-9]+)")


def _place_of(row: int) -> str:
    """Return how a bad row's place is named; rows are counted from 0, and named from 1."""
    return f"row {row + 1}"


def _row_at(place: str) -> int | None:
    """Return the row of such a place; None for others."""
    found = _PLACE.fullmatch(place)
    return None if found is None else int(found[1]) - 1


def shown_row(rows: pa.RecordBatch | pa.Table, row: int) -> str:
    """Return one row as text: its first columns, without values that text does not show well."""
    shown = []
    for name, column in zip(rows.schema.names[:20], rows.columns[:20], strict=True):
        kind = column.type.value_type if kinds.is_dictionary(column.type) else column.type
        plain = not is_text(kind) or kinds.is_string(kind) or kinds.is_large_string(kind)
        if isinstance(kind, pa.BaseExtensionType) or kinds.is_nested(kind) or not plain:
            shown.append(f"{name}=…")
            continue
        try:
            shown.append(f"{name}={column[row].as_py()!r}")
        except (UnicodeDecodeError, ValueError, OverflowError):
            shown.append(f"{name}=?")
    return excerpt_of(", ".join(shown))


def _reason(field: pa.Field, *, cast: bool) -> str:
    if is_tensor(field.type) and not cast:
        return f"column {field.name!r} has nulls, and a tensor has no place for them"
    if cast:
        return misfit(f"column {field.name!r}", field.type)
    if kinds.is_timestamp(field.type):
        return f"column {field.name!r} is beyond the times that milliseconds can tell"
    return f"column {field.name!r} is not UTF-8"


def _is_cast(data_type: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether the request gave the column its type."""
    return has_cast(data_type) if not is_tensor(wanted) else _is_given_shape(data_type)


def _is_given_shape(data_type: pa.DataType) -> bool:
    """Return whether only the request gives the lists of a tensor column their length.

    Lists of fixed size, which `logical_field` accepts, have their own. The lists of an extension may have any size.
    """
    if lists_within(data_type) is None:
        return False
    return not (kinds.is_fixed_size_list(data_type) and data_type.list_size > 0 and not is_list(data_type.value_type))


def _logical(given: pa.Array, data_type: pa.DataType) -> tuple[pa.Array, Fits]:
    if isinstance(given, pa.ChunkedArray):
        given = given.combine_chunks()
    storage = given.storage if isinstance(given, pa.ExtensionArray) else given
    if kinds.is_dictionary(storage.type):
        storage = storage.dictionary_decode()
    if is_tensor(data_type) and _is_given_shape(given.type):
        return tensors_of_lists(storage, data_type)
    if not is_tensor(data_type) and has_cast(given.type):
        return _as_given(storage, data_type)
    return _as_kept(storage, data_type)


def _as_given(storage: pa.Array, data_type: pa.DataType) -> tuple[pa.Array, Fits]:
    """Apply the cast that the column would have without its extension."""
    kept = kept_type(storage.type)
    values, are_kept = (storage, None) if is_foreign(storage.type) else _as_kept(storage, kept)
    cast = cast_between(kept, data_type)
    if cast is None:
        return values, are_kept
    made, fits = cast_rows(values, cast)
    if are_kept is None:
        return made, fits
    return made, are_kept if fits is None else are_kept & fits


def _as_kept(storage: pa.Array, data_type: pa.DataType) -> tuple[pa.Array, Fits]:
    """Convert values to the type that a version uses for them."""
    if is_tensor(data_type):
        return _tensors(storage, data_type)
    if kinds.is_string(data_type):
        texts, fits = cast_rows(storage.cast(_bytes_of(storage.type)), lambda values: values.cast(pa.string()))
        return texts, fits
    if kinds.is_timestamp(data_type) and data_type.unit == "s":
        return _kept_as_milliseconds(storage.cast(data_type))
    return (storage if storage.type == data_type else storage.cast(data_type)), None


def _kept_as_milliseconds(seconds: pa.Array) -> tuple[pa.Array, Fits]:
    """Refuse seconds beyond the range of milliseconds.

    Parquet has no whole seconds, so a version's files store milliseconds.
    """
    _, fits = cast_rows(seconds, lambda values: values.cast(pa.timestamp("ms", seconds.type.tz)))
    return (seconds if fits is None else pc.if_else(pa.array(fits), seconds, pa.scalar(None, seconds.type))), fits


def _bytes_of(text: pa.DataType) -> pa.DataType:
    """Return the bytes type to which strings are cast first, since files may wrongly claim UTF-8."""
    return pa.large_binary() if kinds.is_large_string(text) else pa.binary()


def _tensors(lists: pa.Array, fixed_shape_tensor_type: pa.FixedShapeTensorType) -> tuple[pa.Array, Fits]:
    values, fits = rows_without_nulls(lists)
    plain = pa.FixedSizeListArray.from_arrays(values, fixed_shape_tensor_type.storage_type.list_size)
    return pa.ExtensionArray.from_storage(fixed_shape_tensor_type, plain), fits


def _chunked(column: pa.Array) -> pa.ChunkedArray:
    return column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])


# --- Overrides ---
# `column_types`: the types of columns that override those of a source.


class Overrides:
    """The override types by column name.

    Remembers which columns occurred, because a column that no source has is a mistake.
    """

    def __init__(self, column_types: Mapping[str, str]) -> None:
        self._places = {name: index for index, name in enumerate(column_types)}
        self._types = {name: self._parsed(name, text) for name, text in column_types.items()}
        self._met: set[str] = set()

    @property
    def types(self) -> Mapping[str, pa.DataType]:
        return self._types

    def types_among(self, names: list[str]) -> dict[str, pa.DataType]:
        """Return the override types of the columns `names`."""
        found = {name: self._types[name] for name in names if name in self._types}
        self._met.update(found)
        return found

    def field(self, name: str) -> str:
        """Return the request's field that gives column `name` its type."""
        return f"column_types[{self._places[name]}]"

    def refuse_unknown(self) -> None:
        """Raise `InvalidArgument` for the first column that no source has."""
        for name in self._types:
            if name not in self._met:
                raise invalid_field(f"{self.field(name)}.column", name, "name a column that a source has")

    def applied_to(self, rows: RowSource, file: SourceFile) -> RowSource:
        """Return `rows` with their columns cast; values that do not fit make bad rows.

        Raises `InvalidArgument` naming `column_types[i]` if no value could fit.
        """
        casts = {}
        for name, wanted in self.types_among(rows.schema.names).items():
            try:
                cast = cast_between(rows.schema.field(name).type, wanted)
            except CastRefused as refused:
                remedy = f"column {name!r}: {refused}; use another"
                raise invalid_field(f"{self.field(name)}.arrow_type", str(wanted), remedy) from None
            if cast is not None:
                casts[name] = (cast, wanted)
        return _CastRows(rows, file, casts) if casts else rows

    def _parsed(self, name: str, text: str) -> pa.DataType:
        try:
            return parse_type(text)
        except TypeRefused as refused:
            raise invalid_field(f"{self.field(name)}.arrow_type", text, str(refused)) from None


class _CastRows:
    """Rows whose columns are cast. The first one is row `first_row` of the file, counted from 0.

    The place of a bad row is its number among all rows of the file; that of an image is its path.
    """

    def __init__(
        self,
        rows: RowSource,
        file: SourceFile,
        casts: Mapping[str, tuple[Cast, pa.DataType]],
        first_row: int = 0,
    ) -> None:
        self._rows, self._file, self._casts, self._first_row = rows, file, MappingProxyType(dict(casts)), first_row
        self.schema = pa.schema([self._field(field) for field in rows.schema])

    @property
    def class_names(self) -> list[str] | None:
        return self._rows.class_names

    @property
    def row_count(self) -> int | None:
        return self._rows.row_count

    @property
    def size_bytes(self) -> int:
        return self._rows.size_bytes

    def parts(self) -> Sequence[RowSource]:
        parts, found = self._rows.parts(), []
        first_row = self._first_row
        for rows in parts:
            part = copy(self)  # shares the columns and their casts with the other parts
            part._rows, part._first_row = rows, first_row
            found.append(part)
            if rows.row_count is None and self.class_names is None:
                return [self]  # it is not known which row the next part begins with
            first_row += rows.row_count or 0
        return found

    def tables(self, bad: BadRowSink) -> Iterator[pa.Table]:
        counter = _Counter(bad, self._first_row)
        for table in self._rows.tables(counter):
            yield self._cast(table, counter)

    def _cast(self, table: pa.Table, counter: _Counter) -> pa.Table:
        columns, good, reasons = [], np.ones(table.num_rows, np.bool_), {}
        for field, column in zip(self.schema, table.columns, strict=True):
            if field.name in self._casts:
                column, fits = _cast_column(column, *self._casts[field.name])
                for row in np.flatnonzero(good & ~fits).tolist() if fits is not None else ():
                    reasons[row] = misfit(f"column {field.name!r}", field.type)
                good = good if fits is None else good & fits
            columns.append(column)
        rows = counter.next_rows(table.num_rows)
        for row, reason in sorted(reasons.items()):
            place = _place_of(int(rows[row])) if self.class_names is None else f"image {table['path'][row]}"
            counter.add(self._file.uri, place, reason, shown_row(table, row))
        cast = pa.Table.from_arrays(columns, schema=self.schema)
        return cast.filter(pa.array(good)) if reasons else cast

    def _field(self, field: pa.Field) -> pa.Field:
        if field.name not in self._casts:
            return field
        wanted = self._casts[field.name][1]
        return pa.field(field.name, wanted, nullable=field.nullable and not is_tensor(wanted))


class _Counter:
    """Passes bad rows on, and finds the rows of the file that tables of good rows have."""

    def __init__(self, bad: BadRowSink, first_row: int) -> None:
        self._bad = bad
        self._next_row = first_row
        # The rows from `_next_row` on that the source left out, ascending.
        self._left_out: list[int] = []

    def add(self, source: str, place: str, reason: str, excerpt: str, rows: int = 1) -> None:
        row = _row_at(place)
        if row is not None and row >= self._next_row:
            self._left_out.append(row)
        self._bad.add(source, place, reason, excerpt, rows)

    def next_rows(self, count: int) -> NDArray[np.int64]:
        """Return the numbers of the next table's rows."""
        left_out = np.array(self._left_out, np.int64)
        ordinals = np.arange(count, dtype=np.int64)
        # The good row i comes after every left-out row that has at most i good rows before it.
        good_before = left_out - self._next_row - np.arange(len(left_out))
        rows: NDArray[np.int64] = self._next_row + ordinals + np.searchsorted(good_before, ordinals, side="right")
        if count:
            self._next_row = int(rows[-1]) + 1
            self._left_out = [row for row in self._left_out if row >= self._next_row]
        return rows


def _cast_column(column: pa.ChunkedArray, cast: Cast, data_type: pa.DataType) -> tuple[pa.ChunkedArray, Fits]:
    parts = [cast_rows(chunk, cast) for chunk in column.chunks]
    cast_column = pa.chunked_array([values for values, _ in parts], type=data_type)
    if all(fits is None for _, fits in parts):
        return cast_column, None
    return cast_column, np.concatenate(
        [np.ones(len(values), np.bool_) if fits is None else fits for values, fits in parts]
    )
