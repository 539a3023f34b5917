"""A stream of a Ray dataset's tables to a consumer that can stop at any moment.

Ray Data blocks its consumer while it waits for a block, and cancels tasks without waiting for their end. So Ray's
iterator runs on its own thread, and this module keeps its executor to shut it down properly.
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

# How long Ray Data waits for tasks before it checks which have ended. With Ray's default of 0.1 s, such waits take an
# eighth of a job of two seconds.
LOOKED_AT_EVERY_S, RAYS_OWN_EVERY_S = 0.02, streaming_executor_state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S
SHORT_S = 10.0
# The number of tables that are buffered for the consumer.
TABLES_AHEAD = 16
# Ray's default of a second is long for a job of two seconds.
SHARE_ASKED_EVERY_S = 0.1

# A killed worker ends at once. An unreachable node takes longer, until Ray declares it dead.
TASKS_END_TIMEOUT_S = 120.0
# An executor that is still starting cannot be shut down yet.
END_TRIED_EVERY_S = 0.05

_streams: contextvars.ContextVar[DatasetStream] = contextvars.ContextVar("streams")
_END = object()


class _Remember(ExecutionCallback):
    """Callback that registers the executor with its stream. Ray constructs it on the iterating thread."""

    def before_execution_starts(self, executor: StreamingExecutor) -> None:
        _streams.get().begin(executor)
        # Ray asks twice before it knows its share of the cluster, and runs one task until then.
        manager = executor._resource_manager
        manager.GLOBAL_LIMITS_UPDATE_INTERVAL_S = SHARE_ASKED_EVERY_S  # type: ignore[assignment]
        manager._get_total_resources = _streams.get().counting(manager._get_total_resources)


class _Closed(Exception):
    """The consumer has closed the stream."""


class RayFailed(Exception):
    """Ray Data failed. The cause has the reason."""


def quiet_context(*, block_bytes: int) -> DataContext:
    """Return the settings for making a dataset to be streamed. Blocks have about `block_bytes`."""
    settings: DataContext = copy.deepcopy(ray.data.DataContext.get_current())
    settings.enable_progress_bars = False
    settings.enable_operator_progress_bars = False
    settings.enable_auto_log_stats = False
    settings.print_on_execution_start = False
    settings.target_max_block_size = block_bytes
    # A custom function has its own timeout, and may take an hour for one batch.
    settings.execution_no_progress_timeout_s = -1
    settings.custom_execution_callback_classes = [_Remember]
    return settings


def prepare() -> None:
    """Import what Ray Data loads lazily for its first dataset, which takes most of a second.

    Needs a Ray cluster.
    """
    from ray.data._internal.logical.optimizers import get_execution_plan  # nothing else here depends on it

    with DataContext.current(quiet_context(block_bytes=1)):
        dataset = ray.data.from_items([{"row": 0}]).flat_map(lambda row: [row])
    get_execution_plan(dataset._logical_plan)


class DatasetStream:
    """The tables of a dataset that was made under `quiet_context`.

    With several `tasks_a_cpu`, one task runs while the next is already submitted. Otherwise a CPU is idle until Ray
    Data, which checks every tenth of a second, has seen that its task has ended. For the first SHORT_S seconds Ray Data
    then checks more often.
    """

    def __init__(self, dataset: Dataset, tasks_a_cpu: int = 1) -> None:
        self._dataset = dataset
        self._tasks_a_cpu = tasks_a_cpu
        self._executors: list[StreamingExecutor] = []
        self._queue: queue.Queue[Any] = queue.Queue(TABLES_AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._iterate, name="ray-data", daemon=True)

    def tables(self, while_waiting: Callable[[], None], interval_s: float) -> Generator[pa.Table, None, None]:
        """Yield the tables, and call `while_waiting` every `interval_s` and before each table.

        An exception of `while_waiting` ends the stream. Raises `RayFailed`. No task runs any more once the iterator is
        closed.
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
        """A number that grows whenever a task has produced output or has ended, even before its table is consumed."""
        operators = [operator for executor in tuple(self._executors) for operator in executor._topology or ()]
        return sum(one.metrics.num_task_outputs_generated + one.metrics.num_tasks_finished for one in operators)

    def counting(self, share: Callable[[], ExecutionResources]) -> Callable[[], ExecutionResources]:
        """Return the share of the cluster that Ray Data assumes.

        Ray, which owns the CPUs, still decides how many tasks run at once.
        """

        def counted() -> ExecutionResources:
            resources = share()
            return resources.copy(cpu=self._tasks_a_cpu * resources.cpu)

        return counted

    def begin(self, executor: StreamingExecutor) -> None:
        """Register an executor whose operators are ready and whose tasks have not begun.

        The iterating thread calls this.
        """
        if self._closed.is_set():
            for operator in executor._topology or ():  # some operators have started actors
                operator.shutdown(Timer(), force=True)  # type: ignore[no-untyped-call]
            raise _Closed
        # Ray itself shuts the executor down when a task fails.
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
    """Set Ray's poll interval for this whole process. It does not affect results."""
    streaming_executor_state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S = seconds


class _Ending:
    """Shutdown of an executor after which none of its tasks runs, whichever caller asks.

    When a task fails, Ray lets the others continue. It starts more tasks during shutdown, because it waits at most two
    seconds for its loop. Even with force it does not wait for the tasks' end.
    """

    def __init__(self, executor: StreamingExecutor, shutdown: Callable[..., None]) -> None:
        self._executor = executor
        self._shutdown = shutdown

    def __call__(self, force: bool, exception: Exception | None = None) -> None:
        executor = self._executor
        with executor._shutdown_lock:
            if not executor._execution_started or executor._shutdown:
                return
            executor._shutdown = True  # makes the loop that starts tasks end
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
