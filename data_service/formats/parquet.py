"""Reads one Parquet file, a bounded number of rows at a time.

Its footer and page headers are checked first, so that no page takes more memory than allowed.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from types import MappingProxyType
from typing import BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as kinds

from data_service.formats import interface
from data_service.formats.interface import BadRowSink, RowSource, blaming, decoded_bytes, is_text
from data_service.formats.typed_columns import MAX_ROW_BYTES, TypedColumns, logical_schema_of
from data_service.storage.source_files import SourceFile
from shared.dataset_version.manifest import MAX_COLUMNS, is_tensor, row_bytes

# --- Parquet rows ---
# Decodes one Parquet file, a bounded number of rows at a time.

MAX_BATCH_ROWS = 1024
MAX_PAGE_BYTES = 256 * 1024 * 1024
# The most bytes that a value of a list takes: its number, or a narrower one and its list's offset.
VALUE_BYTES = 8
MAX_FOOTER_BYTES = 64 * 1024 * 1024
MAX_FOOTER_LIST = 100_000
# Of an object or upload: the bytes of one request, those that are kept in memory at once, and those of a usual footer.
FETCH_BYTES = 16 * 1024 * 1024
FETCHED_BYTES = 128 * 1024 * 1024
TAIL_BYTES = 64 * 1024


class ParquetRows:
    """The rows of one Parquet file.

    Columns keep their types if a version supports them (`logical_field`); others get that of `types`.

    No claim of the file is trusted: rows are counted as they are decoded, and pages that would need too much memory are
    refused by their headers before any is decoded.
    """

    class_names: list[str] | None = None

    def __init__(self, file: SourceFile, types: Mapping[str, pa.DataType] = MappingProxyType({})) -> None:
        self._file = file
        self._types = types
        self._part: _Part | None = None
        # The footer is at the end, so an upload must be complete.
        file.wait_until_whole()
        with self._opened() as opened:
            footer = parse_footer(self._footer_bytes(opened))
            given = _parquet(opened).schema_arrow
            self._texts = [field.name for field in given if is_text(field.type)]
            self._extended_texts = [field.name for field in given if _is_extended_text(field.type)]
            self.schema = self._logical_schema(given)
            self.size_bytes = _size(opened)
        self.row_count = _plausible_rows(footer)
        self._decoded_bytes = sum(map(_group_bytes, footer.row_groups))
        claimed_bytes = sum(group.total_bytes for group in footer.row_groups)
        fixed_bytes = row_bytes(pa.schema([field for field in self.schema if not is_text(field.type)])) or 0
        if fixed_bytes > MAX_ROW_BYTES:
            raise file.corrupt(f"a row takes {fixed_bytes} bytes; at most {MAX_ROW_BYTES} are read")
        width = max(fixed_bytes, claimed_bytes // max(footer.row_count, 1), 1)
        self._batch_rows = min(max(interface.CHUNK_BYTES // width, 1), MAX_BATCH_ROWS)

    def parts(self) -> Sequence[RowSource]:
        """Divides the file into runs of row groups.

        An upload was verified when it was opened; the parts do not verify it again.
        """
        if self._part is not None or self._decoded_bytes <= interface.PART_BYTES:
            return [self]
        with self._opened() as opened:
            parts = _parts(self._footer_bytes(opened))
        return [self._only(part) for part in parts] if len(parts) > 1 else [self]

    def _only(self, part: _Part) -> ParquetRows:
        rows = copy(self)
        rows._part = part
        rows.row_count = _plausible_rows(part.footer)
        rows.size_bytes = sum(max(column.size_bytes, 0) for group in part.footer.row_groups for column in group.columns)
        return rows

    def tables(self, bad: BadRowSink) -> Iterator[pa.Table]:
        with self._opened() as opened:
            footer = self._footer(opened)
            _fetch_chunks(opened, footer)
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
        columns = TypedColumns(self._file, self.schema, self._part.first_row if self._part else 0)
        groups = self._part.groups if self._part else None
        row_count = 0
        for batch in parquet.iter_batches(rows, groups, use_threads=False):
            row_count += batch.num_rows
            size_bytes = decoded_bytes(batch)
            if size_bytes > interface.MAX_DECODED_BYTES:
                raise self._file.corrupt(f"{batch.num_rows} of its rows decode to {size_bytes} bytes")
            yield columns.table(batch, bad)
        if row_count != footer.row_count:
            # Arrow silently skips some rows, such as a row group's only list if it spans several pages.
            raise self._file.corrupt(f"{row_count} rows are decoded, and its footer has {footer.row_count}")

    def _logical_schema(self, schema: pa.Schema) -> pa.Schema:
        for field in schema:
            if isinstance(field.type, pa.BaseExtensionType) and kinds.is_dictionary(field.type.storage_type):
                # Arrow aborts the process after the last batch of such a column.
                remedy = "which cannot be read from Parquet; write its values without a dictionary"
                raise self._file.corrupt(f"column {field.name!r} has the type {field.type}, {remedy}")
        return logical_schema_of(self._file, schema, self._types)

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        with closing(self._file.open()) as opened, blaming(self._file, "Parquet"):
            try:
                yield opened if is_local(opened) else cast(BinaryIO, FetchedRanges(opened))
            except (FooterError, PageError) as error:
                raise self._file.corrupt(str(error)) from None

    def _footer(self, opened: BinaryIO) -> Footer:
        """Returns the footer, of the part's row groups alone. It was parsed before Arrow sees it."""
        data = self._footer_bytes(opened)
        if self._part is None:
            return parse_footer(data)
        if sha256(data).digest() != self._part.footer_sha256:
            raise self._file.corrupt("it changed while it was read")
        return self._part.footer

    def _footer_bytes(self, opened: BinaryIO) -> bytes:
        """Checks the footer's size, and reads it."""
        size_bytes = _size(opened)
        if size_bytes < 12:
            raise self._file.corrupt("it is not a whole Parquet file: it has no footer")
        if isinstance(opened, FetchedRanges):
            opened.fetch(max(size_bytes - TAIL_BYTES, 0), size_bytes)
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
        data = bytes(opened.read(footer_bytes))
        opened.seek(0)
        return data

    def _lists(self, schema: pq.ParquetSchema, index: int) -> _Lists | None:
        """Returns the list counter of a column; None for a column with one value a row."""
        if schema.column(index).max_repetition_level == 0:
            return None
        path = schema.column(index).path
        name = path.split(".")[0]
        kept = self.schema.field(name).type if name in self.schema.names else None
        return _Lists(path, math.prod(kept.shape) if kept is not None and is_tensor(kept) else 1)

    def _check_pages(self, opened: BinaryIO, footer: Footer, schema: pq.ParquetSchema) -> tuple[dict[str, int], int]:
        """Checks all page headers before any page is decoded.

        Returns the text columns that Arrow cannot read as dictionaries, with the maximum bytes of one text: texts may
        share bytes with others, but none exceeds its page. Also returns the maximum bytes of one row's list.
        """

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
                    continue  # a row group without rows
                if column.begin < 4 or column.size_bytes < 0 or column.begin + column.size_bytes > file_bytes:
                    raise PageError(f"column {column.path!r} lies outside of the file")
                for page in pages(read_at, column.begin, column.size_bytes):
                    _check_page(page, column.path, counted)
                    page_bytes[column.path] = max(page_bytes.get(column.path, 1), page.uncompressed_bytes)
                    if page.encoding in (DELTA_LENGTH_BYTE_ARRAY, DELTA_BYTE_ARRAY):
                        in_deltas.add(column.path)
        opened.seek(0)
        list_bytes = max((one.row_bytes(footer.row_count) for one in lists if one is not None), default=0)
        # A file without rows has no entry in `page_bytes`.
        whole = [name for name in self._texts if name in in_deltas] + self._extended_texts
        return {name: page_bytes[name] for name in whole if name in page_bytes}, list_bytes


