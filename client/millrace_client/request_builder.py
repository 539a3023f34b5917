"""Builds requests from files, or from a dataset version, and keeps the names of their rows.

CSV and Parquet files are read as Arrow tables of a bounded number of rows. A request has as many rows as a server
accepts.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pyarrow.types as kinds

from millrace_client.data import DataClient
from millrace_client.rows import (
    NULL_VALUES,
    Array,
    BadInput,
    ColumnTypes,
    Place,
    Tensor,
    dtype_of,
    inputs_of_table,
    is_binary,
    is_picture,
    pixels_of,
    takes_pixels,
)
from shared.names import MAX_MESSAGE_BYTES

# --- Asking ---

# Image formats that a server decodes.
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
LABEL = "label"
SHOWN_COLUMNS = 3


@dataclass(frozen=True)
class Row:
    """The origin of a row.

    `number` counts the rows of a file from 1; None for a file of a single row. `shown` are the texts of its first
    columns, `truth` is its label if known.
    """

    source: str
    number: int | None = None
    shown: Mapping[str, str] = field(default_factory=dict)
    truth: int | None = None

    def __str__(self) -> str:
        return self.source if self.number is None else f"{self.source}, row {self.number}"


@dataclass(frozen=True)
class Request:
    inputs: Mapping[str, Array]
    rows: Sequence[Row]

    def part(self, begin: int, end: int) -> Request:
        return Request({name: values[begin:end] for name, values in self.inputs.items()}, self.rows[begin:end])


@dataclass(frozen=True)
class RequestBuilder:
    """Builds `requests` of at most `rows` rows each."""

    rows: int
    requests: Iterator[Request]


def requests_of_files(files: Sequence[Path], inputs: Sequence[Tensor], types: ColumnTypes, rows: int) -> RequestBuilder:
    """Build requests of each table row and each image, in the order of the files.

    A table has a column for each input, or several tables with the same number of rows have them together. `types` are
    those of the model's times. Raises `BadInput`, as `requests` do.
    """
    for path in files:
        _check_kind(path)
    groups = _groups([open_table(path) for path in files if is_table(path)], inputs)
    of_first = {group[0].path: group for group in groups}
    alone = any(not is_table(path) for path in files) or any(
        _has_images(table.schema, inputs) for group in groups for table in group
    )
    together = 1 if alone else rows

    def requests() -> Iterator[Request]:
        for path in files:
            if not is_table(path):
                yield Request(_picture(path, inputs), [Row(str(path))])
            elif path in of_first:
                yield from _rows_of(of_first[path], inputs, types, together)

    return RequestBuilder(together, requests())


def requests_of_version(
    data: DataClient, version: str, split: str, limit: int, inputs: Sequence[Tensor], types: ColumnTypes, rows: int
) -> RequestBuilder:
    """Build requests from a split's rows, with their labels if it has such a column."""
    source = f"split {split!r} of {version}"
    batches = data.read_batches(version, split=split, limit=limit)
    first = next(batches, None)
    if first is None:
        raise BadInput(f"{source} has no row")
    names = [tensor.name for tensor in inputs]
    missing = [name for name in names if name not in first.schema.names]
    if missing:
        raise _missing(source, missing, first.schema, inputs)
    labelled = _has_labels(first.schema, inputs)
    shown = _shown_columns(first.schema, leave_out={LABEL} if labelled else set())
    together = 1 if _has_images(first.schema, inputs) else rows

    def requests() -> Iterator[Request]:
        start = 0
        for table in cut(chain([first], batches), together):
            truths = table.column(LABEL).to_pylist() if labelled else [None] * table.num_rows
            named = enumerate(zip(_texts(table, shown), truths, strict=True), start)
            yield Request(
                inputs_of_table(inputs, types, table, Place(source, start), names),
                [Row(f"{split} {number}", shown=text, truth=truth) for number, (text, truth) in named],
            )
            start += table.num_rows
        if not start:
            raise BadInput(f"{source} has no row")

    return RequestBuilder(together, requests())


def limited(requests: Iterable[Request], rows: int) -> Iterator[Request]:
    """Yield requests until they have `rows` rows; 0: all."""
    left = rows
    for request in requests:
        if rows and len(request.rows) >= left:
            yield request.part(0, left)
            return
        yield request
        left -= len(request.rows)


