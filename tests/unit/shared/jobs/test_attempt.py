"""What an attempt writes into the log, however its entry function ends. No Ray: the store alone decides."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shared.errors import (
    Cancelled,
    Internal,
    InvalidArgument,
    MillraceError,
    ResourceExhausted,
    Unavailable,
    error_from_record,
    invalid_field,
)
from shared.jobs import AttemptContext, JobRecord, Jobs, JobState, attempt
from shared.jobs.attempt import run_attempt
from shared.jobs.transitions import begin_attempt, confirm_cancel, confirm_delete, lose_attempt, request_delete
from shared.resource_log import StaleAttempt
from shared.storage import ObjectStore
from tests.support.waiting import wait_until

FOLDER = "things/one"
SECRET = "/root/secret/path"


@pytest.fixture(autouse=True)
def quick_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "REQUEST_POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(attempt, "COMMIT_RETRY_S", 0.01)


@pytest.fixture
def jobs(store: ObjectStore) -> Jobs:
    """With a job whose first attempt has begun."""
    jobs = Jobs(store, "toy")
    job = JobRecord(uid="u1", name=FOLDER, spec={"n": 7}, create_time=1.0, update_time=1.0, max_failures=1)
    jobs.create(FOLDER, job)
    begin(jobs)
    return jobs


def begin(jobs: Jobs) -> JobRecord:
    job = jobs.get(FOLDER, FOLDER)
    return jobs.transition(FOLDER, lambda newest: begin_attempt(newest, 2.0), attempt=job.attempt + 1)


def take_over(jobs: Jobs) -> JobRecord:
    """A later attempt begins, as when the reconciler took this one for dead."""
    job = jobs.get(FOLDER, FOLDER)
    cause = Unavailable("gone")
    jobs.transition(FOLDER, lambda newest: lose_attempt(newest, cause, 3.0), attempt=job.attempt)
    return begin(jobs)


def run(store: ObjectStore, entry: Callable[[AttemptContext], dict[str, Any]], number: int = 1) -> JobRecord:
    run_attempt(entry, store, "toy", FOLDER, number)
    return Jobs(store, "toy").get(FOLDER, FOLDER)


def raising(error: Exception) -> Callable[[AttemptContext], dict[str, Any]]:
    def entry(_: AttemptContext) -> dict[str, Any]:
        raise error

    return entry


class Outages(ObjectStore):
    """A real store whose next conditional writes end in an outage, as many as are set."""

    def __init__(self, store: ObjectStore) -> None:
        self.__dict__.update(vars(store))
        self.outages = 0

    def put_if_absent(self, key: str, data: bytes | bytearray | memoryview) -> None:
        if self.outages:
            self.outages -= 1
            raise Unavailable("the object store does not answer")
        super().put_if_absent(key, data)

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        if self.outages:
            raise Unavailable("the object store does not answer")
        super().put(key, data)


def test_the_result_is_committed(store: ObjectStore, jobs: Jobs) -> None:
    seen: list[tuple[int, dict[str, Any]]] = []

    def entry(context: AttemptContext) -> dict[str, Any]:
        seen.append((context.attempt, context.job.spec))
        return {"manifest": "m", "rows": 3}

    done = run(store, entry)

    assert (done.state, done.result, done.error) == (JobState.SUCCEEDED, {"manifest": "m", "rows": 3}, None)
    assert seen == [(1, {"n": 7})]
    assert jobs.get(FOLDER, FOLDER) == done


@pytest.mark.usefixtures("jobs")
def test_an_error_that_another_attempt_would_meet_fails_the_job_with_its_record(store: ObjectStore) -> None:
    error = invalid_field("sources[0].uri", "file:///x", "the file is truncated")

    done = run(store, raising(error))

    assert (done.state, done.failures) == (JobState.FAILED, 0)
    assert done.error is not None
    reported = error_from_record(done.error)
    assert isinstance(reported, InvalidArgument)
    assert reported.fields == error.fields
    assert reported.message == error.message


@pytest.mark.parametrize("error", [Unavailable("away"), ResourceExhausted("full"), Internal("a fault")], ids=repr)
def test_a_passing_error_is_tried_again_until_too_many(store: ObjectStore, jobs: Jobs, error: MillraceError) -> None:
    first = run(store, raising(error))
    assert (first.state, first.failures) == (JobState.RECOVERING, 1)
    assert first.error == error.as_record()

    begin(jobs)
    second = run(store, raising(error), 2)

    assert (second.state, second.failures) == (JobState.FAILED, 2)
    assert second.error is not None
    assert second.error["reason"] == "TOO_MANY_FAILURES"
    assert error.message in second.error["message"]


@pytest.mark.usefixtures("jobs")
def test_an_unexpected_exception_is_reported_by_a_correlation_id_and_without_internals(
    store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        lost = run(store, raising(RuntimeError(f"no such thing in {SECRET}")))

    assert (lost.state, lost.failures) == (JobState.RECOVERING, 1)
    assert lost.error is not None
    correlation_id = lost.error["metadata"]["correlation_id"]
    assert correlation_id in lost.error["message"]
    assert SECRET not in str(lost.error)
    # The log has both, so that they can be brought together.
    assert correlation_id in caplog.text
    assert SECRET in caplog.text


def test_an_attempt_that_obeys_a_cancel_ends_the_job_cancelled(store: ObjectStore, jobs: Jobs) -> None:
    began = threading.Event()

    def entry(context: AttemptContext) -> dict[str, Any]:
        began.set()
        while True:
            context.raise_if_stopped()

    working = threading.Thread(target=run, args=(store, entry))
    working.start()
    began.wait()
    jobs.cancel(FOLDER, FOLDER)
    working.join(60)

    assert not working.is_alive()
    done = jobs.get(FOLDER, FOLDER)
    assert (done.state, done.error) == (JobState.CANCELLED, None)


def test_a_cancel_that_comes_after_the_work_does_not_undo_it(store: ObjectStore, jobs: Jobs) -> None:
    def entry(_: AttemptContext) -> dict[str, Any]:
        jobs.cancel(FOLDER, FOLDER)
        return {"manifest": "m"}

    assert run(store, entry).state is JobState.SUCCEEDED


@pytest.mark.parametrize("error", [Unavailable("away"), RuntimeError("broken")], ids=repr)
def test_an_attempt_that_is_lost_while_being_cancelled_leaves_the_job_cancelled(
    store: ObjectStore, jobs: Jobs, error: Exception
) -> None:
    def entry(_: AttemptContext) -> dict[str, Any]:
        jobs.cancel(FOLDER, FOLDER)
        raise error

    assert run(store, entry).state is JobState.CANCELLED


@pytest.mark.usefixtures("jobs")
def test_a_cancellation_that_nobody_requested_is_a_lost_attempt(store: ObjectStore) -> None:
    lost = run(store, raising(Cancelled("a call of ours was cancelled")))

    assert (lost.state, lost.failures) == (JobState.RECOVERING, 1)


@pytest.mark.parametrize(
    "ending",
    [None, InvalidArgument("bad"), Unavailable("away"), RuntimeError("broken"), Cancelled("stop")],
    ids=["success", "failure", "passing error", "unexpected", "cancelled"],
)
def test_a_stale_attempt_writes_nothing_however_it_ends(
    store: ObjectStore, jobs: Jobs, ending: Exception | None
) -> None:
    def entry(_: AttemptContext) -> dict[str, Any]:
        take_over(jobs)
        if ending:
            raise ending
        return {"manifest": "the zombie's"}

    after = run(store, entry)

    assert (after.state, after.attempt, after.result) == (JobState.RUNNING, 2, {})
    assert after.failures == 1  # the loss that was written when it was taken for dead, and no other


@pytest.mark.parametrize(
    "ending", [None, Unavailable("away"), RuntimeError("broken"), InvalidArgument("bad")], ids=repr
)
def test_an_attempt_that_was_wrongly_taken_for_dead_can_still_end(
    store: ObjectStore, jobs: Jobs, ending: Exception | None
) -> None:
    def entry(_: AttemptContext) -> dict[str, Any]:
        cause = Unavailable("gone")
        jobs.transition(FOLDER, lambda newest: lose_attempt(newest, cause, 3.0), attempt=1)
        if ending:
            raise ending
        return {"manifest": "m"}

    after = run(store, entry)

    expected = {
        type(None): JobState.SUCCEEDED,
        Unavailable: JobState.RECOVERING,
        RuntimeError: JobState.RECOVERING,
        InvalidArgument: JobState.FAILED,
    }
    assert after.state is expected[type(ending)]
    assert after.failures == 1  # one attempt was lost, not two


def test_raise_if_stopped_stops_a_zombie(store: ObjectStore, jobs: Jobs) -> None:
    ended = threading.Event()

    def entry(context: AttemptContext) -> dict[str, Any]:
        take_over(jobs)
        try:
            while True:
                context.raise_if_stopped()
        finally:
            ended.set()

    after = run(store, entry)

    assert ended.is_set()
    assert (after.state, after.attempt) == (JobState.RUNNING, 2)


@pytest.mark.parametrize("number", [0, 2], ids=["earlier", "later"])
@pytest.mark.usefixtures("jobs")
def test_an_attempt_that_is_not_the_present_one_does_not_even_begin(store: ObjectStore, number: int) -> None:
    after = run(store, raising(AssertionError("must not be called")), number)

    assert (after.state, after.attempt) == (JobState.RUNNING, 1)


def test_an_attempt_of_a_final_job_does_not_begin(store: ObjectStore, jobs: Jobs) -> None:
    jobs.transition(FOLDER, lambda job: replace(job, state=JobState.FAILED))

    assert run(store, raising(AssertionError("must not be called"))).state is JobState.FAILED


@pytest.mark.usefixtures("jobs")
def test_an_outage_at_the_commit_is_waited_out(store: ObjectStore) -> None:
    outages = Outages(store)

    def entry(_: AttemptContext) -> dict[str, Any]:
        outages.outages = 3
        return {"manifest": "m"}

    run_attempt(entry, outages, "toy", FOLDER, 1)

    assert outages.outages == 0
    assert Jobs(store, "toy").get(FOLDER, FOLDER).result == {"manifest": "m"}


@pytest.mark.usefixtures("jobs")
def test_an_outage_longer_than_the_retry_limit_is_reported_to_the_caller(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "COMMIT_TIMEOUT_S", 0.05)
    outages = Outages(store)

    def entry(_: AttemptContext) -> dict[str, Any]:
        outages.outages = 1_000_000
        return {"manifest": "m"}

    with pytest.raises(Unavailable):
        run_attempt(entry, outages, "toy", FOLDER, 1)
    assert Jobs(store, "toy").get(FOLDER, FOLDER).state is JobState.RUNNING


def test_reports_replace_one_another_and_are_what_clients_see(store: ObjectStore, jobs: Jobs) -> None:
    def entry(context: AttemptContext) -> dict[str, Any]:
        context.report(step=1, loss=2.5)
        context.report(step=2)
        return {}

    run(store, entry)

    assert jobs.progress(FOLDER) == {"step": 2}


@pytest.mark.usefixtures("jobs")
def test_an_outage_costs_a_report_and_not_the_attempt(store: ObjectStore) -> None:
    outages = Outages(store)

    def entry(context: AttemptContext) -> dict[str, Any]:
        outages.outages = 1
        context.report(step=1)
        outages.outages = 0
        return {}

    run_attempt(entry, outages, "toy", FOLDER, 1)

    assert Jobs(store, "toy").get(FOLDER, FOLDER).state is JobState.SUCCEEDED


def test_a_stale_attempt_reports_nothing(store: ObjectStore, jobs: Jobs) -> None:
    def entry(context: AttemptContext) -> dict[str, Any]:
        context.report(step=1)
        take_over(jobs)
        while True:
            try:
                context.raise_if_stopped()
            except Exception:
                context.report(step=99)
                raise

    run(store, entry)

    assert jobs.progress(FOLDER) == {"step": 1}


@pytest.mark.usefixtures("jobs")
@pytest.mark.parametrize("error", [None, Unavailable("gone"), KeyError("odd")])
def test_clean_up_runs_when_the_log_holds_the_outcome(store: ObjectStore, error: Exception | None) -> None:
    seen = []

    def entry(context: AttemptContext) -> dict[str, Any]:
        context.afterwards(lambda: seen.append(context.newest().state))
        if error is not None:
            raise error
        return {}

    job = run(store, entry)

    assert seen == [job.state]
    assert job.state is not JobState.RUNNING


@pytest.mark.usefixtures("jobs")
def test_no_thread_is_left_behind(store: ObjectStore) -> None:
    before = threading.active_count()

    run(store, lambda _: {})

    assert threading.active_count() <= before


@pytest.mark.parametrize("reused", [False, True], ids=["deleted", "its name is another's"])
@pytest.mark.parametrize("how", ["looks", "asks afresh", "asks for the newest", "fails", "succeeds"])
def test_an_attempt_at_a_job_that_was_deleted_stops_and_writes_nothing(
    store: ObjectStore, jobs: Jobs, reused: bool, how: str
) -> None:
    def entry(context: AttemptContext) -> dict[str, Any]:
        jobs.cancel(FOLDER, FOLDER)
        for decide in (confirm_cancel, request_delete, confirm_delete):
            jobs.transition(FOLDER, lambda job, decide=decide: decide(job, 3.0))  # type: ignore[misc]
        if reused:
            new = JobRecord(uid="u2", name=FOLDER, spec={"n": 8}, create_time=4.0, update_time=4.0)
            jobs.create(FOLDER, new)
        context._newest = context.job  # what it heard on the way there may be nothing
        if how == "looks":
            wait_until(lambda: not goes_on(context.raise_if_stopped), "that it is gone")
        elif how == "asks afresh":
            assert not goes_on(lambda: context.raise_if_stopped(fresh=True))
        elif how == "asks for the newest":
            assert not goes_on(context.newest)
        elif how == "fails":
            raise InvalidArgument("a row is damaged")
        context.report(done=1)
        return {}

    def goes_on(ask: Callable[[], object]) -> bool:
        """Whether it goes on."""
        try:
            ask()
        except StaleAttempt:
            return False
        return True

    run_attempt(entry, store, "toy", FOLDER, 1)

    newest = jobs.newest(FOLDER)
    assert newest is not None
    assert (newest.state, newest.error) == (JobState.PENDING if reused else JobState.DELETED, None)
    if how in ("looks", "asks afresh", "asks for the newest"):
        assert jobs.progress(FOLDER) == {}
