"""Events reach the log in order, outages of the store delay them, and a stale attempt learns that it is one."""

from __future__ import annotations

import json
import time

import pytest

from shared.errors import DataLoss, Internal, Unavailable
from shared.jobs import JobRecord, Jobs
from shared.jobs.registry import progress_key
from shared.jobs.transitions import begin_attempt, confirm_cancel, confirm_delete, lose_attempt, request_delete
from shared.storage import ObjectStore
from tests.support.waiting import wait_until
from train_service.records import event_log
from train_service.records.event_log import CANCEL, GO_ON, STALE, TRAIN_KIND, Event, EventKind, EventLog, Reporter

JOB = "trainingJobs/a"


@pytest.fixture
def jobs(store: ObjectStore) -> Jobs:
    """One job, at its first attempt."""
    jobs = Jobs(store, TRAIN_KIND)
    jobs.create(JOB, JobRecord(uid="u", name=JOB, spec={}, create_time=0, update_time=0))
    begin(jobs)
    return jobs


def begin(jobs: Jobs) -> None:
    attempt = jobs.get(JOB, JOB).attempt + 1
    jobs.transition(JOB, lambda job: begin_attempt(job, time.time()), attempt=attempt)


def written(store: ObjectStore) -> list[Event]:
    return list(EventLog(store, JOB).after(0))


def test_all_that_was_reported_is_written_in_order_once_the_reporter_is_left(store: ObjectStore, jobs: Jobs) -> None:
    with Reporter(store, JOB, 1) as reporter:
        for step in range(20):
            reporter.emit(EventKind.PROGRESS, step=step)
        reporter.emit(EventKind.WARNING, text="mended")

    events = written(store)
    assert [event.sequence for event in events] == list(range(1, 22))
    assert [event.payload for event in events] == [*({"step": step} for step in range(20)), {"text": "mended"}]
    assert {event.attempt for event in events} == {1}
    assert json.loads(store.get(progress_key(JOB))) == {"step": 19}
    assert jobs.progress(JOB) == {"step": 19}


@pytest.mark.usefixtures("jobs")
def test_events_before_an_error_are_written_too(store: ObjectStore) -> None:
    def end() -> None:
        with Reporter(store, JOB, 1) as reporter:
            reporter.emit(EventKind.WARNING, text="about to end")
            raise RuntimeError("the run ends")

    with pytest.raises(RuntimeError, match="the run ends"):
        end()

    assert [event.payload for event in written(store)] == [{"text": "about to end"}]


