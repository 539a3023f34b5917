"""The rows of a part, a batch at a time, each in the split where it goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_service.domain.split_rules import Divider
from data_service.transforming.plan import Part
from shared.dataset_version import RowGroup, VersionReader
from shared.dataset_version.columns import row_bytes
from shared.dataset_version.reader import GroupSizes
from shared.dataset_version.version import DatasetVersion
from shared.dataset_version.writer import DEFAULT_GROUP_ROWS
from shared.errors import InvalidArgument
from shared.settings import StoreSettings
from shared.storage import open_store
from shared.transforms.batch import Batch, batch_of
from shared.transforms.pipeline import Pipeline
from shared.transforms.schema import RowError
from shared.transforms.steps.decoding import DecodeImage, side_by_side

# Rows are worked on so many bytes at a time, before or after: what stays within a processor's cache.
BATCH_BYTES = 2 * 1024 * 1024
MIN_BATCH_ROWS, MAX_BATCH_ROWS = 16, 16_384
# Of rows without a fixed width.
DEFAULT_BATCH_ROWS = 1024
# So many bytes of them are read and decoded at once, unless one row group alone has more.
READ_BYTES = 4 * 1024 * 1024
# A dictionary hides how much its texts make, but no group makes more than its share; so few hold a batch of small rows.
UNEQUAL_GROUPS = DEFAULT_BATCH_ROWS // DEFAULT_GROUP_ROWS
# Decoded images may be large until they are resized: few at a time, and fewer where they claim too many pixels.
DECODED_BATCH_ROWS = 16
# A batch that fails sooner is searched for the row at fault.
SEARCH_WITHIN_S = 1.0

T = TypeVar("T")


def batch_rows(pipeline: Pipeline, given: pa.Schema, made: pa.Schema) -> int:
    """How many rows to work on at a time."""
    if any(isinstance(step, DecodeImage) for step in pipeline.steps):
        return DECODED_BATCH_ROWS
    widths = [row_bytes(given), row_bytes(made)]
    if None in widths:
        return DEFAULT_BATCH_ROWS
    widest = max(1, *(width for width in widths if width is not None))
    return min(MAX_BATCH_ROWS, max(MIN_BATCH_ROWS, BATCH_BYTES // widest))


@dataclass(frozen=True)
class SplitRows:
    """Rows of one batch that go to one split, in the order of their ids in the source."""

    split: str
    table: pa.Table
    row_ids: NDArray[np.int64]

    def worked(self, work: Callable[[Batch], T]) -> T:
        """What `work`, steps that work row by row, makes of the rows; raises as steps do, but names row ids."""
        started = time.monotonic()
        try:
            return work(batch_of(self.table))
        except RowError as error:
            row_id = str(self.row_ids[error.row])
            raise _told(error.path, f"row {row_id}: {error.problem}", {"row_id": row_id}) from error
        except InvalidArgument as error:
            # A custom function says only that it failed. What is slow to fail would be slow to search.
            searched = time.monotonic() - started < SEARCH_WITHIN_S
            rows = self._smallest_refused(work) if searched else self
            raise rows._named(error) from error

    def few_pixels(self, images: Sequence[str]) -> Iterator[SplitRows]:
        """The same rows, as many at a time as may be decoded side by side; `images` are the columns that hold some."""
        if not images:
            yield self
            return
        for begin, end in side_by_side(map(self.table.column, images), len(self.row_ids)):
            yield self._slice(begin, end)

    def _smallest_refused(self, work: Callable[[Batch], object]) -> SplitRows:
        """Of rows that `work` refuses, the first row by whose half of a half of … it is refused still."""
        half = len(self.row_ids) // 2
        if not half:
            return self
        for part in (self._slice(0, half), self._slice(half, len(self.row_ids))):
            try:
                work(batch_of(part.table))
            except InvalidArgument:
                return part._smallest_refused(work)
        return self  # only all together

    def _slice(self, begin: int, end: int) -> SplitRows:
        return SplitRows(self.split, self.table.slice(begin, end - begin), self.row_ids[begin:end])

    def _named(self, error: InvalidArgument) -> InvalidArgument:
        first, last = self.row_ids[0], self.row_ids[-1]
        where = f"row {first}" if first == last else f"rows {first} to {last}"
        field = error.metadata.get("field", "")
        why = error.message.removeprefix(f"{field}: ")
        return _told(field, f"{where}: {why}", {"row_id": str(first)})


def _told(field: str, why: str, metadata: dict[str, str]) -> InvalidArgument:
    return InvalidArgument(
        f"{field}: {why}", reason="BAD_ROW", metadata={"field": field, **metadata}, fields=[(field, why)]
    )


@dataclass(frozen=True)
class RowSource:
    """Reads parts of a version, at most `batch_rows` rows at a time; travels to Ray's workers.

    Without a divider rows stay in their split. `images` are columns whose images will be decoded: of them come as many
    at a time as may be decoded side by side.
    """

    settings: StoreSettings
    version: DatasetVersion
    divider: Divider | None
    batch_rows: int
    images: tuple[str, ...] = ()

    def divided(self, part: Part, columns: Sequence[str]) -> Iterator[SplitRows]:
        """The named columns. Raises `InvalidArgument` for a row without a split, `DataLoss` for a damaged source."""
        images = [name for name in self.images if name in columns]
        for rows in self._divided(part, columns):
            yield from rows.few_pixels(images)

    def _divided(self, part: Part, columns: Sequence[str]) -> Iterator[SplitRows]:
        keys = self.divider.columns if self.divider else []
        wanted = [*columns, *(name for name in keys if name not in columns)]
        for table, row_ids in self._batches(part, wanted):
            if self.divider is None:
                yield SplitRows(part.split, table, row_ids)
                continue
            assigned = self.divider.assign(table, row_ids)
            mine = table.select(columns)
            for index, split in enumerate(assigned.splits):
                chosen = assigned.choice == index
                if chosen.all():
                    yield SplitRows(split, mine, row_ids)
                elif chosen.any():
                    yield SplitRows(split, mine.filter(pa.array(chosen)).combine_chunks(), row_ids[chosen])

    def _batches(self, part: Part, columns: Sequence[str]) -> Iterator[tuple[pa.Table, NDArray[np.int64]]]:
        reader = VersionReader(open_store(self.settings), self.version)
        for groups in self._together(reader, part.groups, columns):
            row_count = sum(group.row_count for group in groups)
            # A table of no columns has no rows either.
            table = reader.read_many(groups, columns) if columns else None
            for begin in range(0, row_count, self.batch_rows):
                rows = min(self.batch_rows, row_count - begin)
                row_ids = np.arange(begin, begin + rows, dtype=np.int64) + groups[0].first_row_id
                yield pa.table({}) if table is None else table.slice(begin, rows), row_ids

    def _together(
        self, reader: VersionReader, groups: Sequence[RowGroup], columns: Sequence[str]
    ) -> Iterator[list[RowGroup]]:
        """As many groups as are read at a time, at least one: a read costs the same few milliseconds, however little it
        brings, so it brings several batches where rows are wider after the work than before."""
        most_groups = UNEQUAL_GROUPS if row_bytes(reader.select(columns)) is None else MAX_BATCH_ROWS
        sizes = GroupSizes(reader, columns)
        packed: list[RowGroup] = []
        size_bytes = 0
        for group in groups:
            group_bytes = sizes.told(group)
            size_bytes += group_bytes
            if packed and (len(packed) == most_groups or size_bytes > READ_BYTES):
                yield packed
                packed, size_bytes = [], group_bytes
            packed.append(group)
        if packed:
            yield packed
