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


def plan_parts(reader: VersionReader, output: pa.Schema, splits: Sequence[str] = (), min_bytes: int = 0) -> list[Part]:
    """`output` has the columns that the work makes; `splits` empty: all. `min_bytes` are those that make a part worth
    its start, 0 those of a transform."""
    widths = _work_bytes_per_row(reader, output)
    manifest = reader.version.manifest
    wanted = [split for split in manifest.splits if not splits or split.name in splits]
    total_bytes = sum(
        file.row_count * width
        for file, width in zip(manifest.files, widths, strict=True)
        if not splits or file.split in splits
    )
    max_bytes = min(MAX_PART_BYTES, max(min_bytes or MIN_PART_BYTES, total_bytes // WANTED_PARTS))
    parts: list[Part] = []
    for split in wanted:
        for groups in _packed(reader.row_groups(split.name), widths, max_bytes):
            parts.append(Part(len(parts), split.name, groups))
    return parts


def _packed(groups: Sequence[RowGroup], widths: Sequence[int], max_bytes: int) -> Iterator[tuple[RowGroup, ...]]:
    packed: list[RowGroup] = []
    size_bytes = 0
    for group in groups:
        group_bytes = group.row_count * widths[group.file_index]
        if packed and size_bytes + group_bytes > max_bytes:
            yield tuple(packed)
            packed, size_bytes = [], 0
        packed.append(group)
        size_bytes += group_bytes
    if packed:
        yield tuple(packed)


def _work_bytes_per_row(reader: VersionReader, output: pa.Schema) -> list[int]:
    """Of each file's rows, the wider of what comes in and what goes out; where the types do not tell, by the file's
    size: within a version rows may be of very unequal sizes, and a file bounds by how much."""
    source = pa.schema([field for field in reader.schema if field.name != ROW_ID])
    fixed = [row_bytes(schema) for schema in (source, output)]
    stored = [COMPRESSION * file.size_bytes // max(file.row_count, 1) for file in reader.version.manifest.files]
    return [max(1, *(one if width is None else width for width in fixed)) for one in stored]