def is_local(opened: BinaryIO) -> bool:
    """Returns whether a read is no request: the file has a descriptor."""
    return isinstance(opened, io.BufferedReader) and isinstance(opened.raw, io.FileIO)


class FetchedRanges(io.RawIOBase):
    """A file whose reads are requests, with ranges that are fetched ahead in large ones.

    A read outside of the ranges, or beyond the end of one, goes to the file itself.
    """

    def __init__(self, opened: BinaryIO) -> None:
        self._opened = opened
        self._ranges: list[tuple[int, memoryview]] = []
        self._position = 0
        self._size_bytes: int | None = None

    def fetch(self, begin: int, end: int) -> None:
        """Fetches these bytes, unless a range has them."""
        if self._range_of(begin, end - begin) is not None:
            return
        fetched = bytearray()
        self._opened.seek(begin)
        while begin + len(fetched) < end and (piece := self._opened.read(min(end - begin - len(fetched), FETCH_BYTES))):
            fetched += piece
        self._ranges.append((begin, memoryview(fetched)))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == 2 and self._size_bytes is None:
            self._size_bytes = _size(self._opened)
        origin = (0, self._position, self._size_bytes or 0)[whence]
        self._position = origin + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        found = None if size < 0 else self._range_of(self._position, size)
        if found is None:
            self._opened.seek(self._position)
            data = self._opened.read(size)
        else:
            begin, fetched = found
            data = bytes(fetched[self._position - begin : self._position - begin + size])
        self._position += len(data)
        return data

    def _range_of(self, begin: int, size: int) -> tuple[int, memoryview] | None:
        """Returns the range that has all these bytes, up to the file's end."""
        if self._size_bytes is not None:
            size = min(size, max(self._size_bytes - begin, 0))
        return next((one for one in self._ranges if one[0] <= begin and begin + size <= one[0] + len(one[1])), None)


