"""Rows that Ray Data prepares: who waits for them gets on as they come, and not for ever where none come."""

from __future__ import annotations

import time

import pytest

from shared.dataset_stream import DatasetStream
from shared.errors import Unavailable
from tests.unit.shared.test_dataset_stream import LONG_S, TABLE, Dataset, Executor, announce
from train_service import preparation
from train_service.preparation import prepared


class Touches:
    """Counts the signs that a rank gets on."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "POLL_S", 0.05)
    monkeypatch.setattr(preparation, "FIRST_WITHIN_S", 1.5)
    monkeypatch.setattr(preparation, "NEXT_WITHIN_S", 0.6)


def stream(dataset: Dataset) -> DatasetStream:
    return DatasetStream(dataset)  # type: ignore[arg-type]


def without_a_cpu(executor: Executor) -> None:
    executor._execution_started = True
    executor.ended.wait(LONG_S)


def test_who_waits_for_tasks_that_never_run_does_not_get_on_and_ends_with_the_cause() -> None:
    touched, began = Touches(), time.monotonic()

    with pytest.raises(Unavailable, match="CPU") as stalled:
        next(prepared(stream(Dataset(announce, without_a_cpu)), touched))

    assert stalled.value.specific_reason == "PREPARATION_STALLED"
    assert touched.count == 0
    assert time.monotonic() - began > 1.5  # what a start may take


def test_a_task_that_has_made_something_is_a_sign_though_its_table_comes_later() -> None:
    def work_on(executor: Executor) -> None:
        executor._execution_started = True
        for _ in range(8):  # longer than any one wait may take
            time.sleep(0.3)
            executor.operator.metrics.num_tasks_finished += 1

    touched = Touches()
    tables = prepared(stream(Dataset(announce, work_on)), touched)

    assert next(tables) is TABLE
    assert touched.count >= 6
    tables.close()


def test_after_the_first_table_less_patience_is_enough_and_who_takes_them_may_take_his_time() -> None:
    def go(executor: Executor) -> None:
        executor._execution_started = True

    class TwoTables(Dataset):
        def iter_batches(self, **_: object):  # type: ignore[no-untyped-def]
            announce(self.executor)
            go(self.executor)
            yield TABLE
            yield TABLE
            self.executor.ended.wait(LONG_S)

    touched = Touches()
    tables = prepared(stream(TwoTables()), touched)
    assert next(tables) is TABLE
    time.sleep(0.8)
    assert next(tables) is TABLE
    seen, began = touched.count, time.monotonic()
    with pytest.raises(Unavailable):
        next(tables)
    assert touched.count <= seen + 1  # as it began to wait
    assert 0.5 < time.monotonic() - began < 1.4
