"""Runs one function on all parts of a version, or of an import's sources, with Ray Data.

This file has the task for a group of parts, the pool of workers, the search for the part that killed a worker, and the
progress of passes.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from uuid import uuid4

import pyarrow as pa
import ray
from ray import ObjectRef, cloudpickle

from data_service.domain.transform_spec import PredictSpec, Workers
from data_service.version_attempt import FULL, KeptPass, KeptWork, kept_results
from shared.errors import (
    STORE_OUTAGES,
    FailedPrecondition,
    MillraceError,
    ResourceExhausted,
    Unavailable,
    error_from_record,
    first_line,
)
from shared.jobs import AttemptContext, JobRecord, warm_workers
from shared.jobs.warm_workers import WarmWorkers
from shared.logging_and_tracing import hidden
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store

if TYPE_CHECKING:
    from ray.data import Dataset

logger = logging.getLogger(__name__)


# --- Parts ---


class Part(Protocol):
    """A piece of a job's input that one task works on; cloudpickle must be able to send it.

    What the parts are depends on the input alone, never on the cluster or on faults. Where results are kept, a part's
    `repr` says all that distinguishes it, as that of a dataclass of plain values does.
    """

    @property
    def number(self) -> int:
        """Counts from 0, in row order."""

    @property
    def row_count(self) -> int:
        """The rows of the part, or an estimate, or 0 if unknown; only progress depends on it."""

    @property
    def where(self) -> str:
        """How errors name the part, such as "rows 0 to 99 of split 'train'"."""


P = TypeVar("P", bound=Part)

# The work on one part. It and its results must be picklable.
Work = Callable[[P], Any]
# Pairs of a part and its work's result.
Results = Generator[tuple[P, Any], None, None]


# --- Passes ---
# Passes over the parts, with progress: the building blocks of the jobs that make versions.


@dataclass(frozen=True)
class Passes:
    """Runs passes over parts; `folder` is the attempt's own."""

    context: AttemptContext
    folder: str
    run_parts: PartRunner
    progress: Progress

    def over(
        self,
        phase: str,
        work: Work[P],
        parts: Sequence[P],
        *,
        foreign_code: bool,
        pool: Pool | None = None,
        kept: KeptPass | None = None,
    ) -> Results[P]:
        """Yield each part with its result.

        With `kept`, results that earlier attempts kept come first, and only the other parts are worked on. A caller
        that leaves early must close the generator first, because tasks may still write.
        """
        self.progress.begin(phase, sum(part.row_count for part in parts))
        left = {part.number: part for part in parts}
        if kept is not None:
            with closing(kept_results(self.context.store, self.folder, kept, parts)) as taken_over:
                for part, result in taken_over:
                    self.context.raise_if_stopped()
                    del left[part.number]
                    self.progress.add(part.row_count)
                    yield part, result
            work = KeptWork(work, kept, self.folder, self.context.store.settings)
        if left:
            running = self.run_parts(
                self.context, self.folder, work, list(left.values()), foreign_code=foreign_code, pool=pool
            )
            with closing(running) as results:
                for part, result in results:
                    self.progress.add(part.row_count)
                    yield part, result
        self.progress.report()


# --- All parts on Ray ---
# Runs one function on all parts of a version with Ray Data, streaming: groups of parts in, a small record of each out.
#
# A part's whole work happens within its task, so no row travels through Ray's object store.

# How often a waiting attempt checks whether it should stop.
POLL_S = 0.2
# If a worker dies, its part is retried MAX_RETRIES times before the attempt gives up.
MAX_RETRIES = 1
# Smaller than any record, so that Ray sends each record at once and does not collect a task's records into larger
# blocks.
RECORD_BYTES = 16
# The most parts that are repeated if a task is lost.
MAX_PARTS_A_TASK = 8
TASKS_A_CPU = 4
SINGLE_A_CPU = 2
# The tasks that are submitted to Ray per CPU: one running and one queued.
SUBMITTED_A_CPU = 2