def _fetch_chunks(opened: BinaryIO, footer: Footer) -> None:
    """Fetches the column chunks of all row groups at once, if they are within the budget.

    Larger ones are streamed: each page is a request or more.
    """
    chunks = [column for group in footer.row_groups for column in group.columns if column.size_bytes > 0]
    if not isinstance(opened, FetchedRanges) or not chunks:
        return
    begin, end = min(chunk.begin for chunk in chunks), max(chunk.begin + chunk.size_bytes for chunk in chunks)
    if begin >= 0 and end <= _size(opened) and end - begin <= FETCHED_BYTES:
        opened.fetch(begin, end)


@dataclass(frozen=True)
class _Part:
    """A run of row groups; `footer` has these alone, and `footer_sha256` is that of the file's whole footer."""

    groups: range
    first_row: int
    footer: Footer
    footer_sha256: bytes


def _parts(footer_bytes: bytes) -> list[_Part]:
    """Divides the row groups into runs of about `PART_BYTES` decoded bytes; a larger group is a part of its own.

    A file whose footer contradicts itself is one part, so that reading it finds the error.
    """
    footer = parse_footer(footer_bytes)
    if _contradicts_itself(footer):
        return []
    groups = footer.row_groups
    cuts, size_bytes = [0], 0
    for index, group in enumerate(groups):
        decoded = _group_bytes(group)
        if size_bytes and size_bytes + decoded > interface.PART_BYTES:
            cuts.append(index)
            size_bytes = 0
        size_bytes += decoded
    digest = sha256(footer_bytes).digest()
    parts, first_row = [], 0
    for begin, end in pairwise([*cuts, len(groups)]):
        row_count = sum(group.row_count for group in groups[begin:end])
        part_footer = Footer(row_count, footer.leaf_count, groups[begin:end])
        parts.append(_Part(range(begin, end), first_row, part_footer, digest))
        first_row += row_count
    return parts


def _group_bytes(group: RowGroupFooter) -> int:
    """Returns the decoded bytes that a row group claims, at least its stored ones."""
    return max(group.total_bytes, sum(column.size_bytes for column in group.columns), 0)


def _contradicts_itself(footer: Footer) -> bool:
    counts = [group.row_count for group in footer.row_groups]
    return any(count < 0 for count in counts) or sum(counts) != footer.row_count


def _plausible_rows(footer: Footer) -> int | None:
    """Returns the number of rows that the footer claims; None for one that no file has.

    Such a file's rows are counted before they get their ids.
    """
    return None if _contradicts_itself(footer) or footer.row_count > interface.MAX_ROWS else footer.row_count


def _gathered(tables: Iterator[pa.Table], most: int) -> Iterator[pa.Table]:
    """Combines up to `most` tables into one, because each table has a fixed cost, however few its rows."""
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
    """Returns whether it is an extension type of texts, which Arrow cannot read as a dictionary without aborting the
    process.
    """
    return isinstance(arrow_type, pa.BaseExtensionType) and is_text(arrow_type.storage_type)


def _size(opened: BinaryIO) -> int:
    """Returns the size in bytes.

    Arrow's files do not return the position from `seek`.
    """
    size_bytes = opened.seek(0, 2)
    return opened.tell() if size_bytes is None else size_bytes


