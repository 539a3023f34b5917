"""Divides a version into parts, one for each task.

The parts depend on the version and the new columns alone. A part's files depend on the part, so the cluster must not
influence it: otherwise the same transform on more machines would give other digests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from shared.dataset_version import RowGroup, VersionReader
from shared.dataset_version.manifest import ROW_ID, row_bytes

# The uncompressed bytes of a part's rows, before or after the work: enough to be worth a task, few enough to have
# several in a machine's memory.
MAX_PART_BYTES = 32 * 1024 * 1024
MIN_PART_BYTES = 8 * 1024 * 1024
# A version too small for this many parts of the maximum size has smaller parts, so that a cluster can share the work.
WANTED_PARTS = 16
# The approximate compression factor of LZ4 for texts and numbers.
COMPRESSION = 3


@dataclass(frozen=True)
class PartitionRange:
    """Consecutive row groups of one split; a `Part`.

    `number` counts from 0 in the order of row ids. `first_row_ids` are the first row ids of its results, by split;
    empty until they are known.
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

    @property
    def where(self) -> str:
        return f"rows {self.first_row_id} to {self.first_row_id + self.row_count - 1} of split {self.split!r}"


def plan_parts(
    reader: VersionReader, output: pa.Schema, splits: Sequence[str] = (), min_bytes: int = 0
) -> list[PartitionRange]:
    """Divides a version into parts.

    `output` has the columns of the work's results; `splits` empty: all. `min_bytes` is the minimum size of a part, 0
    for that of a transform.
    """
    widths = _work_bytes_per_row(reader, output)
    manifest = reader.version.manifest
    wanted = [split for split in manifest.splits if not splits or split.name in splits]
    total_bytes = sum(
        file.row_count * width
        for file, width in zip(manifest.files, widths, strict=True)
        if not splits or file.split in splits
    )
    max_bytes = min(MAX_PART_BYTES, max(min_bytes or MIN_PART_BYTES, total_bytes // WANTED_PARTS))
    parts: list[PartitionRange] = []
    for split in wanted:
        for groups in _packed(reader.row_groups(split.name), widths, max_bytes):
            parts.append(PartitionRange(len(parts), split.name, groups))
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
    """Returns the bytes per row for each file, the wider of input and output.

    If the types do not determine the width, the file's size does: row sizes may vary much within a version, and less
    within a file.
    """
    source = pa.schema([field for field in reader.schema if field.name != ROW_ID])
    fixed = [row_bytes(schema) for schema in (source, output)]
    stored = [COMPRESSION * file.size_bytes // max(file.row_count, 1) for file in reader.version.manifest.files]
    return [max(1, *(one if width is None else width for width in fixed)) for one in stored]
