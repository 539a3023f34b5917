"""Writes the rows of one split as Parquet files, the same bytes for the same rows however they arrive."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as kinds

from shared.dataset_version.columns import ROW_ID_FIELD, is_tensor, row_bytes, stored_schema, to_stored
from shared.dataset_version.manifest import DataFile, sha256_hex
from shared.storage import ObjectStore

COMPRESSION = "lz4"
MAX_FILE_BYTES = 64 * 1024 * 1024
# A row group is the unit of reading: small enough that even a small version divides over many lanes, large enough that
# a request per group is worth its round trip.
TARGET_GROUP_BYTES = 256 * 1024
MAX_GROUP_BYTES = 32 * 1024 * 1024
MIN_GROUP_ROWS, MAX_GROUP_ROWS = 256, 4096
# Of rows without a fixed width.
DEFAULT_GROUP_ROWS = 256
# Row groups are written some at once, which takes two thirds of the time.
BLOCK_BYTES = 4 * 1024 * 1024
BLOCK_ROWS = 16 * MAX_GROUP_ROWS


def group_rows(schema: pa.Schema) -> int:
    """How many rows of these columns make a row group: a power of two, and a function of the types alone."""
    width = row_bytes(schema)
    if width is None:
        return DEFAULT_GROUP_ROWS
    target = TARGET_GROUP_BYTES // max(width, 1)
    rows = min(max(target, MIN_GROUP_ROWS), MAX_GROUP_ROWS, max(MAX_GROUP_BYTES // max(width, 1), 1))
    return 1 << (rows.bit_length() - 1)


class SplitWriter:
    """Takes one split's rows in the order of their ids. Holds a few row groups, and one file on local disk.

    `schema` has the logical columns without `_row_id`, which is added. Files land in the store below `folder`, named
    `{name}-00000.parquet`, `…-00001.parquet`, …; `name` is the split's where none is given.
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
        self._group_rows = group_rows(schema)
        self._pending: list[pa.Table] = []
        self._pending_rows = self._pending_bytes = 0
        self._file: _OpenFile | None = None
        self._files: list[DataFile] = []

    def write(self, table: pa.Table) -> None:
        """Appends rows whose columns are those of `schema`."""
        self._pending.append(table)
        self._pending_rows += table.num_rows
        self._pending_bytes += table.nbytes
        if self._pending_rows >= self._group_rows and (
            self._pending_bytes >= BLOCK_BYTES or self._pending_rows >= BLOCK_ROWS
        ):
            self._drain(self._pending_rows - self._pending_rows % self._group_rows)

    def close(self) -> list[DataFile]:
        """Writes what is pending and uploads the last file. Returns all files of the split."""
        self._drain(self._pending_rows)
        if self._file:
            self._upload(self._file)
        return self._files

    def _drain(self, rows: int) -> None:
        """Writes the first `rows` of what is pending: whole row groups, and at the end what is left."""
        if not rows:
            return
        pending = pa.concat_tables(self._pending)
        self._pending = [pending.slice(rows)]
        self._pending_rows, self._pending_bytes = pending.num_rows - rows, self._pending[0].nbytes
        ids = pa.array(np.arange(self._next_row_id, self._next_row_id + rows, dtype=np.int64))
        stored = to_stored(pending.slice(0, rows).append_column(ROW_ID_FIELD, ids)).combine_chunks()
        begin = 0
        for count in self._runs(stored):
            self._open_file().write_groups(stored.slice(begin, count), self._group_rows)
            self._next_row_id += count
            begin += count

    def _runs(self, stored: pa.Table) -> Iterator[int]:
        """How many rows go into the open file, the next one, …: a file ends before it grows beyond `MAX_FILE_BYTES`."""
        run = 0
        for begin in range(0, stored.num_rows, self._group_rows):
            group = stored.slice(begin, self._group_rows)
            size = _raw_bytes(group)
            file = self._open_file()
            if file.raw_bytes and file.raw_bytes + size > MAX_FILE_BYTES:
                if run:
                    yield run
                    run = 0
                self._upload(file)
                self._file = None
                file = self._open_file()
            file.raw_bytes += size
            run += group.num_rows
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


def _raw_bytes(stored: pa.Table) -> int:
    """Of the values, as the rows alone determine it: how they were cut into buffers has no say in it."""
    total = 0
    for column in stored.columns:
        try:
            total += column.type.bit_width * len(column) // 8
        except ValueError:  # of no fixed width
            total += 4 * len(column) + (pc.sum(pc.binary_length(column)).as_py() or 0)
    return total


class _OpenFile:
    """One Parquet file on local disk while it grows."""

    def __init__(self, path: Path, schema: pa.Schema, first_row_id: int) -> None:
        # Of the groups that are written or about to be.
        self.raw_bytes = 0
        self._path = path
        self._first_row_id = first_row_id
        self._groups: list[int] = []
        # Neither statistics nor a dictionary help where each value is an image, and they would double its header.
        plain = [field.name for field in schema if not is_tensor(field.type)]
        texts = [field.name for field in schema if kinds.is_string(field.type) or kinds.is_binary(field.type)]
        self._writer = pq.ParquetWriter(
            path,
            stored_schema(schema),
            compression=COMPRESSION,
            write_page_checksum=True,
            write_statistics=plain,
            use_dictionary=texts,
        )

    def write_groups(self, stored: pa.Table, group_rows: int) -> None:
        """Row groups of `group_rows` rows; the last may be smaller."""
        self._writer.write_table(stored, row_group_size=group_rows)
        self._groups += [min(group_rows, stored.num_rows - begin) for begin in range(0, stored.num_rows, group_rows)]

    def close(self) -> Path:
        self._writer.close()
        return self._path

    def describe(self, split: str) -> DataFile:
        with self._path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size_bytes = file.seek(-8, 2) + 8
            # A Parquet file ends with its metadata, their length, and the magic.
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
        )
