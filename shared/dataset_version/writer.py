"""Writes the rows of one split as Parquet files.

The bytes depend only on the rows, however the rows arrive, and so do the ends of row groups.

A row group is the unit of reading, checking, caching and transforming, so its size bounds the memory of all of these.
Groups are small enough that even a small version divides over many lanes, and large enough to be worth a request each:
they grow with the rows before them (docs/decisions/0004).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

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
    is_tensor,
    row_bytes,
    sha256_hex,
    stored_schema,
    to_stored,
)
from shared.storage import ObjectStore

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
