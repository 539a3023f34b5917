"""The seekable loader: the batches of one rank from any step on, read and prepared ahead by a thread.

The rows of a batch are a pure function of (seed, epoch, step, rank, world size), so a resumed run has no state of the
loader to restore.

`Loader.batches` starts a thread. For each step it asks `domain.order` for the positions of this rank's rows. Seed and
epoch permute the row groups, deal them out to lanes, and shuffle each lane within windows. The thread reads the rows in
windows, applies the transform (`loading.preprocessing`) and puts the batch into a queue of limited length. Several
small batches are prepared in one go. An error in the thread is raised to the consumer, which closes the generator to
end the thread.

`Windows` keeps the current shuffle window of each of the rank's lanes open, and reads the next. `LoaderFactory` builds
a loader from a specification. `RowCache` has the rows in memory.

Row groups are cached: read once, ahead of time if requested, checked, and kept while there is room. A label that the
loss cannot take is refused, with its row, before anything is learnt from it.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
from numpy.typing import NDArray

from shared.dataset_version import ROW_ID, DatasetVersion, RowGroup, VersionReader
from shared.dataset_version.parquet import Footers
from shared.errors import DataLoss, InvalidArgument
from shared.storage import ObjectStore
from shared.transforms import RowKeys, batch_of
from shared.transforms.records import bytes_of_input
from train_service.domain.order import (
    BatchPlan,
    Ints,
    blocks_of,
    epoch_order,
    grouped_by_length,
    rank_positions,
    step_bounds,
    steps_per_epoch,
)
from train_service.domain.spec import CLASSIFICATION, TrainingSpec
from train_service.loading.preprocessing import Array, Preprocessing, RowBuffers, Rows, bytes_of_row
from train_service.store_retry import retry_on_outage, store_call, waiting_for

# --- Loader ---

# Batches read ahead: for large batches, and the maximum for small ones.
BATCHES_AHEAD, SMALL_BATCHES_AHEAD = 4, 16
SMALL_BATCHES_BYTES = 16 * 1024 * 1024
# This many small batches are prepared in one go, as long as they fit a processor's cache.
TOGETHER, TOGETHER_BYTES = 4, 2 * 1024 * 1024
# Waking a thread costs as much as making a small batch. A consumer that finds no batch ready first sleeps this long:
# several small batches are ready by then, and a large one takes longer anyway.
NAP_S = 5e-4


@dataclass(frozen=True)
class Batch:
    """One rank's share of one step.

    `inputs` float32 (rows, *shape), or records (rows,) of several inputs; `labels` int64 (rows,) or float32 for a
    regression, `row_ids` int64 (rows,). If the device computes the last transform steps, `inputs` are uint8 images.
    `step` counts over all epochs from 0; `step_rows` is the number of rows over all ranks.
    """

    step: int
    epoch: int
    inputs: Array
    labels: Ints
    row_ids: Ints
    step_rows: int


class Loader:
    """Batches of the train split, for any number of passes.

    Not shared between threads, because its cache is not.
    """

    def __init__(
        self, cache: RowCache, preprocessing: Preprocessing, plan: BatchPlan, *, for_device: bool = False
    ) -> None:
        """Prepare the loader. With `for_device` the inputs are `Preprocessing.for_device` of the rows."""
        self._cache = cache
        self._preprocessing = preprocessing
        self._plan = plan
        self._prepare = preprocessing.for_device if for_device else preprocessing
        self._blocks = blocks_of(cache.row_groups, plan.lanes)
        self._rows = cache.row_count
        self.steps_per_epoch = steps_per_epoch(self._rows, plan.global_batch)
        self.total_steps = self.steps_per_epoch * plan.epochs
        self.lanes = plan.lanes

    def batches(self, first_step: int) -> Generator[Batch, None, None]:
        """Yield the batches from `first_step` to the end of the run. Errors of reading are raised here.

        The thread that reads ahead ends with the generator: close it unless the last batch was taken.
        """
        ahead: queue.SimpleQueue[Batch | BaseException | None] = queue.SimpleQueue()
        capacity = threading.Semaphore(self._batches_ahead())
        closed = False

        def read() -> None:
            try:
                for batch in self._read(first_step):
                    capacity.acquire()
                    if closed:
                        return
                    ahead.put(batch)
                ahead.put(None)
            except BaseException as error:  # raised again in the consumer's thread
                ahead.put(error)

        thread = threading.Thread(target=read, name="loader", daemon=True)
        thread.start()

        def taken() -> Batch | BaseException | None:
            if ahead.empty():
                time.sleep(NAP_S)
            with waiting_for(thread):
                return ahead.get()

        try:
            while (item := taken()) is not None:
                if isinstance(item, BaseException):
                    raise item
                capacity.release()
                yield item
        finally:
            closed = True
            capacity.release()
            thread.join()

    def _batch_bytes(self) -> int:
        rows = -(-self._plan.global_batch // self._plan.world_size)
        return max(rows * bytes_of_input(self._preprocessing.output), 1)

    def _batches_ahead(self) -> int:
        return min(max(SMALL_BATCHES_BYTES // self._batch_bytes(), BATCHES_AHEAD), SMALL_BATCHES_AHEAD)

    def _batches_together(self) -> int:
        return min(max(TOGETHER_BYTES // self._batch_bytes(), 1), TOGETHER) if self._preprocessing.is_quick else 1

    def _read(self, first_step: int) -> Iterator[Batch]:
        plan, together = self._plan, self._batches_together()
        # New memory for each epoch's windows would be faulted in page by page, while a GPU waits for the first rows.
        buffers: RowBuffers = {}
        for epoch in range(first_step // self.steps_per_epoch, plan.epochs):
            windows = Windows(self._cache, self._blocks, plan, epoch, buffers=buffers)
            begin = max(first_step - epoch * self.steps_per_epoch, 0)
            for step in range(begin, self.steps_per_epoch, together):
                yield from self._prepared(windows, epoch, range(step, min(step + together, self.steps_per_epoch)))

    def _prepared(self, windows: Windows, epoch: int, steps: range) -> Iterator[Batch]:
        """Yield the batches of consecutive steps of an epoch, their rows read together."""
        plan = self._plan
        bounds = [step_bounds(self._rows, self.steps_per_epoch, step) for step in steps]
        rows = windows.rows(bounds[0][0], bounds[-1][1])
        counts = [len(rank_positions(*bound, plan.lanes, plan.rank, plan.world_size)) for bound in bounds]
        ends = np.cumsum(counts).tolist()
        parts = [rows.slice(end - count, end) for count, end in zip(counts, ends, strict=True)]
        for step, (begin, end), part, inputs in zip(
            steps, bounds, parts, self._inputs(epoch, rows, parts), strict=True
        ):
            yield Batch(
                step=epoch * self.steps_per_epoch + step,
                epoch=epoch,
                inputs=inputs,
                labels=part.labels,
                row_ids=part.row_ids,
                step_rows=end - begin,
            )

    def _inputs(self, epoch: int, rows: Rows, parts: Sequence[Rows]) -> Iterator[Array]:
        """Yield the model's inputs of each part of `rows`, prepared together. A row's result does not depend on the
        others."""

        def prepare(some: Rows) -> Array:
            return self._prepare(some, RowKeys(self._plan.seed, epoch, some.row_ids))

        try:
            whole = prepare(rows)
        except InvalidArgument:
            if len(parts) == 1:
                raise
            # The parts before the bad row are good batches.
            yield from map(prepare, parts)
        else:
            yield from np.split(whole, np.cumsum([len(part.row_ids) for part in parts])[:-1])


# --- Windows ---


class Windows:
    """The current shuffle window of each lane of a rank.

    Positions only grow within an epoch, so the lanes of a rank move from window to window together.
    """

    def __init__(
        self,
        cache: RowCache,
        blocks: Ints,
        plan: BatchPlan,
        epoch: int,
        *,
        read_ahead: bool = True,
        buffers: RowBuffers | None = None,
    ) -> None:
        """Prepare an epoch's windows.

        `read_ahead`: the next window is read while one is open. `buffers` are those of the epoch before, whose windows
        are not used any more.
        """
        self._cache = cache
        self._read_ahead = read_ahead
        self._plan = plan
        self._order = epoch_order(blocks, plan.lanes, plan.seed, epoch, plan.window_rows)
        self._lanes = range(plan.rank, plan.lanes, plan.world_size)
        self._number = -1
        # The number of the last computed window, and its rows.
        self._unshuffled: tuple[int, Ints] = (-1, np.empty(0, np.int64))
        # State of the open window: the rows, lane after lane; the rank's positions; the index of the row of each
        # position.
        self._rows: Rows | None = None
        self._buffers: RowBuffers = {} if buffers is None else buffers
        self._positions = np.empty(0, np.int64)
        self._places = np.empty(0, np.int64)

    def rows(self, begin: int, end: int) -> Rows:
        """Return the rank's rows at the positions [begin, end) of the epoch."""
        span = self._plan.lanes * self._order.window_rows
        parts = []
        for number in range(begin // span, -(-end // span)):
            opened = self._open(number)
            first, last = np.searchsorted(self._positions, (begin, end)).tolist()
            parts.append(opened.take(self._places[first:last]))
        return Rows.joined(parts)

    def _open(self, number: int) -> Rows:
        if self._rows is None or number != self._number:
            self._rows = None  # free the buffers, which the next window reuses
            unshuffled = self._rows_of(number)
            if self._read_ahead:
                self._cache.read_ahead(unshuffled)
                self._cache.read_ahead(self._rows_of(number + 1))
            self._rows = self._cache.rows(unshuffled, self._buffers)
            self._shuffle(number, self._rows)
            self._number = number
        return self._rows

    def _rows_of(self, number: int) -> Ints:
        """Return the rows of a window, lane after lane, before they are shuffled."""
        if self._unshuffled[0] != number:
            self._unshuffled = (
                number,
                np.concatenate([self._order.unshuffled_window(lane, number) for lane in self._lanes]),
            )
        return self._unshuffled[1]

    def _shuffle(self, number: int, rows: Rows) -> None:
        plan, order = self._plan, self._order
        lengths = lengths_of(rows, plan.length_column) if plan.length_column else None
        chunk, chunks = order.chunks(number, -(-plan.global_batch // plan.lanes)) if plan.length_column else (1, None)
        span = plan.lanes * order.window_rows
        end = min((number + 1) * span, order.row_count)
        self._positions = rank_positions(number * span, end, plan.lanes, plan.rank, plan.world_size)
        self._places = np.empty_like(self._positions)
        base = 0
        # Position p belongs to lane p mod `plan.lanes`.
        for place, lane in enumerate(self._lanes):
            shuffle = order.shuffle(lane, number)
            if lengths is not None and chunks is not None:
                of_lane = lengths[base : base + len(shuffle)]
                shuffle = grouped_by_length(shuffle, of_lane, chunk, chunks)
            self._places[place :: len(self._lanes)] = base + shuffle
            base += len(shuffle)


def lengths_of(rows: Rows, column: str) -> Ints:
    """Return the length of each row: bytes of a text, numbers of a tensor that are not 0, or the number itself."""
    if column in rows.tensors:
        values = rows.tensors[column]
        return np.asarray(np.count_nonzero(values.reshape(len(values), -1), axis=1), np.int64)
    assert rows.scalars is not None
    scalars = rows.scalars.column(column)
    if not kinds.is_integer(scalars.type):
        scalars = pc.binary_length(scalars)
    return np.asarray(scalars.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False), np.int64)


# --- Loader factory ---

# Large rows need room for each lane's current row group and the next: 24 lanes, 20 MiB each, twice.
CACHE_BYTES = 1024 * 1024 * 1024
# Each lane reads its own file. Without room for all footers, every window would parse them again. The footers of 24
# lanes take 640 MiB if rows have a hundred columns of doubles, and 20 MiB if they are small images.
FOOTER_BYTES = 768 * 1024 * 1024


class LoaderFactory:
    """Builds the loader and the caches of a run's dataset version for one of its ranks."""

    def __init__(self, store: ObjectStore, version: DatasetVersion, spec: TrainingSpec) -> None:
        """Prepare the reading. Raises `InvalidArgument` if the transform does not fit the version."""
        self.preprocessing = Preprocessing(spec, version.columns)
        self._spec = spec
        self._store = store
        self._version = version

    def labels(self, note_progress: Callable[[], None] = lambda: None) -> RowCache:
        """Return the labels of the train split, without any other column."""
        return self.cache(self._spec.train_split, note_progress, columns=[])

    def cache(
        self, split: str, note_progress: Callable[[], None] = lambda: None, *, columns: Sequence[str] | None = None
    ) -> RowCache:
        """Return a cache of the split's rows.

        `note_progress` is called whenever rows are requested. `columns` defaults to those that the transform reads.
        """
        spec, columns = self._spec, self.preprocessing.columns if columns is None else columns
        reader = VersionReader(self._store, self._version, Footers(FOOTER_BYTES))
        cache = RowCache(
            reader,
            split,
            columns,
            spec.label_column,
            spec.model.num_classes,
            CACHE_BYTES,
            spec.task,
            allow_non_finite=spec.allow_non_finite,
        )
        cache.note_progress = note_progress
        return cache

    def plan(self, rank: int, world_size: int) -> BatchPlan:
        spec = self._spec
        return BatchPlan(
            spec.seed,
            spec.lanes,
            spec.global_batch_size,
            spec.epochs,
            rank,
            world_size,
            spec.window_rows,
            spec.group_by_length,
        )

    def loader(
        self, rank: int, world_size: int, note_progress: Callable[[], None] = lambda: None, *, for_device: bool = False
    ) -> Loader:
        """Return a loader of the train split, read by threads of this process."""
        cache = self.cache(self._spec.train_split, note_progress)
        return Loader(cache, self.preprocessing, self.plan(rank, world_size), for_device=for_device)


# --- Row cache ---

# Threads that read ahead, at most one per processor. Each requests several ranges of a remote store at once.
READERS = min(4, os.cpu_count() or 1)
# Limit on memory of row groups being read ahead. Further groups are read when they are requested.
AHEAD_BYTES = 256 * 1024 * 1024


class RowCache:
    """Cache of the rows of one split, read by position. The least recently used row groups leave first.

    Not thread-safe: each loader has its own. It uses its own threads to read ahead.
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
        """Prepare the cache.

        `columns` are those that the job's transform reads; `num_classes` is K for regression; `capacity` in bytes.
        Without a `label_column` rows have no labels: (rows, 0).
        """
        self._reader = reader
        self._groups = retry_on_outage(lambda: reader.row_groups(split), "the row groups")
        self._columns = list(columns)
        self._label_column = label_column
        self._num_classes = num_classes
        self._task = task
        self._allow_non_finite = allow_non_finite
        self._capacity = capacity
        self._held: OrderedDict[int, Rows] = OrderedDict()
        self._cached_bytes = 0
        # Row groups being read: the future of their share, and their index in it.
        self._coming: dict[int, tuple[Future[list[Rows]], int]] = {}
        self._readers: ThreadPoolExecutor | None = None
        self._ends = self._groups.ends
        # The rows of each row group: (G,).
        self.row_groups = self._groups.row_counts
        self.row_count = self._groups.row_count
        self.row_bytes = bytes_of_row(reader.version, split, columns)
        self.bytes_read = 0
        # Called whenever rows are requested, as a sign of progress.
        self.note_progress: Callable[[], None] = lambda: None

    def read_ahead(self, positions: Ints) -> None:
        """Start reading the row groups of `positions` that are not cached, as many as fit.

        Each thread reads one contiguous share, because adjacent groups are cheap to read together.
        """
        numbers = self._capacity_for(number for number in self._needed(positions) if number not in self._held)
        if not numbers:
            return
        if self._readers is None:
            self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="row groups")
        for share in np.array_split(numbers, min(READERS, len(numbers))):
            reading = self._readers.submit(self._read, [self._groups[number] for number in share])
            self._coming.update({number: (reading, place) for place, number in enumerate(share.tolist())})

    def rows(self, positions: Ints, into: RowBuffers | None = None) -> Rows:
        """Return the rows at `positions` (from 0 at the split's beginning), in that order.

        If rows must be copied, their tensors use the memory of `into` until it is used again.

        Raises `DataLoss` if the stored row ids do not match their positions in the version, and `InvalidArgument` that
        names the row of a label that is missing, outside 0..num_classes-1 or, for regression, not finite.
        """
        groups = self._group_of(positions)
        # Runs of consecutive rows within one row group; each is copied at once.
        begins = np.flatnonzero((np.diff(positions, prepend=-2) != 1) | (np.diff(groups, prepend=-1) != 0))
        parts = []
        for begin, end in itertools.pairwise([*begins.tolist(), len(positions)]):
            self.note_progress()
            number = int(groups[begin])
            first = int(positions[begin] - self._ends[number] + self.row_groups[number])
            parts.append(self._group(number).slice(first, first + end - begin))
        # Even no rows have columns: take them from a cached row group if there is one.
        return Rows.joined(parts or [self._group(next(iter(self._held), 0)).slice(0, 0)], into)

    def _needed(self, positions: Ints) -> list[int]:
        """Return the row groups of these positions, sorted. Many positions share a group."""
        groups = self._group_of(positions)
        return sorted(set(groups[np.flatnonzero(np.diff(groups, prepend=-1))].tolist()))

    def _capacity_for(self, numbers: Iterable[int]) -> list[int]:
        """Return the groups that are not being read, up to the first that would exceed `AHEAD_BYTES`."""
        rows, chosen = sum(int(self.row_groups[number]) for number in self._coming), []
        for number in numbers:
            if number in self._coming:
                continue
            rows += int(self.row_groups[number])
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
            except BaseException:  # the groups of the failed read are read again on request
                self._coming = {other: one for other, one in self._coming.items() if one[0] is not reading}
                raise
        else:
            (read,) = self._read([self._groups[number]])
        self._held[number] = read
        self._cached_bytes += read.size_bytes
        self.bytes_read += read.size_bytes
        while self._cached_bytes > self._capacity and len(self._held) > 1:
            self._cached_bytes -= self._held.popitem(last=False)[1].size_bytes
        return read

    def _read(self, groups: Sequence[RowGroup]) -> list[Rows]:
        """Read row groups, in any thread. Adjacent groups of one file are read together."""
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


# --- Labels ---


def labels_of(
    table: pa.Table, column: str, row_ids: Ints, num_classes: int, task: str, *, allow_non_finite: bool = False
) -> NDArray[Any]:
    """Return classes, int64 (rows,), or for regression numbers, float32 (rows,) or (rows, K) of a tensor column.

    Raises `InvalidArgument` that names the first row whose label is missing, no class or, unless the job allows such,
    not finite.
    """
    _refuse_nulls(table, column, row_ids)
    if task == CLASSIFICATION:
        return _classes(table.column(column).to_numpy(), column, row_ids, num_classes)
    read = batch_of(table.select([column]))[column]
    values = read if isinstance(read, np.ndarray) else read.to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):  # values beyond float32 are reported as not finite
        numbers = values.astype(np.float32)
    if allow_non_finite:
        return numbers
    finite = np.isfinite(numbers).reshape(len(numbers), -1).all(1)
    if not finite.all():
        row = int(np.flatnonzero(~finite)[0])
        raise InvalidArgument(
            f"row {int(row_ids[row])} has the label {values[row]} in column {column!r}; labels must be finite float32 "
            "numbers, so filter or mend such rows in TransformVersion, or set spec.allow_non_finite",
            reason="NON_FINITE_LABEL",
            metadata={"row_id": str(int(row_ids[row]))},
            fields=[("spec.label_column", f"row {int(row_ids[row])}: {values[row]}")],
        )
    return numbers


def _classes(labels: NDArray[Any], column: str, row_ids: Ints, num_classes: int) -> NDArray[Any]:
    if labels.size and not (labels.min() >= 0 and labels.max() < num_classes):
        row = int(np.flatnonzero((labels < 0) | (labels >= num_classes))[0])
        raise InvalidArgument(
            f"row {int(row_ids[row])} has the label {int(labels[row])} in column {column!r}; "
            f"spec.model.num_classes is {num_classes}, so labels must be 0 to {num_classes - 1}",
            reason="LABEL_OUT_OF_RANGE",
            fields=[("spec.model.num_classes", f"a label is {int(labels[row])}")],
        )
    return labels.astype(np.int64)


def _refuse_nulls(table: pa.Table, column: str, row_ids: Ints) -> None:
    values = table.column(column)
    if values.null_count:
        row = int(row_ids[int(np.flatnonzero(values.is_null().to_numpy())[0])])
        raise InvalidArgument(
            f"column {column!r} has nulls, the first in row {row}; fill or drop them before training",
            reason="NULL_VALUES",
            metadata={"row_id": str(row)},
            fields=[("spec.label_column", f"row {row} has no label")],
        )
