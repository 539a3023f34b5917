"""Divides a version into parts, one for each task.

The parts depend on the version and the new columns alone. A part's files depend on the part, so the cluster must not
influence it: otherwise the same transform on more machines would give other digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from shared.dataset_version import RowGroup, RowGroups, VersionReader
from shared.dataset_version.manifest import ROW_ID, Split, row_bytes
from shared.dataset_version.pages import FilePage, Ints

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
    """Consecutive row groups of one split, as one part of a pass.

    `number` counts from 0 in the order of row ids. `first_row_ids` are the first row ids of its results, by split;
    empty until they are known.
    """

    number: int
    split: str
    groups: Sequence[RowGroup]
    first_row_ids: Mapping[str, int] = field(default_factory=dict)

    @property
    def first_row_id(self) -> int:
        return self.groups[0].first_row_id

    @property
    def row_count(self) -> int:
        last = self.groups[-1]
        return last.first_row_id + last.row_count - self.first_row_id

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
    return list(parts_of(reader, output, splits, min_bytes))


def parts_of(
    reader: VersionReader, output: pa.Schema, splits: Sequence[str] = (), min_bytes: int = 0
) -> Iterator[PartitionRange]:
    """Yields the parts of `plan_parts`, each when it is asked for: the first ones cost the same in any version."""
    wanted = [split for split in reader.version.manifest.splits if not splits or split.name in splits]
    widths = _WorkWidths(reader, output)
    max_bytes = min(MAX_PART_BYTES, max(min_bytes or MIN_PART_BYTES, widths.total_bytes(wanted) // WANTED_PARTS))
    number = 0
    for split in wanted:
        for groups in _packed(widths.groups_of(split), max_bytes):
            yield PartitionRange(number, split.name, groups)
            number += 1


def _packed(pages: Iterable[tuple[RowGroups, Ints]], max_bytes: int) -> Iterator[RowGroups]:
    """Yields runs of groups of at most `max_bytes`, of one group at least.

    The groups come page by page, with the bytes of each group.
    """
    left, left_bytes = RowGroups.joined([]), np.zeros(0, np.int64)
    for page, page_bytes in pages:
        groups, group_bytes = RowGroups.joined([left, page]), np.concatenate([left_bytes, page_bytes])
        ends, begin, before = np.cumsum(group_bytes), 0, 0
        while True:
            end = max(begin + 1, int(np.searchsorted(ends, before + max_bytes, side="right")))
            if end >= len(groups):  # groups of the next page may fit
                break
            yield groups[begin:end]
            begin, before = end, int(ends[end - 1])
        left, left_bytes = groups[begin:], group_bytes[begin:]
    if len(left):
        yield left


class _WorkWidths:
    """The bytes per row during the work: the wider of input and output.

    If the types do not determine the width, the file's size does: row sizes may vary much within a version, and less
    within a file.
    """

    def __init__(self, reader: VersionReader, output: pa.Schema) -> None:
        source = pa.schema([field for field in reader.schema if field.name != ROW_ID])
        widths = [row_bytes(schema) for schema in (source, output)]
        self._reader = reader
        self._fixed = max(1, *(width or 0 for width in widths))
        self._is_fixed = None not in widths

    def groups_of(self, split: Split) -> Iterator[tuple[RowGroups, Ints]]:
        """Yields the row groups of a split, page by page, with the bytes of each."""
        end_row_id = split.first_row_id + split.row_count
        for page, groups in self._reader.files.row_groups_by_page(split.first_row_id, end_row_id):
            group_counts = np.diff(groups.file_starts, append=len(groups))
            widths = self._of(page)[groups.file_indices - page.first_file]
            yield groups, groups.row_counts * np.repeat(widths, group_counts)

    def total_bytes(self, splits: Sequence[Split]) -> int:
        """Returns the bytes of these splits, or a smaller number that is enough for parts of `MAX_PART_BYTES`."""
        rows = sum(split.row_count for split in splits)
        if self._is_fixed:
            return rows * self._fixed
        # Each file's width is rounded down, by less than a byte for each of its rows.
        stored = sum(self._reader.version.manifest.bytes_of_split(split.name) for split in splits)
        at_least = max(rows * self._fixed, COMPRESSION * stored - rows)
        if at_least >= MAX_PART_BYTES * WANTED_PARTS:
            return at_least
        return sum(int(group_bytes.sum()) for split in splits for _, group_bytes in self.groups_of(split))

    def _of(self, page: FilePage) -> Ints:
        """Returns the bytes per row of each file of the page."""
        if self._is_fixed:
            return np.full(len(page), self._fixed)
        return np.maximum(COMPRESSION * page.size_bytes // np.maximum(page.row_counts, 1), self._fixed)