@dataclass
class _Lists:
    """A column of lists: the expected number of values in each list, and the number that the pages claim."""

    path: str
    size: int
    values: int = 0
    most_in_a_page: int = 0

    def add(self, page: Page) -> None:
        self.values += page.values
        self.most_in_a_page = max(self.most_in_a_page, page.values)

    def row_bytes(self, row_count: int) -> int:
        """Returns the maximum bytes of one decoded row.

        Page headers do not show where a row begins, so one row may have a whole page, and the next row the next page. 0
        if all rows together are within the limit.
        """
        if VALUE_BYTES * self.values <= interface.MAX_DECODED_BYTES:
            return 0
        # Longer lists are bad rows, which do not spoil the file. But lists may not continue over any number of pages.
        if self.values > 8 * self.size * row_count:
            raise PageError(
                f"column {self.path!r} has {self.values} values in lists, where {row_count} rows of {self.size} are "
                f"wanted"
            )
        return VALUE_BYTES * self.most_in_a_page


def _check_page(page: Page, column: str, lists: _Lists | None) -> None:
    """Checks the decoded size that a page's header claims.

    A list's values are decoded row by row, however many a row has, and any number of equal values takes a few bytes.
    But the starts of rows of the expected length take at least one bit per value, or the two bytes of a run; only rows
    of one value do not.
    """
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
    # Without a buffer, whole column chunks would be held, however large the writer made its row groups. Nanoseconds,
    # Arrow's default for INT96, overflow before 1677 and after 2262; microseconds cover every year that Spark writes.
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


# --- Parquet pages ---
# Reads Parquet's page headers, without decoding the pages.
#
# Source: https://github.com/apache/parquet-format (parquet.thrift, PageHeader). A decoder allocates the size that a
# page's header claims, and never writes beyond it, so limiting the claim limits the memory.

MAX_HEADER_BYTES = 16 * 1024 * 1024
FIRST_READ_BYTES = 512
# The fields of PageHeader for data pages of both versions, mapped to the field of the encoding in each.
_DATA_PAGES = {5: 2, 8: 4}
DELTA_LENGTH_BYTE_ARRAY, DELTA_BYTE_ARRAY = 6, 7

ReadAt = Callable[[int, int], bytes]


class PageError(ValueError):
    """The bytes are no sequence of pages; the text says why."""


@dataclass(frozen=True)
class Page:
    """A page's header, with the sizes that it claims.

    `values` counts the values of nested lists, and nulls; 0 for a dictionary page. `encoding` is Parquet's number of
    the encoding; -1 for a dictionary page.
    """

    uncompressed_bytes: int
    compressed_bytes: int
    header_bytes: int
    values: int
    encoding: int


def pages(read_at: ReadAt, begin: int, size: int) -> Iterator[Page]:
    """Yields the pages of one column chunk, `size` bytes from `begin`.

    `read_at(position, size)` returns the file's bytes there, fewer only at its end. Raises `PageError`.
    """
    position, end = begin, begin + size
    while position < end:
        page = _page(read_at, position, end)
        yield page
        position += page.header_bytes + page.compressed_bytes
    if position > end:
        raise PageError("a page goes on after its column's end")


def _page(read_at: ReadAt, position: int, end: int) -> Page:
    size = FIRST_READ_BYTES
    while True:
        data = read_at(position, min(size, end - position))
        try:
            return _parsed_page(data)
        except ThriftError:
            raise PageError("a page's header is damaged") from None
        except IndexError:
            if size >= min(MAX_HEADER_BYTES, end - position) or len(data) < min(size, end - position):
                raise PageError("it ends within a page's header") from None
            size *= 8


def _parsed_page(data: bytes) -> Page:
    reader = CompactReader(data)
    sizes, values, encoding = {}, 0, -1
    for field, kind in reader.fields():
        if field in (2, 3) and kind in _WHOLE_NUMBERS:
            sizes[field] = reader.zigzag()
        elif field in _DATA_PAGES and kind == _STRUCT:
            values, encoding = _values(reader, _DATA_PAGES[field])
        else:
            reader.skip(kind)
    uncompressed, compressed = sizes.get(2, -1), sizes.get(3, -1)
    if uncompressed < 0 or compressed < 0 or values < 0:
        raise PageError("a page's header is damaged")
    return Page(uncompressed, compressed, reader.position, values, encoding)


