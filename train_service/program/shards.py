"""`ray.train.get_dataset_shard` for programs: a rank's rows of a dataset version, in Millrace's own order.

The order of an epoch is that of Millrace's own loop, a pure function of position (`domain/order.py`). The rank's i-th
row of a pass is at position base + rank + W*i (`domain/coverage_counts.py`). A pass over an iterable of the shard is an
epoch. A row counts once the program receives it, not when it is read ahead.

Ray's `DataIterator` provides formats, dtypes, collating and devices. Only the source of the rows is ours.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import ray.data
from ray.data import DataContext
from ray.data.block import BlockAccessor

from shared.dataset_version import DatasetVersion, VersionReader
from shared.dataset_version.parquet import Footers
from shared.errors import FailedPrecondition, InvalidArgument
from shared.storage import ObjectStore
from train_service.domain.coverage_counts import (
    MAX_EPOCHS,
    Pass,
    Place,
    Span,
    UnevenRanks,
    extend,
    place_to_resume,
    shard_identity,
)
from train_service.domain.order import EpochOrder, Ints, blocks_of, epoch_order
from train_service.domain.spec import CONTINUE, KEEP, TrainingSpec
from train_service.loading.loader import CACHE_BYTES, FOOTER_BYTES, RowCache
from train_service.loading.preprocessing import RowBuffers, Rows
from train_service.program.ray_hooks import IterableFromIterator, default_format, unwrap_finalized
from train_service.program.signing import RankStore, StoredVersions, Versions
from train_service.store_retry import retry_on_outage, waiting_for

logger = logging.getLogger(__name__)

# Names that tutorials use for the validation split.
VALIDATION_NAMES = ("validation", "valid", "val", "eval", "evaluation")
# Rows of a batch if the program requests whole blocks.
BLOCK_ROWS = 1024

Batch = dict[str, Any]


class ProgramShards:
    """A rank's shards of the job's version, by split."""

    def __init__(
        self,
        store: RankStore,
        spec: TrainingSpec,
        rank: int,
        world_size: int,
        positions: Mapping[str, Any],
        note_progress: Callable[[], None] = lambda: None,
        versions: Versions | None = None,
    ) -> None:
        """Open the version.

        `positions` are those of the checkpoint to resume from, as `merge_reports` returned them. `note_progress` is
        called when rows are read or returned. Without `versions`, `store` is an `ObjectStore`. Raises
        `FailedPrecondition` for a job without a dataset version.
        """
        if not spec.dataset_version:
            raise FailedPrecondition(
                "ray.train.get_dataset_shard: the job names no dataset version; set spec.dataset_version, or read the "
                "data in the training function",
                reason="NO_DATASET",
            )
        self._store = store
        self._versions = versions = versions or StoredVersions(cast(ObjectStore, store))
        self._spec = spec
        self._rank = rank
        self._world_size = world_size
        self._positions = positions
        self._note_progress = note_progress
        self._version = retry_on_outage(lambda: versions.load(spec.dataset_version), "the dataset version")
        self._shards: dict[str, VersionShard] = {}

    def get(self, name: str, state_dict: Mapping[str, Any] | None = None) -> VersionShard:
        """Return the shard of that name, the same object each time. With `state_dict` its next pass starts there.

        Raises `InvalidArgument` for a name that is no split of the version, or a `state_dict` of another job's data.
        """
        split = self._split_of(name)
        shard = self._shards.get(split)
        if shard is None:
            shard = self._shards[split] = self._open(split)
        if state_dict is not None:
            shard.load_state_dict(state_dict)
        return shard

    def take(self) -> dict[str, Any]:
        """Return, in plain values for a report, each split's position and the rows returned since the last call."""
        return {split: shard.take() for split, shard in self._shards.items()}

    def _split_of(self, name: str) -> str:
        names = [split.name for split in self._version.manifest.splits]
        spec = self._spec
        if not name or name == "train":
            return spec.train_split
        if name in names:
            return name
        if name in VALIDATION_NAMES and spec.validation_split:
            return spec.validation_split
        raise InvalidArgument(
            f"ray.train.get_dataset_shard({name!r}): {spec.dataset_version} has the splits {', '.join(names)}; use one "
            "of these",
            reason="NO_SUCH_SPLIT",
        )

    def _open(self, split: str) -> VersionShard:
        saved = self._positions.get(split)
        place = Place()
        if saved:
            goes_on = self._spec.program is not None and self._spec.program.data_resume == CONTINUE
            try:
                place = place_to_resume(saved, self._rank, self._world_size, goes_on=goes_on)
            except UnevenRanks as error:
                raise FailedPrecondition(
                    f"split {split!r} of {self._spec.dataset_version}: {error}; resume on {saved['world_size']} "
                    "workers, or set program.data_resume to REPLAY",
                    reason="UNEVEN_RANKS",
                ) from None
        rows = _SplitRows(self._store, self._versions, self._version, self._spec, split, self._note_progress)
        return VersionShard(rows, self._rank, self._world_size, place, self._note_progress)