@dataclass(frozen=True)
class Pool:
    """A pool of processes that keep their state from part to part.

    For work that keeps what it has loaded. `most` is the maximum number of processes, 0 for as many as fit the cluster;
    each takes `cpus` CPUs and `gpus` GPUs.
    """

    most: int
    cpus: int
    gpus: float


class PartRunner(Protocol):
    def __call__(
        self,
        context: AttemptContext,
        folder: str,
        work: Work[P],
        parts: Sequence[P],
        *,
        foreign_code: bool,
        pool: Pool | None = None,
    ) -> Results[P]:
        """Yield every part with its result, in the order of completion.

        Raises the work's errors and those of `raise_if_stopped`. After an error, or once it is closed, no part is being
        processed any more.

        `folder` is the attempt's own. `foreign_code` says that the work calls functions that may crash. Without a pool
        each part is a task of its own with one CPU.
        """


def run_on_ray(
    context: AttemptContext,
    folder: str,
    work: Work[P],
    parts: Sequence[P],
    *,
    foreign_code: bool,
    pool: Pool | None = None,
) -> Results[P]:
    """Run the parts on this process's Ray cluster; a `PartRunner`."""
    # Code that may crash its worker gets one task per part, so that a crash repeats no other part. A pool's worker
    # keeps its state, so grouping would save nothing there.
    alone = foreign_code or pool is not None
    groups = [[part] for part in parts] if alone else grouped(parts, _cpus())
    if pool is None:
        STANDBY_WORKERS.start_for(min(len(groups), _cpus()))
    from shared.ray_data_stream import DatasetStream, RayFailed  # ray.data: slow to import, and only the job needs it

    by_number = {part.number: part for part in parts}
    # Markers cost two requests a part. Only the end of foreign code depends on the part that it was at.
    begun = Begun(f"{folder}/begun") if alone else None
    pages, places = paged(groups)
    task = PartsTask(work, context.store.settings, begun, pages)
    # Ray Data itself schedules the workers of a pool.
    dataset, submitted = _dataset(task, places, pool), SUBMITTED_A_CPU if pool is None else 1
    watch = CapacityWatch(context, pool or TASK)
    stream = DatasetStream(dataset, submitted).tables(watch.poll, POLL_S)
    left = set(by_number)
    try:
        for record in chain.from_iterable(table.to_pylist() for table in stream):
            if record["error"]:
                raise error_from_record(pickle.loads(record["error"]))
            left.remove(record["part"])
            watch.note_record()
            yield by_number[record["part"]], pickle.loads(record["result"])
        if left:
            # A retried task failed earlier than its first try: Ray takes the end of the second try for the task's end,
            # and its error record for one that has already arrived.
            raise Unavailable(f"Ray lost the results of {len(left)} parts", reason="WORKER_LOST")
    except RayFailed as failure:
        tries = begun.tries(context.store) if begun else {}
        raise _lost(failure.__cause__, tries, by_number, foreign_code, pool) from failure.__cause__
    finally:
        stream.close()
        if begun:
            with suppress(*STORE_OUTAGES):  # the rest is deleted with the attempt's folder
                begun.forget(context.store)


def _cpus() -> int:
    import ray

    return int(ray.cluster_resources().get("CPU", 0))  # type: ignore[no-untyped-call]


