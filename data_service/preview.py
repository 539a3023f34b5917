"""The first rows of a committed version, to look at."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from data_service.domain.contact_sheet import contact_sheet
from shared.dataset_version import VersionReader
from shared.errors import invalid_field

DEFAULT_PREVIEW_ROWS, MAX_PREVIEW_ROWS = 10, 100
# A preview is one message, and most clients take no more than 4 MiB.
PREVIEW_BYTES = 2 * 1024 * 1024


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
    names = {column.name: column.value_names for column in reader.version.columns}
    return Preview(sink.getvalue().to_pybytes(), contact_sheet(tables, names))


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
