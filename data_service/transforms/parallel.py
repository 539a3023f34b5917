"""Runs one function on all parts of a version with Ray Data: the task that takes some parts, the pool of workers that
runs it, which part a worker died on, and passes told as progress.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

import pyarrow as pa
import ray

from data_service.attempt import FULL
from data_service.domain.predict_spec import PredictSpec, Workers
from data_service.transforms.plan import Part
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
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from shared.telemetry import hidden

if TYPE_CHECKING:
    from ray.data import Dataset

logger = logging.getLogger(__name__)


# --- Passes ---
# Passes over the parts of a version, told as progress: what transforms and predictions are made of.


@dataclass(frozen=True)
class Passes:
    """`folder` is the attempt's own."""

    context: AttemptContext
    folder: str
    run_parts: PartRunner
    progress: Progress

    def over(
        self, phase: str, work: Work, parts: Sequence[Part], *, foreign_code: bool, pool: Pool | None = None
    ) -> Results:
        """To be closed, before anything else is done, by whoever leaves it early: tasks may still write."""
        self.progress.begin(phase, sum(part.row_count for part in parts))
        with closing(
            self.run_parts(self.context, self.folder, work, parts, foreign_code=foreign_code, pool=pool)
        ) as results:
            for part, result in results:
                self.progress.add(part.row_count)
                yield part, result
        self.progress.tell()


# --- All parts on Ray ---
# Runs one function on all parts of a version with Ray Data, streaming: groups of parts in, a small record of each out.
#
# The whole of a part's work lies within its task, so no row ever travels through Ray's object store.

# How often a waiting attempt looks whether it is still wanted.
POLL_S = 0.2
# A worker that dies takes its part with it; the part is done again so often before the attempt gives up.
MAX_RETRIES = 1
# Less than any record has, so that each goes on its way as soon as it is made, and none waits for more of its task.
RECORD_BYTES = 16
# Of a task that is lost, so many parts are done again.
MAX_PARTS_A_TASK = 8
TASKS_A_CPU = 4
SINGLE_A_CPU = 2
# At work, and with Ray already.
SUBMITTED_A_CPU = 2

# Parts with what their work returned.
Results = Generator[tuple[Part, Any], None, None]


@dataclass(frozen=True)
class Pool:
    """At most so many processes (0: as many as the cluster has room for) that stay for all parts which they are given,
    each with so many CPUs and GPUs: for work that keeps what it has loaded."""

    most: int
    cpus: int
    gpus: float


class PartRunner(Protocol):
    def __call__(
        self,
        context: AttemptContext,
        folder: str,
        work: Work,
        parts: Sequence[Part],
        *,
        foreign_code: bool,
        pool: Pool | None = None,
    ) -> Results:
        """Every part with its result, as they come. Raises what the work raised, and what `raise_if_stopped` does; once
        it has, or is closed, no part is being worked on any more.

        `folder` is the attempt's own; `foreign_code` says that the work calls functions that may crash. Without a pool
        each part is a task of its own, of one CPU.
        """


def run_on_ray(
    context: AttemptContext,
    folder: str,
    work: Work,
    parts: Sequence[Part],
    *,
    foreign_code: bool,
    pool: Pool | None = None,
) -> Results:
    """The `PartRunner` on the Ray cluster of this process."""
    # Code that may crash its worker has a task for each part, so that the others are not tried again for it; and a
    # worker of a pool has nothing to load between two.
    alone = foreign_code or pool is not None
    groups = [[part] for part in parts] if alone else grouped(parts, _cpus())
    if pool is None:
        WAITING.take(min(len(groups), _cpus()))
    from shared.dataset_stream import DatasetStream, RayFailed  # ray.data: slow, and only the job needs it

    by_number = {part.number: part for part in parts}
    begun = Begun(f"{folder}/begun")
    task = PartsTask(work, context.store.settings, begun)
    # What a pool's workers do next is Ray Data's own business.
    dataset, submitted = _dataset(task, groups, pool), SUBMITTED_A_CPU if pool is None else 1
    stream = DatasetStream(dataset, submitted).tables(context.raise_if_stopped, POLL_S)
    left = set(by_number)
    try:
        for record in chain.from_iterable(table.to_pylist() for table in stream):
            if record["error"]:
                raise error_from_record(pickle.loads(record["error"]))
            left.remove(record["part"])
            yield by_number[record["part"]], pickle.loads(record["result"])
        if left:
            # A task that was tried again and failed earlier than before: Ray takes the end of the second for the
            # task's, and its error for a record that has come already.
            raise Unavailable(f"Ray lost the results of {len(left)} parts", reason="WORKER_LOST")
    except RayFailed as failure:
        raise _lost(failure.__cause__, begun.tries(context.store), by_number, foreign_code, pool) from failure.__cause__
    finally:
        stream.close()
        with suppress(*STORE_OUTAGES):  # what is left of them goes with the attempt's folder
            begun.forget(context.store)