def _check_kind(path: Path) -> None:
    try:
        known = is_table(path) or path.suffix.lower() in PICTURE_SUFFIXES or is_picture(path)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from None
    if not known:
        taken = ", ".join((*PICTURE_SUFFIXES, *CSV_SUFFIXES, *PARQUET_SUFFIXES))
        raise BadInput(f"{path} is no image, CSV or Parquet", remedy=f"name a file that ends in one of {taken}")


def _picture(path: Path, inputs: Sequence[Tensor]) -> Mapping[str, Array]:
    tensor, *others = inputs
    name, shape = tensor.name, tuple(tensor.shape[1:])
    if not others and takes_pixels(tensor):
        return {name: pixels_of(path, shape, str(path))[None]}
    if not others and tensor.datatype == "BYTES" and all(size == 1 for size in shape):
        try:
            return {name: np.array([path.read_bytes()], object).reshape(1, *shape)}
        except OSError as error:
            raise BadInput(f"{path} cannot be read: {error.strerror or error}") from None
    taken = ", ".join(f"{one.name} {one.datatype} {list(one.shape)}" for one in inputs)
    raise BadInput(
        f"{path} is an image, and the model takes {taken}",
        remedy="give a CSV or a Parquet file with a column for each of these",
    )


def _groups(tables: Sequence[TableFile], inputs: Sequence[Tensor]) -> list[Sequence[TableFile]]:
    """Return each table separately, or all together if every input is in one of them and none has all."""
    names = [tensor.name for tensor in inputs]
    for table in tables:
        twice = [name for name in names if table.schema.names.count(name) > 1]
        if twice:
            raise BadInput(f"{table.path} has several columns {twice[0]!r}", remedy="rename all but one of them")
    owners = [[table for table in tables if table.has(name)] for name in names]
    lacking = [table for table in tables if not all(table.has(name) for name in names)]
    side_by_side = all(len(found) == 1 for found in owners) and all(table in chain(*owners) for table in tables)
    if len(tables) > 1 and len(lacking) == len(tables) and side_by_side:
        return [tables]
    for table in lacking:
        missing = [name for name in names if not table.has(name)]
        raise _missing(str(table.path), missing, table.schema, inputs)
    return [[table] for table in tables]


def _rows_of(
    group: Sequence[TableFile], inputs: Sequence[Tensor], types: ColumnTypes, together: int
) -> Iterator[Request]:
    """Yield the rows of one table, or of several side by side."""
    first, names = group[0], [tensor.name for tensor in inputs]
    shown = _shown_columns(first.schema)
    given = [[tensor for tensor in inputs if table.has(tensor.name)] for table in group]
    columns = [dict.fromkeys(tensor.name for tensor in tensors) for tensors in given]
    columns[0] |= dict.fromkeys(shown)
    start = 1
    pieces = [cut(table.read([*column]), together) for table, column in zip(group, columns, strict=True)]
    for parts in zip_longest(*pieces):
        if len({part.num_rows if part is not None else 0 for part in parts}) > 1:
            files = ", ".join(str(table.path) for table in group)
            raise BadInput(f"{files} have different numbers of rows", remedy="give files whose rows belong together")
        sent: dict[str, Array] = {}
        for table, tensors, part in zip(group, given, parts, strict=True):
            sent |= inputs_of_table(tensors, types, part, Place(str(table.path), start), names)
        texts = enumerate(_texts(parts[0], shown))
        yield Request(sent, [Row(str(first.path), start + index, shown=text) for index, text in texts])
        start += parts[0].num_rows
    if start == 1:
        raise BadInput(f"{first.path} has no row")


def _has_images(schema: pa.Schema, inputs: Sequence[Tensor]) -> bool:
    """Return whether encoded images may be sent, whose total pixels per request a server limits."""
    sent = [schema.field(tensor.name).type for tensor in inputs if tensor.name in schema.names]
    return any(is_binary(kind.value_type if kinds.is_dictionary(kind) else kind) for kind in sent)


def _has_labels(schema: pa.Schema, inputs: Sequence[Tensor]) -> bool:
    if LABEL in [tensor.name for tensor in inputs] or schema.names.count(LABEL) != 1:
        return False
    return bool(kinds.is_integer(schema.field(LABEL).type))