class _SplitRows:
    """The rows of a split in the order of an epoch, one window of all lanes at a time."""

    def __init__(
        self,
        store: RankStore,
        versions: Versions,
        version: DatasetVersion,
        spec: TrainingSpec,
        split: str,
        note_progress: Callable[[], None],
    ) -> None:
        self.columns = [column.name for column in version.columns]
        self.version = version
        self.split = split
        self.spec = spec
        # Labels are ordinary columns here, so the cache checks none.
        reader = VersionReader(store, version, Footers(FOOTER_BYTES), check_there=versions.check_not_deleted)
        self._cache = RowCache(reader, split, self.columns, "", 0, CACHE_BYTES)
        self._cache.note_progress = note_progress
        self._blocks = blocks_of(self._cache.row_groups, spec.lanes)
        self.row_count = self._cache.row_count
        self._capacity: RowBuffers = {}

    @property
    def keeps_remainder(self) -> bool:
        return self.spec.program is not None and self.spec.program.remainder == KEEP

    def first_row(self) -> Rows:
        """Return the first row of the split, or no row if it is empty."""
        return self._cache.rows(np.arange(min(self.row_count, 1), dtype=np.int64))

    def windows(self, way: Pass, epoch: int, rank: int, taken: int) -> Iterator[_Window]:
        """Yield the rank's rows of `epoch`, starting at its row number `taken`.

        One window is in memory, and the row groups of the next are being read. A window's rows are valid until the next
        window is requested.
        """
        order = epoch_order(self._blocks, self.spec.lanes, self.spec.seed, epoch, self.spec.window_rows)
        ahead = self._plan(order, way, rank, taken)
        while ahead is not None:
            rows, inverse, end = ahead
            ahead = self._plan(order, way, rank, end)
            self._cache.read_ahead(rows)
            if ahead is not None:
                self._cache.read_ahead(ahead[0])
            yield _Window(self._cache.rows(rows, self._capacity), inverse)

    def _plan(self, order: EpochOrder, way: Pass, rank: int, begin: int) -> tuple[Ints, Ints, int] | None:
        """Plan the window that holds the rank's row `begin`.

        Return the rank's rows in the order of the files, the index of each of its rows among them in the order of the
        epoch, and the number after its last row. Return None after the end of the pass.
        """
        count = way.rows_of(rank)
        if begin >= count:
            return None
        span = order.lanes * order.window_rows
        number = way.first_position(rank, begin) // span
        end = min(count, way.rows_before(rank, (number + 1) * span))
        rows = order.rows(way.positions(rank, begin, end))
        by_file = np.argsort(rows)
        inverse = np.empty_like(by_file)
        inverse[by_file] = np.arange(len(rows))
        return rows[by_file], inverse, end


@dataclass(frozen=True, eq=False)
class _Window:
    rows: Rows
    # The index in `rows` of each of the rank's rows, in the order of the epoch.
    places: Ints


