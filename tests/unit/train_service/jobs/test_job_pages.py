"""A page of training jobs: from the index it shows what it shows from the logs, at a fraction of the requests."""

from __future__ import annotations

import json
import time

import pytest

from shared import names
from shared.errors import InvalidArgument
from shared.jobs import JobRecord, Jobs
from shared.jobs.registry import Changes
from shared.jobs.transitions import begin_attempt
from shared.storage import ObjectStore
from tests.support.counting_store import CountingStore
from tests.support.training_records import JOB, begin, commit, finish, make_job
from tests.unit.train_service.checkpoints.test_coverage_records import VERSION
from train_service.jobs.training_jobs import JobView, TrainingJobs
from train_service.records import event_log
from train_service.records.event_log import TRAIN_KIND, EventKind, Reporter


@pytest.fixture
def jobs(store: ObjectStore) -> Jobs:
    """`trainingJobs/j`, SUCCEEDED with two checkpoints, and the PENDING jobs `trainingJobs/k1` to `k4`."""
    jobs = make_job(store, VERSION)
    begin(jobs)
    store.put(f"{JOB}/progress.json", json.dumps({"step": 7}).encode())
    for step in (3, 7):
        commit(store, step, ())
    finish(jobs)
    spec = jobs.get(JOB, JOB).spec
    for number in range(1, 5):
        name = f"trainingJobs/k{number}"
        jobs.create(name, JobRecord(uid=f"u{number}", name=name, spec=spec, create_time=0, update_time=0))
    jobs.wait_for("trainingJobs/k2", "2 more CPUs")
    return jobs


def pages(training: TrainingJobs, size: int) -> list[JobView]:
    views, token = training.page(size, "")
    while token:
        more, token = training.page(size, token)
        views += more
    return views


@pytest.mark.usefixtures("jobs")
@pytest.mark.parametrize("size", [1, 2, 5, 0])
def test_the_index_shows_what_the_logs_show(store: ObjectStore, size: int) -> None:
    from_logs = pages(TrainingJobs(store), size)
    TrainingJobs(store).index.keep()

    from_index = pages(TrainingJobs(store), size)

    assert from_index == from_logs
    assert [view.record.name.rpartition("/")[2] for view in from_index] == ["j", "k1", "k2", "k3", "k4"]
    assert from_index[0].progress == {"step": 7}
    assert from_index[0].newest is not None
    assert from_index[0].newest.name.endswith("00000007")
    assert from_index[2].waiting_for == "2 more CPUs"


@pytest.mark.usefixtures("jobs")
def test_a_token_goes_on_after_the_last_job_that_was_sent_though_it_is_gone(store: ObjectStore) -> None:
    training = TrainingJobs(store)
    training.index.keep()

    views, token = training.page(10, names.token_of("k2x"))
    assert [view.record.name for view in views] == ["trainingJobs/k3", "trainingJobs/k4"]
    assert token == ""
    with pytest.raises(InvalidArgument, match="page_token"):
        training.page(10, "é")
    with pytest.raises(InvalidArgument, match="page_size"):
        training.page(1001, "")


def test_a_report_of_an_attempt_is_in_the_list_soon_and_costs_no_note_each_time(
    store: ObjectStore, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "NOTE_INTERVAL_S", 3600.0)
    training = TrainingJobs(store)
    training.index.keep()
    name = "trainingJobs/k1"
    jobs.transition(name, lambda newest: begin_attempt(newest, time.time()), attempt=1)
    training.index.keep()

    with Reporter(store, name, 1) as reporter:
        for step in range(5):
            reporter.emit(EventKind.PROGRESS, step=step)

    assert [change.name for change in Changes(store, TRAIN_KIND).read()] == [name]
    assert pages(training, 10)[1].progress == {"step": 4}


def test_the_last_of_several_reports_is_in_the_list_though_none_follows(
    store: ObjectStore, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "NOTE_INTERVAL_S", 2.0)
    training = TrainingJobs(store)
    name = "trainingJobs/k1"
    jobs.transition(name, lambda newest: begin_attempt(newest, time.time()), attempt=1)
    training.index.keep()
    give_up_at = time.monotonic() + 120.0

    with Reporter(store, name, 1) as reporter:
        for step in range(2):  # the second one soon after the first
            reporter.emit(EventKind.PROGRESS, step=step)
            while pages(training, 10)[1].progress != {"step": step}:
                assert time.monotonic() < give_up_at, f"report {step} is not in the list"
                training.index.keep()


@pytest.mark.usefixtures("jobs")
def test_a_page_reads_no_log_of_a_job_that_has_not_changed(store: ObjectStore) -> None:
    TrainingJobs(store).index.keep()
    counted = CountingStore(store)

    assert len(pages(TrainingJobs(counted), 10)) == 5

    assert not [request for request in counted.requests if "trainingJobs/" in request]
    assert len(counted.requests) <= 6