def _shown_columns(schema: pa.Schema, leave_out: Iterable[str] = ()) -> list[str]:
    """Return the first columns that are readable as text."""
    names = [one.name for one in schema if one.name not in leave_out and not one.name.startswith("_")]
    readable = [name for name in names if schema.names.count(name) == 1 and _is_readable(schema.field(name).type)]
    return readable[:SHOWN_COLUMNS]


def _is_readable(kind: pa.DataType) -> bool:
    if kinds.is_dictionary(kind):
        return _is_readable(kind.value_type)
    if is_binary(kind) or kinds.is_fixed_size_binary(kind) or isinstance(kind, pa.BaseExtensionType):
        return False
    if kinds.is_timestamp(kind) and kind.tz:  # a zone that this machine may not know
        return False
    try:
        pa.array([], kind).cast(pa.string())
    except pa.ArrowNotImplementedError:
        return False
    return True


def _texts(table: pa.Table, columns: Sequence[str]) -> list[dict[str, str]]:
    """Return each row's texts, without nulls."""
    texts = {name: table.column(name).cast(pa.string()).to_pylist() for name in columns}
    return [
        {name: column[index] for name, column in texts.items() if column[index] is not None}
        for index in range(table.num_rows)
    ]


def _missing(source: str, missing: Sequence[str], schema: pa.Schema, inputs: Sequence[Tensor]) -> BadInput:
    there, names = ", ".join(schema.names[:20]), ", ".join(tensor.name for tensor in inputs)
    return BadInput(
        f"{source} has no column {', '.join(missing)}; it has {there}, and the model's inputs are {names}",
        remedy="name its columns as the model's inputs are named; further ones are left out",
    )


# --- CSV and Parquet files ---

CSV_SUFFIXES, PARQUET_SUFFIXES = (".csv", ".csv.gz"), (".parquet", ".pq")
# A CSV record spans at most two blocks.
CSV_BLOCK_BYTES = 16 * 1024 * 1024
# Arrow reads INT96 timestamps as nanoseconds, which overflow before 1677 and after 2262.
INT96_UNIT = "us"
# The batch size for Parquet files, which bounds the memory for large photographs.
BATCH_ROWS = 256

REMEDIES = {"CSV": "give a CSV in UTF-8 whose first line names the columns", "Parquet": "write the file anew"}
# Arrow counts the header line, too.
_ROW = re.compile(r"CSV parse error: Row #(\d+)")


@dataclass(frozen=True)
class TableFile:
    """A table file. `schema` has all of its columns; `read` yields the rows of the given columns, at least one."""

    path: Path
    schema: pa.Schema
    read: Callable[[Sequence[str]], Iterator[pa.RecordBatch]]

    def has(self, column: str) -> bool:
        return column in self.schema.names


def is_table(path: Path) -> bool:
    return path.name.lower().endswith((*CSV_SUFFIXES, *PARQUET_SUFFIXES))


def open_table(path: Path) -> TableFile:
    """Open a CSV or Parquet file. A CSV's columns are all texts, named by its first line.

    Raises `BadInput` for an invalid file, as `read` does.
    """
    if path.name.lower().endswith(PARQUET_SUFFIXES):
        with _blaming(path, "Parquet"), pq.ParquetFile(path, coerce_int96_timestamp_unit=INT96_UNIT) as file:
            return TableFile(path, file.schema_arrow, lambda columns: _parquet_rows(path, columns))
    with _blaming(path, "CSV"):
        _check_quotes(path)
    with _blaming(path, "CSV"), _csv_reader(path, pc.ConvertOptions()) as reader:
        schema = pa.schema([(name, pa.string()) for name in reader.schema.names])
    return TableFile(path, schema, lambda columns: _csv_rows(path, columns))