class VersionShard(ray.data.DataIterator):
    """One rank's rows of a split.

    Its columns are the version's: tensors as arrays (rows, *shape), encoded images and texts as objects, numbers in
    their own type; a null number becomes NaN.
    """

    def __init__(
        self, rows: _SplitRows, rank: int, world_size: int, place: Place, note_progress: Callable[[], None]
    ) -> None:
        self._rows = rows
        self._rank = rank
        self._world_size = world_size
        self._note_progress = note_progress
        self._place = place
        # Guards the state of reports, which may come from another thread than the batches.
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        # The pass whose rows count, and whether an iterator has begun it.
        self._passes = 0
        self._is_begun = False

    # --- API that tutorials call ---

    def state_dict(self) -> dict[str, Any]:
        """Return the position of all ranks that are in step with this one.

        It is valid on any rank, whatever the number of ranks.
        """
        place = self._normalized()
        return {
            **self._identity(),
            "epoch": place.epoch,
            "rows": place.base + self._world_size * place.taken,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Start the next pass at that position. Raises `InvalidArgument` if it belongs to other data."""
        for key, wanted in self._identity().items():
            if state_dict.get(key) != wanted:
                raise InvalidArgument(
                    f"ray.train.get_dataset_shard: the state_dict has {key} = {state_dict.get(key)!r}, and this job "
                    f"{wanted!r}; load one that this job saved",
                    reason="SHARD_STATE_MISMATCH",
                )
        epoch, rows = state_dict.get("epoch"), state_dict.get("rows")
        if not (
            isinstance(epoch, int)
            and isinstance(rows, int)
            and 0 <= epoch <= MAX_EPOCHS
            and 0 <= rows <= self._rows.row_count
        ):
            raise InvalidArgument(
                f"ray.train.get_dataset_shard: the state_dict says epoch {epoch!r} and {rows!r} rows of "
                f"{self._rows.row_count}; load one that this job saved",
                reason="SHARD_STATE_MISMATCH",
            )
        with self._lock:
            self._place, self._is_begun = Place(epoch, rows), False
            self._passes += 1

    def take(self) -> dict[str, Any]:
        """Return the state for a report, see `ProgramShards.take`."""
        with self._lock:
            # Under one lock: rows that are returned meanwhile belong to the next report, and so does their position.
            place, spans, self._spans = self._behind(self._place), self._spans, []
        return {
            "shard": self._identity(),
            "place": [place.epoch, place.base, place.taken],
            "given": spans,
        }

    def iter_rows(self) -> Any:
        def rows() -> Iterator[dict[str, Any]]:
            for batch in self._iter_batches(batch_size=1, batch_format="numpy"):
                yield {name: values[0] for name, values in batch.items()}

        return ShardBatches(rows, self)

    def _iter_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = 256,
        batch_format: str | None = "default",
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,  # noqa: ARG002 - Ray's own methods pass it
        _collate_fn: Callable[[Any], Any] | None = None,
        _finalize_fn: Callable[[Any], Any] | None = None,
    ) -> ShardBatches:
        if local_shuffle_buffer_size is not None:
            logger.warning(
                "local_shuffle_buffer_size has no effect: split %r comes in an order of its own in each epoch, drawn "
                "from the job's seed",
                self._rows.split,
            )
        form = default_format(batch_format)

        def prepare(rows: Rows) -> Any:
            batch = _in_format(_as_arrays(rows, self._rows.columns), form)
            if _collate_fn is not None:
                batch = _collate_fn(batch)
            return _finalize_fn(batch) if _finalize_fn is not None else batch

        def batches() -> Iterator[Any]:
            return self._give(prepare, batch_size or BLOCK_ROWS, drop_last and batch_size is not None, prefetch_batches)

        return ShardBatches(batches, self)

    def iter_batches(self, **options: Any) -> ShardBatches:
        """Iterate as Ray does: `batch_size`, `batch_format`, `drop_last`, `prefetch_batches`."""
        return cast(ShardBatches, super().iter_batches(**options))

    def iter_torch_batches(self, **options: Any) -> ShardBatches:
        """Iterate as Ray does, with these and `dtypes`, `device`, `collate_fn`, `pin_memory`."""
        return cast(ShardBatches, super().iter_torch_batches(**options))

    def _to_ref_bundle_iterator(self) -> Any:
        raise FailedPrecondition(
            "a shard of a dataset version is read row by row and has no blocks; use iter_torch_batches, iter_batches "
            "or iter_rows",
            reason="NOT_OFFERED",
        )

    def materialize(self) -> Any:
        return self._to_ref_bundle_iterator()

    def stats(self) -> str:
        return f"{self!r} at {self._normalized()}"

    def schema(self) -> Any:
        """Return Ray's schema of the version's columns, by the first row."""
        block = BlockAccessor.batch_to_block(_as_arrays(self._rows.first_row(), self._rows.columns))
        return ray.data.Schema(BlockAccessor.for_block(block).schema())

    def get_context(self) -> DataContext:
        return DataContext.get_current()

    def __repr__(self) -> str:
        rows = self._rows
        return f"VersionShard({rows.version.name}, split={rows.split!r}, rank={self._rank} of {self._world_size})"

    # --- passes ----------------------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        rows = self._rows
        return shard_identity(rows.version.name, rows.version.manifest_sha256, rows.split, rows.row_count, rows.spec)

    def _way(self, place: Place) -> Pass:
        return Pass(self._rows.row_count, place.base, self._world_size, self._rows.keeps_remainder)

    def _normalized(self) -> Place:
        """Return the position, at the next epoch's beginning if the pass is complete.

        Rank 0's pass is the longest. A rank with a row less stays in the epoch until it begins another pass, so that
        all ranks are in the same epoch.
        """
        with self._lock:
            place = self._place
        return self._behind(place)

    def _behind(self, place: Place) -> Place:
        done = place.taken >= self._way(place).rows_of(0) and (place.taken > 0 or place.base > 0)
        return Place(place.epoch + 1) if done else place

    def _begin_pass(self) -> tuple[int, Place]:
        """Begin a pass. It is a new epoch, except the first pass after a checkpoint or a `state_dict`."""
        place = self._normalized()
        with self._lock:
            if self._is_begun and place.epoch == self._place.epoch:
                place = Place(place.epoch + 1)  # the program has left the pass before its end
            self._place, self._is_begun = place, True
            self._passes += 1
            return self._passes, place

    def _give(self, prepare: Callable[[Rows], Any], size: int, drop_last: bool, prefetch: int) -> Iterator[Any]:
        number, place = self._begin_pass()
        way = self._way(place)

        def read() -> Iterator[tuple[int, Any]]:
            for rows in _cut(self._rows.windows(way, place.epoch, self._rank, place.taken), size):
                if len(rows.row_ids) == size or not drop_last:
                    yield len(rows.row_ids), prepare(rows)

        with _ReadAhead(read(), max(prefetch, 1)) as batches:
            for count, batch in batches:
                self._note(number, way, count)
                yield unwrap_finalized(batch)
        with self._lock:
            if self._passes == number:
                # Also if its last rows were too few for a batch.
                if way.rows_of(self._rank) < way.rows_of(0):
                    self._place = Place(place.epoch, place.base, way.rows_of(self._rank))
                else:
                    self._place, self._is_begun = Place(place.epoch + 1), False

    def _note(self, number: int, way: Pass, count: int) -> None:
        with self._lock:
            if self._passes != number:
                raise FailedPrecondition(
                    f"{self!r} is iterated twice at once: another pass over it has begun; finish one before the next",
                    reason="TWO_PASSES",
                )
            epoch, base, taken = self._place.epoch, self._place.base, self._place.taken
            first, last = way.first_position(self._rank, taken), way.first_position(self._rank, taken + count)
            extend(self._spans, [epoch, first, last, self._world_size])
            self._place = Place(epoch, base, taken + count)
        self._note_progress()


class ShardBatches(IterableFromIterator[Any]):
    """An iterable over a shard: each pass is an epoch. It also has the shard's position."""

    def __init__(self, iterate: Callable[[], Iterator[Any]], shard: VersionShard) -> None:
        super().__init__(iterate)
        self._shard = shard

    def state_dict(self) -> dict[str, Any]:
        return self._shard.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._shard.load_state_dict(state_dict)


class _ReadAhead:
    """Read-ahead of an iterator by a thread, up to `ahead` items. Use it as a context around the iteration."""

    def __init__(self, items: Iterator[tuple[int, Any]], ahead: int) -> None:
        self._items = items
        self._ready: queue.SimpleQueue[tuple[int, Any] | BaseException | None] = queue.SimpleQueue()
        self._capacity = threading.Semaphore(ahead)
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="shard", daemon=True)

    def __enter__(self) -> Generator[tuple[int, Any], None, None]:
        self._thread.start()
        return self._taken()

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._capacity.release()
        self._thread.join()

    def _taken(self) -> Generator[tuple[int, Any], None, None]:
        while True:
            with waiting_for(self._thread):
                item = self._ready.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            self._capacity.release()
            yield item

    def _read(self) -> None:
        try:
            self._capacity.acquire()
            while not self._closed:
                item = next(self._items, None)
                self._ready.put(item)
                if item is None:
                    return
                self._capacity.acquire()
        except BaseException as error:  # raised again in the program, whose pass it ends
            self._ready.put(error)


def _cut(windows: Iterator[_Window], size: int) -> Iterator[Rows]:
    """Yield pieces of `size` rows, across windows. The last one may have fewer."""
    left: list[Rows] = []
    missing = size
    for window in windows:
        begin = 0
        while begin < len(window.places):
            end = min(begin + missing, len(window.places))
            left.append(window.rows.take(window.places[begin:end]))
            missing -= end - begin
            begin = end
            if not missing:
                yield Rows.joined(left)
                left, missing = [], size
    if left:
        yield Rows.joined(left)


def _as_arrays(rows: Rows, columns: Sequence[str]) -> Batch:
    """Return an array (rows, ...) by column, in this order."""
    batch = rows.batch()
    arrays: Batch = {}
    for name in columns:
        values = batch[name]
        arrays[name] = values if isinstance(values, np.ndarray) else values.to_numpy(zero_copy_only=False)
    return arrays


def _in_format(columns: Batch, form: str | None) -> Any:
    if form == "numpy":
        return columns
    block = BlockAccessor.for_block(BlockAccessor.batch_to_block(columns))
    return block.to_batch_format(form)
