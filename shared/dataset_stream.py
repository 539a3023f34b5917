"""What a Ray dataset makes, as it comes, in the hands of somebody who can stop it at any moment.

Ray Data blocks whoever waits for a block, and cancels tasks without waiting for their end. So its iterator runs on a
thread of its own, and its executor, which can do both, is remembered.
"""

from __future__ import annotations

import contextvars
import copy
import queue
import threading
from collections.abc import Callable, Generator
from typing import Any, cast

import pyarrow as pa
import ray.data
from ray.data import DataContext, Dataset
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data._internal.execution.streaming_executor import StreamingExecutor

# So many tables wait for whoever takes them.
TABLES_AHEAD = 16
# Ray's own second is long where all the work takes two.
SHARE_ASKED_EVERY_S = 0.1

_started: contextvars.ContextVar[list[StreamingExecutor]] = contextvars.ContextVar("started")
_END = object()


class _RememberExecutor(ExecutionCallback):
    """Ray makes it, on the thread that iterates."""

    def before_execution_starts(self, executor: StreamingExecutor) -> None:
        _started.get().append(executor)
        # It learns of its share of the cluster by asking twice, and works with one task until then.
        executor._resource_manager.GLOBAL_LIMITS_UPDATE_INTERVAL_S = SHARE_ASKED_EVERY_S


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
    settings.custom_execution_callback_classes = [_RememberExecutor]
    return settings


class DatasetStream:
    """The tables of a dataset that was made under `quiet_context`."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._executors: list[StreamingExecutor] = []
        self._queue: queue.Queue[Any] = queue.Queue(TABLES_AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._iterate, name="ray-data", daemon=True)

    def tables(self, while_waiting: Callable[[], None], interval_s: float) -> Generator[pa.Table, None, None]:
        """Calls `while_waiting` every `interval_s` and before each table; what it raises ends the stream.

        Raises `RayFailed`. In any case no task runs any more when the iterator is closed.
        """
        self._thread.start()
        try:
            while True:
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
            self._closed.set()
            for executor in self._executors:
                executor.shutdown(force=True)
            self._thread.join()

    def _iterate(self) -> None:
        _started.set(self._executors)
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
