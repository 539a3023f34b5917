"""The tables of rows that Ray Data's tasks prepare, for a rank that waits for them, but not for ever.

Nothing of Ray's holds a CPU for these tasks. Where others take the last one, Ray Data waits without a word.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import closing

import pyarrow as pa
import ray
from ray.exceptions import RayError

from shared.dataset_stream import DatasetStream
from shared.errors import Unavailable
from shared.jobs.transitions import INSUFFICIENT_RESOURCES
from shared.transforms import Pipeline
from shared.transforms.steps.custom import DEFAULT_TIMEOUT_S, Custom
from train_service.domain.capacity import INGEST_CPUS
from train_service.domain.spec import TrainingSpec
from train_service.domain.watchdog import STARTING_SECONDS
from train_service.placement import usable_nodes
from train_service.store_retry import OUTAGE_TIMEOUT_S, store_call

logger = logging.getLogger(__name__)

POLL_S = 1.0
# The first tasks import and compile.
FIRST_TIMEOUT_S = STARTING_SECONDS
# A piece of many small rows may take long to prepare, and other work may have the CPUs for a while.
NEXT_TIMEOUT_S = OUTAGE_TIMEOUT_S
# Ray Data gives what a task makes on in blocks, which need not begin and end as the pieces do.
PIECES_A_BLOCK = 2
ASKED_TIMEOUT_S = 10
# What Ray calls it where a task waits for a CPU no longer.
GIVEN_TO_A_WORKER = "SUBMITTED_TO_WORKER"
HAS_ITS_CPU = (GIVEN_TO_A_WORKER, "PENDING_ARGS_FETCH", "RUNNING", "RUNNING_IN_RAY_GET", "RUNNING_IN_RAY_WAIT")


def longest_s(spec: TrainingSpec) -> float:
    """How long the functions of the transform may take, by their own limits, until a task has made something."""
    steps = Pipeline.from_config(spec.transform, spec.input_column).steps
    limits = (step.timeout_s or DEFAULT_TIMEOUT_S for step in steps if isinstance(step, Custom))
    return PIECES_A_BLOCK * sum(limits)


def prepared(
    stream: DatasetStream, touched: Callable[[], None], longest_s: float = 0.0, tasks: str = ""
) -> Generator[pa.Table, None, None]:
    """The tables of `stream`; `touched` is called for each, and whenever a task got on. For `longest_s` a task may be
    at work on functions of its own. `tasks` is the name of the run's tasks for this rank: another rank's may have the
    last CPU and wait, in good health, for this one.

    Raises `Unavailable` where no task gets on, and what the stream raises. Whoever takes the tables may take his time.
    """
    watch = _Watch(stream, touched, longest_s, tasks)
    with closing(stream.tables(watch.poll, POLL_S)) as tables:
        while True:
            with store_call():  # as there: who waits here gives up by himself
                table = next(tables, None)
            if table is None:
                return
            watch.got_on()
            yield table
            watch.got_on()


class _Watch:
    def __init__(self, stream: DatasetStream, touched: Callable[[], None], longest_s: float, tasks: str = "") -> None:
        self._stream = stream
        self._touched = touched
        self._tasks = tasks
        self._done = 0
        self._since = time.monotonic()
        self._longest_s = longest_s
        self._timeout_s = FIRST_TIMEOUT_S + longest_s
        self._extended = False

    def got_on(self) -> None:
        self._touched()
        self._since, self._timeout_s = time.monotonic(), NEXT_TIMEOUT_S + self._longest_s
        self._extended = False

    def poll(self) -> None:
        if (done := self._stream.done) > self._done:
            self._done = done
            self.got_on()
        elif time.monotonic() - self._since > self._timeout_s:
            self._judge()

    def _judge(self) -> None:
        text = f"Ray Data has prepared no row for {self._timeout_s:.0f} s"
        if at_work_s := longest_at_work_s(self._tasks):
            if at_work_s < self._timeout_s and not self._extended:
                # It has found its CPU only now. Once is enough: Ray Data begins a task that dies anew without end.
                self._since, self._extended = time.monotonic() - at_work_s, True
                return
            # What it stands still on is a CPU, too: that none is free does not mean that there was no room.
            raise Unavailable(f"{text}: a task stands still", reason="PREPARATION_STALLED")
        if not _has_free_cpu():
            # Not a failure: the next attempt begins once there is room for its tasks, too.
            raise Unavailable(f"{text}: its tasks found no CPU", reason=INSUFFICIENT_RESOURCES)
        raise Unavailable(f"{text}, though a CPU is free: a task stands still", reason="PREPARATION_STALLED")


def longest_at_work_s(tasks: str) -> float:
    """How long the oldest of the tasks of that name that have a CPU now has had it, by what Ray's dashboard knows; 0
    where none has one, or nobody can be asked."""
    from ray.util.state import list_tasks  # only where something is wrong
    from ray.util.state.common import RAY_MAX_LIMIT_FROM_API_SERVER
    from ray.util.state.exception import RayStateApiException

    if not tasks:
        return 0.0
    try:
        unfinished = list_tasks(
            address=ray.get_runtime_context().gcs_address,
            # A task's tries that failed are listed besides the one that goes on.
            filters=[("name", "=", tasks), ("state", "!=", "FINISHED"), ("state", "!=", "FAILED")],
            limit=RAY_MAX_LIMIT_FROM_API_SERVER,
            detail=True,
            timeout=ASKED_TIMEOUT_S,
            raise_on_missing_output=False,
        )
    except (RayStateApiException, RayError, OSError, ValueError) as error:  # of the last kind: there is no dashboard
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
