"""Reads a committed version row group by row group, and nothing that is not what was committed."""

from __future__ import annotations

import io
import itertools
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from shared.dataset_version.column_names import repeated
from shared.dataset_version.columns import ROW_ID, logical_schema, to_logical
from shared.dataset_version.footers import Footers
from shared.dataset_version.manifest import DataFile, sha256_hex
from shared.dataset_version.row_groups import MAX_UNEQUAL_GROUP_BYTES
from shared.dataset_version.version import DatasetVersion, check_not_deleted
from shared.dataset_version.writer import MAX_FILE_BYTES
from shared.errors import DataLoss, invalid_field
from shared.storage import ObjectMissing, ObjectStore

# So many unwanted bytes are read along rather than asked around: about what S3 sends in the time of a round trip.
MAX_GAP_BYTES = 512 * 1024
# Arrow joins its reads over holes of that size, and must find the bytes of the hole.
ARROW_HOLE_BYTES = 8 * 1024


@dataclass(frozen=True)
class RowGroup:
    """The rows `first_row_id` to `first_row_id + row_count`; `file_index` counts in the manifest's files."""

    file_index: int
    group_index: int
    first_row_id: int
    row_count: int


class VersionReader:
    """Thread-safe. Each read is one request for each run of neighbouring columns and groups, all at the same time;
    the footers last used are kept, in `footers`, which readers may share."""

    def __init__(self, store: ObjectStore, version: DatasetVersion, footers: Footers | None = None) -> None:
        self._store = store
        self.version = version
        self._files = version.manifest.files
        self._footers = Footers() if footers is None else footers
        # By file: of a row group, about how much its dictionaries hide.
        self._hidden_bytes: dict[int, int] = {}
        # Of the columns whose sizes were asked for last.
        self._places: tuple[tuple[str, ...] | None, list[int]] | None = None
        self._schema: pa.Schema | None = None
        self._lock = threading.Lock()
        # Of the files, footers and what came along included.
        self.bytes_fetched = 0

    @property
    def schema(self) -> pa.Schema:
        """The logical columns, `_row_id` last."""
        if self._schema is None:
            spellings = {column.name: column.arrow_type for column in self.version.columns}
            self._schema = logical_schema(self._open(0, self._footer(0), []).schema_arrow, spellings)
        return self._schema

    def row_groups(self, split: str) -> list[RowGroup]:
        """Of one split, in the order of row ids. Raises `InvalidArgument` for a split that is not there."""
        self.version.split(split)
        groups = []
        for file_index, file in enumerate(self._files):
            if file.split != split:
                continue
            first = file.first_row_id
            for group_index, rows in enumerate(file.row_groups):
                groups.append(RowGroup(file_index, group_index, first, rows))
                first += rows
        return groups

    def read(self, row_group: RowGroup, columns: Sequence[str] | None = None) -> pa.Table:
        """The named columns in that order (None: all but `_row_id`), each in one chunk, of their logical types.

        Raises `InvalidArgument` for an unknown column and `DataLoss` when a page is not what was written.
        """
        return self.read_many([row_group], columns)

    def read_many(self, row_groups: Sequence[RowGroup], columns: Sequence[str] | None = None) -> pa.Table:
        """As `read`, of one or more row groups in their order. Those of a file that follow each other here are fetched
        and decoded together, which is several times faster than one by one."""
        schema = self.select(columns)
        tables = [to_logical(self._read_of_file(groups, schema.names), schema) for groups in _by_file(row_groups)]
        if len(tables) == 1:
            return tables[0]
        return pa.concat_tables(tables).combine_chunks() if tables else schema.empty_table()

    def decoded_bytes(self, row_group: RowGroup, columns: Sequence[str] | None = None) -> int:
        """About how much memory those columns take once they are read, if no text is there twice. Raises as `read`."""
        return sum(column.total_uncompressed_size for column in self._columns(row_group, columns))

    def bytes_with_repeats(self, row_group: RowGroup, columns: Sequence[str] | None = None) -> int:
        """As `decoded_bytes`, but with texts that many rows share, which a dictionary has once: what all groups of the
        file may so hide together is shared out among them. Where some hide more than others, those of a file are more
        by `MAX_FILE_BYTES` at the most."""
        size_bytes = texts = 0
        for column in self._columns(row_group, columns):
            size_bytes += column.total_uncompressed_size
            if column.has_dictionary_page:
                texts += column.total_uncompressed_size
        # No row has more than the whole dictionary.
        most = min(texts * row_group.row_count, MAX_UNEQUAL_GROUP_BYTES)
        return size_bytes + min(self._hidden_of_group(row_group.file_index), max(most - texts, 0))

    def _hidden_of_group(self, file_index: int) -> int:
        """On the average: its footer tells of how many of a file's values, of which there are at most `MAX_FILE_BYTES`
        where the manifest does not count them."""
        if file_index not in self._hidden_bytes:
            footer = self._footer(file_index)
            groups = range(footer.num_row_groups)
            told = sum(footer.row_group(index).total_byte_size for index in groups)
            counted = self._files[file_index].raw_bytes
            raw_bytes = MAX_FILE_BYTES if counted is None else counted
            self._hidden_bytes[file_index] = max(raw_bytes - told, 0) // len(groups)
        return self._hidden_bytes[file_index]

    def _columns(self, row_group: RowGroup, columns: Sequence[str] | None) -> list[pq.ColumnChunkMetaData]:
        """In no order: which ones they are is worked out once for all the groups that are asked for in a row."""
        key = None if columns is None else tuple(columns)
        known = self._places
        if known is None or known[0] != key:
            names = self.schema.names
            wanted = frozenset(self.select(columns).names)
            known = self._places = key, [place for place, name in enumerate(names) if name in wanted]
        group = self._footer(row_group.file_index).row_group(row_group.group_index)
        return [group.column(place) for place in known[1]]

    def select(self, columns: Sequence[str] | None) -> pa.Schema:
        """The schema of these columns. Raises `InvalidArgument` for one that is unknown or named twice."""
        schema = self.schema
        if columns is None:
            return pa.schema([field for field in schema if field.name != ROW_ID])
        there = {name: place for place, name in enumerate(schema.names)}
        again = next(repeated(columns), len(columns))
        for index, name in enumerate(columns):
            if name not in there:
                raise invalid_field(f"columns[{index}]", name, f"use some of {', '.join(schema.names)}")
            if index == again:
                raise invalid_field(f"columns[{index}]", name, "name each column once")
        return pa.schema([schema.field(there[name]) for name in columns])

    def _footer(self, file_index: int) -> pq.FileMetaData:
        file = self._files[file_index]
        key = self.version.folder, file.path
        known = self._footers.get(key)
        if known is not None:
            return known
        (data,) = self._get_ranges(file, [(file.size_bytes - file.footer_bytes, file.footer_bytes)])
        if sha256_hex(data) != file.footer_sha256:
            raise _lost(self.version, file, "does not have the footer that its manifest names")
        footer = pq.read_metadata(pa.BufferReader(b"PAR1" + bytes(data)))
        self._footers.keep(key, footer, file.footer_bytes)
        return footer

    def _read_of_file(self, groups: Sequence[RowGroup], columns: Sequence[str]) -> pa.Table:
        """The stored columns of these groups of one file."""
        file_index = groups[0].file_index
        file = self._files[file_index]
        indices = [group.group_index for group in groups]
        try:
            footer = self._footer(file_index)
            fetched = self._fetch(file, {one: footer.row_group(one) for one in indices}, columns)
            parquet = self._open(file_index, footer, fetched)
            stored = parquet.read_row_groups(indices, columns=columns, use_threads=False)
        except (pa.ArrowException, OSError, EOFError) as error:
            raise _lost(self.version, file, "does not hold what was written") from error
        if stored.num_rows != sum(group.row_count for group in groups):
            raise _lost(self.version, file, "does not hold the rows that its manifest names")
        return stored.select(columns)

    def _fetch(self, file: DataFile, groups: Mapping[int, pq.RowGroupMetaData], columns: Sequence[str]) -> list[_Piece]:
        """The bytes of these columns. What lies between two of them, in a group or to the next group, comes too where
        it is little: one request more costs more than those bytes. Of groups between those that are wanted nothing
        comes: on the way to a few that are far apart it would be most of the file."""
        joined: list[tuple[int, int]] = []
        last = 0
        for number, group in sorted(groups.items()):
            for start, end in sorted(_span(group.column(index)) for index in _wanted(group, columns)):
                gap_bytes = MAX_GAP_BYTES if number - last <= 1 else ARROW_HOLE_BYTES
                if joined and start - joined[-1][1] <= gap_bytes:
                    joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
                else:
                    joined.append((start, end))
                last = number
        read = self._get_ranges(file, [(start, end - start) for start, end in joined])
        return [_Piece(start, data) for (start, _), data in zip(joined, read, strict=True)]

    def _get_ranges(self, file: DataFile, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        key = f"{self.version.folder}/{file.path}"
        with self._lock:
            self.bytes_fetched += sum(length for _, length in ranges)
        try:
            return self._store.get_ranges(key, ranges)
        except ObjectMissing:
            check_not_deleted(self._store, self.version)
            raise _lost(self.version, file, "is gone") from None
        except DataLoss:
            raise _lost(self.version, file, "does not have the size that its manifest names") from None

    def _open(self, file_index: int, footer: pq.FileMetaData, pieces: Sequence[_Piece]) -> pq.ParquetFile:
        source = pa.PythonFile(_Window(pieces, self._files[file_index].size_bytes), mode="r")
        return pq.ParquetFile(source, metadata=footer, page_checksum_verification=True)


@dataclass(frozen=True)
class _Piece:
    """Bytes of a file from `start` on."""

    start: int
    data: memoryview


class _Window(io.RawIOBase):
    """A file of which only some pieces were fetched, in their order."""

    def __init__(self, pieces: Sequence[_Piece], size_bytes: int) -> None:
        self._pieces = pieces
        self._starts = [piece.start for piece in pieces]
        self._size_bytes = size_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> memoryview:
        """A view: Arrow takes it as it takes bytes, and nothing is copied."""
        index = bisect_right(self._starts, self._position) - 1
        if index < 0:
            raise EOFError("a read before the fetched columns")
        begin = self._position - self._starts[index]
        data = self._pieces[index].data[begin : None if size < 0 else begin + size]
        self._position += len(data)
        return data


def _by_file(row_groups: Sequence[RowGroup]) -> list[list[RowGroup]]:
    """The groups cut where one is of another file than the one before it."""
    return [list(groups) for _, groups in itertools.groupby(row_groups, lambda group: group.file_index)]


def _wanted(group: pq.RowGroupMetaData, columns: Sequence[str]) -> list[int]:
    names = frozenset(columns)
    return [index for index in range(group.num_columns) if group.column(index).path_in_schema in names]


def _span(column: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """Where a column of a row group begins and ends in its file."""
    start = column.dictionary_page_offset or column.data_page_offset
    return start, start + column.total_compressed_size


def _lost(version: DatasetVersion, file: DataFile, why: str) -> DataLoss:
    return DataLoss(
        f"{file.path} of {version.name} {why}",
        reason="DAMAGED_FILE",
        metadata={"resource": version.name, "file": file.path},
    )
