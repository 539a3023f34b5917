"""Metrics of steps: written without holding the run up, read back as the run whose work counts computed them."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest

from shared.errors import InvalidArgument, NotFound
from shared.names import token_of
from shared.storage import ObjectMissing, ObjectStore
from tests.support.counting_store import CountingStore
from tests.support.flaky_store import FlakyStore
from tests.support.training_records import JOB, make_job
from tests.support.waiting import wait_until
from train_service.jobs.run_records import RunRecords
from train_service.records import metrics_log
from train_service.records.metrics_log import MetricPoint, MetricsLog, encode, metrics_page


@pytest.fixture
def records(store: ObjectStore) -> RunRecords:
    make_job(store, "datasets/d/versions/v")
    return RunRecords(store)


def write(store: ObjectStore, attempt: int, first_step: int, last_step: int) -> None:
    """An attempt that does the steps behind `first_step`; its loss is its number."""
    with MetricsLog(store, JOB, attempt, first_step) as log:
        for step in range(first_step + 1, last_step + 1):
            log.add(step, step // 10, {"loss": float(attempt)})


def all_points(records: RunRecords, after_step: int = 0, page_size: int = 0) -> list[MetricPoint]:
    points, token = records.metrics(JOB, after_step, page_size, "")
    while token:
        more, token = records.metrics(JOB, after_step, page_size, token)
        points += more
    return points


def keys(store: ObjectStore) -> list[str]:
    return sorted(info.key.rpartition("/")[2] for info in store.list(f"{JOB}/metrics"))


def test_logged_points_are_read_back_with_step_epoch_and_attempt(store: ObjectStore, records: RunRecords) -> None:
    with MetricsLog(store, JOB, 3, 20) as log:
        log.add(21, 2, {"loss": 0.5, "accuracy": 0.25})
        log.add(22, 2, {"loss": math.nan, "step": 7.0})
        log.add(22, 2, {"validation_loss": 0.125})

    one, two = all_points(records)

    assert (one.step, one.epoch, one.attempt, one.values) == (21, 2, 3, {"loss": 0.5, "accuracy": 0.25})
    assert abs(one.time - time.time()) < 60
    assert math.isnan(two.values.pop("loss"))
    assert two.values == {"step": 7.0, "validation_loss": 0.125}
    assert keys(store) == ["a00003-f00000020-00000020-00000022.parquet"]


def test_points_are_written_while_the_run_goes_on_when_asked(store: ObjectStore, records: RunRecords) -> None:
    with MetricsLog(store, JOB, 1, 0) as log:
        for step in (1, 2, 3):
            log.add(step, 0, {"loss": 1.0})
            log.flush()
            wait_until(lambda: len(all_points(records)) == step, "the points")  # noqa: B023
        assert len(keys(store)) == 1


def test_of_a_lost_attempt_only_what_the_next_one_is_built_on_counts(store: ObjectStore, records: RunRecords) -> None:
    write(store, 1, 0, 70)
    write(store, 2, 50, 55)
    write(store, 3, 50, 60)

    points = all_points(records)

    assert [point.step for point in points] == list(range(1, 61))
    assert [point.attempt for point in points] == [1] * 50 + [3] * 10
    assert all(point.values == {"loss": float(point.attempt)} for point in points)


def test_an_attempt_that_fell_back_behind_the_one_before_replaces_both(store: ObjectStore, records: RunRecords) -> None:
    write(store, 1, 0, 30)
    write(store, 2, 20, 40)
    write(store, 3, 10, 15)  # the checkpoint at step 20 was damaged

    assert [(point.step, point.attempt) for point in all_points(records)] == [
        *((step, 1) for step in range(1, 11)),
        *((step, 3) for step in range(11, 16)),
    ]


def test_an_attempt_counts_from_its_beginning_before_its_first_step(store: ObjectStore, records: RunRecords) -> None:
    write(store, 1, 0, 30)
    with MetricsLog(store, JOB, 2, 20):
        wait_until(lambda: len(all_points(records)) == 20, "the beginning of the second attempt")


@pytest.mark.parametrize("page_size", [1, 7, 10_000])
def test_pages_hold_every_point_once(
    store: ObjectStore, records: RunRecords, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_log, "PART_POINTS", 10)
    write(store, 1, 0, 34)
    write(store, 2, 25, 50)

    assert [point.step for point in all_points(records, 3, page_size)] == list(range(4, 51))
    assert all_points(records, 50) == []


def test_full_parts_stay_and_the_point_of_validation_joins_its_step(
    store: ObjectStore, records: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_log, "PART_POINTS", 5)
    with MetricsLog(store, JOB, 1, 0) as log:
        for step in range(1, 11):
            log.add(step, 0, {"loss": 1.0})
            if step % 5 == 0:
                log.add(step, 0, {"validation_loss": 2.0})

    points = all_points(records, 0, 5)
    assert [point.step for point in points] == list(range(1, 11))
    assert [len(point.values) for point in points] == [1, 1, 1, 1, 2] * 2
    assert len(keys(store)) == 3


def test_an_outage_delays_the_points_and_loses_none(
    store: ObjectStore, records: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_log, "RETRY_S", 0.01)
    flaky = FlakyStore(store)
    with MetricsLog(flaky, JOB, 1, 0) as log:
        log.add(1, 0, {"loss": 1.0})
        flaky.go_away()
        log.flush()
        wait_until(lambda: flaky.refused > 2, "the outage to be noticed")
        for step in range(2, 2000):  # a wait for the store would not end
            log.add(step, 0, {"loss": 1.0})
        flaky.come_back()

    assert [point.step for point in all_points(records)] == list(range(1, 2000))


def test_the_end_of_a_run_waits_for_the_store_but_not_for_ever(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal passed_s
        passed_s += seconds

    clock = SimpleNamespace(time=time.time, monotonic=lambda: passed_s, sleep=sleep)
    monkeypatch.setattr(metrics_log, "time", clock)
    monkeypatch.setattr(metrics_log, "RETRY_S", 0.5)
    monkeypatch.setattr(metrics_log, "END_TIMEOUT_S", 2.0)
    flaky = FlakyStore(store)
    flaky.go_away()

    with MetricsLog(flaky, JOB, 1, 0) as log:
        log.add(1, 0, {"loss": 1.0})

    assert flaky.refused > 3
    assert passed_s == 2.5
    assert keys(store) == []


def test_a_part_that_was_left_when_its_process_died_is_not_read_beside_the_longer_one(
    store: ObjectStore, records: RunRecords
) -> None:
    points = [MetricPoint(step, 0, 1, 1.0, {"loss": 1.0}) for step in range(1, 9)]
    store.put(f"{JOB}/metrics/a00001-f00000000-00000000-00000005.parquet", encode(points[:5]))
    store.put(f"{JOB}/metrics/a00001-f00000000-00000000-00000008.parquet", encode(points))
    store.put(f"{JOB}/metrics/notes.txt", b"not ours")

    assert all_points(records) == points


def test_a_part_that_vanishes_while_it_is_read_is_looked_for_again(
    store: ObjectStore, records: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, 1, 0, 5)
    get, misses = store.get, [1, 2]

    def replaced_meanwhile(key: str) -> bytes:
        if key.endswith(".parquet") and misses:
            misses.pop()
            raise ObjectMissing(key)
        return get(key)

    monkeypatch.setattr(store, "get", replaced_meanwhile)
    assert len(all_points(records)) == 5
    assert not misses


@pytest.mark.timed
def test_a_hundred_thousand_points_are_read_quickly(store: ObjectStore, records: RunRecords) -> None:
    with MetricsLog(store, JOB, 1, 0) as log:
        for step in range(1, 100_001):
            log.add(step, 0, dict.fromkeys(("loss", "accuracy", "learning_rate", "rows_per_second"), 0.5))

    began = time.thread_time()
    points = all_points(records, 0, metrics_log.MAX_POINTS)
    whole_s = time.thread_time() - began
    began = time.thread_time()
    last, _ = records.metrics(JOB, 99_990, 0, "")
    last_s = time.thread_time() - began

    assert len(points) == 100_000
    assert len(last) == 10
    # It takes some hundredths of a second, and all of them about one.
    assert last_s < whole_s / 4


def test_an_invalid_query_of_metrics_is_refused_by_its_field(records: RunRecords) -> None:
    for after_step, size, token, field in (
        (-1, 0, "", "after_step"),
        (0, 10_001, "", "page_size"),
        (0, 0, "YQ==", "page_token"),
    ):
        with pytest.raises(InvalidArgument, match=field):
            records.metrics(JOB, after_step, size, token)
    with pytest.raises(NotFound):
        records.metrics("trainingJobs/none", 0, 0, "")


@pytest.mark.parametrize("token", ["9" * 5000, "9" * 20, "-1", "1.5", "x"])
def test_a_token_that_no_page_gave_is_refused(store: ObjectStore, token: str) -> None:
    with pytest.raises(InvalidArgument, match="page_token"):
        metrics_log.metrics_page(store, "trainingJobs/a", 0, 10, token_of(token))


@pytest.mark.parametrize("attempts", [1, 20])
def test_a_page_reads_the_parts_that_it_shows_whatever_their_number(store: ObjectStore, attempts: int) -> None:
    for number in range(40):
        first, attempt = 10 * number, number * attempts // 40
        points = [MetricPoint(first + each, 0, attempt, 0.0, {"loss": float(attempt)}) for each in range(1, 11)]
        began = 10 * (-(-attempt * 40 // attempts))
        store.put(f"{JOB}/metrics/a{attempt:05d}-f{began:08d}-{first:08d}-{first + 10:08d}.parquet", encode(points))
    counting = CountingStore(store)

    points, token = metrics_page(counting, JOB, 205, 12, "")

    assert [point.step for point in points] == list(range(206, 218))
    assert [point.values["loss"] for point in points] == [
        float((point.step - 1) // 10 * attempts // 40) for point in points
    ]
    assert token
    assert len(counting.requests) == 1 + 2
