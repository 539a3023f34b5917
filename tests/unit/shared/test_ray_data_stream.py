"""Whoever takes a dataset's tables can stop at any moment, and no task of Ray's runs any more then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from shared import ray_data_stream
from shared.errors import Cancelled
from shared.ray_data_stream import DatasetStream, RayFailed

TABLE = pa.table({"a": [1]})
# A wait for what never comes takes longer than a test may.
LONG_S = 3600.0


class Executor:
    """Of Ray's, what a stream touches: nothing can be shut down before the execution has started, or twice."""

    def __init__(self) -> None:
        self._resource_manager = SimpleNamespace(_get_total_resources=None)
        self._shutdown_lock = threading.RLock()
        self._execution_started = False
        self._shutdown = False
        self._topology = [Operator()]
        self.ended = threading.Event()
        self.forced: bool | None = None

    @property
    def operator(self) -> Operator:
        return self._topology[0]

    def start(self) -> None:
        """As `execute` begins."""
        ray_data_stream._Remember().before_execution_starts(self)  # type: ignore[arg-type]

    def join(self, timeout: float | None = None) -> None: ...

    def shutdown(self, force: bool, exception: Exception | None = None) -> None:  # noqa: ARG002
        if not self._execution_started or self._shutdown:
            return
        self._shutdown = True
        self.forced = force
        self.ended.set()


class Operator:
    def __init__(self) -> None:
        self.forced: bool | None = None
        self.metrics = SimpleNamespace(num_tasks_finished=0, num_task_outputs_generated=0)

    def shutdown(self, _: object, force: bool) -> None:
        self.forced = force

    def get_active_tasks(self) -> list[Any]:
        return []


class Dataset:
    """Runs `steps` of its executor, one after the other, until the tables come. Before that of the number `held_at` it
    waits until it `may_go_on`."""

    def __init__(self, *steps: Callable[[Executor], None], held_at: int = -1) -> None:
        self.executor = Executor()
        self.at = -1
        self.is_held, self.may_go_on = threading.Event(), threading.Event()
        self._steps = steps
        self._held_at = held_at

    def iter_batches(self, **_: object) -> Iterator[pa.Table]:
        for at, step in enumerate(self._steps):
            if at == self._held_at:
                self.is_held.set()
                assert self.may_go_on.wait(LONG_S)
            self.at = at
            step(self.executor)
        while not self.executor.ended.is_set():
            yield TABLE


def plan(_: Executor) -> None: ...


def announce(executor: Executor) -> None:
    executor.start()


def work(executor: Executor) -> None:
    """Tasks run, and the first table is far away."""
    executor._execution_started = True
    executor.ended.wait(LONG_S)


def fail(executor: Executor) -> None:
    error = ValueError("a task has failed")
    executor._execution_started = True
    executor.shutdown(force=False, exception=error)
    raise error


def tables(dataset: Dataset, while_waiting: Callable[[], None] = lambda: None) -> Iterator[pa.Table]:
    return DatasetStream(dataset).tables(while_waiting, 0.02)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [0, 1, 2], ids=["planning", "announced", "working"])
def test_a_cancel_at_any_step_ends_the_work_and_waits_for_no_table(step: int) -> None:
    dataset = Dataset(plan, announce, work, held_at=step + 1)

    def stopped() -> None:
        if dataset.is_held.is_set() or dataset.executor._execution_started:
            dataset.may_go_on.set()
            raise Cancelled("a client wishes an end")

    with pytest.raises(Cancelled):
        next(tables(dataset, stopped))

    executor = dataset.executor
    assert executor.forced or (step == 0 and executor.operator.forced and not executor._execution_started)
    assert "ray-data" not in {thread.name for thread in threading.enumerate()}


def test_a_cancel_before_the_pass_begins_nothing() -> None:
    dataset = Dataset(plan, announce, work)

    def stopped() -> None:
        raise Cancelled("a client wishes an end")

    with pytest.raises(Cancelled):
        next(tables(dataset, stopped))

    time.sleep(0.05)
    assert dataset.at == -1


def test_the_other_tasks_of_one_that_failed_are_ended_by_force() -> None:
    dataset = Dataset(announce, fail)

    with pytest.raises(RayFailed) as failed:
        next(tables(dataset))

    assert str(failed.value.__cause__) == "a task has failed"
    assert dataset.executor.forced


def test_a_taker_who_has_enough_ends_the_work() -> None:
    def go(executor: Executor) -> None:
        executor._execution_started = True

    dataset = Dataset(announce, go)
    taking = tables(dataset)

    assert next(taking) is TABLE
    assert not dataset.executor.ended.is_set()
    taking.close()  # type: ignore[attr-defined]

    assert dataset.executor.forced
