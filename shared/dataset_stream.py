"""What a Ray dataset makes, as it comes, in the hands of somebody who can stop it at any moment.

Ray Data blocks whoever waits for a block, and cancels tasks without waiting for their end. So its iterator runs on a
thread of its own, and its executor is remembered, and ended as we need it.
"""

from __future__ import annotations

import contextvars
import copy
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

import pyarrow as pa
import ray.data
from ray import ObjectRef, ObjectRefGenerator
from ray.data import DataContext, Dataset
from ray.data._internal.execution import streaming_executor_state
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data._internal.execution.interfaces import ExecutionResources
from ray.data._internal.execution.streaming_executor import StreamingExecutor
from ray.data._internal.stats import Timer

logger = logging.getLogger(__name__)

# How long it waits for tasks before it looks which have ended. With its own tenth of a second, an eighth of what takes
# two seconds is such waits.
LOOKED_AT_EVERY_S, RAYS_OWN_EVERY_S = 0.02, streaming_executor_state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S
SHORT_S = 10.0
# So many tables wait for whoever takes them.
TABLES_AHEAD = 16
# Ray's own second is long where all the work takes two.
SHARE_ASKED_EVERY_S = 0.1

# A worker that is ended is gone in a moment; a node that cannot be reached takes longer, until Ray declares it dead.
TASKS_END_TIMEOUT_S = 120.0
# An executor that is only just being started cannot be shut down yet.
END_TRIED_EVERY_S = 0.05

_streams: contextvars.ContextVar[DatasetStream] = contextvars.ContextVar("streams")
_END = object()


class _Remember(ExecutionCallback):
    """Ray makes it, on the thread that iterates."""

    def before_execution_starts(self, executor: StreamingExecutor) -> None:
        _streams.get().begin(executor)
        # It learns of its share of the cluster by asking twice, and works with one task until then.
        manager = executor._resource_manager
        manager.GLOBAL_LIMITS_UPDATE_INTERVAL_S = SHARE_ASKED_EVERY_S  # type: ignore[assignment]
        manager._get_total_resources = _streams.get().counting(manager._get_total_resources)


class _Closed(Exception):
    """Nobody takes the tables any more."""


class RayFailed(Exception):
    """Ray Data gave up. The cause says why."""


def quiet_context(*, block_bytes: int) -> DataContext:
    """The settings under which a dataset must be made that is to be streamed; its blocks have about `block_bytes`."""
    settings: DataContext = copy.deepcopy(ray.data.DataContext.get_current())
    settings.enable_progress_bars = False
    settings.enable_operator_progress_bars = False
    settings.enable_auto_log_stats = False
    settings.print_on_execution_start = False
    settings.target_max_block_size = block_bytes
    # A custom function may take an hour for one batch, and has a timeout of its own.
    settings.execution_no_progress_timeout_s = -1
    settings.custom_execution_callback_classes = [_Remember]
    return settings


def prepare() -> None:
    """Imports what Ray Data puts off until a first dataset is run, which is most of a second. Needs a Ray cluster."""
    from ray.data._internal.logical.optimizers import get_execution_plan  # nothing else here depends on it

    with DataContext.current(quiet_context(block_bytes=1)):
        dataset = ray.data.from_items([{"row": 0}]).flat_map(lambda row: [row])
    get_execution_plan(dataset._logical_plan)