def grouped(parts: Sequence[P], cpus: int) -> list[list[P]]:
    """Group consecutive parts into tasks.

    One task per part would be slow, because Ray's worker spends time between tasks. Groups are smaller when there are
    few parts for each CPU, and the last ones have one part, so that no CPU idles for long at the end.
    """
    cpus = max(cpus, 1)
    size = max(1, min(MAX_PARTS_A_TASK, len(parts) // (TASKS_A_CPU * cpus)))
    together = max(0, len(parts) - SINGLE_A_CPU * cpus) // size * size
    groups = [list(parts[first : first + size]) for first in range(0, together, size)]
    return [*groups, *([part] for part in parts[together:])]


# --- Pages of parts ---
# The parts of one source have most of what they are made of in common: schema, casts, how the file is opened. So they
# are pickled many at a time, and what they share is there once a page. A task has the place of its group.

# A page is full when the groups after its first reach this. The first has what all of them share, and for a wide table
# that alone may take more.
PAGE_BYTES = 256 * 1024


def paged(groups: Sequence[Sequence[Part]]) -> tuple[list[bytes | ObjectRef[bytes]], list[dict[str, int]]]:
    """Return the groups in pages, and the place of each group as a row of a dataset.

    A single page travels with the task. More of them lie in Ray's object store, so this process does not have to keep
    them.
    """
    stored: list[bytes | ObjectRef[bytes]] = []
    places: list[dict[str, int]] = []
    begun = _NewPage()
    for group in groups:
        if begun.is_full:
            stored.append(ray.put(begun.data))
            begun = _NewPage()
        places.append({"page": len(stored), "group": begun.add(group)})
    return [*stored, ray.put(begun.data) if stored else begun.data], places


class _NewPage:
    """One pickler writes all groups, so an object of an earlier group is not written again."""

    def __init__(self) -> None:
        self._file = io.BytesIO()
        self._pickler = cloudpickle.Pickler(self._file, protocol=5)  # type: ignore[no-untyped-call]
        self._count = self._first_group_bytes = 0

    @property
    def is_full(self) -> bool:
        return self._file.tell() - self._first_group_bytes >= PAGE_BYTES

    @property
    def data(self) -> bytes:
        return self._file.getvalue()

    def add(self, group: Sequence[Part]) -> int:
        """Return the number of the group in this page."""
        self._pickler.dump(list(group))  # type: ignore[no-untyped-call]
        self._count += 1
        if self._count == 1:
            self._first_group_bytes = self._file.tell()
        return self._count - 1


class _OpenPage:
    """Reads the groups of a page in order, as far as they are needed."""

    def __init__(self, page: bytes | ObjectRef[bytes]) -> None:
        self.key = _key_of(page)
        self._unpickler = pickle.Unpickler(io.BytesIO(page if isinstance(page, bytes) else ray.get(page)))
        self._groups: list[list[Any]] = []

    def group(self, number: int) -> list[Any]:
        while len(self._groups) <= number:
            self._groups.append(self._unpickler.load())
        return self._groups[number]


def _key_of(page: bytes | ObjectRef[bytes]) -> bytes:
    """Return what distinguishes the page. Unlike a reference it does not keep the page in Ray's object store."""
    return page if isinstance(page, bytes) else bytes(page.binary())


# The page that this process read last: the next task often has a group of the same one.
_last_page: _OpenPage | None = None


def _group(pages: Sequence[bytes | ObjectRef[bytes]], place: Mapping[str, int]) -> list[Any]:
    global _last_page
    page, opened = pages[place["page"]], _last_page
    _last_page = None  # a page that cannot be read is opened anew
    if opened is None or opened.key != _key_of(page):
        opened = _OpenPage(page)
    group = opened.group(place["group"])
    _last_page = opened
    return group


def _dataset(task: PartsTask, places: Sequence[Mapping[str, int]], pool: Pool | None) -> Dataset:
    import ray.data

    from shared.ray_data_stream import quiet_context

    with ray.data.DataContext.current(quiet_context(block_bytes=RECORD_BYTES)):
        given = ray.data.from_items(list(places), override_num_blocks=len(places))
        if pool is None:
            return given.flat_map(task, num_cpus=1, max_retries=MAX_RETRIES, runtime_env=WARM_WORKERS.runtime_env)
        return given.flat_map(
            PoolWorker,  # Ray creates one instance in each actor
            fn_constructor_args=(task,),
            # Actors without capacity wait, and the others work meanwhile.
            compute=ray.data.ActorPoolStrategy(
                size=min(len(places), pool.most or _capacity(pool)), max_tasks_in_flight_per_actor=1
            ),
            num_cpus=pool.cpus,
            num_gpus=pool.gpus or None,
            # A dead actor is restarted for all remaining parts; the part on which it died is tried once more.
            max_restarts=-1,
            max_task_retries=MAX_RETRIES,
        )


def _capacity(pool: Pool) -> int:
    """Return how many of its processes fit the nodes if they were idle; at least 1."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return max(1, sum(pool_fits(pool, node) for node in nodes))


def pool_fits(pool: Pool, node: Mapping[str, float]) -> int:
    """Return how many of its processes fit a node with these total resources."""
    fits = int(node.get("CPU", 0.0) // pool.cpus)
    return min(fits, int(node.get("GPU", 0.0)) * int(1 / pool.gpus)) if pool.gpus else fits


def _lost(
    cause: BaseException | None,
    tries: Mapping[int, int],
    parts: Mapping[int, Part],
    foreign_code: bool,
    pool: Pool | None = None,
) -> MillraceError:
    """Translate the error with which Ray gave up the work.

    Only an error of the work itself ends the job.
    """
    from ray import exceptions

    logger.warning("Ray gave the work up: %r", cause)
    # The actor of a pool was restarted, and died again on the same part.
    if isinstance(cause, exceptions.WorkerCrashedError) or (pool and isinstance(cause, exceptions.RayActorError)):
        # Actors also die with their nodes, which is not the work's fault; two deaths on one part are hardly chance.
        twice = any(count > 1 for count in tries.values())
        return crash_error(tries, parts, foreign_code=foreign_code and (pool is None or twice))
    if isinstance(cause, exceptions.OutOfMemoryError):
        return Unavailable("Ray ended a worker for want of memory", reason="WORKER_OUT_OF_MEMORY")
    why = first_line(cause) if cause else "no reason"
    return Unavailable(f"Ray gave the work up: {why}", reason="WORKER_LOST")


# --- The task of some parts ---
# The code in Ray's workers: processes a group of parts in order, and returns a record for each.


class PartsTask:
    """The function that Ray's worker calls for the place of each group of parts in `pages`."""

    def __init__(
        self,
        work: Work[Any],
        settings: StoreSettings,
        begun: Begun | None,
        pages: Sequence[bytes | ObjectRef[bytes]],
    ) -> None:
        self._work = work
        self._settings = settings
        self._begun = begun
        self._pages = pages

    def __call__(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield a record for each part as it completes.

        Errors are records too: Ray would wrap an exception, and retry some.
        """
        store = open_store(self._settings)
        for part in _group(self._pages, row):
            record = self._record(store, part)
            yield record
            if record["error"]:
                return

    def _record(self, store: ObjectStore, part: Part) -> dict[str, Any]:
        try:
            with _one_thread(), self._begun.working_on(store, part) if self._begun else nullcontext():
                return {"part": part.number, "result": pickle.dumps(self._work(part)), "error": b""}
        except Exception as error:
            return {"part": part.number, "result": b"", "error": pickle.dumps(_public_error(error, part).as_record())}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit Arrow to one thread, since a task has one CPU.

    Restores the setting afterwards, because the worker may run other tasks.
    """
    before = pa.cpu_count()
    pa.set_cpu_count(1)
    try:
        yield
    finally:
        pa.set_cpu_count(before)


def _public_error(error: Exception, part: Part) -> MillraceError:
    """Return the error of a part for the attempt.

    The internals of an unexpected error are hidden.
    """
    if isinstance(error, MillraceError):
        return error
    if isinstance(error, MemoryError):
        return ResourceExhausted(f"a worker of Ray has too little memory for {part.where}")
    if isinstance(error, OSError) and error.errno in FULL:
        return ResourceExhausted(
            "the disk of a node of Ray is full; free some space in its temporary folder", reason="SCRATCH_FULL"
        )
    return hidden(error, logger, f"{part.where}: the work failed")


class PoolWorker:
    """The function that a pool's actor calls.

    Its work keeps its state from part to part.
    """

    def __init__(self, task: PartsTask) -> None:
        self._task = task

    def __call__(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        return self._task(row)


# --- Crashes ---
# Finds the part that a worker was processing when it died: Ray reports only that a worker died.


@dataclass(frozen=True)
class Begun:
    """Markers in the store for the parts in progress.

    The marker of a part remains if its worker dies. It names the worker's process.
    """

    folder: str

    @contextmanager
    def working_on(self, store: ObjectStore, part: Part) -> Iterator[None]:
        key = f"{self.folder}/{part.number}-{uuid4().hex}"
        store.put(key, str(os.getpid()).encode())
        try:
            yield
        finally:
            store.delete(key)

    def tries(self, store: ObjectStore) -> Counter[int]:
        """Return how often each part, by number, was begun and not ended."""
        return Counter(int(info.key.rsplit("/", 1)[-1].partition("-")[0]) for info in store.list(self.folder))

    def forget(self, store: ObjectStore) -> None:
        store.delete_folder(self.folder)


def crash_error(tries: Mapping[int, int], parts: Mapping[int, Part], *, foreign_code: bool) -> MillraceError:
    """Return the error for work whose worker died too often.

    `tries` and `parts` are keyed by the parts' numbers. With `foreign_code`, which may do anything, the work is to
    blame and another attempt would end the same way. Otherwise the cause is outside of the work, such as a killed
    process.
    """
    killers = [parts[number] for number, count in tries.items() if count > 1] or [parts[number] for number in tries]
    where = "; ".join(part.where for part in killers) or f"one of {len(parts)} parts"
    metadata = {"parts": where}
    if foreign_code:
        return FailedPrecondition(
            f"the worker died, and died again, on {where}: a custom function crashes or hangs on one of them, or "
            "the code of a bundle does",
            reason="TRANSFORM_CRASHED",
            metadata=metadata,
        )
    return Unavailable(f"the worker died, and died again, on {where}", reason="WORKER_LOST", metadata=metadata)


# --- Standby workers ---
# Ray workers that wait, with their modules imported, for the tasks of the next import or transform: without them a
# transform of a few seconds would spend most of its time on starting workers.

WARM_WORKERS = WarmWorkers(
    # The last two are modules that a dataset's tasks import: its settings, and Ray Data's issue detection.
    ("ray.data", "data_service.transforms.passes", "shared.ray_data_stream", "ray.data._internal.issue_detection"),
    kept_for_s=900,
)
# The most standby workers; each takes about 200 MiB.
MAX = 4


class StandbyWorkers:
    """The standby workers of one attempt, which has its own process.

    Counts the workers that its tasks take, so that the same number can be started for the next attempt. Ray does not
    report how many wait.
    """

    def __init__(self) -> None:
        self._taken = 0

    def start_for(self, tasks: int) -> None:
        """Start `tasks` no-op tasks in the warm-worker environment.

        Ray then spawns and preloads worker processes while this process prepares the first real tasks. If warm workers
        already wait, this costs nothing. Runs once per attempt.
        """
        if self._taken:
            return
        self._taken = tasks
        no_op = ray.remote(num_cpus=1, max_retries=0, runtime_env=WARM_WORKERS.runtime_env)(_no_op)
        for _ in range(tasks):
            no_op.remote()

    def replace(self) -> None:
        """Start workers for the next attempt, after the job is done.

        A failure is only logged: it must not fail this job.
        """
        if not self._taken or not warm_workers.wanted():
            return
        try:
            # Ray may be configured with more CPUs than exist, and starting a worker needs a real one.
            start(min(self._taken, MAX, os.cpu_count() or 1))
        except Exception:
            logger.warning("no processes wait for the next job", exc_info=True)


STANDBY_WORKERS = StandbyWorkers()


def start(count: int) -> None:
    """Start at most `count` workers, spread over the nodes with free CPU slots."""
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    cpus = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in nodes}
    rounds = ([node_id for node_id in cpus if cpus[node_id] > number] for number in range(MAX))
    WARM_WORKERS.start(Counter(islice(chain.from_iterable(rounds), count)))


def _no_op() -> None:
    """Do nothing: the worker has imported all modules when it is called."""


# --- Progress ---
# The progress of a transform or a prediction, reported at most twice a second.

INTERVAL_S = 0.5


class Progress:
    """Reports the progress of a job's passes.

    `phase` is FITTING or WRITING; for a prediction, CHECKING or PREDICTING. The rows of passes of one phase add up.
    """

    def __init__(self, context: AttemptContext) -> None:
        self._context = context
        self._phase = ""
        self._rows_done = self._rows_total = 0
        self._began_at = self._reported_at = 0.0

    def begin(self, phase: str, rows: int) -> None:
        """Begin a pass over `rows` rows."""
        if phase != self._phase:
            self._phase = phase
            self._rows_done = self._rows_total = 0
            self._began_at = time.monotonic()
        self._rows_total += rows
        self.report()

    def add(self, rows: int) -> None:
        self._rows_done += rows
        if time.monotonic() - self._reported_at > INTERVAL_S:
            self.report()

    def report(self) -> None:
        self._reported_at = time.monotonic()
        self._context.report(
            phase=self._phase,
            rows_done=self._rows_done,
            rows_total=self._rows_total,
            rows_per_second=self._rows_done / max(self._reported_at - self._began_at, 1e-3),
        )


# --- Capacity ---
# Checks whether any node of the cluster could ever hold a task, or a worker of a prediction.

# A task of a part, as a pool of one worker.
TASK = Pool(most=1, cpus=1, gpus=0.0)
# How long no part may end before the nodes are looked at, and then between two looks.
CAPACITY_POLL_S = 2.0


class CapacityWatch:
    """Follows an attempt's tasks, and reports what the cluster lacks while no node could run any of them.

    Its tasks stay submitted, so that an autoscaler sees what they ask for.
    """

    def __init__(self, context: AttemptContext, each: Pool, clock: Callable[[], float] = time.monotonic) -> None:
        self._context = context
        self._each = each
        self._clock = clock
        self._looked_at = clock()
        # Whether clients may see that the attempt waits.
        self._is_waiting = False

    def poll(self) -> None:
        """Raise if the job is to stop."""
        self._context.raise_if_stopped()
        if self._clock() - self._looked_at >= CAPACITY_POLL_S:
            self._report(lacking(self._each))

    def note_record(self) -> None:
        """Note that a part has ended."""
        if self._is_waiting:
            self._report("")
        self._looked_at = self._clock()

    def _report(self, what: str) -> None:
        if what or self._is_waiting:
            self._is_waiting = self._context.report_waiting(what)
        self._looked_at = self._clock()


def missing_capacity(job: JobRecord) -> str:
    """Return what the cluster lacks for one worker of a prediction.

    Empty for any other job: a small import needs no task, and the attempt of a large one reports what its tasks lack.
    """
    return lacking(pool_of(PredictSpec.from_record(job.spec["predict"]).workers)) if "predict" in job.spec else ""


def lacking(each: Pool) -> str:
    """Return what the cluster lacks for one worker of the pool, or for one task.

    Busy nodes count, since a worker waits for capacity on them.
    """
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    if any(pool_fits(each, node["Resources"]) for node in nodes if node["Alive"]):
        return ""
    gpus = f" and {each.gpus:g} GPU" if each.gpus else ""
    return f"a node with {each.cpus} CPU{gpus} for a {'task' if each is TASK else 'worker'}"


def pool_of(workers: Workers) -> Pool:
    return Pool(most=workers.most, cpus=workers.cpus, gpus=workers.gpus)
