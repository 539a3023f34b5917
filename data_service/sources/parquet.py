"""One Parquet file, decoded a bounded number of rows at a time."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as kinds

from data_service.domain.parquet_footer import Footer, FooterError, parse_footer
from data_service.domain.parquet_pages import DELTA_BYTE_ARRAY, DELTA_LENGTH_BYTE_ARRAY, Page, PageError, pages
from data_service.sources import interface
from data_service.sources.content import blaming
from data_service.sources.decoded_size import decoded_bytes, is_text
from data_service.sources.interface import BadRowSink
from data_service.sources.source_files import SourceFile
from data_service.sources.typed_columns import MAX_ROW_BYTES, TypedColumns, logical_schema_of
from shared.dataset_version.columns import MAX_COLUMNS, is_tensor, row_bytes

MAX_BATCH_ROWS = 1024
MAX_PAGE_BYTES = 256 * 1024 * 1024
# Of a list, at most: its numbers, or narrower ones and where lists begin.
VALUE_BYTES = 8
MAX_FOOTER_BYTES = 64 * 1024 * 1024
MAX_FOOTER_LIST = 100_000


class ParquetRows:
    """One Parquet file; its columns keep their types as far as a version has them (`logical_field`), and have that of
    `types` where it does not.

    Nothing that it claims is believed: rows are counted as they are decoded, and pages that would need too much memory
    are refused by their own headers before any is decoded.
    """

    class_names: list[str] | None = None

    def __init__(self, file: SourceFile, types: Mapping[str, pa.DataType] = MappingProxyType({})) -> None:
        self._file = file
        self._types = types
        # Its footer is at the end, so an upload has to be there as a whole.
        file.wait_until_whole()
        with self._opened() as opened:
            footer = self._footer(opened)
            given = _parquet(opened).schema_arrow
            self._texts = [field.name for field in given if is_text(field.type)]
            self._extended_texts = [field.name for field in given if _is_extended_text(field.type)]
            self.schema = self._logical_schema(given)
        claimed_bytes = sum(group.total_bytes for group in footer.row_groups)
        fixed_bytes = row_bytes(pa.schema([field for field in self.schema if not is_text(field.type)])) or 0
        if fixed_bytes > MAX_ROW_BYTES:
            raise file.corrupt(f"a row takes {fixed_bytes} bytes; at most {MAX_ROW_BYTES} are read")
        width = max(fixed_bytes, claimed_bytes // max(footer.row_count, 1), 1)
        self._batch_rows = min(max(interface.CHUNK_BYTES // width, 1), MAX_BATCH_ROWS)

    def tables(self, bad: BadRowSink) -> Iterator[pa.Table]:
        with self._opened() as opened:
            footer = self._footer(opened)
            parquet = _parquet(opened, self._texts)
            if self._logical_schema(parquet.schema_arrow) != self.schema:
                raise self._file.corrupt("it changed while it was read")
            whole, list_bytes = self._check_pages(opened, footer, parquet.schema)
            batch_rows = min(self._batch_rows, max(interface.MAX_DECODED_BYTES // max(list_bytes, 1), 1))
            if whole:
                parquet = _parquet(opened, [name for name in self._texts if name not in whole])
                batch_rows = min(batch_rows, max(interface.MAX_DECODED_BYTES // sum(whole.values()), 1))
            yield from _gathered(self._decoded(parquet, batch_rows, footer, bad), self._batch_rows // batch_rows)

    def _decoded(self, parquet: pq.ParquetFile, rows: int, footer: Footer, bad: BadRowSink) -> Iterator[pa.Table]:
        columns = TypedColumns(self._file, self.schema)
        row_count = 0
        for batch in parquet.iter_batches(rows, use_threads=False):
            row_count += batch.num_rows
            size_bytes = decoded_bytes(batch)
            if size_bytes > interface.MAX_DECODED_BYTES:
                raise self._file.corrupt(f"{batch.num_rows} of its rows decode to {size_bytes} bytes")
            yield columns.table(batch, bad)
        if row_count != footer.row_count:
            # Arrow leaves some out without a word, such as a row group's only list where it is in several pages.
            raise self._file.corrupt(f"{row_count} rows are decoded, and its footer has {footer.row_count}")

    def _logical_schema(self, given: pa.Schema) -> pa.Schema:
        for field in given:
            if isinstance(field.type, pa.BaseExtensionType) and kinds.is_dictionary(field.type.storage_type):
                # Arrow aborts the process behind the last batch of such a column.
                remedy = "which cannot be read from Parquet; write its values without a dictionary"
                raise self._file.corrupt(f"column {field.name!r} has the type {field.type}, {remedy}")
        return logical_schema_of(self._file, given, self._types)

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        with closing(self._file.open()) as opened, blaming(self._file, "Parquet"):
            try:
                yield opened
            except (FooterError, PageError) as error:
                raise self._file.corrupt(str(error)) from None

    def _footer(self, opened: BinaryIO) -> Footer:
        """Looked at before Arrow parses it, and so is its size before it is read."""
        size_bytes = _size(opened)
        if size_bytes < 12:
            raise self._file.corrupt("it is not a whole Parquet file: it has no footer")
        opened.seek(size_bytes - 8)
        footer_bytes, magic = struct.unpack("<I4s", opened.read(8))
        is_parquet = magic == b"PAR1"
        if is_parquet and footer_bytes > MAX_FOOTER_BYTES:
            raise self._file.corrupt(
                f"its footer claims {footer_bytes} bytes; at most {MAX_FOOTER_BYTES} are read, and "
                f"{MAX_COLUMNS} columns"
            )
        if not is_parquet or footer_bytes > size_bytes - 12:
            raise self._file.corrupt("it is not a whole Parquet file: it does not end with a footer")
        opened.seek(size_bytes - 8 - footer_bytes)
        footer = parse_footer(opened.read(footer_bytes))
        opened.seek(0)
        return footer

    def _lists(self, schema: pq.ParquetSchema, index: int) -> _Lists | None:
        """None for a column of one value a row."""
        if schema.column(index).max_repetition_level == 0:
            return None
        path = schema.column(index).path
        name = path.split(".")[0]
        kept = self.schema.field(name).type if name in self.schema.names else None
        return _Lists(path, math.prod(kept.shape) if kept is not None and is_tensor(kept) else 1)

    def _check_pages(self, opened: BinaryIO, footer: Footer, schema: pq.ParquetSchema) -> tuple[dict[str, int], int]:
        """The columns of texts that Arrow cannot read as dictionaries, with the bytes that one text may have: it shares
        bytes with those before it, or with a dictionary, but none has more than its page. And the bytes that a row's
        list may have."""

        def read_at(position: int, size: int) -> bytes:
            opened.seek(position)
            return bytes(opened.read(size))

        file_bytes = _size(opened)
        lists = [self._lists(schema, index) for index in range(footer.leaf_count)]
        page_bytes: dict[str, int] = {}
        in_deltas: set[str] = set()
        for group in footer.row_groups:
            for column, counted in zip(group.columns, lists, strict=True):
                if column.size_bytes == 0:
                    continue  # of a row group without rows
                if column.begin < 4 or column.size_bytes < 0 or column.begin + column.size_bytes > file_bytes:
                    raise PageError(f"column {column.path!r} lies outside of the file")
                for page in pages(read_at, column.begin, column.size_bytes):
                    _check_page(page, column.path, counted)
                    page_bytes[column.path] = max(page_bytes.get(column.path, 1), page.uncompressed_bytes)
                    if page.encoding in (DELTA_LENGTH_BYTE_ARRAY, DELTA_BYTE_ARRAY):
                        in_deltas.add(column.path)
        opened.seek(0)
        list_bytes = max((one.row_bytes(footer.row_count) for one in lists if one is not None), default=0)
        # None where a file has no rows.
        whole = [name for name in self._texts if name in in_deltas] + self._extended_texts
        return {name: page_bytes[name] for name in whole if name in page_bytes}, list_bytes


def _gathered(tables: Iterator[pa.Table], most: int) -> Iterator[pa.Table]:
    """Up to so many tables as one: what becomes of a table takes its time for each, however few its rows."""
    waiting: list[pa.Table] = []
    size_bytes = 0
    for table in tables:
        if waiting and size_bytes + table.nbytes > interface.CHUNK_BYTES:
            yield _as_one(waiting)
            waiting, size_bytes = [], 0
        waiting.append(table)
        size_bytes += table.nbytes
        if len(waiting) >= most:
            yield _as_one(waiting)
            waiting, size_bytes = [], 0
    if waiting:
        yield _as_one(waiting)


def _as_one(tables: Sequence[pa.Table]) -> pa.Table:
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables).combine_chunks()


def _is_extended_text(arrow_type: pa.DataType) -> bool:
    """Of such a column Arrow ends the process where it reads it as a dictionary."""
    return isinstance(arrow_type, pa.BaseExtensionType) and is_text(arrow_type.storage_type)


def _size(opened: BinaryIO) -> int:
    """In bytes; Arrow's files do not tell where they are sought to."""
    size_bytes = opened.seek(0, 2)
    return opened.tell() if size_bytes is None else size_bytes


