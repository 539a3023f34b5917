"""Rows that Ray Data prepares: who waits for them gets on as they come, and not for ever where none come."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import ray

from shared.errors import Unavailable
from shared.jobs.transitions import INSUFFICIENT_RESOURCES
from shared.ray_data_stream import DatasetStream
from tests.support.waiting import wait_until
from tests.unit.shared.test_ray_data_stream import LONG_S, TABLE, Dataset, Executor, announce
from tests.unit.train_service.domain.test_spec import GOOD
from train_service.domain.spec import TrainingSpec
from train_service.loading import cluster_loader
from train_service.loading.cluster_loader import prepared
from train_service.placement import Node


class Touches:
    """Counts the signs that a rank gets on."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_loader, "POLL_S", 0.05)
    monkeypatch.setattr(cluster_loader, "FIRST_TIMEOUT_S", 1.5)
    monkeypatch.setattr(cluster_loader, "NEXT_TIMEOUT_S", 0.6)
    free_cpus(monkeypatch, 1.0)


def free_cpus(monkeypatch: pytest.MonkeyPatch, number: float) -> None:
    nodes = [Node("n", {"CPU": number}, {"CPU": 2.0})]
    monkeypatch.setattr(cluster_loader, "usable_nodes", lambda: nodes, raising=False)


def stream(dataset: Dataset) -> DatasetStream:
    return DatasetStream(dataset)  # type: ignore[arg-type]


def without_a_cpu(executor: Executor) -> None:
    executor._execution_started = True
    executor.ended.wait(LONG_S)


def test_a_wait_for_tasks_that_never_run_reports_no_progress_and_ends_with_the_cause() -> None:
    progress, began = Touches(), time.monotonic()

    with pytest.raises(Unavailable, match="no row") as stalled:
        next(prepared(stream(Dataset(announce, without_a_cpu)), progress))

    assert stalled.value.specific_reason == "PREPARATION_STALLED"
    assert progress.count == 0
    assert time.monotonic() - began > 1.5  # what a start may take


class Clock:
    """Seconds that a test lets pass. With `at_each_poll`, so many pass whenever they are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed_s = self.at_each_poll = 0.0
        monkeypatch.setattr(cluster_loader, "time", self)
        monkeypatch.setattr(cluster_loader, "POLL_S", 0.001)

    def monotonic(self) -> float:
        self.passed_s += self.at_each_poll
        return self.passed_s


def test_a_task_that_has_made_something_is_a_sign_though_its_table_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, progress = Clock(monkeypatch), Touches()

    def work_on(executor: Executor) -> None:
        executor._execution_started = True
        for number in range(8):  # longer than any one wait may take
            clock.passed_s += 0.3
            executor.operator.metrics.num_tasks_finished += 1
            wait_until(lambda signs=number: progress.count > signs, "the sign")  # type: ignore[misc]

    tables = prepared(stream(Dataset(announce, work_on)), progress)

    assert next(tables) is TABLE
    assert progress.count >= 8
    assert clock.passed_s > cluster_loader.FIRST_TIMEOUT_S
    tables.close()


def test_after_the_first_table_less_patience_is_enough_and_who_takes_them_may_take_his_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class TwoTables(Dataset):
        def iter_batches(self, **_: object):  # type: ignore[no-untyped-def]
            announce(self.executor)
            self.executor._execution_started = True
            yield TABLE
            yield TABLE
            self.executor.ended.wait(LONG_S)

    clock, progress = Clock(monkeypatch), Touches()
    tables = prepared(stream(TwoTables()), progress)
    assert next(tables) is TABLE
    clock.passed_s += 0.8
    assert next(tables) is TABLE
    seen, began = progress.count, clock.passed_s
    clock.at_each_poll = 0.05
    with pytest.raises(Unavailable):
        next(tables)
    assert progress.count <= seen + 1  # as it began to wait
    assert cluster_loader.NEXT_TIMEOUT_S <= clock.passed_s - began < cluster_loader.FIRST_TIMEOUT_S


def test_tasks_that_find_no_cpu_end_the_attempt_as_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is no failure: the next attempt waits for room."""
    free_cpus(monkeypatch, 0.0)

    with pytest.raises(Unavailable, match="no CPU") as stalled:
        next(prepared(stream(Dataset(announce, without_a_cpu)), Touches()))

    assert stalled.value.specific_reason == INSUFFICIENT_RESOURCES


