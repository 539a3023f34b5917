"""The same batches as `Loader` gives, prepared by Ray Data's tasks on all CPUs of the cluster.

It is for transforms that would hold up the worker that trains.

One task prepares the rows that a rank computes within one shuffle window of all its lanes, in the order of their
positions; the rank cuts what comes into steps. A row is prepared by itself, keyed by its id, so it does not matter
with which others it is prepared.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
import ray.data

from shared.dataset_stream import DatasetStream, RayFailed, quiet_context
from shared.dataset_version import VersionReader, load_version
from shared.errors import MillraceError, Unavailable, first_line
from shared.settings import StoreSettings
from shared.storage import open_store
from shared.transforms import RowKeys
from train_service.domain.order import Ints, SlicePlan, blocks_of, rank_positions, step_bounds
from train_service.domain.spec import TrainingSpec
from train_service.loading.loader import Batch, Loader
from train_service.loading.preparation import longest_s, prepared
from train_service.loading.preprocessing import Preprocessing
from train_service.loading.row_cache import RowCache
from train_service.loading.rows import Array
from train_service.loading.windows import Windows

PIECE_BYTES = 8 * 1024 * 1024
# Tasks of one dataset: Ray Data keeps something of each.
TASKS_AT_ONCE = 4096
TASK_CACHE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Source:
    """Where the rows are; plain values, for they travel to the tasks."""

    store: StoreSettings
    spec: TrainingSpec
    plan: SlicePlan
    # Of prepared rows that travel together.
    piece_bytes: int


@dataclass(frozen=True, eq=False)
class _Piece:
    """Prepared rows in the order of their positions, as `Batch` has them."""

    inputs: Array
    labels: Array
    row_ids: Ints

    @classmethod
    def of(cls, table: pa.Table, shape: tuple[int, ...]) -> _Piece:
        table = table.combine_chunks()
        inputs, labels = (table.column(name).chunk(0) for name in ("inputs", "labels"))
        start = inputs.offset * inputs.type.byte_width
        flat = np.frombuffer(inputs.buffers()[1], np.float32, len(inputs) * inputs.type.byte_width // 4, start)
        tensors = isinstance(labels, pa.FixedShapeTensorArray)
        return cls(
            flat.reshape(len(inputs), *shape),
            labels.to_numpy_ndarray() if tensors else labels.to_numpy(),
            table.column("row_ids").to_numpy(),
        )

    @classmethod
    def joined(cls, pieces: list[_Piece]) -> _Piece:
        parts = ([getattr(piece, name) for piece in pieces] for name in ("inputs", "labels", "row_ids"))
        return cls(*(np.concatenate(part) for part in parts))

    def rows(self, begin: int, end: int) -> _Piece:
        return _Piece(self.inputs[begin:end], self.labels[begin:end], self.row_ids[begin:end])

    def table(self) -> pa.Table:
        width = self.inputs[0].nbytes
        flat = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(width), len(self.inputs), [None, pa.py_buffer(self.inputs)]
        )
        labels = self.labels if self.labels.ndim == 1 else pa.FixedShapeTensorArray.from_numpy_ndarray(self.labels)
        return pa.table({"inputs": flat, "labels": labels, "row_ids": self.row_ids})


class ClusterLoader(Loader):
    """Batches of the train split; one iteration at a time."""

    def __init__(
        self,
        cache: RowCache,
        preprocessing: Preprocessing,
        plan: SlicePlan,
        spec: TrainingSpec,
        store: StoreSettings,
        piece_bytes: int = PIECE_BYTES,
        run: str = "",
    ) -> None:
        """`cache` tells the layout of the split; its rows are not read. Ray's tasks are named after `run`."""
        super().__init__(cache, preprocessing, plan)
        self._run = run
        self._source = Source(store, spec, plan, piece_bytes)

    def _read(self, first_step: int) -> Iterator[Batch]:
        plan = self._plan
        with closing(self._pieces(first_step)) as pieces:
            cut = _Cut(pieces)
            for step in range(first_step, self.total_steps):
                epoch, of_epoch = divmod(step, self.steps_per_epoch)
                begin, end = step_bounds(self._rows, self.steps_per_epoch, of_epoch)
                mine = len(rank_positions(begin, end, plan.lanes, plan.rank, plan.world_size))
                taken = cut.take(mine)
                # As torch takes it: its own to write to. What Ray hands over is everybody's.
                inputs = np.require(taken.inputs, requirements=["C", "W", "O"])
                yield Batch(step, epoch, inputs, taken.labels, taken.row_ids, step_rows=end - begin)

    def _pieces(self, first_step: int) -> Generator[_Piece, None, None]:
        """Prepared rows of this rank from `first_step` on, in the order of their positions."""
        tasks = list(self._tasks(first_step))
        shape = self._preprocessing.output.shape
        for start in range(0, len(tasks), TASKS_AT_ONCE):
            for table in _prepared(self._source, tasks[start : start + TASKS_AT_ONCE], self._cache.touched, self._run):
                yield _Piece.of(table, shape)

    def _tasks(self, first_step: int) -> Iterator[dict[str, int]]:
        """Of each epoch that is left, the stretches of positions [begin, end), a shuffle window of every lane each."""
        stretch = self._plan.lanes * self._plan.window_rows
        for epoch in range(first_step // self.steps_per_epoch, self._plan.epochs):
            of_epoch = max(first_step - epoch * self.steps_per_epoch, 0)
            first, _ = step_bounds(self._rows, self.steps_per_epoch, of_epoch)
            for begin in range(first - first % stretch, self._rows, stretch):
                yield {"epoch": epoch, "begin": max(begin, first), "end": min(begin + stretch, self._rows)}


def _prepared(
    source: Source, tasks: list[dict[str, int]], touched: Callable[[], None], run: str
) -> Generator[pa.Table, None, None]:
    settings = quiet_context(block_bytes=source.piece_bytes)
    settings.execution_options.preserve_order = True
    with ray.data.DataContext.current(settings):
        given = ray.data.from_items(tasks, override_num_blocks=len(tasks))
        prepare = _named(source, run)
        dataset = given.map_batches(prepare, batch_size=None, batch_format="pyarrow", num_cpus=1)
    # As Ray Data calls them.
    name = f"MapBatches({prepare.__name__})" if run else ""
    try:
        yield from prepared(DatasetStream(dataset), touched, longest_s(source.spec), name)
    except RayFailed as failure:
        raise _cause(failure.__cause__) from failure.__cause__


def _named(source: Source, run: str) -> Callable[[pa.Table], Iterator[pa.Table]]:
    """`_prepare` from that source, under a name by which Ray can be asked for the tasks of `run`, see `run_name`."""

    def prepare(tasks: pa.Table) -> Iterator[pa.Table]:
        return _prepare(tasks, source)

    prepare.__name__ = f"prepare:{run}" if run else "prepare"
    return prepare


def _prepare(tasks: pa.Table, source: Source) -> Iterator[pa.Table]:
    """Runs in Ray's tasks, on one stretch at a time."""
    cache, preprocessing = _opened(source)
    plan = source.plan
    blocks = blocks_of(cache.row_groups, plan.lanes)
    # Positions of all ranks, of which this one has its share.
    at_once = plan.world_size * max(1, source.piece_bytes // (4 * math.prod(preprocessing.output.shape)))
    for task in tasks.to_pylist():
        windows = Windows(cache, blocks, plan, task["epoch"], read_ahead=False)
        for start in range(task["begin"], task["end"], at_once):
            rows = windows.rows(start, min(start + at_once, task["end"]))
            if not len(rows.row_ids):
                continue
            inputs = preprocessing(rows, RowKeys(plan.seed, task["epoch"], rows.row_ids))
            yield _Piece(inputs, rows.labels, rows.row_ids).table()


@functools.lru_cache(maxsize=1)
def _opened_by(_: str) -> list[tuple[RowCache, Preprocessing]]:
    return []


def _opened(source: Source) -> tuple[RowCache, Preprocessing]:
    """Kept for the next task that this process runs for the same rank."""
    held = _opened_by(repr(asdict(source)))
    if not held:
        spec, store = source.spec, open_store(source.store)
        version = load_version(store, spec.dataset_version)
        preprocessing = Preprocessing(spec, version.columns)
        reader, columns = VersionReader(store, version), preprocessing.columns
        split, label, classes = spec.train_split, spec.label_column, spec.model.num_classes
        cache = RowCache(
            reader,
            split,
            columns,
            label,
            classes,
            TASK_CACHE_BYTES,
            spec.task,
            allow_non_finite=spec.allow_non_finite,
        )
        held.append((cache, preprocessing))
    return held[0]


class _Cut:
    """Takes rows off a sequence of pieces, however they are cut."""

    def __init__(self, pieces: Iterator[_Piece]) -> None:
        self._pieces = pieces
        self._piece: _Piece | None = None
        self._at = 0

    def take(self, count: int) -> _Piece:
        """The next `count` rows. A batch within one piece is a view of it."""
        taken: list[_Piece] = []
        missing = count
        while missing:
            if self._piece is None or self._at == len(self._piece.row_ids):
                self._piece, self._at = next(self._pieces), 0
            end = min(self._at + missing, len(self._piece.row_ids))
            taken.append(self._piece.rows(self._at, end))
            missing -= end - self._at
            self._at = end
        return taken[0] if len(taken) == 1 else _Piece.joined(taken)


def _cause(error: BaseException | None) -> MillraceError:
    """What a task raised, if it is an error of ours; else that the work was lost."""
    seen = error
    while seen is not None:
        if isinstance(seen, MillraceError):
            return seen
        seen = getattr(seen, "cause", None) or seen.__cause__
    why = first_line(error) if error else "no reason"
    return Unavailable(f"Ray Data gave up the preparation of rows: {why}", reason="PREPARATION_LOST")