class DatasetStream:
    """The tables of a dataset that was made under `quiet_context`.

    With several `tasks_a_cpu`, one is at work and the next has been submitted: else a CPU has nothing to do until Ray
    Data, which looks every tenth of a second, has seen that its task has ended. At first it then looks more often.
    """

    def __init__(self, dataset: Dataset, tasks_a_cpu: int = 1) -> None:
        self._dataset = dataset
        self._tasks_a_cpu = tasks_a_cpu
        self._executors: list[StreamingExecutor] = []
        self._queue: queue.Queue[Any] = queue.Queue(TABLES_AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._iterate, name="ray-data", daemon=True)

    def tables(self, while_waiting: Callable[[], None], interval_s: float) -> Generator[pa.Table, None, None]:
        """Calls `while_waiting` every `interval_s` and before each table; what it raises ends the stream.

        Raises `RayFailed`. In any case no task runs any more when the iterator is closed.
        """
        while_waiting()
        short_until_s = time.monotonic() + (SHORT_S if self._tasks_a_cpu > 1 else 0.0)
        self._thread.start()
        try:
            while True:
                _poll_interval(LOOKED_AT_EVERY_S if time.monotonic() < short_until_s else RAYS_OWN_EVERY_S)
                while_waiting()
                try:
                    item = self._queue.get(timeout=interval_s)
                except queue.Empty:
                    continue
                if item is _END:
                    return
                if isinstance(item, BaseException):
                    raise RayFailed from item
                yield item
        finally:
            _poll_interval(RAYS_OWN_EVERY_S)
            self._end()

    @property
    def done(self) -> int:
        """Grows whenever a task has made something or has ended, though nobody has its table yet."""
        operators = [operator for executor in tuple(self._executors) for operator in executor._topology or ()]
        return sum(one.metrics.num_task_outputs_generated + one.metrics.num_tasks_finished for one in operators)

    def counting(self, share: Callable[[], ExecutionResources]) -> Callable[[], ExecutionResources]:
        """What Ray Data takes for its share of the cluster. How many tasks run at once is up to Ray, which has the
        CPUs."""

        def counted() -> ExecutionResources:
            resources = share()
            return resources.copy(cpu=self._tasks_a_cpu * resources.cpu)

        return counted

    def begin(self, executor: StreamingExecutor) -> None:
        """Called by the thread that iterates, when the operators stand ready and no task has begun."""
        if self._closed.is_set():
            for operator in executor._topology or ():  # some have started actors
                operator.shutdown(Timer(), force=True)  # type: ignore[no-untyped-call]
            raise _Closed
        # Ray shuts it down itself where a task fails.
        executor.shutdown = _Ending(executor, executor.shutdown)  # type: ignore[method-assign]
        self._executors.append(executor)

    def _end(self) -> None:
        self._closed.set()
        ended = False
        while not ended:
            ended = not self._thread.is_alive()
            for executor in tuple(self._executors):
                executor.shutdown(force=True)
            self._thread.join(END_TRIED_EVERY_S)

    def _iterate(self) -> None:
        _streams.set(self)
        try:
            for batch in self._dataset.iter_batches(batch_size=None, prefetch_batches=0, batch_format="pyarrow"):
                self._offer(cast(pa.Table, batch))
                if self._closed.is_set():
                    return
            self._offer(_END)
        except BaseException as error:
            self._offer(error)

    def _offer(self, item: Any) -> None:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.2)
                return
            except queue.Full:
                continue


def _poll_interval(seconds: float) -> None:
    """In all of this process: how often is no matter for what comes out."""
    streaming_executor_state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S = seconds


class _Ending:
    """Shuts an executor down, whoever asks for it, in such a way that no task of it runs any more.

    Ray lets the other tasks go on where one fails, starts some while it waits for its loop no longer than two seconds,
    and even by force does not wait for their end.
    """

    def __init__(self, executor: StreamingExecutor, shutdown: Callable[..., None]) -> None:
        self._executor = executor
        self._shutdown = shutdown

    def __call__(self, force: bool, exception: Exception | None = None) -> None:
        executor = self._executor
        with executor._shutdown_lock:
            if not executor._execution_started or executor._shutdown:
                return
            executor._shutdown = True  # by which the loop that starts tasks ends
            executor.join(TASKS_END_TIMEOUT_S)
            executor._shutdown = False
            tasks = [
                task.get_waitable() for operator in executor._topology or () for task in operator.get_active_tasks()
            ]
            self._shutdown(force=force or bool(tasks) or exception is not None, exception=exception)
        _wait_for_end(tasks)


def _wait_for_end(tasks: Sequence[ObjectRef[Any] | ObjectRefGenerator]) -> None:
    if not tasks:
        return
    ends = [task.completed() if isinstance(task, ObjectRefGenerator) else task for task in tasks]
    _, running = ray.wait(ends, num_returns=len(ends), timeout=TASKS_END_TIMEOUT_S, fetch_local=False)
    if running:
        logger.warning("%d cancelled tasks have not ended within %.0f s", len(running), TASKS_END_TIMEOUT_S)
