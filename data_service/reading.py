"""Rows of a committed version as Arrow IPC, a row group in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from data_service.domain import contact_sheet
from data_service.domain.contact_sheet import Tile
from shared.dataset_version import VersionReader
from shared.errors import invalid_field

MESSAGE_BYTES = 1024 * 1024
DEFAULT_PREVIEW_ROWS, MAX_PREVIEW_ROWS = 10, 100
# A preview is one message, and most clients take no more than 4 MiB.
PREVIEW_BYTES = 2 * 1024 * 1024
LABEL = "label"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which rows and columns: an empty split means all, no columns all but `_row_id`, a limit of 0 none."""

    split: str
    columns: Sequence[str]
    offset: int
    limit: int


def read_stream(reader: VersionReader, selection: Selection) -> Iterator[bytes]:
    """One Arrow IPC stream in pieces of at most `MESSAGE_BYTES`, in the order of row ids.

    Raises `InvalidArgument` for an unknown split or column or a negative range, and `DataLoss`.
    """
    for field, value in (("offset", selection.offset), ("limit", selection.limit)):
        if value < 0:
            raise invalid_field(field, value, "use 0 or more")
    splits = [selection.split] if selection.split else [split.name for split in reader.version.manifest.splits]
    groups = [group for split in splits for group in reader.row_groups(split)]
    schema = reader.select(selection.columns or None)
    sink = _Pieces()
    with pa.ipc.new_stream(sink, schema) as stream:
        skip = selection.offset
        left = selection.limit or sum(group.row_count for group in groups)
        for group in groups:
            if left <= 0:
                break
            if skip >= group.row_count:
                skip -= group.row_count
                continue
            table = reader.read(group, schema.names).slice(skip, left)
            skip = 0
            left -= table.num_rows
            for batch in _batches(table):
                stream.write_batch(batch)
                yield from sink.take(MESSAGE_BYTES)
    yield from sink.take(1)


@dataclass(frozen=True)
class Preview:
    """`arrow_ipc` has a column `split` in front; `contact_sheet_png` is empty where no column is an image."""

    arrow_ipc: bytes
    contact_sheet_png: bytes


def preview(reader: VersionReader, rows_per_split: int) -> Preview:
    """The first rows of each split, fewer where they would not fit one message."""
    if not 0 <= rows_per_split <= MAX_PREVIEW_ROWS:
        raise invalid_field(
            "rows_per_split", rows_per_split, f"use 0 (for {DEFAULT_PREVIEW_ROWS}) to {MAX_PREVIEW_ROWS}"
        )
    splits = [split.name for split in reader.version.manifest.splits]
    tables = {
        split: _first_rows(reader, split, rows_per_split or DEFAULT_PREVIEW_ROWS, PREVIEW_BYTES // len(splits))
        for split in splits
    }
    labelled = [
        table.add_column(0, "split", pa.array([split] * table.num_rows, pa.string())) for split, table in tables.items()
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, labelled[0].schema) as stream:
        for table in labelled:
            stream.write_table(table)
    return Preview(sink.getvalue().to_pybytes(), _contact_sheet(tables))


def _first_rows(reader: VersionReader, split: str, rows: int, most_bytes: int) -> pa.Table:
    pieces: list[pa.Table] = []
    for group in reader.row_groups(split):
        pieces.append(reader.read(group).slice(0, rows - sum(piece.num_rows for piece in pieces)))
        if sum(piece.num_rows for piece in pieces) >= rows:
            break
    table = pa.concat_tables(pieces)
    while table.num_rows > 1 and table.nbytes > most_bytes:
        table = table.slice(0, table.num_rows // 2)
    return table


def _contact_sheet(tables: dict[str, pa.Table]) -> bytes:
    schema = next(iter(tables.values())).schema
    for field in schema:
        if isinstance(field.type, pa.FixedShapeTensorType) and contact_sheet.is_drawable(
            str(field.type.value_type), field.type.shape
        ):
            return contact_sheet.draw([(split, _tiles(table, field.name)) for split, table in tables.items()])
    return b""


def _tiles(table: pa.Table, column: str) -> list[Tile]:
    images = table.column(column).combine_chunks().to_numpy_ndarray()
    captions = [""] * table.num_rows
    if LABEL in table.schema.names:
        captions = [str(value) for value in table.column(LABEL).to_pylist()]
    return [Tile(image, caption) for image, caption in zip(images, captions, strict=True)]


def _batches(table: pa.Table) -> Iterator[pa.RecordBatch]:
    rows = max(1, table.num_rows * MESSAGE_BYTES // max(table.nbytes, 1))
    yield from table.to_batches(max_chunksize=rows)


class _Pieces:
    """A sink for Arrow that hands out what was written so far."""

    closed = False

    def __init__(self) -> None:
        self._pending = bytearray()

    def write(self, data: bytes) -> int:
        self._pending += memoryview(data)
        return len(data)

    def take(self, least: int) -> Iterator[bytes]:
        """Pieces of `MESSAGE_BYTES` while `least` bytes are pending; the last may be shorter."""
        while len(self._pending) >= least:
            yield bytes(self._pending[:MESSAGE_BYTES])
            del self._pending[:MESSAGE_BYTES]

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Bytes are taken after the stream has ended."""
