"""The requests of a job's watchers: two a second at most for all of them, and what they are sent."""

from __future__ import annotations

import time

import pytest

from shared.errors import NotFound
from shared.jobs import JobRecord, Jobs
from shared.jobs.transitions import confirm_suspend, lose_attempt
from shared.storage import ObjectStore
from tests.support.counting_store import CountingStore
from tests.support.training_records import JOB, begin, finish, make_job
from tests.unit.train_service.checkpoints.test_coverage_records import VERSION
from train_service.jobs import run_records
from train_service.jobs.deletion import Deletions, GarbageCollector
from train_service.jobs.run_records import FollowedJob, JobReading
from train_service.jobs.training_jobs import JobView, TrainingJobs
from train_service.records import event_log
from train_service.records.event_log import EventKind, EventLog, SegmentedLog


@pytest.fixture
def jobs(store: ObjectStore) -> Jobs:
    """With `JOB`, PENDING."""
    return make_job(store, VERSION)


class Followed:
    """A job that is followed on a store that counts, by a clock that the test sets."""

    def __init__(self, store: ObjectStore) -> None:
        self.counted = CountingStore(store)
        self.now = 0.0
        # The time at which all events count as written just now, however slow the machine is.
        began = time.time()
        jobs = TrainingJobs(self.counted)
        waiting_for = Jobs(self.counted, "train").waiting_for
        self._followed = FollowedJob(self.counted, JOB, jobs.view, waiting_for, lambda: self.now, lambda: began)
        self.reading: JobReading[JobView] = self._followed.read()

    def requests_after(self, seconds: float) -> int:
        """Read again so much later, and return the number of requests."""
        self.now += seconds
        self.counted.forget()
        self.reading = self._followed.read()
        return len(self.counted.requests)


def report(store: ObjectStore, kind: EventKind = EventKind.PROGRESS) -> None:
    EventLog(store, JOB).append(1, kind, {"text": "one"})


def test_a_watched_job_costs_at_most_two_requests_a_second_in_each_state(store: ObjectStore, jobs: Jobs) -> None:
    followed = Followed(store)

    def requests() -> list[int]:
        return [followed.requests_after(seconds) for seconds in (1.0, 0.1, 0.1, 1.0, 1.0)]

    assert requests() == [2, 1, 1, 2, 2]
    begin(jobs)
    followed.requests_after(0.1)
    assert requests() == [2, 1, 1, 2, 2]
    jobs.transition(JOB, lambda job: lose_attempt(job, NotFound("gone"), time.time()), attempt=1)
    followed.requests_after(0.1)
    assert requests() == [2, 1, 1, 2, 2]
    jobs.suspend(JOB, JOB)
    jobs.transition(JOB, lambda job: confirm_suspend(job, time.time()))
    followed.requests_after(0.1)
    assert followed.requests_after(1.0) == 2


def test_a_report_a_second_is_read_with_no_request_more(store: ObjectStore, jobs: Jobs) -> None:
    begin(jobs)
    followed = Followed(store)
    for number in range(1, 4):
        report(store)
        assert followed.requests_after(1.0) == 2
        assert followed.reading.last_sequence == number


def test_reports_that_came_faster_than_they_were_read_are_all_read_at_a_transition(
    store: ObjectStore, jobs: Jobs
) -> None:
    begin(jobs)
    followed = Followed(store)
    for _ in range(3):
        report(store)
    followed.requests_after(1.0)
    assert followed.reading.last_sequence == 1
    finish(jobs)
    followed.requests_after(0.1)
    assert followed.reading.last_sequence == 3
    assert [one.sequence for one in followed.reading.events_after(1) or ()] == [2, 3]


@pytest.mark.parametrize("ahead_s", [-60.0, 0.0, 60.0])
def test_reports_of_a_worker_whose_clock_differs_are_seen_as_soon(
    store: ObjectStore, jobs: Jobs, ahead_s: float
) -> None:
    begin(jobs)
    now = 1000.0
    service = TrainingJobs(store)
    followed = FollowedJob(store, JOB, service.view, Jobs(store, "train").waiting_for, lambda: now, lambda: now)
    followed.read()
    log = SegmentedLog(store, f"{JOB}/events")
    for second in range(20):
        for share in (0.0, 0.5):
            time_s = now + share + ahead_s
            log.add({"time": time_s, "kind": EventKind.PROGRESS, "payload": {}}, 1, f"{second}-{share}")
        now += 1.0
        followed.read()

    # Two seconds behind at most: a report is read alone where another may follow it.
    assert followed.read().last_sequence >= 36


def test_events_besides_reports_are_read_together(store: ObjectStore, jobs: Jobs) -> None:
    begin(jobs)
    followed = Followed(store)
    for _ in range(3):
        report(store, EventKind.WARNING)
    followed.requests_after(1.0)
    assert followed.reading.last_sequence == 3


def test_a_watcher_that_is_far_behind_reads_the_events_itself(
    store: ObjectStore, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_records, "KEPT_EVENTS", 2)
    begin(jobs)
    report(store, EventKind.WARNING)
    followed = Followed(store)
    for _ in range(3):
        report(store, EventKind.WARNING)
    followed.requests_after(1.0)
    after = [followed.reading.events_after(sequence) for sequence in range(5)]
    assert [None if some is None else [one.sequence for one in some] for some in after] == [None, None, [3, 4], [4], []]


def test_the_reason_of_a_waiting_job_is_seen(store: ObjectStore, jobs: Jobs) -> None:
    followed = Followed(store)
    jobs.wait_for(JOB, "1 GPU")
    for _ in range(2):
        followed.requests_after(1.0)
    assert followed.reading.view.waiting_for == "1 GPU"


def test_each_state_is_read_once(store: ObjectStore, jobs: Jobs) -> None:
    followed = Followed(store)
    pending: JobRecord = jobs.get(JOB, JOB)
    begin(jobs)
    jobs.suspend(JOB, JOB)
    followed.requests_after(0.1)
    assert [one.state.name for one in followed.reading.states_after(pending)] == ["RUNNING", "SUSPENDING"]
    assert followed.reading.states_after(jobs.get(JOB, JOB)) == ()
    assert followed.reading.has(pending)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_watcher_in_the_middle_of_a_segment_sees_the_rest_though_the_records_were_deleted_meanwhile(
    store: ObjectStore, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, is_resumed: bool
) -> None:
    monkeypatch.setattr(event_log, "SEGMENT_RECORDS", 4)
    begin(jobs)
    report(store, EventKind.WARNING)
    followed = Followed(store)
    assert followed.reading.last_sequence == 1
    for _ in range(8):
        report(store, EventKind.WARNING)
    jobs.suspend(JOB, JOB)
    jobs.transition(JOB, lambda job: confirm_suspend(job, time.time()))
    GarbageCollector(store, Deletions(store)).collect()
    assert not store.exists(f"{JOB}/events/log/{2:012d}.json")
    if is_resumed:
        jobs.resume(JOB, JOB)
        begin(jobs)

    followed.requests_after(1.0)

    assert followed.reading.last_sequence == 9
    assert [one.sequence for one in followed.reading.events_after(1) or ()] == list(range(2, 10))
    assert followed.requests_after(1.0) == 2