def _values(reader: CompactReader, encoding_field: int) -> tuple[int, int]:
    """Returns (number, encoding) of a DataPageHeader or DataPageHeaderV2, whose first fields agree."""
    values = encoding = -1
    for field, kind in reader.fields():
        if field == 1 and kind in _WHOLE_NUMBERS:
            values = reader.zigzag()
        elif field == encoding_field and kind in _WHOLE_NUMBERS:
            encoding = reader.zigzag()
        else:
            reader.skip(kind)
    return values, encoding


# --- Parquet footer ---
# Reads the parts of Parquet's footer that locate the columns.
#
# Source: https://github.com/apache/parquet-format (parquet.thrift, FileMetaData). Arrow's reader allocates a kilobyte
# or more for each column chunk of a footer, while three bytes can claim one. It also aborts the process when asked for
# the metadata of an inconsistent chunk. So this code checks a footer before Arrow sees it.

MAX_CHUNKS = 250_000
MAX_VALUES = 10_000_000


class FooterError(ValueError):
    """The bytes are no acceptable footer; the text says why."""


@dataclass(frozen=True)
class ColumnChunk:
    """A column chunk: its pages are the file's `size_bytes` bytes from `begin`.

    `path` joins the names of nested fields by dots.
    """

    path: str
    begin: int
    size_bytes: int


@dataclass(frozen=True)
class RowGroupFooter:
    total_bytes: int
    row_count: int
    columns: list[ColumnChunk]


@dataclass(frozen=True)
class Footer:
    """A file's footer, as the file claims it.

    `leaf_count` is the number of columns that each row group must have.
    """

    row_count: int
    leaf_count: int
    row_groups: list[RowGroupFooter]


def parse_footer(data: bytes) -> Footer:
    """Parses a footer; raises `FooterError`."""
    try:
        return _parsed(CompactReader(data, MAX_VALUES))
    except ThriftError as error:
        raise FooterError(f"its footer is damaged: {error}") from None
    except IndexError:
        raise FooterError("its footer is damaged: it ends too early") from None


def _parsed(reader: CompactReader) -> Footer:
    row_count = leaf_count = chunk_count = 0
    groups: list[RowGroupFooter] = []
    for field, kind in reader.fields():
        if field == 2:
            # The first element is the root, which contains all others.
            leaf_count = sum([_is_leaf(reader) for _ in reader.structs(kind)][1:])
        elif field == 3:
            row_count = reader.whole_number(kind)
        elif field == 4:
            for _ in reader.structs(kind):
                groups.append(_row_group(reader, MAX_CHUNKS - chunk_count))
                chunk_count += len(groups[-1].columns)
        else:
            reader.skip(kind)
    if any(len(group.columns) != leaf_count for group in groups):
        raise FooterError("its footer is damaged: a row group has other columns than the file")
    return Footer(row_count, leaf_count, groups)


def _is_leaf(reader: CompactReader) -> bool:
    """Reads a SchemaElement and returns whether it has no children."""
    children = 0
    for field, kind in reader.fields():
        if field == 5:
            children = reader.whole_number(kind)
        else:
            reader.skip(kind)
    return children == 0


def _row_group(reader: CompactReader, max_chunks: int) -> RowGroupFooter:
    total_bytes = row_count = 0
    columns: list[ColumnChunk] = []
    for field, kind in reader.fields():
        if field == 1:
            for _ in reader.structs(kind):
                columns.append(_chunk(reader))
                if len(columns) > max_chunks:
                    raise FooterError(
                        f"its row groups have more than {MAX_CHUNKS} columns together; write larger row groups"
                    )
        elif field == 2:
            total_bytes = reader.whole_number(kind)
        elif field == 3:
            row_count = reader.whole_number(kind)
        else:
            reader.skip(kind)
    return RowGroupFooter(total_bytes, row_count, columns)


def _chunk(reader: CompactReader) -> ColumnChunk:
    found = None
    for field, kind in reader.fields():
        if field == 3:
            found = _column_metadata(reader)
        else:
            reader.skip(kind)
    if found is None:
        raise FooterError("its footer is damaged: a column has no metadata")
    return found