def test_a_task_that_stands_still_on_the_last_cpu_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is counted: the CPU that is not free is its own."""
    free_cpus(monkeypatch, 0.0)
    began = time.monotonic()
    monkeypatch.setattr(cluster_loader, "longest_at_work_s", lambda _: time.monotonic() - began)

    with pytest.raises(Unavailable, match="a task stands still") as stalled:
        next(prepared(stream(Dataset(announce, without_a_cpu)), Touches()))

    assert stalled.value.specific_reason == "PREPARATION_STALLED"


def test_a_task_that_found_its_cpu_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    free_cpus(monkeypatch, 0.0)
    began = time.monotonic()
    monkeypatch.setattr(cluster_loader, "longest_at_work_s", lambda _: max(0.0, time.monotonic() - began - 1.0))

    with pytest.raises(Unavailable) as stalled:
        next(prepared(stream(Dataset(announce, without_a_cpu)), Touches()))

    assert stalled.value.specific_reason == "PREPARATION_STALLED"
    assert time.monotonic() - began > 2.5, "a start from when it began"


def test_a_task_that_dies_and_is_begun_anew_for_ever_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that needs more memory than there is: Ray Data tries without end, and each try has just begun."""
    free_cpus(monkeypatch, 0.0)
    passed = [0.0]
    monkeypatch.setattr(cluster_loader, "time", SimpleNamespace(monotonic=lambda: passed[0]))
    monkeypatch.setattr(cluster_loader, "longest_at_work_s", lambda _: passed[0] % 1.0)
    watch = cluster_loader._Watch(stream(Dataset()), Touches(), 0.0, "tasks")

    def look_on() -> None:
        while passed[0] < 100.0:
            passed[0] += 0.05
            watch.poll()

    for _ in range(2):
        began = passed[0]
        with pytest.raises(Unavailable) as stalled:
            look_on()
        assert stalled.value.specific_reason == "PREPARATION_STALLED"
        assert passed[0] - began < 2 * 1.5 + 0.2
        watch.note_progress()


def test_the_tries_that_are_over_do_not_hide_the_task_that_has_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def task(state: str, begun_s: float) -> SimpleNamespace:
        events = [{"state": cluster_loader.GIVEN_TO_A_WORKER, "created_ms": begun_s * 1000}]
        return SimpleNamespace(name="tasks", state=state, events=events)

    there = [*(task("FAILED", 1.0) for _ in range(500)), *(task("PENDING_NODE_ASSIGNMENT", 1.0) for _ in range(500))]
    there += [task("FINISHED", 1.0), task("RUNNING", 60.0)]

    def list_tasks(*, filters: list[tuple[str, str, str]], limit: int = 100, **_: object) -> list[SimpleNamespace]:
        fits = (all((getattr(one, key) == of) == (how == "=") for key, how, of in filters) for one in there)
        return list(itertools.compress(there, fits))[:limit]

    monkeypatch.setattr("ray.util.state.list_tasks", list_tasks)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="here"))
    monkeypatch.setattr(cluster_loader, "time", SimpleNamespace(time=lambda: 100.0))

    assert cluster_loader.longest_at_work_s("tasks") == 40.0
    assert cluster_loader.longest_at_work_s("other tasks") == 0.0


@pytest.mark.parametrize(("timeout_s", "stalls"), [(1800.0, False), (0.0, True)])
def test_a_step_that_may_take_half_an_hour_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float, stalls: bool
) -> None:
    """Nothing comes for 900 s before the first table and after it, while the task is at work; its step is allowed to
    take longer."""
    monkeypatch.setattr(cluster_loader, "FIRST_TIMEOUT_S", 600.0)
    monkeypatch.setattr(cluster_loader, "NEXT_TIMEOUT_S", 600.0)
    step = {"custom": {"function": "some.module:function", "columns": ["image"], "timeoutS": timeout_s}}
    spec = TrainingSpec.from_config({**GOOD.as_config(), "transform": {"steps": [step]}})
    passed = [0.0]
    monkeypatch.setattr(cluster_loader, "time", SimpleNamespace(monotonic=lambda: passed[0]))
    watch = cluster_loader._Watch(stream(Dataset()), Touches(), cluster_loader.longest_s(spec))

    for _ in range(2):
        passed[0] += 900.0
        if stalls:
            with pytest.raises(Unavailable):
                watch.poll()
        else:
            watch.poll()
        watch.note_progress()


def test_the_tasks_of_ray_data_do_without_torch() -> None:
    code = "import sys, train_service.loading.cluster_loader; print('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
