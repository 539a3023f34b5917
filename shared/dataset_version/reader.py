"""Reads a committed version row group by row group, and nothing that is not what was committed."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from shared.dataset_version.columns import ROW_ID, logical_schema, to_logical
from shared.dataset_version.manifest import DataFile, sha256_hex
from shared.dataset_version.version import DatasetVersion
from shared.errors import DataLoss, invalid_field
from shared.storage import ObjectMissing, ObjectStore


@dataclass(frozen=True)
class RowGroup:
    """The rows `first_row_id` to `first_row_id + row_count`; `file_index` counts in the manifest's files."""

    file_index: int
    group_index: int
    first_row_id: int
    row_count: int


class VersionReader:
    """Thread-safe. Each read is one request for each run of neighbouring columns; footers are read once and kept."""

    def __init__(self, store: ObjectStore, version: DatasetVersion) -> None:
        self._store = store
        self.version = version
        self._files = version.manifest.files
        self._footers: dict[int, pq.FileMetaData] = {}
        self._schema: pa.Schema | None = None
        self._lock = threading.Lock()

    @property
    def schema(self) -> pa.Schema:
        """The logical columns, `_row_id` last."""
        if self._schema is None:
            self._schema = logical_schema(self._open(0, b"", 0).schema_arrow)
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
        schema = self.select(columns)
        file = self._files[row_group.file_index]
        try:
            footer = self._footer(row_group.file_index)
            start, data = self._fetch(file, footer.row_group(row_group.group_index), schema.names)
            parquet = self._open(row_group.file_index, data, start)
            stored = parquet.read_row_group(row_group.group_index, columns=schema.names, use_threads=False)
        except (pa.ArrowException, OSError, EOFError) as error:
            raise _lost(self.version, file, "does not hold what was written") from error
        if stored.num_rows != row_group.row_count:
            raise _lost(self.version, file, "does not hold the rows that its manifest names")
        return to_logical(stored.select(schema.names), schema)

    def select(self, columns: Sequence[str] | None) -> pa.Schema:
        """The schema of these columns. Raises `InvalidArgument` for one that is unknown or named twice."""
        schema = self.schema
        if columns is None:
            return pa.schema([field for field in schema if field.name != ROW_ID])
        for index, name in enumerate(columns):
            if name not in schema.names:
                raise invalid_field(f"columns[{index}]", name, f"use some of {', '.join(schema.names)}")
            if name in columns[:index]:
                raise invalid_field(f"columns[{index}]", name, "name each column once")
        return pa.schema([schema.field(name) for name in columns])

    def _footer(self, file_index: int) -> pq.FileMetaData:
        with self._lock:
            known = self._footers.get(file_index)
        if known is not None:
            return known
        file = self._files[file_index]
        data = self._get_range(file, file.size_bytes - file.footer_bytes, file.footer_bytes)
        if sha256_hex(data) != file.footer_sha256:
            raise _lost(self.version, file, "does not have the footer that its manifest names")
        footer = pq.read_metadata(pa.BufferReader(b"PAR1" + data))
        with self._lock:
            self._footers[file_index] = footer
        return footer

    def _fetch(self, file: DataFile, group: pq.RowGroupMetaData, columns: Sequence[str]) -> tuple[int, bytes]:
        """The bytes from the first of these columns to the last, and where they start in the file.

        Columns between two wanted ones come too: one request costs less than their bytes save.
        """
        spans = []
        for index in range(group.num_columns):
            column = group.column(index)
            if column.path_in_schema in columns:
                start = column.dictionary_page_offset or column.data_page_offset
                spans.append((start, start + column.total_compressed_size))
        first, end = min(span[0] for span in spans), max(span[1] for span in spans)
        return first, self._get_range(file, first, end - first)

    def _get_range(self, file: DataFile, start: int, length: int) -> bytes:
        key = f"{self.version.folder}/{file.path}"
        try:
            return self._store.get_range(key, start, length)
        except ObjectMissing:
            raise _lost(self.version, file, "is gone") from None
        except DataLoss:
            raise _lost(self.version, file, "does not have the size that its manifest names") from None

    def _open(self, file_index: int, data: bytes, start: int) -> pq.ParquetFile:
        source = pa.PythonFile(_Window(data, start, self._files[file_index].size_bytes), mode="r")
        return pq.ParquetFile(source, metadata=self._footer(file_index), page_checksum_verification=True)


class _Window(io.RawIOBase):
    """A file of which only the bytes from `start` on were fetched."""

    def __init__(self, data: bytes, start: int, size_bytes: int) -> None:
        self._data = memoryview(data)
        self._start = start
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

    def read(self, size: int = -1) -> bytes:
        begin = self._position - self._start
        if begin < 0:
            raise EOFError("a read before the fetched columns")
        piece = bytes(self._data[begin : begin + size])
        self._position += len(piece)
        return piece


def _lost(version: DatasetVersion, file: DataFile, why: str) -> DataLoss:
    return DataLoss(
        f"{file.path} of {version.name} {why}",
        reason="DAMAGED_FILE",
        metadata={"resource": version.name, "file": file.path},
    )
