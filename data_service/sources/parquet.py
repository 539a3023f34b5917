"""One Parquet file, decoded a bounded number of rows at a time."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
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
from shared.dataset_version.column_names import MAX_COLUMNS
from shared.dataset_version.columns import is_tensor, row_bytes

MAX_BATCH_ROWS = 1024
MAX_PAGE_BYTES = 256 * 1024 * 1024
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
        columns = TypedColumns(self._file, self.schema)
        with self._opened() as opened:
            footer = self._footer(opened)
            parquet = _parquet(opened, self._texts)
            if self._logical_schema(parquet.schema_arrow) != self.schema:
                raise self._file.corrupt("it changed while it was read")
            whole = self._check_pages(opened, footer, parquet.schema)
            batch_rows = self._batch_rows
            if whole:
                parquet = _parquet(opened, [name for name in self._texts if name not in whole])
                batch_rows = min(batch_rows, max(interface.MAX_DECODED_BYTES // sum(whole.values()), 1))
            for batch in parquet.iter_batches(batch_rows, use_threads=False):
                size_bytes = decoded_bytes(batch)
                if size_bytes > interface.MAX_DECODED_BYTES:
                    raise self._file.corrupt(f"{batch.num_rows} of its rows decode to {size_bytes} bytes")
                yield columns.table(batch, bad)

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

    def _list_size(self, schema: pq.ParquetSchema, index: int) -> int | None:
        """How many values a row of the column has; None where it has one."""
        if schema.column(index).max_repetition_level == 0:
            return None
        name = schema.column(index).path.split(".")[0]
        kept = self.schema.field(name).type if name in self.schema.names else None
        return math.prod(kept.shape) if kept is not None and is_tensor(kept) else 1

    def _check_pages(self, opened: BinaryIO, footer: Footer, schema: pq.ParquetSchema) -> dict[str, int]:
        """The columns of texts that Arrow cannot read as dictionaries, with the bytes that one text may have: it shares
        bytes with those before it, or with a dictionary, but none has more than its page."""

        def read_at(position: int, size: int) -> bytes:
            opened.seek(position)
            return bytes(opened.read(size))

        file_bytes = _size(opened)
        list_sizes = [self._list_size(schema, index) for index in range(footer.leaf_count)]
        page_bytes: dict[str, int] = {}
        in_deltas: set[str] = set()
        for group in footer.row_groups:
            for column, list_size in zip(group.columns, list_sizes, strict=True):
                if column.size_bytes == 0:
                    continue  # of a row group without rows
                if column.begin < 4 or column.size_bytes < 0 or column.begin + column.size_bytes > file_bytes:
                    raise PageError(f"column {column.path!r} lies outside of the file")
                for page in pages(read_at, column.begin, column.size_bytes):
                    _check_page(page, column.path, list_size)
                    page_bytes[column.path] = max(page_bytes.get(column.path, 1), page.uncompressed_bytes)
                    if page.encoding in (DELTA_LENGTH_BYTE_ARRAY, DELTA_BYTE_ARRAY):
                        in_deltas.add(column.path)
        opened.seek(0)
        # None where a file has no rows.
        whole = [name for name in self._texts if name in in_deltas] + self._extended_texts
        return {name: page_bytes[name] for name in whole if name in page_bytes}


def _is_extended_text(arrow_type: pa.DataType) -> bool:
    """Of such a column Arrow ends the process where it reads it as a dictionary."""
    return isinstance(arrow_type, pa.BaseExtensionType) and is_text(arrow_type.storage_type)


def _size(opened: BinaryIO) -> int:
    """In bytes; Arrow's files do not tell where they are sought to."""
    size_bytes = opened.seek(0, 2)
    return opened.tell() if size_bytes is None else size_bytes


def _check_page(page: Page, column: str, list_size: int | None) -> None:
    """A list's values are decoded row by row, however many a row has, and any number of equal ones takes a few bytes.
    But where rows of the promised length begin, each takes a bit for each value, or at least a run's two bytes; only
    rows of one value do not. Lists that go on from page to page are bounded by each page alone."""
    decoded_bytes = page.uncompressed_bytes if list_size is None else max(page.uncompressed_bytes, 8 * page.values)
    if decoded_bytes > MAX_PAGE_BYTES:
        raise PageError(f"a page of column {column!r} decodes to {decoded_bytes} bytes; {MAX_PAGE_BYTES} are decoded")
    if list_size is not None and list_size > 1 and page.values > 8 * list_size * max(page.uncompressed_bytes, 1):
        raise PageError(f"a page of column {column!r} has lists of more than {list_size} values")


def _parquet(opened: BinaryIO, as_dictionaries: Sequence[str] = ()) -> pq.ParquetFile:
    # Unbuffered would hold whole column chunks, however large the writer made its row groups.
    return pq.ParquetFile(
        opened,
        read_dictionary=list(as_dictionaries),
        buffer_size=1024 * 1024,
        pre_buffer=False,
        page_checksum_verification=True,
        thrift_string_size_limit=MAX_FOOTER_BYTES,
        thrift_container_size_limit=MAX_FOOTER_LIST,
    )
