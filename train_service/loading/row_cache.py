"""Row groups in memory: read once, ahead of time where it is told, checked, and kept while there is room."""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from shared.dataset_version import ROW_ID, RowGroup, VersionReader
from shared.errors import DataLoss
from shared.transforms import batch_of
from train_service.domain.order import Ints
from train_service.domain.spec import CLASSIFICATION
from train_service.loading.labels import labels_of
from train_service.loading.rows import Array, RowBuffers, Rows, bytes_of_row
from train_service.store_retry import retry_on_outage, store_call

# Threads that read ahead, and have as many processors: each asks a store far away for several ranges at once.
READERS = min(4, os.cpu_count() or 1)
# What is on its way holds so much memory at most; what would be more is read when it is asked for.
AHEAD_BYTES = 256 * 1024 * 1024


class RowCache:
    """Reads rows of one split by their position in it. Least recently used row groups leave first.

    Not thread-safe: each loader has its own. It has threads of its own that read ahead.
    """

    def __init__(
        self,
        reader: VersionReader,
        split: str,
        columns: Sequence[str],
        label_column: str,
        num_classes: int,
        capacity: int,
        task: str = CLASSIFICATION,
        *,
        allow_non_finite: bool = False,
    ) -> None:
        """`columns` are those that the job's transform reads; `num_classes` is K for regression; `capacity` in
        bytes. Without a `label_column` rows have no labels: (rows, 0)."""
        self._reader = reader
        self._groups = retry_on_outage(lambda: reader.row_groups(split), "the row groups")
        self._columns = list(columns)
        self._label_column = label_column
        self._num_classes = num_classes
        self._task = task
        self._allow_non_finite = allow_non_finite
        self._capacity = capacity
        self._held: OrderedDict[int, Rows] = OrderedDict()
        self._in_flight_bytes = 0
        # Each with its place among those that are read together.
        self._coming: dict[int, tuple[Future[list[Rows]], int]] = {}
        self._readers: ThreadPoolExecutor | None = None
        counts = [group.row_count for group in self._groups]
        self._ends = np.cumsum(np.asarray(counts, np.int64))
        self.row_groups = counts
        self.row_bytes = bytes_of_row(reader.version, split, columns)
        self.bytes_read = 0
        # Called whenever rows are asked for, as a sign that whoever does so gets on.
        self.touched: Callable[[], None] = lambda: None

    def read_ahead(self, positions: Ints) -> None:
        """Begins to read the row groups that the rows at `positions` need and that are not held, as many as there is
        room for. Each reader has its share of them in one piece: groups are cheap to read together."""
        numbers = self._capacity_for(number for number in self._needed(positions) if number not in self._held)
        if not numbers:
            return
        if self._readers is None:
            self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="row groups")
        for share in np.array_split(numbers, min(READERS, len(numbers))):
            reading = self._readers.submit(self._read, [self._groups[number] for number in share])
            self._coming.update({number: (reading, place) for place, number in enumerate(share.tolist())})

    def rows(self, positions: Ints, into: RowBuffers | None = None) -> Rows:
        """The rows at `positions` (from 0 at the split's beginning), in that order; where they must be copied, their
        tensors lie in `into` until it is used again.

        Raises `DataLoss` when the stored bytes carry other row ids than their place in the version says, and
        `InvalidArgument` naming the row for a label that is missing, outside 0..num_classes-1 or, for regression, not
        finite.
        """
        groups = self._group_of(positions)
        # Stretches of rows that follow each other in a row group: each is copied at once.
        begins = np.flatnonzero((np.diff(positions, prepend=-2) != 1) | (np.diff(groups, prepend=-1) != 0))
        parts = []
        for begin, end in itertools.pairwise([*begins.tolist(), len(positions)]):
            self.touched()
            number = int(groups[begin])
            first = int(positions[begin] - self._ends[number]) + self._groups[number].row_count
            parts.append(self._group(number).slice(first, first + end - begin))
        # No rows have columns all the same: those of any row group, of one that is held where there is one.
        return Rows.joined(parts or [self._group(next(iter(self._held), 0)).slice(0, 0)], into)

    def _needed(self, positions: Ints) -> list[int]:
        """The row groups of these positions, of which many follow each other, in their order."""
        groups = self._group_of(positions)
        return sorted(set(groups[np.flatnonzero(np.diff(groups, prepend=-1))].tolist()))

    def _capacity_for(self, numbers: Iterable[int]) -> list[int]:
        """Those that are not on their way, up to the first that would be too much."""
        rows, chosen = sum(self.row_groups[number] for number in self._coming), []
        for number in numbers:
            if number in self._coming:
                continue
            rows += self.row_groups[number]
            if rows * self.row_bytes > AHEAD_BYTES:
                break
            chosen.append(number)
        return chosen

    def _group_of(self, positions: Ints) -> Ints:
        found: Ints = np.searchsorted(self._ends, positions, side="right")
        return found

    def _group(self, number: int) -> Rows:
        held = self._held.get(number)
        if held is not None:
            self._held.move_to_end(number)
            return held
        if number in self._coming:
            reading, place = self._coming[number]
            try:
                with store_call():
                    read = reading.result()[place]
                del self._coming[number]
            except BaseException:  # whoever asks again for one of those that were read together has it read anew
                self._coming = {other: one for other, one in self._coming.items() if one[0] is not reading}
                raise
        else:
            (read,) = self._read([self._groups[number]])
        self._held[number] = read
        self._in_flight_bytes += read.size_bytes
        self.bytes_read += read.size_bytes
        while self._in_flight_bytes > self._capacity and len(self._held) > 1:
            self._in_flight_bytes -= self._held.popitem(last=False)[1].size_bytes
        return read

    def _read(self, groups: Sequence[RowGroup]) -> list[Rows]:
        """Runs in any thread. Those of one file, which follow each other, are read together."""
        by_file = itertools.groupby(groups, lambda group: group.file_index)
        return [rows for _, of_file in by_file for rows in self._read_of_file(list(of_file))]

    def _read_of_file(self, groups: Sequence[RowGroup]) -> list[Rows]:
        labelled = [self._label_column] if self._label_column else []
        names = list(dict.fromkeys([*self._columns, *labelled, ROW_ID]))
        table = retry_on_outage(lambda: self._reader.read_many(groups, names), "row groups")
        row_ids: Ints = table.column(ROW_ID).to_numpy()
        ends = np.cumsum([group.row_count for group in groups]).tolist()
        for group, end in zip(groups, ends, strict=True):
            planned = np.arange(group.first_row_id, group.first_row_id + group.row_count)
            if not np.array_equal(row_ids[end - group.row_count : end], planned):
                raise DataLoss(
                    f"the rows stored at {group.first_row_id} and after carry other row ids", reason="WRONG_ROW_IDS"
                )
        labels = self._labels(table, row_ids)
        columns = batch_of(table.select(self._columns))
        tensors = {name: values for name, values in columns.items() if isinstance(values, np.ndarray)}
        scalars = {name: values for name, values in columns.items() if isinstance(values, pa.Array)}
        rows = Rows(tensors, pa.RecordBatch.from_pydict(scalars) if scalars else None, labels, row_ids)
        return [rows.slice(end - group.row_count, end) for group, end in zip(groups, ends, strict=True)]

    def _labels(self, table: pa.Table, row_ids: Ints) -> Array:
        if not self._label_column:
            return np.empty((len(row_ids), 0), np.int64)
        return labels_of(
            table,
            self._label_column,
            row_ids,
            self._num_classes,
            self._task,
            allow_non_finite=self._allow_non_finite,
        )