def _column_metadata(reader: CompactReader) -> ColumnChunk:
    path, size_bytes = "", 0
    offsets = []
    for field, kind in reader.fields():
        if field == 3:
            path = ".".join(name.decode("utf-8", "replace") for name in reader.texts(kind))
        elif field == 7:
            size_bytes = reader.whole_number(kind)
        elif field in (9, 11):  # the first data page, and the dictionary page, which comes before it
            offsets.append(reader.whole_number(kind))
        else:
            reader.skip(kind)
    # A column without values has only one of the two, at offset 0.
    return ColumnChunk(path, min((offset for offset in offsets if offset), default=0), size_bytes)


# --- Thrift ---
# Thrift's compact protocol, as far as Parquet's headers and footers need it.
#
# Source: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md

_BOOL_TRUE, _BOOL_FALSE, _BYTE, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 6, 7, 8, 9, 10, 12
_WHOLE_NUMBERS = (4, 5, 6)
_MAX_NESTING = 16


class ThriftError(ValueError):
    """The bytes are no struct of Thrift's compact protocol."""


class CompactReader:
    """Reads one struct from the first byte on.

    A parser that keeps its values takes memory for each struct and list element, so at most `max_values` of them are
    read. Raises `IndexError` at the end of the bytes, and `ThriftError`.
    """

    def __init__(self, data: bytes, max_values: int = 1_000_000) -> None:
        self._data = data
        self._values_left = max_values
        self.position = 0

    def fields(self) -> Iterator[tuple[int, int]]:
        """Yields (number, kind) of each field of the struct that begins here.

        The caller must read or skip each value.
        """
        self._count(1)
        number = 0
        while header := self._byte():
            kind = header & 0x0F
            number = number + (header >> 4) if header >> 4 else self.zigzag()
            yield number, kind

    def whole_number(self, kind: int) -> int:
        """Returns the value of a field of this kind."""
        if kind not in _WHOLE_NUMBERS:
            raise ThriftError("a number is none")
        return self.zigzag()

    def zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def binary(self, kind: int = _BINARY) -> bytes:
        if kind != _BINARY:
            raise ThriftError("a text is none")
        size = self._varint()
        begin = self.position
        self._advance(size)
        return self._data[begin : self.position]

    def structs(self, kind: int) -> Iterator[None]:
        """Yields at the beginning of each struct of a list; the caller reads its fields."""
        count, inner = self._list(kind)
        if inner != _STRUCT and count:
            raise ThriftError("a list holds no structs")
        for _ in range(count):
            yield

    def texts(self, kind: int) -> list[bytes]:
        count, inner = self._list(kind)
        return [self.binary(inner) for _ in range(count)]

    def skip(self, kind: int, nesting: int = 0) -> None:
        if nesting > _MAX_NESTING:
            raise ThriftError("structs lie in structs too deep")
        if kind in (_BOOL_TRUE, _BOOL_FALSE):
            return
        if kind == _BYTE:
            self._advance(1)
        elif kind <= _I64:
            self._varint()
        elif kind == _DOUBLE:
            self._advance(8)
        elif kind == _BINARY:
            self._advance(self._varint())
        elif kind in (_LIST, _SET):
            self._skip_list(kind, nesting)
        elif kind == _STRUCT:
            for _, inner in self.fields():
                self.skip(inner, nesting + 1)
        else:
            raise ThriftError("a field has an unknown kind")

    def _skip_list(self, kind: int, nesting: int) -> None:
        count, inner = self._list(kind)
        for _ in range(count):
            if inner in (_BOOL_TRUE, _BOOL_FALSE):
                self._advance(1)
            else:
                self.skip(inner, nesting + 1)

    def _list(self, kind: int) -> tuple[int, int]:
        """Returns (number, kind) of the elements of the list that begins here."""
        if kind not in (_LIST, _SET):
            raise ThriftError("a list is none")
        header = self._byte()
        count, inner = header >> 4, header & 0x0F
        if count == 15:
            count = self._varint()
        self._count(count)
        return count, inner

    def _count(self, values: int) -> None:
        self._values_left -= values
        if self._values_left < 0:
            raise ThriftError("it holds too many values")

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ThriftError("a number goes on for too long")

    def _byte(self) -> int:
        byte = self._data[self.position]
        self.position += 1
        return byte

    def _advance(self, size: int) -> None:
        if self.position + size > len(self._data):
            raise IndexError
        self.position += size
