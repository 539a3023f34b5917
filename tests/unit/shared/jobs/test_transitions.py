"""A job's transitions: a table of every state and every event, and what each keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from shared.errors import NotFound, ResourceExhausted, Unavailable, error_from_record
from shared.jobs.transitions import (
    INSUFFICIENT_RESOURCES,
    MAX_WAIT_S,
    PREEMPTED,
    RESIZED,
    JobRecord,
    JobState,
    begin_attempt,
    confirm_cancel,
    confirm_delete,
    confirm_suspend,
    fail,
    follow_deleted,
    lose_attempt,
    request_cancel,
    request_delete,
    request_resume,
    request_suspend,
    succeed,
    take_up,
    undo_delete,
)
from tests.unit.shared.jobs.sample_job import a_job

NOW = 200.0
CAUSE = Unavailable("the process ended", reason="ATTEMPT_LOST", metadata={"node": "n1"})

EVENTS: dict[str, Callable[[JobRecord], JobRecord]] = {
    "begin": lambda job: begin_attempt(job, NOW),
    "lose": lambda job: lose_attempt(job, CAUSE, NOW),
    "succeed": lambda job: succeed(job, {"manifest": "m"}, NOW),
    "fail": lambda job: fail(job, NotFound("the source is not there"), NOW),
    "request_cancel": lambda job: request_cancel(job, NOW),
    "confirm_cancel": lambda job: confirm_cancel(job, NOW),
    "request_suspend": lambda job: request_suspend(job, NOW),
    "confirm_suspend": lambda job: confirm_suspend(job, NOW),
    "request_resume": lambda job: request_resume(job, NOW),
    "request_delete": lambda job: request_delete(job, NOW),
    "undo_delete": lambda job: undo_delete(job, NOW),
    "confirm_delete": lambda job: confirm_delete(job, NOW),
}
# What leaves a state at rest.
RETURNS = {"request_delete", "undo_delete", "confirm_delete", "request_resume"}

# (state, event) → the state after; what is not listed is illegal.
LEGAL = {
    ("PENDING", "begin"): "RUNNING",
    ("RECOVERING", "begin"): "RUNNING",
    ("RUNNING", "lose"): "RECOVERING",
    ("CANCELLING", "lose"): "CANCELLED",
    ("RUNNING", "succeed"): "SUCCEEDED",
    ("RECOVERING", "succeed"): "SUCCEEDED",
    ("CANCELLING", "succeed"): "SUCCEEDED",
    ("PENDING", "fail"): "FAILED",
    ("RUNNING", "fail"): "FAILED",
    ("RECOVERING", "fail"): "FAILED",
    ("CANCELLING", "fail"): "FAILED",
    ("PENDING", "request_cancel"): "CANCELLING",
    ("RUNNING", "request_cancel"): "CANCELLING",
    ("RECOVERING", "request_cancel"): "CANCELLING",
    ("CANCELLING", "request_cancel"): "CANCELLING",
    ("SUCCEEDED", "request_cancel"): "SUCCEEDED",
    ("FAILED", "request_cancel"): "FAILED",
    ("CANCELLED", "request_cancel"): "CANCELLED",
    ("DELETING", "request_cancel"): "DELETING",
    ("DELETED", "request_cancel"): "DELETED",
    ("SUSPENDING", "request_cancel"): "CANCELLING",
    ("SUSPENDED", "request_cancel"): "CANCELLED",
    ("CANCELLING", "confirm_cancel"): "CANCELLED",
    ("PENDING", "request_suspend"): "SUSPENDING",
    ("RUNNING", "request_suspend"): "SUSPENDING",
    ("RECOVERING", "request_suspend"): "SUSPENDING",
    ("SUSPENDING", "request_suspend"): "SUSPENDING",
    ("SUSPENDED", "request_suspend"): "SUSPENDED",
    ("SUSPENDING", "confirm_suspend"): "SUSPENDED",
    ("SUSPENDING", "lose"): "SUSPENDED",
    ("SUSPENDING", "succeed"): "SUCCEEDED",
    ("SUSPENDING", "fail"): "FAILED",
    ("PENDING", "request_resume"): "PENDING",
    ("RUNNING", "request_resume"): "RUNNING",
    ("RECOVERING", "request_resume"): "RECOVERING",
    ("SUSPENDED", "request_resume"): "RECOVERING",
    ("FAILED", "request_resume"): "RECOVERING",
    ("CANCELLED", "request_resume"): "RECOVERING",
    ("SUSPENDED", "request_delete"): "DELETING",
    ("SUCCEEDED", "request_delete"): "DELETING",
    ("FAILED", "request_delete"): "DELETING",
    ("CANCELLED", "request_delete"): "DELETING",
    ("DELETING", "request_delete"): "DELETING",
    ("DELETING", "undo_delete"): "FAILED",
    ("DELETING", "confirm_delete"): "DELETED",
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", list(JobState))
def test_every_transition_is_the_one_in_the_table_or_refused(state: JobState, event: str) -> None:
    job = a_job(state)

    if (state, event) in LEGAL:
        after = EVENTS[event](job)
        assert after.state == LEGAL[state, event]
        assert (after.uid, after.name, after.spec, after.create_time) == (job.uid, job.name, job.spec, 100.0)
        assert after.update_time == (100.0 if after is job else NOW)
    else:
        with pytest.raises(ValueError, match=f"trainingJobs/j is {state}"):
            EVENTS[event](job)


def test_nothing_but_a_deletion_or_a_resumption_leaves_a_final_state() -> None:
    for state in JobState:
        for event in set(EVENTS) - RETURNS:
            if state.final and (state, event) in LEGAL:
                assert LEGAL[state, event] == state or (state, event) == ("SUSPENDED", "request_cancel")


def test_each_beginning_counts_the_attempt_and_nothing_else_does() -> None:
    assert begin_attempt(a_job("RECOVERING"), NOW).attempt == 3
    for event in set(EVENTS) - RETURNS - {"begin"}:
        state = {"confirm_cancel": "CANCELLING", "confirm_suspend": "SUSPENDING"}.get(event, "RUNNING")
        assert EVENTS[event](a_job(state)).attempt == 2


def test_attempts_may_be_lost_max_failures_times_and_not_once_more() -> None:
    job = a_job("PENDING", max_failures=2)
    for failures in (1, 2):
        job = lose_attempt(begin_attempt(job, NOW), CAUSE, NOW)
        assert (job.state, job.failures) == ("RECOVERING", failures)
        assert job.error == CAUSE.as_record()

    job = lose_attempt(begin_attempt(job, NOW), CAUSE, NOW)

    assert (job.state, job.failures) == ("FAILED", 3)
    assert job.error is not None
    error = error_from_record(job.error)
    assert error.specific_reason == "TOO_MANY_FAILURES"
    assert error.metadata == {"node": "n1", "failures": "3"}
    assert "the process ended" in error.message


def test_a_job_that_a_full_store_ended_says_so() -> None:
    full = ResourceExhausted("the store is full", reason="STORE_FULL", retry_after_s=30.0)

    ended = lose_attempt(a_job("RUNNING", max_failures=0), full, NOW)

    assert ended.error is not None
    assert isinstance(error_from_record(ended.error), ResourceExhausted)


def test_without_allowed_failures_the_first_lost_attempt_fails_the_job() -> None:
    assert lose_attempt(a_job("RUNNING", max_failures=0), CAUSE, NOW).state == "FAILED"


def test_success_clears_what_disturbed_earlier_attempts() -> None:
    job = begin_attempt(lose_attempt(a_job("RUNNING"), CAUSE, NOW), NOW)

    done = succeed(job, {"manifest": "m"}, NOW)

    assert (done.error, done.result) == (None, {"manifest": "m"})


def test_only_a_request_moves_the_etag() -> None:
    job = a_job("RUNNING")

    for event in ("lose", "succeed", "fail"):
        assert EVENTS[event](job).generation == 1
    requested = request_cancel(job, NOW)
    assert requested.generation == 2
    assert request_cancel(requested, NOW + 1) is requested
    assert confirm_cancel(requested, NOW).generation == 2


@pytest.mark.parametrize("state", ["SUCCEEDED", "FAILED", "CANCELLED"])
def test_a_refused_deletion_leaves_the_job_as_it_was_with_a_new_etag(state: str) -> None:
    job = a_job(state)

    back = undo_delete(request_delete(job, NOW), NOW)

    assert (back.state, back.result, back.deleted_from) == (job.state, job.result, None)
    assert back.generation == job.generation + 1


def test_a_job_in_the_log_of_a_deleted_one_counts_its_attempts_from_one() -> None:
    tombstone = confirm_delete(request_delete(a_job("SUCCEEDED"), NOW), NOW)

    job = begin_attempt(follow_deleted(replace(a_job(), attempt=0), tombstone), NOW)

    assert job.attempt > tombstone.attempt
    assert job.attempts_made == 1


@pytest.mark.parametrize(("reason", "preemptions"), [(PREEMPTED, 1), (RESIZED, 0), (INSUFFICIENT_RESOURCES, 0)])
def test_an_attempt_that_makes_room_is_no_failure(reason: str, preemptions: int) -> None:
    job = lose_attempt(a_job("RUNNING", failures=3), Unavailable("its node goes", reason=reason), NOW)

    assert (job.state, job.failures, job.preemptions) == ("RECOVERING", 3, preemptions)


def test_preemptions_beyond_their_budget_are_failures() -> None:
    spent = replace(a_job("RUNNING", failures=3), preemptions=100)

    assert lose_attempt(spent, Unavailable("its node goes", reason=PREEMPTED), NOW).state == "FAILED"


def test_a_job_that_finds_no_room_waits_ever_longer_and_never_fails_of_it() -> None:
    job, waits = a_job("RUNNING", failures=3), []
    for _ in range(1000):
        job = lose_attempt(job, Unavailable("room was taken", reason=INSUFFICIENT_RESOURCES), NOW)
        assert (job.state, job.failures, job.preemptions) == ("RECOVERING", 3, 0)
        waits.append(job.begin_after - NOW)
        job = begin_attempt(job, NOW)
    assert waits[:4] == [1.0, 2.0, 4.0, 8.0]
    assert max(waits) == waits[-1] == MAX_WAIT_S

    # Once it had room, it waits briefly again.
    resized = begin_attempt(lose_attempt(job, Unavailable("it grows", reason=RESIZED), NOW), NOW)
    again = lose_attempt(resized, Unavailable("room was taken", reason=INSUFFICIENT_RESOURCES), NOW)
    assert again.begin_after - NOW == 1.0


def test_a_resumed_job_begins_with_nothing_counted_against_it() -> None:
    failed = replace(a_job("FAILED", failures=4), preemptions=7, error=CAUSE.as_record())

    job = request_resume(failed, NOW)

    assert (job.state, job.failures, job.preemptions, job.error) == ("RECOVERING", 0, 0, None)
    assert (job.attempt, job.generation) == (failed.attempt, failed.generation + 1)


OWN = JobRecord(uid="u", name="things/a", spec={}, create_time=1.0, update_time=1.0, runner="by hand")


@pytest.mark.parametrize("state", [state for state in JobState if state not in ("SUCCEEDED", "DELETING", "DELETED")])
def test_the_runner_of_a_job_begins_its_next_attempt_in_any_state_but_the_last(state: JobState) -> None:
    taken = take_up(replace(OWN, state=state, attempt=3, failures=2, error={"kind": "Internal"}), NOW)

    assert (taken.state, taken.attempt, taken.failures, taken.error) == (JobState.RUNNING, 4, 0, None)
    assert taken.runner == "by hand"


def test_a_job_of_a_reconciler_is_nobody_elses_and_one_that_is_done_stays() -> None:
    with pytest.raises(ValueError, match="reconciler"):
        take_up(replace(OWN, runner=""), NOW)
    with pytest.raises(ValueError, match="DELETING"):
        take_up(replace(OWN, state=JobState.DELETING), NOW)
    done = replace(OWN, state=JobState.SUCCEEDED)
    assert take_up(done, NOW) is done


def test_nobody_need_confirm_the_cancelling_of_a_job_that_somebody_runs_by_hand() -> None:
    cancelled = request_cancel(replace(OWN, state=JobState.RUNNING, attempt=1), NOW)

    assert cancelled.state is JobState.CANCELLED
    assert request_cancel(cancelled, NOW) is cancelled
    # And a reconciler may go on with it.
    resumed = request_resume(cancelled, NOW)
    assert (resumed.state, resumed.runner) == (JobState.RECOVERING, "")


def test_a_job_that_somebody_ran_by_hand_and_left_can_be_suspended_and_handed_over() -> None:
    left = lose_attempt(replace(OWN, state=JobState.RUNNING, attempt=1), Unavailable("interrupted"), NOW)

    assert request_suspend(left, NOW).state is JobState.SUSPENDED
    resumed = request_resume(left, NOW)
    assert (resumed.state, resumed.runner, resumed.generation) == (JobState.RECOVERING, "", left.generation + 1)
    at_work = replace(OWN, state=JobState.RUNNING, attempt=1)
    assert request_resume(at_work, NOW) is at_work
    assert request_suspend(at_work, NOW).state is JobState.SUSPENDING
