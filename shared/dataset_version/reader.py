"""Reads a committed version row group by row group, and nothing that is not what was committed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import pyarrow as pa
import pyarrow.parquet as pq

from shared.dataset_version.column_names import repeated
from shared.dataset_version.columns import ROW_ID, logical_schema, to_logical
from shared.dataset_version.footers import Footers
from shared.dataset_version.manifest import DataFile, sha256_hex
from shared.dataset_version.pieces import Piece, PiecesFile, Ranges, wanted_ranges
from shared.dataset_version.version import DatasetVersion, check_not_deleted
from shared.errors import DataLoss, invalid_field
from shared.storage import ObjectMissing, ObjectStore

OF_ANOTHER_SIZE = "does not have the size that its manifest names"


@dataclass(frozen=True)
class RowGroup:
    """The rows `first_row_id` to `first_row_id + row_count`; `file_index` counts in the manifest's files."""

    file_index: int
    group_index: int
    first_row_id: int
    row_count: int


class RangeStore(Protocol):
    """What reading needs of a store; as the methods of `ObjectStore` of these names."""

    def get_ranges(self, key: str, ranges: Ranges) -> list[memoryview]: ...

    def local_file(self, key: str) -> AbstractContextManager[pa.NativeFile | None]: ...


class VersionReader:
    """Thread-safe. Where files are elsewhere, each read is one request for each run of neighbouring columns and groups,
    all at the same time; the footers last used are kept, in `footers`, which readers may share."""

    def __init__(
        self,
        store: RangeStore,
        version: DatasetVersion,
        footers: Footers | None = None,
        *,
        check_there: Callable[[DatasetVersion], None] | None = None,
    ) -> None:
        """`check_there` is called when a file is missing, and raises `NotFound` where the version was deleted. Without
        it `store` must be an `ObjectStore`, which is then asked."""
        self._store = store
        self._check_there = check_there or (lambda found: check_not_deleted(cast(ObjectStore, store), found))
        self.version = version
        self._files = version.manifest.files
        self._footers = Footers() if footers is None else footers
        self._schema: pa.Schema | None = None
        self._lock = threading.Lock()
        # Of the files, footers and what came along included.
        self.bytes_fetched = 0

    @property
    def schema(self) -> pa.Schema:
        """The logical columns, `_row_id` last."""
        if self._schema is None:
            spellings = {column.name: column.arrow_type for column in self.version.columns}
            none_of_it = pa.PythonFile(PiecesFile([], self._files[0].size_bytes), mode="r")
            self._schema = logical_schema(_open(none_of_it, self.footer(0)).schema_arrow, spellings)
        return self._schema

    def row_groups(self, split: str) -> list[RowGroup]:
        """All of one split, in the order of row ids. Raises `InvalidArgument` for a split that is not there."""
        return list(self.row_groups_from(split, 0))

    def row_groups_from(self, split: str, offset: int) -> Iterator[RowGroup]:
        """Those of one split that hold its rows from `offset` on, in the order of row ids, each made as it is asked
        for: who wants the first rows of a large version meets neither its other groups nor files before these rows.
        Raises as `row_groups`."""
        first_row_id = self.version.split(split).first_row_id + offset
        files = ((index, file) for index, file in enumerate(self._files) if file.split == split)
        return _groups_from(files, first_row_id)

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

    def footer(self, file_index: int) -> pq.FileMetaData:
        """Raises `DataLoss` where it is not what was written."""
        file = self._files[file_index]
        key = self.version.folder, file.path
        known = self._footers.get(key)
        if known is not None:
            return known
        with self._told_if_gone(file):
            (data,) = self._get_ranges(file, [(file.size_bytes - file.footer_bytes, file.footer_bytes)])
        if sha256_hex(data) != file.footer_sha256:
            raise _lost(self.version, file, "does not have the footer that its manifest names")
        footer = pq.read_metadata(pa.BufferReader(b"PAR1" + bytes(data)))
        self._footers.keep(key, footer, file.footer_bytes)
        self._count(file.footer_bytes)
        return footer

    def _read_of_file(self, groups: Sequence[RowGroup], columns: Sequence[str]) -> pa.Table:
        """The stored columns of these groups of one file."""
        file_index = groups[0].file_index
        file = self._files[file_index]
        indices = [group.group_index for group in groups]
        footer = self.footer(file_index)
        ranges = wanted_ranges({one: footer.row_group(one) for one in indices}, columns)
        with self._told_if_gone(file), self._store.local_file(self._key(file)) as local:
            try:
                parquet = _open(self._fetched(file, ranges) if local is None else self._checked(file, local), footer)
                stored = parquet.read_row_groups(indices, columns=columns, use_threads=False)
            except (pa.ArrowException, OSError, EOFError) as error:
                if isinstance(error, OSError) and error.errno is not None:  # of the disk's, and not of the file's
                    raise
                raise _lost(self.version, file, "does not hold what was written") from error
        self._count(sum(length for _, length in ranges))
        if stored.num_rows != sum(group.row_count for group in groups):
            raise _lost(self.version, file, "does not hold the rows that its manifest names")
        return stored.select(columns)

    def _checked(self, file: DataFile, local: pa.NativeFile) -> pa.NativeFile:
        """Arrow reads a local file by itself: asked through Python for each column of each group it would keep others
        waiting, such as who makes batches of what was read."""
        if local.size() != file.size_bytes:
            raise _lost(self.version, file, OF_ANOTHER_SIZE)
        return local

    def _fetched(self, file: DataFile, ranges: Ranges) -> pa.NativeFile:
        """Of a file that is elsewhere, these ranges."""
        read = self._get_ranges(file, ranges)
        pieces = [Piece(start, data) for (start, _), data in zip(ranges, read, strict=True)]
        return pa.PythonFile(PiecesFile(pieces, file.size_bytes), mode="r")

    def _get_ranges(self, file: DataFile, ranges: Ranges) -> list[memoryview]:
        try:
            return self._store.get_ranges(self._key(file), ranges)
        except DataLoss:
            raise _lost(self.version, file, OF_ANOTHER_SIZE) from None

    @contextmanager
    def _told_if_gone(self, file: DataFile) -> Iterator[None]:
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


def _groups_from(files: Iterable[tuple[int, DataFile]], first_row_id: int) -> Iterator[RowGroup]:
    for file_index, file in files:
        if file.first_row_id + file.row_count <= first_row_id:
            continue
        first = file.first_row_id
        for group_index, rows in enumerate(file.row_groups):
            if first + rows > first_row_id:
                yield RowGroup(file_index, group_index, first, rows)
            first += rows


def _open(source: pa.NativeFile, footer: pq.FileMetaData) -> pq.ParquetFile:
    return pq.ParquetFile(source, metadata=footer, page_checksum_verification=True)


def _by_file(row_groups: Sequence[RowGroup]) -> list[list[RowGroup]]:
    """The groups cut where one is of another file than the one before it."""
    return [list(groups) for _, groups in itertools.groupby(row_groups, lambda group: group.file_index)]


def _lost(version: DatasetVersion, file: DataFile, why: str) -> DataLoss:
    return DataLoss(
        f"{file.path} of {version.name} {why}",
        reason="DAMAGED_FILE",
        metadata={"resource": version.name, "file": file.path},
    )
