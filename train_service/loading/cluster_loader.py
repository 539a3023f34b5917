"""The batches of `Loader`, prepared by Ray Data's tasks on all CPUs of the cluster.

It is for transforms that are too slow for the worker that trains.

One task prepares the rows that a rank computes within one shuffle window of all its lanes, in the order of their
positions. The rank cuts the resulting pieces into steps. A row is prepared by itself, keyed by its id, so the result
does not depend on the other rows of its task.

A rank waits for the prepared tables, but not forever. Ray reserves no CPU for these tasks: if other work takes the last
one, Ray Data waits silently.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.exceptions import RayError

from shared.dataset_version import VersionReader, load_version
from shared.errors import MillraceError, Unavailable, first_line
from shared.jobs.transitions import INSUFFICIENT_RESOURCES
from shared.ray_data_stream import DatasetStream, RayFailed, quiet_context
from shared.settings import StoreSettings
from shared.storage import open_store
from shared.transforms import Pipeline, RowKeys
from shared.transforms.records import ModelInput, bytes_of_input, dtype_of_input, lengths_of
from shared.transforms.steps.custom import DEFAULT_TIMEOUT_S, Custom
from train_service.domain.capacity import INGEST_CPUS
from train_service.domain.order import BatchPlan, Ints, blocks_of, rank_positions, step_bounds
from train_service.domain.spec import TrainingSpec
from train_service.domain.watchdog import STARTING_SECONDS
from train_service.loading.loader import Batch, Loader, RowCache, Windows
from train_service.loading.preprocessing import Array, Preprocessing
from train_service.placement import usable_nodes
from train_service.store_retry import OUTAGE_TIMEOUT_S, store_call

# --- Loader ---

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 * 1024 * 1024
# Tasks per dataset, limited because Ray Data keeps state for each task.
TASKS_AT_ONCE = 4096
TASK_CACHE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Source:
    """Everything a task needs to read its rows, in plain values, because it is sent to the tasks."""

    store: StoreSettings
    spec: TrainingSpec
    plan: BatchPlan
    # Target size of one piece of prepared rows.
    piece_bytes: int


@dataclass(frozen=True, eq=False)
class _Piece:
    """Prepared rows in the order of their positions, with the fields of `Batch`."""

    inputs: Array
    labels: Array
    row_ids: Ints

    @classmethod
    def from_table(cls, table: pa.Table, row: ModelInput) -> _Piece:
        table = table.combine_chunks()
        inputs, labels = (table.column(name).chunk(0) for name in ("inputs", "labels"))
        start = inputs.offset * inputs.type.byte_width
        dtype = dtype_of_input(row)
        count = len(inputs) * inputs.type.byte_width // dtype.itemsize
        flat = np.frombuffer(inputs.buffers()[1], dtype, count, start)
        tensors = isinstance(labels, pa.FixedShapeTensorArray)
        return cls(
            flat.reshape(len(inputs), *lengths_of(row.shape)),
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
    """Loader of the train split through Ray Data. One iteration at a time."""

    def __init__(
        self,
        cache: RowCache,
        preprocessing: Preprocessing,
        plan: BatchPlan,
        spec: TrainingSpec,
        store: StoreSettings,
        piece_bytes: int = PIECE_BYTES,
        run: str = "",
    ) -> None:
        """Prepare the loader.

        `cache` provides the layout of the split; its rows are not read. Ray's tasks are named after `run`.
        """
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
                # torch may write to its inputs, but Ray's memory is shared and read-only: copy if needed.
                inputs = np.require(taken.inputs, requirements=["C", "W", "O"])
                yield Batch(step, epoch, inputs, taken.labels, taken.row_ids, step_rows=end - begin)

    def _pieces(self, first_step: int) -> Generator[_Piece, None, None]:
        """Yield this rank's prepared rows from `first_step` on, in the order of their positions."""
        tasks = list(self._tasks(first_step))
        row = self._preprocessing.output
        for start in range(0, len(tasks), TASKS_AT_ONCE):
            for table in _prepared(
                self._source, tasks[start : start + TASKS_AT_ONCE], self._cache.note_progress, self._run
            ):
                yield _Piece.from_table(table, row)

    def _tasks(self, first_step: int) -> Iterator[dict[str, int]]:
        """Yield a task per range of positions [begin, end), a shuffle window of every lane, for each epoch left."""
        rows_of_windows = self._plan.lanes * self._plan.window_rows
        for epoch in range(first_step // self.steps_per_epoch, self._plan.epochs):
            of_epoch = max(first_step - epoch * self.steps_per_epoch, 0)
            first, _ = step_bounds(self._rows, self.steps_per_epoch, of_epoch)
            for begin in range(first - first % rows_of_windows, self._rows, rows_of_windows):
                yield {"epoch": epoch, "begin": max(begin, first), "end": min(begin + rows_of_windows, self._rows)}


def _prepared(
    source: Source, tasks: list[dict[str, int]], note_progress: Callable[[], None], run: str
) -> Generator[pa.Table, None, None]:
    settings = quiet_context(block_bytes=source.piece_bytes)
    settings.execution_options.preserve_order = True
    with ray.data.DataContext.current(settings):
        given = ray.data.from_items(tasks, override_num_blocks=len(tasks))
        prepare = _named(source, run)
        dataset = given.map_batches(prepare, batch_size=None, batch_format="pyarrow", num_cpus=1)
    # The name that Ray Data gives the tasks.
    name = f"MapBatches({prepare.__name__})" if run else ""
    try:
        yield from prepared(DatasetStream(dataset), note_progress, longest_s(source.spec), name)
    except RayFailed as failure:
        raise _cause(failure.__cause__) from failure.__cause__


def _named(source: Source, run: str) -> Callable[[pa.Table], Iterator[pa.Table]]:
    """Return `_prepare` bound to the source, named so that Ray can list the tasks of `run`, see `run_name`."""

    def prepare(tasks: pa.Table) -> Iterator[pa.Table]:
        return _prepare(tasks, source)

    prepare.__name__ = f"prepare:{run}" if run else "prepare"
    return prepare


def _prepare(tasks: pa.Table, source: Source) -> Iterator[pa.Table]:
    """Prepare ranges of positions, one after another. Runs in Ray's tasks."""
    cache, preprocessing = _opened(source)
    plan = source.plan
    blocks = blocks_of(cache.row_groups, plan.lanes)
    # Positions of all ranks; this rank computes its share of them.
    at_once = plan.world_size * max(1, source.piece_bytes // bytes_of_input(preprocessing.output))
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
    """Return the cache and the preprocessing of a rank, kept for the next task in this process."""
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
    """Cutter of a sequence of pieces into batches, whatever the pieces' sizes."""

    def __init__(self, pieces: Iterator[_Piece]) -> None:
        self._pieces = pieces
        self._piece: _Piece | None = None
        self._at = 0

    def take(self, count: int) -> _Piece:
        """Return the next `count` rows. A batch within one piece is a view of it."""
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
    """Return the error of ours that a task raised, or `Unavailable`: the preparation was lost."""
    seen = error
    while seen is not None:
        if isinstance(seen, MillraceError):
            return seen
        seen = getattr(seen, "cause", None) or seen.__cause__
    why = first_line(error) if error else "no reason"
    return Unavailable(f"Ray Data gave up the preparation of rows: {why}", reason="PREPARATION_LOST")


# --- Tables of prepared rows ---

POLL_S = 1.0
# The first tasks import and compile.
FIRST_TIMEOUT_S = STARTING_SECONDS
# A piece of many small rows may take long to prepare, and other work may hold the CPUs for a while.
NEXT_TIMEOUT_S = OUTAGE_TIMEOUT_S
# Ray Data passes a task's output on in blocks whose bounds need not match those of the pieces.
PIECES_A_BLOCK = 2
ASKED_TIMEOUT_S = 10
# The state that Ray reports once a task has got its CPU.
GIVEN_TO_A_WORKER = "SUBMITTED_TO_WORKER"
HAS_ITS_CPU = (GIVEN_TO_A_WORKER, "PENDING_ARGS_FETCH", "RUNNING", "RUNNING_IN_RAY_GET", "RUNNING_IN_RAY_WAIT")


def longest_s(spec: TrainingSpec) -> float:
    """Return how long a task may take until its first output, by the limits of the transform's functions."""
    steps = Pipeline.from_config(spec.transform, spec.input_column).steps
    limits = (step.timeout_s or DEFAULT_TIMEOUT_S for step in steps if isinstance(step, Custom))
    return PIECES_A_BLOCK * sum(limits)


def prepared(
    stream: DatasetStream, note_progress: Callable[[], None], longest_s: float = 0.0, tasks: str = ""
) -> Generator[pa.Table, None, None]:
    """Yield the tables of `stream`, and raise if no task makes progress.

    `note_progress` is called for each table, and whenever a task makes progress. A task may run functions for up to
    `longest_s`. `tasks` is the name of the run's tasks for this rank. Only these are examined, because another rank's
    task may hold the last CPU and wait, in good health, for this one.

    Raises `Unavailable` if no task makes progress, and the errors of the stream. The consumer's own time does not
    count.
    """
    watch = _Watch(stream, note_progress, longest_s, tasks)
    with closing(stream.tables(watch.poll, POLL_S)) as tables:
        while True:
            with store_call():  # the wait has its own timeout, so it is no hang
                table = next(tables, None)
            if table is None:
                return
            watch.note_progress()
            yield table
            watch.note_progress()


class _Watch:
    def __init__(
        self, stream: DatasetStream, note_progress: Callable[[], None], longest_s: float, tasks: str = ""
    ) -> None:
        self._stream = stream
        self._note_progress = note_progress
        self._tasks = tasks
        self._done = 0
        self._since = time.monotonic()
        self._longest_s = longest_s
        self._timeout_s = FIRST_TIMEOUT_S + longest_s
        self._extended = False

    def note_progress(self) -> None:
        self._note_progress()
        self._since, self._timeout_s = time.monotonic(), NEXT_TIMEOUT_S + self._longest_s
        self._extended = False

    def poll(self) -> None:
        if (done := self._stream.done) > self._done:
            self._done = done
            self.note_progress()
        elif time.monotonic() - self._since > self._timeout_s:
            self._judge()

    def _judge(self) -> None:
        text = f"Ray Data has prepared no row for {self._timeout_s:.0f} s"
        if at_work_s := longest_at_work_s(self._tasks):
            if at_work_s < self._timeout_s and not self._extended:
                # It got its CPU only now. One extension is enough: Ray Data restarts a task that dies forever.
                self._since, self._extended = time.monotonic() - at_work_s, True
                return
            # A stalled task holds a CPU itself, so that none is free does not mean that there was no room.
            raise Unavailable(f"{text}: a task stands still", reason="PREPARATION_STALLED")
        if not _has_free_cpu():
            # Not a failure: the next attempt begins once there is room for its tasks, too.
            raise Unavailable(f"{text}: its tasks found no CPU", reason=INSUFFICIENT_RESOURCES)
        raise Unavailable(f"{text}, though a CPU is free: a task stands still", reason="PREPARATION_STALLED")


def longest_at_work_s(tasks: str) -> float:
    """Return for how long the oldest running task of that name has had its CPU, by Ray's dashboard.

    Return 0 if no task has a CPU, or if the dashboard cannot answer.
    """
    from ray.util.state import list_tasks  # imported only when something is wrong
    from ray.util.state.common import RAY_MAX_LIMIT_FROM_API_SERVER
    from ray.util.state.exception import RayStateApiException

    if not tasks:
        return 0.0
    try:
        unfinished = list_tasks(
            address=ray.get_runtime_context().gcs_address,
            # Failed tries of a task are listed besides the current one.
            filters=[("name", "=", tasks), ("state", "!=", "FINISHED"), ("state", "!=", "FAILED")],
            limit=RAY_MAX_LIMIT_FROM_API_SERVER,
            detail=True,
            timeout=ASKED_TIMEOUT_S,
            raise_on_missing_output=False,
        )
    except (RayStateApiException, RayError, OSError, ValueError) as error:  # ValueError: there is no dashboard
        logger.warning("Ray cannot say which tasks run: %s", error)
        return 0.0
    begun_ms = [
        event["created_ms"]
        for task in unfinished
        if task.state in HAS_ITS_CPU
        for event in task.events or ()
        if event["state"] == GIVEN_TO_A_WORKER
    ]
    return max(time.time() - min(begun_ms) / 1000, 0.0) if begun_ms else 0.0


def _has_free_cpu() -> bool:
    return any(node.free.get("CPU", 0.0) >= INGEST_CPUS for node in usable_nodes())
