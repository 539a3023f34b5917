"""Reads one Parquet file, a bounded number of rows at a time.

Arrow reads its footer and pages. A reading process bounds what their claims may cost.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Container, Iterator, Mapping, Sequence
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
# The fewest rows that are decoded at once for texts of which each may be as long as all bytes of its column.
MIN_WHOLE_TEXTS = 256
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

    No claim of the file is trusted: rows are counted as they are decoded. What its footer claims sets how many are
    decoded at once, so a wrong claim costs memory, which the limit of the reading process bounds.
    """

    class_names: list[str] | None = None

    def __init__(self, file: SourceFile, types: Mapping[str, pa.DataType] = MappingProxyType({})) -> None:
        self._file = file
        self._types = types
        self._part: _Part | None = None
        # The footer is at the end, so an upload must be complete.
        file.wait_until_whole()
        with self._opened() as opened:
            self._footer_bytes(opened)
            parquet = _parquet(opened)
            given, metadata = parquet.schema_arrow, parquet.metadata
            self._texts = [field.name for field in given if is_text(field.type)]
            self._extended_texts = [field.name for field in given if _is_extended_text(field.type)]
            self.schema = self._logical_schema(given)
            self.size_bytes = _size(opened)
            groups = _groups(metadata)
        self.row_count = _plausible_rows(metadata.num_rows, groups)
        self._decoded_bytes = sum(group.decoded_bytes for group in groups)
        fixed_bytes = row_bytes(pa.schema([field for field in self.schema if not is_text(field.type)])) or 0
        if fixed_bytes > MAX_ROW_BYTES:
            raise file.corrupt(f"a row takes {fixed_bytes} bytes; at most {MAX_ROW_BYTES} are read")
        width = max(fixed_bytes, sum(group.claimed_bytes for group in groups) // max(metadata.num_rows, 1), 1)
        self._batch_rows = min(max(interface.CHUNK_BYTES // width, 1), MAX_BATCH_ROWS)

    def parts(self) -> Sequence[RowSource]:
        """Divide the file into runs of row groups.

        An upload was verified when it was opened; the parts do not verify it again.
        """
        if self._part is not None or self._decoded_bytes <= interface.PART_BYTES:
            return [self]
        with self._opened() as opened:
            parts = _parts(self._footer_bytes(opened), _parquet(opened).metadata)
        return [self._only(part) for part in parts] if len(parts) > 1 else [self]

    def _only(self, part: _Part) -> ParquetRows:
        rows = copy(self)
        rows._part = part
        rows.row_count = part.row_count if part.row_count <= interface.MAX_ROWS else None
        rows.size_bytes = part.size_bytes
        return rows

    def tables(self, bad: BadRowSink) -> Iterator[pa.Table]:
        with self._opened() as opened:
            footer = self._footer_bytes(opened)
            if self._part is not None and sha256(footer).digest() != self._part.footer_sha256:
                raise self._file.corrupt("it changed while it was read")
            parquet = _parquet(opened, self._texts)
            if self._logical_schema(parquet.schema_arrow) != self.schema:
                raise self._file.corrupt("it changed while it was read")
            indices = range(parquet.metadata.num_row_groups) if self._part is None else self._part.groups
            chunks = _chunks(parquet.metadata, indices)
            row_count = parquet.metadata.num_rows if self._part is None else self._part.row_count
            _fetch_chunks(opened, *_range_of_chunks(chunks, _size(opened)))
            batch_rows = self._rows_within(self._batch_rows, self._list_bytes(parquet.schema, chunks, row_count))
            whole = self._whole_texts(parquet.schema, chunks)
            if whole:
                as_dictionaries = [name for name in self._texts if name not in whole]
                parquet = _parquet(opened, as_dictionaries, parquet.metadata)
                batch_rows = min(batch_rows, max(self._rows_within(batch_rows, sum(whole.values())), MIN_WHOLE_TEXTS))
            decoded = self._decoded(parquet.iter_batches(batch_rows, list(indices), use_threads=False), whole)
            yield from _gathered(self._tables(decoded, row_count, bad), self._batch_rows // batch_rows)

    def _tables(self, batches: Iterator[pa.RecordBatch], row_count: int, bad: BadRowSink) -> Iterator[pa.Table]:
        columns = TypedColumns(self._file, self.schema, self._part.first_row if self._part else 0)
        rows_read = 0
        for batch in batches:
            rows_read += batch.num_rows
            yield columns.table(batch, bad)
        if rows_read != row_count:
            # Arrow silently skips some rows, such as a row group's only list if it spans several pages.
            raise self._file.corrupt(f"{rows_read} rows are decoded, and its footer has {row_count}")

    def _decoded(self, batches: Iterator[pa.RecordBatch], whole: Container[str]) -> Iterator[pa.RecordBatch]:
        """Yield batches of a bounded size once each row has its own values.

        Texts that Arrow could not read as dictionaries have theirs already, so their batches are divided.
        """
        for batch in batches:
            size_bytes = decoded_bytes(batch)
            if size_bytes > interface.MAX_DECODED_BYTES:
                shared = batch.select([name for name in batch.schema.names if name not in whole])
                if batch.num_rows == 1 or decoded_bytes(shared) > interface.MAX_DECODED_BYTES:
                    raise self._file.corrupt(f"{batch.num_rows} of its rows decode to {size_bytes} bytes")
                half = batch.num_rows // 2
                yield from self._decoded(iter((batch.slice(0, half), batch.slice(half))), whole)
            else:
                yield batch

    def _rows_within(self, rows: int, row_bytes: int) -> int:
        """Return how many rows of these bytes may be decoded at once, of `rows` at most."""
        return min(rows, max(interface.MAX_DECODED_BYTES // max(row_bytes, 1), 1))

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
            except ClaimError as error:
                raise self._file.corrupt(str(error)) from None

    def _footer_bytes(self, opened: BinaryIO) -> bytes:
        """Check the footer's size, and read it."""
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

    def _list_bytes(self, schema: pq.ParquetSchema, chunks: Chunks, row_count: int) -> int:
        """Return the bytes of a row's longest list on average, as the footer has it; 0 if all are within the limit."""
        longest = 0
        for index in range(len(schema)):
            if schema.column(index).max_repetition_level == 0:
                continue
            values = sum(max(group[index].num_values, 0) for group in chunks)
            if VALUE_BYTES * values <= interface.MAX_DECODED_BYTES:
                continue
            path = schema.column(index).path
            name = path.split(".")[0]
            kept = self.schema.field(name).type if name in self.schema.names else None
            size = math.prod(kept.shape) if kept is not None and is_tensor(kept) else 1
            # Longer lists are bad rows, which do not spoil the file. But lists may not go on over any number of pages.
            if values > 8 * size * row_count:
                raise ClaimError(
                    f"column {path!r} has {values} values in lists, where {row_count} rows of {size} are wanted"
                )
            longest = max(longest, VALUE_BYTES * values // max(row_count, 1))
        return longest

    def _whole_texts(self, schema: pq.ParquetSchema, chunks: Chunks) -> dict[str, int]:
        """Return the text columns that Arrow cannot read as dictionaries, with the most bytes of one text.

        Texts may share bytes with others, but none exceeds its column chunk.
        """
        whole: dict[str, int] = {}
        for index in range(len(schema)):
            name = schema.column(index).path
            if name not in self._texts and name not in self._extended_texts:
                continue
            of_column = [group[index] for group in chunks]
            if name in self._extended_texts or any(DELTAS.intersection(chunk.encodings) for chunk in of_column):
                whole[name] = max((max(chunk.total_uncompressed_size, 1) for chunk in of_column), default=1)
        return whole


def is_local(opened: BinaryIO) -> bool:
    """Return whether a read is no request: the file has a descriptor."""
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
        """Fetch these bytes, unless a range has them."""
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
        """Return the range that has all these bytes, up to the file's end."""
        if self._size_bytes is not None:
            size = min(size, max(self._size_bytes - begin, 0))
        return next((one for one in self._ranges if one[0] <= begin and begin + size <= one[0] + len(one[1])), None)


class ClaimError(ValueError):
    """The footer claims what no file may; the text says what."""


# Encodings of texts that share bytes with the text before them, or that have no lengths of their own.
DELTAS = frozenset({"DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"})


# The column chunks of each row group, as the footer claims them.
Chunks = Sequence[Sequence[pq.ColumnChunkMetaData]]


def _chunks(metadata: pq.FileMetaData, indices: Sequence[int]) -> Chunks:
    """Return the column chunks of these row groups. Arrow ends the process for one that contradicts itself."""
    groups = [metadata.row_group(index) for index in indices]
    if any(group.num_columns != metadata.num_columns for group in groups):
        raise ClaimError("its footer is damaged: a row group has other columns than the file")
    return [[group.column(index) for index in range(group.num_columns)] for group in groups]


@dataclass(frozen=True)
class _Group:
    """A row group, as the footer claims it: its rows, its bytes before compression, and those in the file."""

    row_count: int
    claimed_bytes: int
    stored_bytes: int

    @property
    def decoded_bytes(self) -> int:
        """The decoded bytes that it claims, at least its stored ones."""
        return max(self.claimed_bytes, self.stored_bytes)


def _groups(metadata: pq.FileMetaData) -> list[_Group]:
    found = []
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        # The chunks of one row group at a time: each takes a kilobyte.
        stored_bytes = sum(max(chunk.total_compressed_size, 0) for chunk in _chunks(metadata, [index])[0])
        found.append(_Group(group.num_rows, group.total_byte_size, stored_bytes))
    return found


def _range_of_chunks(chunks: Chunks, file_bytes: int) -> tuple[int, int]:
    """Return where the first chunk begins, and the last one ends. Raises `ClaimError` for one outside of the file.

    To seek there would look like a failing disk.
    """
    first, last = file_bytes, 0
    for chunk in (chunk for group in chunks for chunk in group if chunk.total_compressed_size):
        # A column without values has only one of the two pages, at offset 0.
        begin = min(filter(None, (chunk.data_page_offset, chunk.dictionary_page_offset)), default=0)
        end = begin + chunk.total_compressed_size
        if not 4 <= begin <= end <= file_bytes:
            raise ClaimError(f"column {chunk.path_in_schema!r} lies outside of the file")
        first, last = min(first, begin), max(last, end)
    return first, last


def _fetch_chunks(opened: BinaryIO, begin: int, end: int) -> None:
    """Fetch these bytes, the column chunks of all row groups, at once if they are within the budget.

    Larger ones are streamed: each mebibyte of a chunk is a request or more.
    """
    if isinstance(opened, FetchedRanges) and 0 < end - begin <= FETCHED_BYTES:
        opened.fetch(begin, end)


@dataclass(frozen=True)
class _Part:
    """A run of row groups; `footer_sha256` is that of the file's whole footer."""

    groups: range
    first_row: int
    row_count: int
    size_bytes: int
    footer_sha256: bytes


def _parts(footer_bytes: bytes, metadata: pq.FileMetaData) -> list[_Part]:
    """Divide the row groups into runs of about `PART_BYTES` decoded bytes; a larger group is a part of its own.

    A file whose footer contradicts itself is one part, so that reading it finds the error.
    """
    groups = _groups(metadata)
    if _contradicts_itself(metadata.num_rows, groups):
        return []
    cuts, size_bytes = [0], 0
    for index, group in enumerate(groups):
        decoded = group.decoded_bytes
        if size_bytes and size_bytes + decoded > interface.PART_BYTES:
            cuts.append(index)
            size_bytes = 0
        size_bytes += decoded
    digest = sha256(footer_bytes).digest()
    parts, first_row = [], 0
    for begin, end in pairwise([*cuts, len(groups)]):
        row_count = sum(group.row_count for group in groups[begin:end])
        stored_bytes = sum(group.stored_bytes for group in groups[begin:end])
        parts.append(_Part(range(begin, end), first_row, row_count, stored_bytes, digest))
        first_row += row_count
    return parts


def _contradicts_itself(row_count: int, groups: Sequence[_Group]) -> bool:
    counts = [group.row_count for group in groups]
    return any(count < 0 for count in counts) or sum(counts) != row_count


def _plausible_rows(row_count: int, groups: Sequence[_Group]) -> int | None:
    """Return the number of rows that the footer claims; None for one that no file has.

    Such a file's rows are counted before they get their ids.
    """
    return None if _contradicts_itself(row_count, groups) or row_count > interface.MAX_ROWS else row_count


def _gathered(tables: Iterator[pa.Table], most: int) -> Iterator[pa.Table]:
    """Combine up to `most` tables into one, because each table has a fixed cost, however few its rows."""
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
    """Return whether it is an extension type of texts, which Arrow cannot read as a dictionary without aborting the
    process.
    """
    return isinstance(arrow_type, pa.BaseExtensionType) and is_text(arrow_type.storage_type)


def _size(opened: BinaryIO) -> int:
    """Return the size in bytes.

    Arrow's files do not return the position from `seek`.
    """
    size_bytes = opened.seek(0, 2)
    return opened.tell() if size_bytes is None else size_bytes


def _parquet(
    opened: BinaryIO, as_dictionaries: Sequence[str] = (), metadata: pq.FileMetaData | None = None
) -> pq.ParquetFile:
    # Without a buffer, whole column chunks would be held, however large the writer made its row groups. Nanoseconds,
    # Arrow's default for INT96, overflow before 1677 and after 2262; microseconds cover every year that Spark writes.
    return pq.ParquetFile(
        opened,
        metadata=metadata,
        read_dictionary=list(as_dictionaries),
        buffer_size=1024 * 1024,
        pre_buffer=False,
        coerce_int96_timestamp_unit="us",
        page_checksum_verification=True,
        thrift_string_size_limit=MAX_FOOTER_BYTES,
        thrift_container_size_limit=MAX_FOOTER_LIST,
    )