def test_an_outage_of_the_store_neither_loses_nor_repeats_an_event(
    store: ObjectStore, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store answers, goes away just before the progress is replaced, and comes back."""
    put, refusals = store.put, [Unavailable("away"), Unavailable("away")]

    def failing(key: str, data: bytes) -> None:
        if refusals:
            raise refusals.pop()
        put(key, data)

    monkeypatch.setattr(store, "put", failing)
    with Reporter(store, JOB, 1) as reporter:
        reporter.emit(EventKind.PROGRESS, step=1)
        reporter.emit(EventKind.PROGRESS, step=2)

    assert not refusals
    assert [event.payload for event in written(store)] == [{"step": 1}, {"step": 2}]
    assert jobs.progress(JOB) == {"step": 2}


@pytest.mark.usefixtures("jobs")
@pytest.mark.parametrize("another_writes", [False, True], ids=["alone", "another writes in between"])
def test_an_event_whose_write_was_not_answered_is_written_once(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, another_writes: bool
) -> None:
    put, unanswered = store.put_if_absent, [2]

    def failing(key: str, data: bytes) -> None:
        put(key, data)
        if "/events/" in key and json.loads(data)["number"] in unanswered:
            unanswered.clear()
            if another_writes:
                EventLog(store, JOB).append(1, EventKind.WARNING, {"step": 0})
            raise Unavailable("the answer was lost")

    monkeypatch.setattr(store, "put_if_absent", failing)
    with Reporter(store, JOB, 1) as reporter:
        for step in (1, 2, 3):
            reporter.emit(EventKind.VALIDATED, step=step)

    assert not unanswered
    expected = [1, 2, 0, 3] if another_writes else [1, 2, 3]
    assert [event.payload["step"] for event in written(store)] == expected


@pytest.mark.usefixtures("jobs")
@pytest.mark.parametrize("error", [None, Unavailable("away"), DataLoss("damaged")], ids=["", "outage", "damage"])
def test_a_reporter_gathers_its_events_and_goes_on_where_it_cannot(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    monkeypatch.setattr(event_log, "SEGMENT_RECORDS", 4)
    put = store.put

    def failing(key: str, data: bytes) -> None:
        if error is not None and "/gathered/" in key:
            raise error
        put(key, data)

    monkeypatch.setattr(store, "put", failing)
    with Reporter(store, JOB, 1) as reporter:
        for number in range(10):
            reporter.emit(EventKind.WARNING, text=str(number))
        wait_until(lambda: len(written(store)) == 10, "the events")

    assert [event.payload["text"] for event in written(store)] == [str(number) for number in range(10)]
    assert len(list(store.list(f"{JOB}/events/gathered"))) == (2 if error is None else 0)


def test_a_request_to_cancel_is_heard(store: ObjectStore, jobs: Jobs) -> None:
    with Reporter(store, JOB, 1) as reporter:
        assert reporter.stop_reason == GO_ON
        jobs.cancel(JOB, JOB)
        wait_until(lambda: reporter.stop_reason == CANCEL, "the wish")


def test_an_attempt_that_was_overtaken_hears_it_and_writes_no_more(store: ObjectStore, jobs: Jobs) -> None:
    jobs.transition(JOB, lambda job: lose_attempt(job, Unavailable("lost"), time.time()), attempt=1)
    begin(jobs)
    with Reporter(store, JOB, 2) as newer:
        newer.emit(EventKind.WARNING, text="from the second")

    with Reporter(store, JOB, 1) as overtaken:
        overtaken.emit(EventKind.WARNING, text="from the first")
        wait_until(lambda: overtaken.stop_reason == STALE, "the fence")

    assert [(event.attempt, event.payload["text"]) for event in written(store)] == [(2, "from the second")]


@pytest.mark.parametrize("reused", [False, True], ids=["deleted", "its name is another's"])
def test_an_attempt_at_a_job_that_was_deleted_hears_it_and_writes_no_more(
    store: ObjectStore, jobs: Jobs, reused: bool
) -> None:
    jobs.cancel(JOB, JOB)
    for decide in (confirm_cancel, request_delete, confirm_delete):
        jobs.transition(JOB, lambda job, decide=decide: decide(job, time.time()))  # type: ignore[misc]
    if reused:
        jobs.create(JOB, JobRecord(uid="v", name=JOB, spec={}, create_time=0, update_time=0))

    with Reporter(store, JOB, 1) as reporter:
        wait_until(lambda: reporter.stop_reason == STALE, "that it is gone")
        reporter.emit(EventKind.WARNING, text="from nowhere")

    assert not written(store)


@pytest.mark.usefixtures("jobs")
def test_a_run_whose_events_cannot_be_written_any_more_ends(store: ObjectStore) -> None:
    """Here because an event is not JSON; it is not lost in silence."""

    def tell_on() -> None:
        with Reporter(store, JOB, 1) as reporter:
            reporter.emit(EventKind.WARNING, text=object())
            while True:
                reporter.emit(EventKind.WARNING, text="more")

    with pytest.raises(Internal) as refused:
        tell_on()
    assert refused.value.specific_reason == "EVENTS_LOST"
    assert isinstance(refused.value.__cause__, TypeError)


@pytest.mark.usefixtures("jobs")
def test_leaving_reports_that_the_last_event_could_not_be_written(store: ObjectStore) -> None:
    def report_last() -> None:
        with Reporter(store, JOB, 1) as reporter:
            reporter.emit(EventKind.WARNING, text=object())

    with pytest.raises(Internal, match="cannot be written"):
        report_last()


def test_events_can_be_read_from_any_place(store: ObjectStore) -> None:
    log = EventLog(store, JOB)
    assert log.last_sequence() == 0
    for number in range(5):
        log.append(1, EventKind.WARNING, {"text": str(number)})

    assert [event.payload["text"] for event in log.after(3)] == ["3", "4"]
    assert list(log.after(5)) == []
    assert EventLog(store, JOB).last_sequence() == 5


@pytest.mark.usefixtures("jobs")
def test_two_processes_that_report_the_end_of_an_attempt_at_once_write_one_event(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = store.put_if_absent

    def put_late(key: str, content: bytes) -> object:
        monkeypatch.undo()
        EventLog(store, JOB).append_first(1, EventKind.ATTEMPT_ENDED, {"text": "of rank 1"})
        return put(key, content)

    monkeypatch.setattr(store, "put_if_absent", put_late)
    EventLog(store, JOB).append_first(1, EventKind.ATTEMPT_ENDED, {"text": "of rank 0"})

    assert [event.payload["text"] for event in written(store)] == ["of rank 1"]
