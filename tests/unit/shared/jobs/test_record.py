"""What a job's record says of it, and that nothing of it is lost in the log."""

from __future__ import annotations

import json

from shared.errors import NotFound, ResourceExhausted, Unavailable
from shared.jobs.transitions import JobRecord, JobState, fail, lose_attempt
from tests.unit.shared.jobs.sample_job import a_job

NOW = 200.0


def test_a_job_is_final_once_no_attempt_will_work_on_it() -> None:
    final = ["SUCCEEDED", "FAILED", "CANCELLED", "SUSPENDED", "DELETING", "DELETED"]
    assert [state for state in JobState if state.final] == final


def test_the_next_attempt_begins_when_what_disturbed_the_last_one_allows_it() -> None:
    ended = Unavailable("the process ended", reason="ATTEMPT_LOST")
    full = ResourceExhausted("the store is full", reason="STORE_FULL", retry_after_s=30.0)

    assert lose_attempt(a_job("RUNNING"), full, NOW).begin_after == NOW + 30.0
    assert lose_attempt(a_job("RUNNING"), ended, NOW).begin_after <= NOW
    assert a_job("PENDING").begin_after == 0.0


def test_a_record_survives_json() -> None:
    for state in JobState:
        job = fail(a_job("RUNNING"), NotFound("gone"), NOW) if state is JobState.FAILED else a_job(state)

        assert JobRecord.from_state(json.loads(json.dumps(job.as_state()))) == job