def _cpus() -> int:
    import ray

    return int(ray.cluster_resources().get("CPU", 0))  # type: ignore[no-untyped-call]


def grouped(parts: Sequence[Part], cpus: int) -> list[list[Part]]:
    """Neighbours that one task works on, one after the other: between two tasks a worker of Ray has some to do for Ray.
    Groups are smaller where there are few parts for each CPU, and the last ones have one part, so that no CPU idles
    for long at the end."""
    cpus = max(cpus, 1)
    size = max(1, min(MAX_PARTS_A_TASK, len(parts) // (TASKS_A_CPU * cpus)))
    together = max(0, len(parts) - SINGLE_A_CPU * cpus) // size * size
    groups = [list(parts[first : first + size]) for first in range(0, together, size)]
    return [*groups, *([part] for part in parts[together:])]


def _dataset(task: PartsTask, groups: Sequence[Sequence[Part]], pool: Pool | None) -> Dataset:
    import ray.data

    from shared.dataset_stream import quiet_context

    with ray.data.DataContext.current(quiet_context(block_bytes=RECORD_BYTES)):
        given = ray.data.from_items(
            [{"parts": pickle.dumps(group)} for group in groups], override_num_blocks=len(groups)
        )
        if pool is None:
            return given.flat_map(task, num_cpus=1, max_retries=MAX_RETRIES, runtime_env=WARM_WORKERS.runtime_env)
        return given.flat_map(
            PoolWorker,  # of a class Ray makes one in each actor
            fn_constructor_args=(task,),
            # Those for which there is no room yet wait, and the others work meanwhile.
            compute=ray.data.ActorPoolStrategy(
                size=min(len(groups), pool.most or _capacity(pool)), max_tasks_in_flight_per_actor=1
            ),
            num_cpus=pool.cpus,
            num_gpus=pool.gpus or None,
            # One that died is started again, for all other parts; the part that it died over is tried once more.
            max_restarts=-1,
            max_task_retries=MAX_RETRIES,
        )


def _capacity(pool: Pool) -> int:
    """How many of its processes the nodes could hold if they were empty; 1 where none could."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return max(1, sum(pool_fits(pool, node) for node in nodes))


def pool_fits(pool: Pool, node: Mapping[str, float]) -> int:
    """How many of its processes a node with these resources in all has room for."""
    fits = int(node.get("CPU", 0.0) // pool.cpus)
    return min(fits, int(node.get("GPU", 0.0)) * int(1 / pool.gpus)) if pool.gpus else fits


def _lost(
    cause: BaseException | None,
    tries: Mapping[int, int],
    parts: Mapping[int, Part],
    foreign_code: bool,
    pool: Pool | None = None,
) -> MillraceError:
    """What Ray says of work that it gave up; only what the work itself did wrong ends the job."""
    from ray import exceptions

    logger.warning("Ray gave the work up: %r", cause)
    # An actor of a pool was started again, and died again over the same part.
    if isinstance(cause, exceptions.WorkerCrashedError) or (pool and isinstance(cause, exceptions.RayActorError)):
        # Actors die with their nodes, too, and that is nobody's fault; over one part twice is hardly chance.
        twice = any(count > 1 for count in tries.values())
        return crash_error(tries, parts, foreign_code=foreign_code and (pool is None or twice))
    if isinstance(cause, exceptions.OutOfMemoryError):
        return Unavailable("Ray ended a worker for want of memory", reason="WORKER_OUT_OF_MEMORY")
    why = first_line(cause) if cause else "no reason"
    return Unavailable(f"Ray gave the work up: {why}", reason="WORKER_LOST")


# --- The task of some parts ---
# What Ray's workers are asked to do: the work of some parts, one after the other, with a record of how each went.


# A part's work; it must travel by pickle, and so must what it returns.
Work = Callable[[Part], Any]


class PartsTask:
    """What Ray's worker calls, once for each group of parts."""

    def __init__(self, work: Work, settings: StoreSettings, begun: Begun) -> None:
        self._work = work
        self._settings = settings
        self._begun = begun

    def __call__(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A record for each part, as it is done. Errors are records too: Ray would wrap them, and try some again."""
        store = open_store(self._settings)
        for part in pickle.loads(row["parts"]):
            record = self._record(store, part)
            yield record
            if record["error"]:
                return

    def _record(self, store: ObjectStore, part: Part) -> dict[str, Any]:
        try:
            with _one_thread(), self._begun.working_on(store, part):
                return {"part": part.number, "result": pickle.dumps(self._work(part)), "error": b""}
        except Exception as error:
            return {"part": part.number, "result": b"", "error": pickle.dumps(_told(error, part).as_record())}


@contextmanager
def _one_thread() -> Iterator[None]:
    """A task has one CPU. The worker may do other things later."""
    before = pa.cpu_count()
    pa.set_cpu_count(1)
    try:
        yield
    finally:
        pa.set_cpu_count(before)


def _told(error: Exception, part: Part) -> MillraceError:
    """The error of a part as the attempt gets it; one that nobody expected without its internals."""
    if isinstance(error, MillraceError):
        return error
    if isinstance(error, MemoryError):
        return ResourceExhausted(f"a worker of Ray has too little memory for the rows of part {part.number}")
    if isinstance(error, OSError) and error.errno in FULL:
        return ResourceExhausted(
            "the disk of a node of Ray is full; free some space in its temporary folder", reason="SCRATCH_FULL"
        )
    return hidden(error, logger, f"part {part.number} failed")


class PoolWorker:
    """What an actor of a pool calls: its work stays from part to part."""

    def __init__(self, task: PartsTask) -> None:
        self._task = task

    def __call__(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        return self._task(row)


# --- Crashes ---
# Which part a worker was on when it died: Ray says only that one did.


@dataclass(frozen=True)
class Begun:
    """A marker in the store for each part that is being worked on, and for each whose worker died over it."""

    folder: str

    @contextmanager
    def working_on(self, store: ObjectStore, part: Part) -> Iterator[None]:
        key = f"{self.folder}/{part.number}-{uuid4().hex}"
        store.put(key, b"")
        try:
            yield
        finally:
            store.delete(key)

    def tries(self, store: ObjectStore) -> Counter[int]:
        """How often each part, by number, was begun and not ended."""
        return Counter(int(info.key.rsplit("/", 1)[-1].partition("-")[0]) for info in store.list(self.folder))

    def forget(self, store: ObjectStore) -> None:
        store.delete_folder(self.folder)


def crash_error(tries: Mapping[int, int], parts: Mapping[int, Part], *, foreign_code: bool) -> MillraceError:
    """The error for work that took its worker with it too often; `tries` and `parts` are by the parts' numbers.

    With `foreign_code`, which runs what its author likes, the work is to blame and another attempt would end the same
    way; without, whatever kills processes on this cluster.
    """
    killers = [parts[number] for number, count in tries.items() if count > 1] or [parts[number] for number in tries]
    rows = ", ".join(f"{part.first_row_id} to {part.first_row_id + part.row_count - 1}" for part in killers)
    where = f"rows {rows} of split {killers[0].split!r}" if killers else "some rows"
    metadata = {"rows": rows}
    if foreign_code:
        return FailedPrecondition(
            f"the worker died, and died again, on {where}: a custom function crashes or hangs on one of them",
            reason="TRANSFORM_CRASHED",
            metadata=metadata,
        )
    return Unavailable(f"the worker died, and died again, on {where}", reason="WORKER_LOST", metadata=metadata)


# --- Warm workers ---
# Ray's workers that wait for the tasks of the next transform: a transform of a few seconds would spend most of them on
# their start.

WARM_WORKERS = WarmWorkers(
    # The last two are what a dataset brings its tasks: its settings, and whoever watches them.
    ("ray.data", "data_service.transforms.work", "shared.dataset_stream", "ray.data._internal.issue_detection"),
    kept_for_s=900,
)
# Each holds about 200 MiB.
MAX = 4


class Waiting:
    """Of one attempt, which has a process of its own: the workers that its tasks find waiting, and those that wait for
    the next one's in their place. Ray does not tell how many there are, so only so many are started as were taken."""

    def __init__(self) -> None:
        self._taken = 0

    def take(self, tasks: int) -> None:
        """Where none wait, has some start while this process gets the first tasks ready: else it does so first, and
        then they. Once is enough."""
        if self._taken:
            return
        self._taken = tasks
        meet = ray.remote(num_cpus=1, max_retries=0, runtime_env=WARM_WORKERS.runtime_env)(_meet)
        for _ in range(tasks):
            meet.remote()

    def replace(self) -> None:
        """To be called when the job is done. It must not fail of what is for the next."""
        if not self._taken or not warm_workers.wanted():
            return
        try:
            # Ray may be told of more CPUs than there are, and a start wants a real one.
            start(min(self._taken, MAX, os.cpu_count() or 1))
        except Exception:
            logger.warning("no processes wait for the next transform", exc_info=True)


WAITING = Waiting()


def start(count: int) -> None:
    """Starts at most so many, one after the other on each node that has a CPU for them."""
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    cpus = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in nodes}
    rounds = ([node_id for node_id in cpus if cpus[node_id] > number] for number in range(MAX))
    WARM_WORKERS.start(Counter(islice(chain.from_iterable(rounds), count)))


def _meet() -> None:
    """The worker has imported all when it is called."""


# --- Progress ---
# How far a transform or a prediction is, told at most twice a second.

INTERVAL_S = 0.5


class Progress:
    """`phase`: FITTING or WRITING; of a prediction CHECKING or PREDICTING. Passes of one phase add up."""

    def __init__(self, context: AttemptContext) -> None:
        self._context = context
        self._phase = ""
        self._rows_done = self._rows_total = 0
        self._began_at = self._reported_at = 0.0

    def begin(self, phase: str, rows: int) -> None:
        """A pass over so many rows begins."""
        if phase != self._phase:
            self._phase = phase
            self._rows_done = self._rows_total = 0
            self._began_at = time.monotonic()
        self._rows_total += rows
        self.tell()

    def add(self, rows: int) -> None:
        self._rows_done += rows
        if time.monotonic() - self._reported_at > INTERVAL_S:
            self.tell()

    def tell(self) -> None:
        self._reported_at = time.monotonic()
        self._context.report(
            phase=self._phase,
            rows_done=self._rows_done,
            rows_total=self._rows_total,
            rows_per_second=self._rows_done / max(self._reported_at - self._began_at, 1e-3),
        )


# --- Capacity ---
# Whether the cluster has a node on which a worker of a prediction could ever be started.


def missing_capacity(job: JobRecord) -> str:
    """What the cluster lacks for one worker of a prediction; empty for any other job. Busy nodes count: a worker waits
    for its place on them."""
    if "predict" not in job.spec:
        return ""
    workers = PredictSpec.from_record(job.spec["predict"]).workers
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    if any(pool_fits(pool_of(workers), node["Resources"]) for node in nodes if node["Alive"]):
        return ""
    gpus = f" and {workers.gpus:g} GPU" if workers.gpus else ""
    return f"a node with {workers.cpus} CPU{gpus} for a worker"


def pool_of(workers: Workers) -> Pool:
    return Pool(most=workers.most, cpus=workers.cpus, gpus=workers.gpus)
