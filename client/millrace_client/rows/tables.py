"""CSV and Parquet files as Arrow tables of a bounded number of rows."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from millrace_client.rows.texts import NULL_VALUES
from millrace_client.rows.typed import BadInput

CSV_SUFFIXES, PARQUET_SUFFIXES = (".csv", ".csv.gz"), (".parquet", ".pq")
# A record of a CSV lies in two blocks at most.
CSV_BLOCK_BYTES = 16 * 1024 * 1024
# Nanoseconds, Arrow's own reading of INT96 timestamps, wrap around before 1677 and after 2262.
INT96_UNIT = "us"
# Of a Parquet file; images of a photograph's size are not many gigabytes then.
BATCH_ROWS = 256

REMEDIES = {"CSV": "give a CSV in UTF-8 whose first line names the columns", "Parquet": "write the file anew"}
# Arrow counts the line of names, too.
_ROW = re.compile(r"CSV parse error: Row #(\d+)")


@dataclass(frozen=True)
class TableFile:
    """`schema` has all of its columns; `read` gives the rows of those that it is told, at least one."""

    path: Path
    schema: pa.Schema
    read: Callable[[Sequence[str]], Iterator[pa.RecordBatch]]

    def has(self, column: str) -> bool:
        return column in self.schema.names


def is_table(path: Path) -> bool:
    return path.name.lower().endswith((*CSV_SUFFIXES, *PARQUET_SUFFIXES))


def open_table(path: Path) -> TableFile:
    """A CSV's columns are all of texts; its first line has their names. Raises `BadInput` for what is no such file, as
    `read` does."""
    if path.name.lower().endswith(PARQUET_SUFFIXES):
        with _blaming(path, "Parquet"), pq.ParquetFile(path, coerce_int96_timestamp_unit=INT96_UNIT) as file:
            return TableFile(path, file.schema_arrow, lambda columns: _parquet_rows(path, columns))
    with _blaming(path, "CSV"):
        _check_quotes(path)
    with _blaming(path, "CSV"), _csv_reader(path, pc.ConvertOptions()) as reader:
        schema = pa.schema([(name, pa.string()) for name in reader.schema.names])
    return TableFile(path, schema, lambda columns: _csv_rows(path, columns))


def cut(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """The same rows, `rows` at a time; the last table may have fewer."""
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
    """Raises `BadInput` for a quote that is not closed, or not before a delimiter or a line's end: Arrow would take the
    lines up to the next quote for one text, or leave them out, without a word."""
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
    """By itself Arrow knows a compressed file by a suffix in small letters alone."""
    return "gzip" if path.name.lower().endswith(".gz") else None


@contextmanager
def _csv_reader(path: Path, options: pc.ConvertOptions) -> Iterator[pc.CSVStreamingReader]:
    # Threads would keep Arrow from saying which row is malformed.
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
