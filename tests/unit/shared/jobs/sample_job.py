"""A training job in any state, at its second attempt."""

from __future__ import annotations

from shared.jobs.transitions import JobRecord, JobState


def a_job(state: str = "PENDING", *, failures: int = 0, max_failures: int = 3) -> JobRecord:
    return JobRecord(
        uid="u1",
        name="trainingJobs/j",
        spec={"epochs": 3},
        create_time=100.0,
        update_time=100.0,
        state=JobState(state),
        attempt=2,
        failures=failures,
        max_failures=max_failures,
        deleted_from=JobState.FAILED if state == "DELETING" else None,
    )
