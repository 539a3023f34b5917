"""Runs one function on all parts of a version with Ray Data, streaming: groups of parts in, a small record of each out.

The whole of a part's work lies within its task, so no row ever travels through Ray's object store.
"""

from __future__ import annotations

import functools
import logging
import pickle
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from data_service.attempt_folder import FULL
from data_service.transforming.crashes import Begun, crash_error
from data_service.transforming.plan import Part
from data_service.transforming.warm_workers import WARM_WORKERS
from shared.errors import (
    STORE_OUTAGES,
    MillraceError,
    ResourceExhausted,
    Unavailable,
    error_from_record,
    first_line,
)
from shared.jobs import AttemptContext
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from shared.unexpected import hidden

if TYPE_CHECKING:
    from ray.data import Dataset

logger = logging.getLogger(__name__)

# How often a waiting attempt looks whether it is still wanted.
POLL_S = 0.2
# A worker that dies takes its part with it; the part is done again so often before the attempt gives up.
MAX_RETRIES = 1
# Less than any record has, so that each goes on its way as soon as it is made, and none waits for more of its task.
RECORD_BYTES = 16
# Of a task that is lost, so many parts are done again.
MOST_PARTS_A_TASK = 8
TASKS_A_CPU = 4

# A part's work; it must travel by pickle, and so must what it returns.
Work = Callable[[Part], Any]
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
        they are worked on in tasks of one CPU each.
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
    # Code that may crash its worker has a task for each part, so that the others are not tried again for it.
    groups = [[part] for part in parts] if foreign_code or pool else grouped(parts, _cpus())
    if pool is None:
        _warm_up(len(groups))
    from shared.dataset_stream import DatasetStream, RayFailed  # ray.data: slow, and only the job needs it

    by_number = {part.number: part for part in parts}
    begun = Begun(f"{folder}/begun")
    task = _Task(work, context.store.settings, begun)
    stream = DatasetStream(_dataset(task, groups, pool)).tables(context.raise_if_stopped, POLL_S)
    try:
        for record in chain.from_iterable(table.to_pylist() for table in stream):
            if record["error"]:
                raise error_from_record(pickle.loads(record["error"]))
            yield by_number[record["part"]], pickle.loads(record["result"])
    except RayFailed as failure:
        raise _lost(failure.__cause__, begun.tries(context.store), by_number, foreign_code, pool) from failure.__cause__
    finally:
        stream.close()
        with suppress(*STORE_OUTAGES):  # what is left of them goes with the attempt's folder
            begun.forget(context.store)


@functools.cache
def _warm_up(tasks: int) -> None:
    """Where no workers wait, has some start while this process gets the first tasks ready: else it does so first, and
    then they. Once is enough: an attempt has a process of its own."""
    import ray

    meet = ray.remote(num_cpus=1, max_retries=0, runtime_env=WARM_WORKERS.runtime_env)(_meet)
    for _ in range(min(tasks, _cpus())):
        meet.remote()


def _meet() -> None:
    """The worker has imported all when it is called."""


def _cpus() -> int:
    import ray

    return int(ray.cluster_resources().get("CPU", 0))  # type: ignore[no-untyped-call]


def grouped(parts: Sequence[Part], cpus: int) -> list[list[Part]]:
    """Neighbours that one task works on, one after the other: between two tasks a worker of Ray idles for a fifth of a
    second. Whoever has few parts for each CPU gets smaller groups, so that none idles at the end."""
    size = max(1, min(MOST_PARTS_A_TASK, len(parts) // (TASKS_A_CPU * max(cpus, 1))))
    return [list(parts[first : first + size]) for first in range(0, len(parts), size)]


class _Task:
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


class _Worker:
    """What an actor of a pool calls: its work stays from part to part."""

    def __init__(self, task: _Task) -> None:
        self._task = task

    def __call__(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        return self._task(row)


def _dataset(task: _Task, groups: Sequence[Sequence[Part]], pool: Pool | None) -> Dataset:
    import ray.data

    from shared.dataset_stream import quiet_context

    with ray.data.DataContext.current(quiet_context(block_bytes=RECORD_BYTES)):
        given = ray.data.from_items(
            [{"parts": pickle.dumps(group)} for group in groups], override_num_blocks=len(groups)
        )
        if pool is None:
            return given.flat_map(task, num_cpus=1, max_retries=MAX_RETRIES, runtime_env=WARM_WORKERS.runtime_env)
        return given.flat_map(
            _Worker,  # type: ignore[arg-type]  # of a class Ray makes one in each actor
            fn_constructor_args=(task,),
            # Those for which there is no room yet wait, and the others work meanwhile.
            compute=ray.data.ActorPoolStrategy(
                size=min(len(groups), pool.most or _room(pool)), max_tasks_in_flight_per_actor=1
            ),
            num_cpus=pool.cpus,
            num_gpus=pool.gpus or None,
            # One that died is started again, for all other parts; the part that it died over is tried once more.
            max_restarts=-1,
            max_task_retries=MAX_RETRIES,
        )


def _room(pool: Pool) -> int:
    """How many of its processes the nodes could hold if they were empty; 1 where none could."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return max(1, sum(pool_fits(pool, node) for node in nodes))


def pool_fits(pool: Pool, node: Mapping[str, float]) -> int:
    """How many of its processes a node with these resources in all has room for."""
    fits = int(node.get("CPU", 0.0) // pool.cpus)
    return min(fits, int(node.get("GPU", 0.0) / pool.gpus)) if pool.gpus else fits


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
        return crash_error(tries, parts, foreign_code=foreign_code)
    if isinstance(cause, exceptions.OutOfMemoryError):
        return Unavailable("Ray ended a worker for want of memory", reason="WORKER_OUT_OF_MEMORY")
    why = first_line(cause) if cause else "no reason"
    return Unavailable(f"Ray gave the work up: {why}", reason="WORKER_LOST")
