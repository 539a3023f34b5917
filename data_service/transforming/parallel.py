"""Runs one function on all parts of a version with Ray Data, streaming: groups of parts in, a small record of each out.

The whole of a part's work lies within its task, so no row ever travels through Ray's object store.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from data_service.transforming.crashes import Begun, crash_error
from data_service.transforming.parts_task import PartsTask, PoolWorker, Work
from data_service.transforming.plan import Part
from data_service.transforming.warm_workers import WAITING, WARM_WORKERS
from shared.errors import (
    STORE_OUTAGES,
    MillraceError,
    Unavailable,
    error_from_record,
    first_line,
)
from shared.jobs import AttemptContext

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
    size = max(1, min(MOST_PARTS_A_TASK, len(parts) // (TASKS_A_CPU * cpus)))
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