@dataclass
class _Lists:
    """A column of lists: how many values the version wants in each, and how many the pages claim."""

    path: str
    size: int
    values: int = 0
    most_in_a_page: int = 0

    def add(self, page: Page) -> None:
        self.values += page.values
        self.most_in_a_page = max(self.most_in_a_page, page.values)

    def row_bytes(self, row_count: int) -> int:
        """What a row may decode to: where it begins within a page nothing says, so it may have all of one, and the next
        row all of the next. 0 where all rows together are not too much."""
        if VALUE_BYTES * self.values <= interface.MAX_DECODED_BYTES:
            return 0
        # Longer lists are bad rows, which is no reason to refuse a file; but no list goes on over pages without end.
        if self.values > 8 * self.size * row_count:
            raise PageError(
                f"column {self.path!r} has {self.values} values in lists, where {row_count} rows of {self.size} are "
                f"wanted"
            )
        return VALUE_BYTES * self.most_in_a_page


def _check_page(page: Page, column: str, lists: _Lists | None) -> None:
    """A list's values are decoded row by row, however many a row has, and any number of equal ones takes a few bytes.
    But where rows of the promised length begin, each takes a bit for each value, or at least a run's two bytes; only
    rows of one value do not."""
    values = 0 if lists is None else page.values
    decoded_bytes = max(page.uncompressed_bytes, VALUE_BYTES * values)
    if decoded_bytes > MAX_PAGE_BYTES:
        raise PageError(f"a page of column {column!r} decodes to {decoded_bytes} bytes; {MAX_PAGE_BYTES} are decoded")
    if lists is None:
        return
    if lists.size > 1 and values > 8 * lists.size * max(page.uncompressed_bytes, 1):
        raise PageError(f"a page of column {column!r} has lists of more than {lists.size} values")
    lists.add(page)


def _parquet(opened: BinaryIO, as_dictionaries: Sequence[str] = ()) -> pq.ParquetFile:
    # Unbuffered would hold whole column chunks, however large the writer made its row groups. Nanoseconds, Arrow's own
    # reading of INT96, wrap around before 1677 and after 2262: microseconds hold every year that Spark writes.
    return pq.ParquetFile(
        opened,
        read_dictionary=list(as_dictionaries),
        buffer_size=1024 * 1024,
        pre_buffer=False,
        coerce_int96_timestamp_unit="us",
        page_checksum_verification=True,
        thrift_string_size_limit=MAX_FOOTER_BYTES,
        thrift_container_size_limit=MAX_FOOTER_LIST,
    )
