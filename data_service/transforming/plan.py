"""Cuts a version into parts, each the work of one task: a function of the version and the new columns alone.

What a part's files hold follows from the part, so the cluster must have no say in it: else the same transform on more
machines would give other digests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from shared.dataset_version import RowGroup, VersionReader
from shared.dataset_version.columns import ROW_ID, row_bytes

# Of a part's rows before or after the work, uncompressed: enough to make a task worth its start, little enough to
# keep several in a machine's memory.
MAX_PART_BYTES = 32 * 1024 * 1024
MIN_PART_BYTES = 8 * 1024 * 1024
# A version too small for that many parts of the greatest size has smaller ones, so that a cluster can share the work.
WANTED_PARTS = 16
# LZ4 makes texts and numbers about so much smaller.
COMPRESSION = 3


@dataclass(frozen=True)
class Part:
    """Row groups of one split that follow each other. `number` counts from 0 in the order of row ids.

    `first_row_ids` are those of the rows that it makes, by their split; empty until that is known.
    """

    number: int
    split: str
    groups: tuple[RowGroup, ...]
    first_row_ids: Mapping[str, int] = field(default_factory=dict)

    @property
    def first_row_id(self) -> int:
        return self.groups[0].first_row_id

    @property
    def row_count(self) -> int:
        return sum(group.row_count for group in self.groups)


def plan_parts(reader: VersionReader, output: pa.Schema) -> list[Part]:
    """`output` has the columns that the work makes."""
    width = _work_bytes_per_row(reader, output)
    rows_per_part = max(1, _part_bytes(width * reader.version.manifest.row_count) // width)
    parts: list[Part] = []
    for split in reader.version.manifest.splits:
        for groups in _packed(reader.row_groups(split.name), rows_per_part):
            parts.append(Part(len(parts), split.name, groups))
    return parts


def _packed(groups: Sequence[RowGroup], rows_per_part: int) -> Iterator[tuple[RowGroup, ...]]:
    packed: list[RowGroup] = []
    rows = 0
    for group in groups:
        if packed and rows + group.row_count > rows_per_part:
            yield tuple(packed)
            packed, rows = [], 0
        packed.append(group)
        rows += group.row_count
    if packed:
        yield tuple(packed)


def _part_bytes(total_bytes: int) -> int:
    return min(MAX_PART_BYTES, max(MIN_PART_BYTES, total_bytes // WANTED_PARTS))


def _work_bytes_per_row(reader: VersionReader, output: pa.Schema) -> int:
    """The wider of what comes in and what goes out; where the types do not tell, by the files' sizes."""
    manifest = reader.version.manifest
    source = pa.schema([field for field in reader.schema if field.name != ROW_ID])
    stored = COMPRESSION * manifest.size_bytes // max(manifest.row_count, 1)
    return max(1, *(row_bytes(schema) or stored for schema in (source, output)))
