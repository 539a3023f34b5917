"""The first rows of a committed version, to look at."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from data_service.domain.contact_sheet import contact_sheet
from shared.dataset_version import VersionReader
from shared.errors import invalid_field

DEFAULT_PREVIEW_ROWS, MAX_PREVIEW_ROWS = 10, 100
# A preview is one message, and most clients take no more than 4 MiB: rows, sheet and report share it.
ARROW_BYTES = 1024 * 1024 + 256 * 1024
SHEET_BYTES = 1024 * 1024
# Arrow's mark that a stream ends.
END_BYTES = 8
# Of the rows that are looked at, whether or not they are given as rows: a sheet shows images that are too large for it.
READ_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class Preview:
    """`arrow_ipc` has a column `split` in front; `contact_sheet_png` is empty where no column is an image.

    They have at most `ARROW_BYTES` and `SHEET_BYTES`. Of columns whose bare schema is larger the first are given.
    """

    arrow_ipc: bytes
    contact_sheet_png: bytes


def preview(reader: VersionReader, rows_per_split: int) -> Preview:
    """The first rows of each split, fewer where they would not fit one message: none where the first alone does not.

    The contact sheet shows images of rows that `arrow_ipc` has no room for. Rows are whole, never cut. About
    `READ_BYTES` of rows are in memory at once, and one row group of each split beyond.
    """
    if not 0 <= rows_per_split <= MAX_PREVIEW_ROWS:
        raise invalid_field(
            "rows_per_split", rows_per_split, f"use 0 (for {DEFAULT_PREVIEW_ROWS}) to {MAX_PREVIEW_ROWS}"
        )
    splits = [split.name for split in reader.version.manifest.splits]
    tables = {
        split: _first_rows(reader, split, rows_per_split or DEFAULT_PREVIEW_ROWS, READ_BYTES // len(splits))
        for split in splits
    }
    names = {column.name: column.value_names for column in reader.version.columns}
    return Preview(_arrow_ipc(tables), _sheet(tables, names))


def _first_rows(reader: VersionReader, split: str, rows: int, most_bytes: int) -> pa.Table:
    """In one chunk; at least one row where the split has one."""
    pieces: list[pa.Table] = []
    missing, left_bytes = rows, most_bytes
    for group in reader.row_groups_from(split, 0):
        wanted = reader.read(group).slice(0, missing)
        piece = _fitting(wanted, left_bytes, at_least=0 if pieces else 1)
        if piece.num_rows:
            # A copy, which lets go of the rest of its group.
            pieces.append(piece.take(pa.array(range(piece.num_rows))))
        missing -= piece.num_rows
        left_bytes -= piece.nbytes
        if not missing or piece.num_rows < wanted.num_rows:
            break
    return pa.concat_tables(pieces).combine_chunks() if pieces else reader.select(None).empty_table()


def _fitting(table: pa.Table, most_bytes: int, *, at_least: int) -> pa.Table:
    """The first rows of at most `most_bytes`."""
    fitting = bisect_right(range(1, table.num_rows + 1), most_bytes, key=lambda rows: table.slice(0, rows).nbytes)
    return table.slice(0, max(fitting, min(at_least, table.num_rows)))


def _arrow_ipc(tables: Mapping[str, pa.Table]) -> bytes:
    labelled = [
        table.add_column(0, "split", pa.array([split] * table.num_rows, pa.string())) for split, table in tables.items()
    ]
    schema = _fitting_schema(labelled[0].schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        room = (ARROW_BYTES - END_BYTES - schema.serialize().size) // len(labelled)
        for table in labelled:
            for batch in table.select(range(len(schema))).to_batches():
                fitting = _fitting_message(batch, room)
                # One of no rows takes as many bytes for each column as one of some.
                if fitting.num_rows:
                    stream.write_batch(fitting)
    return bytes(sink.getvalue().to_pybytes())


def _fitting_schema(schema: pa.Schema) -> pa.Schema:
    """Of its first columns, where all are too many; then half of the room is for rows."""

    def size_bytes(columns: int) -> int:
        return int(pa.schema([schema.field(place) for place in range(columns)]).serialize().size)

    if size_bytes(len(schema)) <= ARROW_BYTES - END_BYTES:
        return schema
    fitting = bisect_right(range(1, len(schema) + 1), ARROW_BYTES // 2, key=size_bytes)
    return pa.schema([schema.field(place) for place in range(fitting)])


def _fitting_message(batch: pa.RecordBatch, most_bytes: int) -> pa.RecordBatch:
    """The first rows that make a message of at most `most_bytes`, or none."""

    def size_bytes(rows: int) -> int:
        return int(pa.ipc.get_record_batch_size(batch.slice(0, rows)))

    return batch.slice(0, bisect_right(range(1, batch.num_rows + 1), most_bytes, key=size_bytes))


def _sheet(tables: Mapping[str, pa.Table], value_names: Mapping[str, Sequence[str]]) -> bytes:
    """Of fewer rows where it would be too large."""
    while len(png := contact_sheet(tables, value_names)) > SHEET_BYTES:
        most = max(table.num_rows for table in tables.values())
        if most <= 1:
            return b""
        # By the sheet's size, less a tenth: images are not of one size.
        keep = max(1, min(most - 1, most * SHEET_BYTES * 9 // (10 * len(png))))
        tables = {split: table.slice(0, keep) for split, table in tables.items()}
    return png
