"""Requests out of files, or out of a dataset version, each with what its rows are called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds

from millrace_client.data import DataClient
from millrace_client.rows.columns import Place, inputs_of_table, is_binary
from millrace_client.rows.pictures import is_picture, pixels_of, takes_pixels
from millrace_client.rows.tables import CSV_SUFFIXES, PARQUET_SUFFIXES, TableFile, cut, is_table, open_table
from millrace_client.rows.times import ColumnTypes
from millrace_client.rows.typed import Array, BadInput, Tensor

# Those that a server decodes.
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
LABEL = "label"
SHOWN_COLUMNS = 3


@dataclass(frozen=True)
class Row:
    """`number` counts the rows of a file from 1; None for what is one row by itself. `shown` are the texts of its first
    columns, `truth` is its label where that is known."""

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
class Asking:
    """`requests` of at most `rows` rows each."""

    rows: int
    requests: Iterator[Request]


def asking_of_files(files: Sequence[Path], inputs: Sequence[Tensor], types: ColumnTypes, rows: int) -> Asking:
    """Each row of a table, and each image, in the order of the files; at most `rows` in a request. A table has a column
    for each input, or several of equally many rows have them together. `types` are those of the model's times.

    Raises `BadInput`, as `requests` do.
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

    return Asking(together, requests())


def asking_of_version(
    data: DataClient, version: str, split: str, limit: int, inputs: Sequence[Tensor], types: ColumnTypes, rows: int
) -> Asking:
    """As `asking_of_files`, of the rows of a split, with their labels where it has such a column."""
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

    return Asking(together, requests())


def limited(requests: Iterable[Request], rows: int) -> Iterator[Request]:
    """As many requests as have `rows` rows; 0: all."""
    left = rows
    for one in requests:
        if rows and len(one.rows) >= left:
            yield one.part(0, left)
            return
        yield one
        left -= len(one.rows)


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
    """Each by itself, or all together where none has all inputs, and every input is in one of them."""
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
    """The rows of one table, or of several side by side."""
    first, names = group[0], [tensor.name for tensor in inputs]
    shown = _shown_columns(first.schema)
    given = [[tensor for tensor in inputs if table.has(tensor.name)] for table in group]
    columns = [dict.fromkeys(tensor.name for tensor in tensors) for tensors in given]
    columns[0] |= dict.fromkeys(shown)
    start = 1
    pieces = [cut(table.read([*wanted]), together) for table, wanted in zip(group, columns, strict=True)]
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
    """Whether what is sent may be encoded images, of which a server decodes so many pixels for one request."""
    sent = [schema.field(tensor.name).type for tensor in inputs if tensor.name in schema.names]
    return any(is_binary(kind.value_type if kinds.is_dictionary(kind) else kind) for kind in sent)


def _has_labels(schema: pa.Schema, inputs: Sequence[Tensor]) -> bool:
    if LABEL in [tensor.name for tensor in inputs] or schema.names.count(LABEL) != 1:
        return False
    return bool(kinds.is_integer(schema.field(LABEL).type))


def _shown_columns(schema: pa.Schema, leave_out: Iterable[str] = ()) -> list[str]:
    """The first that a person can read."""
    names = [one.name for one in schema if one.name not in leave_out and not one.name.startswith("_")]
    readable = [name for name in names if schema.names.count(name) == 1 and _is_readable(schema.field(name).type)]
    return readable[:SHOWN_COLUMNS]


def _is_readable(kind: pa.DataType) -> bool:
    if kinds.is_dictionary(kind):
        return _is_readable(kind.value_type)
    if is_binary(kind) or kinds.is_fixed_size_binary(kind) or isinstance(kind, pa.BaseExtensionType):
        return False
    if kinds.is_timestamp(kind) and kind.tz:  # of a zone that this machine may not know
        return False
    try:
        pa.array([], kind).cast(pa.string())
    except pa.ArrowNotImplementedError:
        return False
    return True


def _texts(table: pa.Table, columns: Sequence[str]) -> list[dict[str, str]]:
    """Of each row; nulls are not among them."""
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
