"""The Parquet files of a version: writes the rows of one split, and reads those of a committed version.

The reader reads row group by row group, and verifies everything it reads.

Footers are parsed once and cached. Of a remote Parquet file only the byte ranges of the wanted columns are fetched.

`GroupSizes` estimates the memory of row groups before they are read. A footer gives the size of each column's pages. A
text that many rows share is stored only once there, so the decoded size can be larger. The manifest's `raw_bytes`,
which counts every value of a file, shows how much larger the file is as a whole.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import struct
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as kinds
from numpy.typing import NDArray

from shared.dataset_version.manifest import (
    ROW_ID,
    ROW_ID_FIELD,
    DataFile,
    DatasetVersion,
    is_tensor,
    logical_schema,
    repeated,
    row_bytes,
    sha256_hex,
    stored_schema,
    to_logical,
    to_stored,
)
from shared.dataset_version.pages import PageCache, Ranges, RangeStore, RowGroup, RowGroups, VersionFiles
from shared.dataset_version.version import check_not_deleted
from shared.errors import DataLoss, invalid_field
from shared.storage import ObjectMissing, ObjectStore

# --- Row groups ---

TARGET_GROUP_BYTES = 256 * 1024
MAX_GROUP_BYTES = 32 * 1024 * 1024
MIN_GROUP_ROWS, MAX_GROUP_ROWS = 256, 4096
# For rows without a fixed width: the most rows of a group, and its most bytes unless a single row has more.
DEFAULT_GROUP_ROWS = 256
MAX_UNEQUAL_GROUP_BYTES = 4 * 1024 * 1024
# A group may have twice as many rows as `group_rows` says, and twice as many again, as long as this many groups of its
# size fit before it and it stays below a size that is enough for each column. So a version always has many groups.
GROUPS_BEFORE = 128
GROWN_GROUP_BYTES, GROWN_COLUMN_BYTES = 1024 * 1024, 8 * 1024
GROWN_GROUP_ROWS = 16_384


def group_rows(schema: pa.Schema) -> int:
    """Return the most rows of a version's first row groups: a power of two that depends on the types alone."""
    width = row_bytes(schema)
    if width is None:
        return DEFAULT_GROUP_ROWS
    target = TARGET_GROUP_BYTES // max(width, 1)
    rows = min(max(target, MIN_GROUP_ROWS), MAX_GROUP_ROWS, max(MAX_GROUP_BYTES // max(width, 1), 1))
    return 1 << (rows.bit_length() - 1)


class GroupRows:
    """The most rows of each row group of a version with these columns, logical or stored."""

    def __init__(self, schema: pa.Schema) -> None:
        width = row_bytes(schema)
        self._least = group_rows(schema)
        # The bytes from which a group no longer grows.
        self.grown_bytes = min(max(GROWN_GROUP_BYTES, GROWN_COLUMN_BYTES * len(schema)), MAX_UNEQUAL_GROUP_BYTES)
        fitting = GROWN_GROUP_ROWS if width is None else self.grown_bytes // max(width, 1)
        self._most = max(self._least, min(GROWN_GROUP_ROWS, fitting))

    def at(self, row_id: int) -> int:
        """Return the most rows of a group whose first row has this id: a power of two."""
        rows = self._least
        while 2 * rows <= self._most and 2 * rows * GROUPS_BEFORE <= row_id:
            rows *= 2
        return rows


def cut_groups(stored: pa.Table, *, to_end: bool, first_row_id: int = 0) -> list[int]:
    """Return the row counts of the leading row groups of `stored`, whose first row has the id `first_row_id`.

    Rows of a fixed width make groups of `GroupRows`. For other rows, a group ends before the row with which its values
    would exceed `MAX_UNEQUAL_GROUP_BYTES`, and a group that grew before it exceeds `grown_bytes`. Unless `to_end` is
    set, a last group that later rows could still join is left over.
    """
    sizes = GroupRows(stored.schema)
    if row_bytes(stored.schema) is None:
        return _unequal(_row_sizes(stored), sizes, first_row_id, to_end=to_end)
    groups: list[int] = []
    begin = 0
    while begin + (rows := sizes.at(first_row_id + begin)) <= stored.num_rows:
        groups.append(rows)
        begin += rows
    return [*groups, stored.num_rows - begin] if to_end and begin < stored.num_rows else groups


def raw_bytes(stored: pa.Table) -> int:
    """Return the bytes of the values, a function of the rows alone and not of their buffers."""
    total = 0
    for column in stored.columns:
        try:
            total += column.type.bit_width * len(column) // 8
        except ValueError:  # has no fixed width
            total += 4 * len(column) + (pc.sum(pc.binary_length(column)).as_py() or 0)
    return total


def _unequal(row_sizes: NDArray[np.int64], sizes: GroupRows, first_row_id: int, *, to_end: bool) -> list[int]:
    ends = np.cumsum(row_sizes)
    groups: list[int] = []
    begin, before = 0, 0

    def fitting(max_bytes: int) -> int:
        """Return where a group from `begin` on ends if its bytes are to stay within these."""
        return int(np.searchsorted(ends, before + max_bytes, side="right"))

    while begin < len(ends):
        # The first rows may fill the limit; beyond them only what is small enough makes a group larger.
        min_end, max_end = begin + DEFAULT_GROUP_ROWS, begin + sizes.at(first_row_id + begin)
        allowed = min(max_end, max(min_end, fitting(sizes.grown_bytes)))
        end = max(begin + 1, min(fitting(MAX_UNEQUAL_GROUP_BYTES), allowed))
        max_bytes = MAX_UNEQUAL_GROUP_BYTES if end < min_end else sizes.grown_bytes
        is_full = end == max_end or ends[end - 1] - before >= max_bytes
        if end == len(ends) and not (is_full or to_end):
            break
        groups.append(end - begin)
        begin, before = end, int(ends[end - 1])
    return groups


def _row_sizes(stored: pa.Table) -> NDArray[np.int64]:
    """Return the bytes of each row's values: (N,). Every row has at least one byte, even if empty or null."""
    sizes = np.zeros(stored.num_rows, np.int64)
    bits = 0
    for column in stored.columns:
        try:
            bits += column.type.bit_width
        except ValueError:  # has no fixed width
            sizes += 4 + pc.binary_length(column).fill_null(0).to_numpy().astype(np.int64)
    sizes += -(-bits // 8)
    return sizes


# --- Writer ---

COMPRESSION = "lz4"
MAX_FILE_BYTES = 64 * 1024 * 1024
# Writing several row groups at once takes two thirds of the time.
BLOCK_BYTES = 4 * 1024 * 1024
BLOCK_ROWS = 65_536


class SplitWriter:
    """Writes one split's rows in the order of their ids.

    It holds a few row groups in memory and one file on local disk. `schema` has the logical columns without `_row_id`,
    which is added. Files are stored below `folder`, named `{name}-00000.parquet`, `…-00001.parquet`, …; `name` defaults
    to the split's.
    """

    def __init__(
        self,
        store: ObjectStore,
        folder: str,
        scratch: Path,
        *,
        schema: pa.Schema,
        split: str,
        first_row_id: int,
        name: str = "",
    ) -> None:
        self._store = store
        self._folder = folder
        self._scratch = scratch
        self._schema = schema
        self._split = split
        self._name = name or split
        self._next_row_id = first_row_id
        self._group_rows = GroupRows(schema)
        self._is_unequal = row_bytes(schema) is None
        self._pending: list[pa.Table] = []
        self._pending_rows = self._pending_bytes = 0
        self._file: _OpenFile | None = None
        self._files: list[DataFile] = []

    def write(self, table: pa.Table) -> None:
        """Append rows whose columns are those of `schema`."""
        self._pending.append(table)
        self._pending_rows += table.num_rows
        self._pending_bytes += table.nbytes
        # Rows of variable width can fill a group by bytes before they do by number.
        may_fill = self._is_unequal or self._pending_rows >= self._group_rows.at(self._next_row_id)
        if may_fill and (self._pending_bytes >= BLOCK_BYTES or self._pending_rows >= BLOCK_ROWS):
            self._drain(to_end=False)

    def close(self) -> list[DataFile]:
        """Write the pending rows, upload the last file, and return all files of the split."""
        self._drain(to_end=True)
        if self._file:
            self._upload(self._file)
        return self._files

    def _drain(self, *, to_end: bool) -> None:
        """Write whole row groups of the pending rows; at the end also the rest."""
        if not self._pending_rows:
            return
        pending = pa.concat_tables(self._pending)
        ids = pa.array(np.arange(self._next_row_id, self._next_row_id + self._pending_rows, dtype=np.int64))
        stored = to_stored(pending.append_column(ROW_ID_FIELD, ids))
        begin = 0
        for groups in self._runs(stored, cut_groups(stored, to_end=to_end, first_row_id=self._next_row_id)):
            # In one chunk, because Parquet pages end where chunks do, and chunks depend on how the rows arrived.
            self._open_file().write_groups(stored.slice(begin, sum(groups)).combine_chunks(), groups)
            self._next_row_id += sum(groups)
            begin += sum(groups)
        self._pending = [pending.slice(begin)]
        self._pending_rows, self._pending_bytes = pending.num_rows - begin, self._pending[0].nbytes

    def _runs(self, stored: pa.Table, groups: Sequence[int]) -> Iterator[list[int]]:
        """Yield the groups for the open file, then for the next ones.

        A file ends before it exceeds `MAX_FILE_BYTES`. All groups of one run but the last have the same number of rows.
        """
        run: list[int] = []
        begin = 0
        for rows in groups:
            size = raw_bytes(stored.slice(begin, rows))
            begin += rows
            file = self._open_file()
            if file.raw_bytes and file.raw_bytes + size > MAX_FILE_BYTES:
                if run:
                    yield run
                    run = []
                self._upload(file)
                self._file = None
                file = self._open_file()
            elif run and (rows > run[0] or run[-1] < run[0]):
                yield run
                run = []
            file.raw_bytes += size
            run.append(rows)
        if run:
            yield run

    def _open_file(self) -> _OpenFile:
        if self._file is None:
            path = self._scratch / f"{self._name}-{len(self._files):05d}.parquet"
            self._file = _OpenFile(path, self._schema.append(ROW_ID_FIELD), self._next_row_id)
        return self._file

    def _upload(self, file: _OpenFile) -> None:
        path = file.close()
        self._files.append(file.describe(self._split))
        self._store.upload_file(path, f"{self._folder}/{path.name}")
        path.unlink()


class _OpenFile:
    """One growing Parquet file on local disk."""

    def __init__(self, path: Path, schema: pa.Schema, first_row_id: int) -> None:
        # Bytes of the groups that are written or about to be.
        self.raw_bytes = 0
        self._path = path
        self._first_row_id = first_row_id
        self._groups: list[int] = []
        # Statistics and dictionaries do not help for images, and would double the footer.
        plain = [field.name for field in schema if not is_tensor(field.type)]
        texts = [field.name for field in schema if kinds.is_string(field.type) or kinds.is_binary(field.type)]
        self._writer = pq.ParquetWriter(
            path,
            stored_schema(schema),
            compression=COMPRESSION,
            write_page_checksum=True,
            write_statistics=plain,
            use_dictionary=texts,
            # Consecutive numbers: less than a bit each, instead of eight bytes that compress to four.
            column_encoding={ROW_ID: "DELTA_BINARY_PACKED"},
        )

    def write_groups(self, stored: pa.Table, groups: Sequence[int]) -> None:
        """Write row groups of the given sizes. All are as large as the first; only the last may be smaller."""
        self._writer.write_table(stored, row_group_size=groups[0])
        self._groups += groups

    def close(self) -> Path:
        self._writer.close()
        return self._path

    def describe(self, split: str) -> DataFile:
        with self._path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size_bytes = file.seek(-8, 2) + 8
            # A Parquet file ends with its metadata, their length, and the magic bytes.
            footer_bytes = struct.unpack("<I", file.read(4))[0] + 8
            file.seek(-footer_bytes, 2)
            footer = file.read()
        return DataFile(
            path=self._path.name,
            split=split,
            first_row_id=self._first_row_id,
            row_count=sum(self._groups),
            row_groups=self._groups,
            size_bytes=size_bytes,
            sha256=digest,
            footer_bytes=footer_bytes,
            footer_sha256=sha256_hex(footer),
            raw_bytes=self.raw_bytes,
        )


# --- Reader ---

OF_ANOTHER_SIZE = "does not have the size that its manifest names"


class VersionReader:
    """Reader of the rows of one version. Thread-safe.

    For remote files, each read is one request per run of neighbouring columns and groups, all at the same time.
    `footers` and `pages` cache the most recently used footers and pages of the manifest; readers may share them.
    """

    def __init__(
        self,
        store: RangeStore,
        version: DatasetVersion,
        footers: Footers | None = None,
        *,
        pages: PageCache | None = None,
        check_there: Callable[[DatasetVersion], None] | None = None,
    ) -> None:
        """Make a reader.

        `check_there` is called when a file is missing, and raises `NotFound` if the version was deleted. Without it
        `store` must be an `ObjectStore`, which is asked instead.
        """
        self._store = store
        self._check_there = check_there or (lambda found: check_not_deleted(cast(ObjectStore, store), found))
        self.version = version
        self.files = VersionFiles(store, version, pages, check_there=self._check_there)
        self._footers = Footers() if footers is None else footers
        self._schema: pa.Schema | None = None
        self._lock = threading.Lock()
        # Bytes fetched from the files, including footers and gaps.
        self.bytes_fetched = 0

    @property
    def schema(self) -> pa.Schema:
        """The logical columns, `_row_id` last."""
        if self._schema is None:
            spellings = {column.name: column.arrow_type for column in self.version.columns}
            none_of_it = pa.PythonFile(PiecesFile([], self.files[0].size_bytes), mode="r")
            self._schema = logical_schema(_open(none_of_it, self.footer(0)).schema_arrow, spellings)
        return self._schema

    def row_groups(self, split: str) -> RowGroups:
        """Return all groups of one split as arrays, in the order of row ids.

        Raises `InvalidArgument` for an unknown split, and as `VersionFiles`.
        """
        found = self.version.split(split)
        return self.files.row_groups(found.first_row_id, found.first_row_id + found.row_count)

    def row_groups_from(self, split: str, offset: int) -> Iterator[RowGroup]:
        """Yield the groups of one split that hold its rows from `offset` on, in the order of row ids.

        Groups are made and pages read lazily, so a caller that wants some rows of a large version does not touch its
        other groups. Raises as `row_groups`.
        """
        found = self.version.split(split)
        end_row_id = found.first_row_id + found.row_count
        pages = self.files.row_groups_by_page(found.first_row_id + offset, end_row_id)
        return itertools.chain.from_iterable(groups for _, groups in pages)

    def read(self, row_group: RowGroup, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the named columns in that order (None: all but `_row_id`), each in one chunk of its logical type.

        Raises `InvalidArgument` for an unknown column, and `DataLoss` if a page is not what was written.
        """
        return self.read_many([row_group], columns)

    def read_many(self, row_groups: Sequence[RowGroup], columns: Sequence[str] | None = None) -> pa.Table:
        """Read one or more row groups in their order, as `read` does.

        Consecutive groups of one file are fetched and decoded together, which is several times faster than one by one.
        """
        schema = self.select(columns)
        tables = [to_logical(self._read_of_file(groups, schema.names), schema) for groups in _by_file(row_groups)]
        if len(tables) == 1:
            return tables[0]
        return pa.concat_tables(tables).combine_chunks() if tables else schema.empty_table()

    def select(self, columns: Sequence[str] | None) -> pa.Schema:
        """Return the schema of these columns.

        Raises `InvalidArgument` for a column that is unknown or named twice.
        """
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

    def footer(self, file_index: int) -> pq.FileMetaData:
        """Return a file's parsed footer. Raises `DataLoss` if it is not what was written."""
        file = self.files[file_index]
        key = self.version.folder, file.path
        known = self._footers.get(key)
        if known is not None:
            return known
        with self._reporting_if_gone(file):
            (data,) = self._get_ranges(file, [(file.size_bytes - file.footer_bytes, file.footer_bytes)])
        if sha256_hex(data) != file.footer_sha256:
            raise _lost(self.version, file, "does not have the footer that its manifest names")
        footer = pq.read_metadata(pa.BufferReader(b"PAR1" + bytes(data)))
        self._footers.keep(key, footer, file.footer_bytes)
        self._count(file.footer_bytes)
        return footer

    def _read_of_file(self, groups: Sequence[RowGroup], columns: Sequence[str]) -> pa.Table:
        """Read the stored columns of these groups of one file."""
        file_index = groups[0].file_index
        file = self.files[file_index]
        indices = [group.group_index for group in groups]
        footer = self.footer(file_index)
        ranges = wanted_ranges({index: footer.row_group(index) for index in indices}, columns)
        with self._reporting_if_gone(file), self._store.local_file(self._key(file)) as local:
            try:
                parquet = _open(self._fetched(file, ranges) if local is None else self._checked(file, local), footer)
                stored = parquet.read_row_groups(indices, columns=columns, use_threads=False)
            except (pa.ArrowException, OSError, EOFError) as error:
                if isinstance(error, OSError) and error.errno is not None:  # a fault of the disk, not of the content
                    raise
                raise _lost(self.version, file, "does not hold what was written") from error
        self._count(sum(length for _, length in ranges))
        if stored.num_rows != sum(group.row_count for group in groups):
            raise _lost(self.version, file, "does not hold the rows that its manifest names")
        return stored.select(columns)

    def _checked(self, file: DataFile, local: pa.NativeFile) -> pa.NativeFile:
        """Return the local file after checking its size.

        Arrow reads it directly. Calling Python for each column of each group would block other threads, such as the one
        that makes batches of the rows already read.
        """
        if local.size() != file.size_bytes:
            raise _lost(self.version, file, OF_ANOTHER_SIZE)
        return local

    def _fetched(self, file: DataFile, ranges: Ranges) -> pa.NativeFile:
        """Fetch these ranges of a remote file."""
        read = self._get_ranges(file, ranges)
        pieces = [Piece(start, data) for (start, _), data in zip(ranges, read, strict=True)]
        return pa.PythonFile(PiecesFile(pieces, file.size_bytes), mode="r")

    def _get_ranges(self, file: DataFile, ranges: Ranges) -> list[memoryview]:
        try:
            return self._store.get_ranges(self._key(file), ranges)
        except DataLoss:
            raise _lost(self.version, file, OF_ANOTHER_SIZE) from None

    @contextmanager
    def _reporting_if_gone(self, file: DataFile) -> Iterator[None]:
        try:
            yield
        except ObjectMissing:
            self._check_there(self.version)
            raise _lost(self.version, file, "is gone") from None

    def _count(self, fetched_bytes: int) -> None:
        with self._lock:
            self.bytes_fetched += fetched_bytes

    def _key(self, file: DataFile) -> str:
        return f"{self.version.folder}/{file.path}"


def _open(source: pa.NativeFile, footer: pq.FileMetaData) -> pq.ParquetFile:
    return pq.ParquetFile(source, metadata=footer, page_checksum_verification=True)


def _by_file(row_groups: Sequence[RowGroup]) -> list[list[RowGroup]]:
    """Split the groups into runs of the same file."""
    return [list(groups) for _, groups in itertools.groupby(row_groups, lambda group: group.file_index)]


def _lost(version: DatasetVersion, file: DataFile, why: str) -> DataLoss:
    return DataLoss(
        f"{file.path} of {version.name} {why}",
        reason="DAMAGED_FILE",
        metadata={"resource": version.name, "file": file.path},
    )


# --- Footers ---

# The limit for all parsed footers together.
MAX_BYTES = 256 * 1024 * 1024
# Measured: a parsed footer takes 9 to 10 times its stored bytes, 27 MiB for a file of 100 columns of doubles.
PARSED = 10


class Footers:
    """A cache of parsed footers that several readers may share. Thread-safe.

    The least recently used footers are evicted first; the newest one always stays.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[pq.FileMetaData, int]] = OrderedDict()
        self._kept_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> pq.FileMetaData | None:
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def keep(self, key: Hashable, footer: pq.FileMetaData, footer_bytes: int) -> None:
        """Cache a footer. `footer_bytes` is its size in the file."""
        with self._lock:
            if key in self._kept:  # two threads read it at the same time
                return
            self._kept[key] = footer, footer_bytes * PARSED
            self._kept_bytes += footer_bytes * PARSED
            while self._kept_bytes > self._max_bytes and len(self._kept) > 1:
                _, (_, left_bytes) = self._kept.popitem(last=False)
                self._kept_bytes -= left_bytes


# --- Pieces of a file ---

# Gaps up to this size are read along: about as many bytes as S3 sends in the time of a round trip.
MAX_GAP_BYTES = 512 * 1024
# Arrow merges its reads across gaps of this size, and then needs the bytes of the gap.
ARROW_HOLE_BYTES = 8 * 1024


@dataclass(frozen=True)
class Piece:
    """The bytes of a file from `start` on."""

    start: int
    data: memoryview


def wanted_ranges(groups: Mapping[int, pq.RowGroupMetaData], columns: Sequence[str]) -> list[tuple[int, int]]:
    """Return the (start, length) byte ranges of these columns, in file order.

    `groups` are by their numbers in the file. A small gap between two ranges, in a group or to the next group, is
    fetched, too: another request costs more than those bytes. Groups between the wanted ones are never fetched, because
    for a few groups that are far apart that would be most of the file.
    """
    joined: list[tuple[int, int]] = []
    last = 0
    places: list[int] = []
    for number, group in sorted(groups.items()):
        places = places or _places(group, columns)
        for start, end in sorted(_span(group.column(place)) for place in places):
            gap_bytes = MAX_GAP_BYTES if number - last <= 1 else ARROW_HOLE_BYTES
            if joined and start - joined[-1][1] <= gap_bytes:
                joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
            else:
                joined.append((start, end))
            last = number
    return [(start, end - start) for start, end in joined]


class PiecesFile(io.RawIOBase):
    """The file as Arrow reads it. The pieces are sorted."""

    def __init__(self, pieces: Sequence[Piece], size_bytes: int) -> None:
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
        """Return a view, so that nothing is copied."""
        index = bisect_right(self._starts, self._position) - 1
        if index < 0:
            raise EOFError("a read before the fetched columns")
        begin = self._position - self._starts[index]
        data = self._pieces[index].data[begin : None if size < 0 else begin + size]
        self._position += len(data)
        return data


def _places(group: pq.RowGroupMetaData, columns: Sequence[str]) -> list[int]:
    """Return the indices of these columns, which are the same in all groups of a file."""
    names = frozenset(columns)
    return [index for index in range(group.num_columns) if group.column(index).path_in_schema in names]


def _span(column: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """Return where a column of a row group begins and ends in its file."""
    start = column.dictionary_page_offset or column.data_page_offset
    return start, start + column.total_compressed_size


# --- Sizes of row groups ---


@dataclass(frozen=True)
class ReadBytes:
    """Memory of groups that are read together, in bytes.

    `reported` is the size that footers report. Shared texts add `expected_hidden` on average, and `may_be_hidden` at
    most.
    """

    reported: int = 0
    expected_hidden: int = 0
    may_be_hidden: int = 0
    # By file, the bytes that all its groups hide together.
    files: Mapping[int, int] = field(default_factory=dict)

    def __add__(self, other: ReadBytes) -> ReadBytes:
        return ReadBytes(
            self.reported + other.reported,
            self.expected_hidden + other.expected_hidden,
            self.may_be_hidden + other.may_be_hidden,
            {**self.files, **other.files},
        )

    @property
    def expected(self) -> int:
        """The size if the hidden bytes of a file are spread evenly over its groups."""
        return self.reported + self.expected_hidden

    @property
    def most(self) -> int:
        """The size if these groups hide the most."""
        return self.reported + min(self.may_be_hidden, sum(self.files.values()))


class GroupSizes:
    """Sizes of row groups for some columns of a version (None: all but `_row_id`).

    Raises as `VersionReader.read`.
    """

    def __init__(self, reader: VersionReader, columns: Sequence[str] | None = None) -> None:
        wanted = frozenset(reader.select(columns).names)
        self._reader = reader
        self._places = [place for place, name in enumerate(reader.schema.names) if name in wanted]
        # By file: the hidden bytes of all its groups, and of one group on average.
        self._hidden: dict[int, tuple[int, int]] = {}

    def reported_bytes(self, group: RowGroup) -> int:
        """Return the group's approximate bytes if no text occurs twice."""
        if not self._places:
            return 0
        footer = self._reader.footer(group.file_index).row_group(group.group_index)
        return sum(footer.column(place).total_uncompressed_size for place in self._places)

    def bytes_of(self, group: RowGroup) -> ReadBytes:
        """Return the group's bytes, counting shared texts once per row."""
        footer = self._reader.footer(group.file_index).row_group(group.group_index)
        reported = texts = 0
        for place in self._places:
            column = footer.column(place)
            reported += column.total_uncompressed_size
            if column.has_dictionary_page:
                texts += column.total_uncompressed_size
        if not texts:
            return ReadBytes(reported)
        # No row has more bytes than the whole dictionary.
        most = max(min(texts * group.row_count, MAX_UNEQUAL_GROUP_BYTES) - texts, 0)
        of_file, on_average = self._hidden_in(group.file_index)
        return ReadBytes(reported, min(on_average, most), most, {group.file_index: of_file})

    def _hidden_in(self, file_index: int) -> tuple[int, int]:
        """Return a file's hidden bytes: in total, and per group on average.

        They are the bytes of its values minus those that its footer reports. If the manifest does not count the values,
        `MAX_FILE_BYTES` is assumed.
        """
        if file_index not in self._hidden:
            footer = self._reader.footer(file_index)
            groups = range(footer.num_row_groups)
            total = sum(footer.row_group(index).total_byte_size for index in groups)
            # Row ids take less than they count for, and are no texts.
            place = self._reader.schema.get_field_index(ROW_ID)
            total += ROW_ID_FIELD.type.bit_width // 8 * footer.num_rows
            total -= sum(footer.row_group(index).column(place).total_uncompressed_size for index in groups)
            counted = self._reader.files[file_index].raw_bytes
            hidden = max((MAX_FILE_BYTES if counted is None else counted) - total, 0)
            self._hidden[file_index] = hidden, hidden // len(groups)
        return self._hidden[file_index]