def cut(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """Yield the same rows, `rows` at a time; the last table may have fewer."""
    waiting: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        start = 0
        while start < batch.num_rows:
            piece = batch.slice(start, rows - count)
            waiting.append(piece)
            start, count = start + piece.num_rows, count + piece.num_rows
            if count == rows:
                yield pa.Table.from_batches(waiting)
                waiting, count = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def _parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    with _blaming(path, "Parquet"), pq.ParquetFile(path, coerce_int96_timestamp_unit=INT96_UNIT) as file:
        yield from file.iter_batches(BATCH_ROWS, columns=list(columns))


def _csv_rows(path: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    options = pc.ConvertOptions(
        include_columns=list(columns),
        column_types=dict.fromkeys(columns, pa.string()),
        null_values=["", *NULL_VALUES],
        strings_can_be_null=True,
    )
    with _blaming(path, "CSV"), _csv_reader(path, options) as reader:
        yield from reader


def _check_quotes(path: Path) -> None:
    """Raise `BadInput` for a quote that is not closed before a delimiter or a line's end.

    Arrow would silently join the lines up to the next quote, or drop them.
    """
    csv.field_size_limit(max(csv.field_size_limit(), 2 * CSV_BLOCK_BYTES))
    with pa.input_stream(str(path), _compression(path)) as file:
        lines = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.reader(lines, strict=True)
        last_line = 0
        try:
            for _ in reader:
                last_line = reader.line_num
        except csv.Error as error:
            raise BadInput(
                f"{path} is no CSV that can be read: the quotes of line {last_line + 1} are malformed: {error}",
                remedy="close the quote, or double it",
            ) from None


def _compression(path: Path) -> str | None:
    """Return the compression. Arrow recognises only a lower-case suffix."""
    return "gzip" if path.name.lower().endswith(".gz") else None


@contextmanager
def _csv_reader(path: Path, options: pc.ConvertOptions) -> Iterator[pc.CSVStreamingReader]:
    # With threads, Arrow does not report which row is malformed.
    reading = pc.ReadOptions(use_threads=False, block_size=CSV_BLOCK_BYTES)
    with (
        pa.input_stream(str(path), _compression(path)) as file,
        pc.open_csv(file, reading, pc.ParseOptions(newlines_in_values=True), options) as reader,
    ):
        yield reader


@contextmanager
def _blaming(path: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        why = _ROW.sub(lambda found: f"row {int(found[1]) - 1}", str(error).partition("\n")[0])
        raise BadInput(f"{path} is no {kind} that can be read: {why}", remedy=REMEDIES[kind]) from None


# --- Rows in one request ---

REQUEST_BYTES = 8 * 1024 * 1024
# Bytes of a message besides its rows: the model's name, and names and shapes of inputs.
BESIDE_ROWS_BYTES = 64 * 1024
# The length prefix of each text or byte string.
LENGTH_BYTES = 4
MEBIBYTE = 1024 * 1024


def max_rows(inputs: Sequence[Tensor], wanted: int) -> int:
    """Return at most `wanted` rows whose numbers fit one request."""
    if any(size < 0 for tensor in inputs for size in tensor.shape[1:]):
        return 1
    numbers = [tensor for tensor in inputs if tensor.datatype != "BYTES"]
    row_bytes = sum(math.prod(tensor.shape[1:]) * dtype_of(tensor).itemsize for tensor in numbers)
    return max(1, min(wanted, REQUEST_BYTES // max(row_bytes, 1)))


def cut_by_bytes(requests: Iterable[Request]) -> Iterator[Request]:
    """Cut requests to at most `REQUEST_BYTES`, or to one row, because the length of texts is unknown beforehand.

    Raises `BadInput` for a row that fits no request.
    """
    for request in requests:
        begin, taken = 0, 0
        for row, size in enumerate(_row_bytes(request)):
            if size > MAX_MESSAGE_BYTES - BESIDE_ROWS_BYTES:
                limit = f"a server takes {MAX_MESSAGE_BYTES // MEBIBYTE} MiB in one request, names and shapes too"
                raise BadInput(
                    f"{request.rows[row]} takes {size // MEBIBYTE} MiB, and {limit}", remedy="make it smaller"
                )
            if row > begin and taken + size > REQUEST_BYTES:
                yield request.part(begin, row)
                begin, taken = row, 0
            taken += size
        yield request.part(begin, len(request.rows))


def _row_bytes(request: Request) -> list[int]:
    """Return each row's bytes in the message."""
    sizes: npt.NDArray[np.int64] = np.zeros(len(request.rows), np.int64)
    for values in request.inputs.values():
        sizes += _lengths(values) if values.dtype == object else values.nbytes // max(len(values), 1)
    found: list[int] = sizes.tolist()
    return found


def _lengths(values: Array) -> npt.NDArray[np.int64]:
    """Return the wire size of each row's texts and bytes."""
    flat = [LENGTH_BYTES + len(one.encode() if isinstance(one, str) else one) for one in values.reshape(-1)]
    lengths: npt.NDArray[np.int64] = np.array(flat, np.int64).reshape(len(values), -1).sum(axis=1)
    return lengths
