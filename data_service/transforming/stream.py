"""The rows of a Ray dataset as they come, in the hands of somebody who can stop them at any moment.

Ray Data blocks whoever waits for a row, and cancels tasks without waiting for their end. So its iterator runs on a
thread of its own, and its executor, which can do both, is remembered.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable, Generator
from typing import Any, cast

import pyarrow as pa
from ray.data import Dataset
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data._internal.execution.streaming_executor import StreamingExecutor

_started: contextvars.ContextVar[list[StreamingExecutor]] = contextvars.ContextVar("started")
_END = object()


class RememberExecutor(ExecutionCallback):
    """To be among the dataset's `custom_execution_callback_classes`; Ray makes it, on the thread that iterates."""

    def before_execution_starts(self, executor: StreamingExecutor) -> None:
        _started.get().append(executor)


class RayFailed(Exception):
    """Ray Data gave up. The cause says why."""


class RowStream:
    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._executors: list[StreamingExecutor] = []
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._iterate, name="ray-data-rows", daemon=True)

    def rows(self, while_waiting: Callable[[], None], interval_s: float) -> Generator[dict[str, Any], None, None]:
        """Calls `while_waiting` every `interval_s` and after each row; what it raises ends the stream.

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
            for executor in self._executors:
                executor.shutdown(force=True)
            self._thread.join()

    def _iterate(self) -> None:
        _started.set(self._executors)
        try:
            for batch in self._dataset.iter_batches(batch_size=None, prefetch_batches=0, batch_format="pyarrow"):
                for row in cast(pa.Table, batch).to_pylist():
                    self._queue.put(row)
            self._queue.put(_END)
        except BaseException as error:
            self._queue.put(error)
