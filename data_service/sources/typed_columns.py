"""From the columns that a typed file (Parquet, Arrow) has to a version's logical ones; rows that do not fit go to the
sink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
from numpy.typing import NDArray

from data_service.domain.list_tensors import example_tensor, fits_lists, is_list, tensors_of_lists
from data_service.domain.row_casts import Fits, cast_between, cast_rows, misfit, rows_without_nulls
from data_service.sources.decoded_size import is_text
from data_service.sources.foreign_types import (
    has_cast,
    is_castable,
    is_foreign,
    kept_type,
    lists_within,
    plain_type,
    suggested_type,
)
from data_service.sources.interface import BadRowSink, excerpt_of
from data_service.sources.source_files import SourceFile
from shared.dataset_version.columns import MAX_COLUMNS, is_tensor, logical_field, name_problem
from shared.errors import InvalidArgument
from shared.value_texts import zone_problem

MAX_ROW_BYTES = 64 * 1024 * 1024


def logical_schema_of(file: SourceFile, given: pa.Schema, types: Mapping[str, pa.DataType]) -> pa.Schema:
    """The columns as a version keeps them; those whose own type it does not keep have that of `types`.

    Raises `InvalidArgument` naming the file, and the column at fault.
    """
    if len(given) > MAX_COLUMNS:
        raise file.corrupt(f"it has {len(given)} columns; at most {MAX_COLUMNS} are read")
    check_names(file, given.names)
    for field in given:
        if kinds.is_fixed_size_binary(field.type) and field.type.byte_width < 1:
            raise file.corrupt(f"column {field.name!r} has values of no bytes")
    return pa.schema([_logical_field(file, field, types.get(field.name)) for field in given])


def _logical_field(file: SourceFile, field: pa.Field, wanted: pa.DataType | None) -> pa.Field:
    try:
        return logical_field(field)
    except InvalidArgument as error:
        plain, lists = plain_type(field.type), lists_within(field.type)
        if wanted is not None and is_tensor(wanted) and lists is not None and fits_lists(lists, wanted):
            return pa.field(field.name, wanted, nullable=False)
        if wanted is not None and (problem := zone_problem(plain, wanted)):
            raise file.corrupt(f"column {field.name!r}: {problem}") from None
        if wanted is not None and is_castable(plain, wanted):
            return pa.field(field.name, wanted, field.nullable)
        failed = f"; it cannot be cast to {wanted}" if wanted is not None else ""
        raise file.corrupt(f"{error.message}{_remedy(plain, lists)}{failed}") from None


def _remedy(plain: pa.DataType, lists: pa.DataType | None) -> str:
    """What else the request can say, or the file have."""
    if lists is not None and (tensor := example_tensor(lists)):
        return f", or give it a type by column_types, such as {tensor} where all rows have that shape"
    if kinds.is_struct(plain):
        return "; write each of its fields as a column of its own"
    suggested = suggested_type(plain)
    return f", or give it another type by column_types, such as {suggested}" if suggested is not None else ""


def check_names(file: SourceFile, names: Sequence[str]) -> None:
    """Raises `InvalidArgument` for names that no version can have."""
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
    """Turns batches of one file into tables of `schema`, its logical columns."""

    def __init__(self, file: SourceFile, schema: pa.Schema) -> None:
        self._file = file
        self._schema = schema
        self._row = 0

    def table(self, batch: pa.RecordBatch, bad: BadRowSink) -> pa.Table:
        """The good rows of the next batch; rows are counted for the places of bad ones."""
        columns, misfits = [], []
        for field, given in zip(self._schema, batch.columns, strict=True):
            column, fits = _logical(given, field.type)
            if len(column) != batch.num_rows:
                raise self._file.corrupt(f"column {field.name!r} has {len(column)} values for {batch.num_rows} rows")
            columns.append(column)
            if fits is not None:
                misfits.append(_Misfit(fits, _reason(field, cast=_is_cast(given.type, field.type))))
            if not field.nullable and column.null_count:
                # Writers take a schema's word, and so did pyarrow of whoever made this one.
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
            bad.add(self._file.uri, f"row {self._row + row + 1}", reason, shown_row(batch, row))
        return good


def shown_row(rows: pa.RecordBatch | pa.Table, row: int) -> str:
    """One row as text: its first columns, without what no text shows well."""
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


def _is_cast(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether the request gave the column its type."""
    return has_cast(given) if not is_tensor(wanted) else _is_given_shape(given)


def _is_given_shape(given: pa.DataType) -> bool:
    """Of what becomes a tensor: whether only the request says how long its lists are, and not they themselves, as
    those do that `logical_field` takes. An extension's lists have any size, whatever the request says."""
    if lists_within(given) is None:
        return False
    return not (kinds.is_fixed_size_list(given) and given.list_size > 0 and not is_list(given.value_type))


def _logical(given: pa.Array, wanted: pa.DataType) -> tuple[pa.Array, Fits]:
    if isinstance(given, pa.ChunkedArray):
        given = given.combine_chunks()
    storage = given.storage if isinstance(given, pa.ExtensionArray) else given
    if kinds.is_dictionary(storage.type):
        storage = storage.dictionary_decode()
    if is_tensor(wanted) and _is_given_shape(given.type):
        return tensors_of_lists(storage, wanted)
    if not is_tensor(wanted) and has_cast(given.type):
        return _as_given(storage, wanted)
    return _as_kept(storage, wanted)


def _as_given(storage: pa.Array, wanted: pa.DataType) -> tuple[pa.Array, Fits]:
    """By the cast that the column would have, were its values all that it is."""
    kept = kept_type(storage.type)
    values, are_kept = (storage, None) if is_foreign(storage.type) else _as_kept(storage, kept)
    cast = cast_between(kept, wanted)
    if cast is None:
        return values, are_kept
    made, fits = cast_rows(values, cast)
    if are_kept is None:
        return made, fits
    return made, are_kept if fits is None else are_kept & fits


def _as_kept(storage: pa.Array, wanted: pa.DataType) -> tuple[pa.Array, Fits]:
    """By the type that such values have in a version."""
    if is_tensor(wanted):
        return _tensors(storage, wanted)
    if kinds.is_string(wanted):
        texts, fits = cast_rows(storage.cast(_bytes_of(storage.type)), lambda values: values.cast(pa.string()))
        return texts, fits
    if kinds.is_timestamp(wanted) and wanted.unit == "s":
        return _kept_as_milliseconds(storage.cast(wanted))
    return (storage if storage.type == wanted else storage.cast(wanted)), None


def _kept_as_milliseconds(seconds: pa.Array) -> tuple[pa.Array, Fits]:
    """Parquet has no whole seconds: a version's files hold milliseconds, which some seconds are beyond."""
    _, fits = cast_rows(seconds, lambda values: values.cast(pa.timestamp("ms", seconds.type.tz)))
    return (seconds if fits is None else pc.if_else(pa.array(fits), seconds, pa.scalar(None, seconds.type))), fits


def _bytes_of(text: pa.DataType) -> pa.DataType:
    """Strings are looked at as bytes first: files may claim that they are UTF-8."""
    return pa.large_binary() if kinds.is_large_string(text) else pa.binary()


def _tensors(lists: pa.Array, wanted: pa.FixedShapeTensorType) -> tuple[pa.Array, Fits]:
    values, fits = rows_without_nulls(lists)
    plain = pa.FixedSizeListArray.from_arrays(values, wanted.storage_type.list_size)
    return pa.ExtensionArray.from_storage(wanted, plain), fits


def _chunked(column: pa.Array) -> pa.ChunkedArray:
    return column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])
