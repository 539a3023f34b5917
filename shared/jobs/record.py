"""A job's state and its legal transitions: pure functions on plain values."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shared.errors import Internal, MillraceError, ResourceExhausted


class JobState(enum.StrEnum):
    #  PENDING ──▶ RUNNING ◀──▶ RECOVERING
    #     │          │  └──▶ SUCCEEDED │
    #     │          └─────────────────┴──▶ FAILED
    #     └──────────┴── CANCELLING ──▶ CANCELLED
    #  SUCCEEDED, FAILED, CANCELLED ◀──▶ DELETING ──▶ DELETED
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    CANCELLING = "CANCELLING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    # What it made is being taken away.
    DELETING = "DELETING"
    # A tombstone: the resource does not exist, and a new one may begin in the same log.
    DELETED = "DELETED"

    @property
    def final(self) -> bool:
        """Whether no attempt works on it, nor will."""
        return self not in (JobState.PENDING, JobState.RUNNING, JobState.RECOVERING, JobState.CANCELLING)


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """The whole state of a job after one transition. Times are seconds since the epoch."""

    uid: str
    # The resource that the job is or makes, e.g. `trainingJobs/j`.
    name: str
    # What was asked for, as JSON-able values; fixed for ever.
    spec: dict[str, Any]
    create_time: float
    update_time: float
    body_sha256: str = ""
    state: JobState = JobState.PENDING
    # The number of the attempt at work, or of the last; `first_attempt - 1` before the first.
    attempt: int = 0
    # Above 1 where a deleted job's log goes on: no attempt of the old one may pass for one of the new.
    first_attempt: int = 1
    # The Ray actor of the present or last attempt; empty before the first.
    actor: str = ""
    failures: int = 0
    max_failures: int = 3
    # Counts wishes, not progress: 1 for the creation, 2 once a cancel was asked for.
    generation: int = 1
    # `MillraceError.as_record` of what ended or last disturbed it.
    error: dict[str, Any] | None = None
    # What the attempt that succeeded committed.
    result: dict[str, Any] = field(default_factory=dict)
    # While DELETING: the state to go back to where the deletion is refused.
    deleted_from: JobState | None = None

    @property
    def begin_after(self) -> float:
        """When the next attempt may begin: what disturbed the last one may ask for time, as a full store does."""
        if self.state is not JobState.RECOVERING or self.error is None:
            return 0.0
        return self.update_time + (self.error.get("retry_after_s") or 0.0)

    @property
    def attempts_made(self) -> int:
        return self.attempt - self.first_attempt + 1

    def as_state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> JobRecord:
        deleted_from = state.get("deleted_from")
        return cls(
            **{
                **state,
                "state": JobState(state["state"]),
                "deleted_from": JobState(deleted_from) if deleted_from else None,
            }
        )


def begin_attempt(job: JobRecord, now: float, actor: str = "") -> JobRecord:
    """PENDING, RECOVERING → RUNNING under the next attempt number, in the Ray actor of that name."""
    _expect(job, JobState.PENDING, JobState.RECOVERING)
    return replace(job, state=JobState.RUNNING, attempt=job.attempt + 1, actor=actor, update_time=now)


def lose_attempt(job: JobRecord, cause: MillraceError, now: float) -> JobRecord:
    """The attempt ended without a result: → RECOVERING, or FAILED once more were lost than allowed.

    A job that is being cancelled has nothing left to recover: → CANCELLED.
    """
    if job.state is JobState.CANCELLING:
        return confirm_cancel(job, now)
    _expect(job, JobState.RUNNING)
    failures = job.failures + 1
    if failures > job.max_failures:
        # What an operator can put right is told as what it is.
        kind = ResourceExhausted if isinstance(cause, ResourceExhausted) else Internal
        error = kind(
            f"{failures} attempts were lost, {job.max_failures} may be; the last: {cause.message}",
            reason="TOO_MANY_FAILURES",
            metadata={**cause.metadata, "failures": str(failures)},
        )
        return replace(job, state=JobState.FAILED, failures=failures, error=error.as_record(), update_time=now)
    return replace(job, state=JobState.RECOVERING, failures=failures, error=cause.as_record(), update_time=now)


def succeed(job: JobRecord, result: dict[str, Any], now: float) -> JobRecord:
    """The commit: any live state → SUCCEEDED. A cancel that came too late does not undo it."""
    _expect(job, JobState.RUNNING, JobState.RECOVERING, JobState.CANCELLING)
    return replace(job, state=JobState.SUCCEEDED, result=result, error=None, update_time=now)


def fail(job: JobRecord, error: MillraceError, now: float) -> JobRecord:
    """Any live state → FAILED: another attempt would meet the same error."""
    _expect(job, JobState.PENDING, JobState.RUNNING, JobState.RECOVERING, JobState.CANCELLING)
    return replace(job, state=JobState.FAILED, error=error.as_record(), update_time=now)


def request_cancel(job: JobRecord, now: float) -> JobRecord:
    """A client's wish: any live state → CANCELLING. Final states and repeated wishes stay as they are."""
    if job.state.final or job.state is JobState.CANCELLING:
        return job
    return replace(job, state=JobState.CANCELLING, generation=job.generation + 1, update_time=now)


def confirm_cancel(job: JobRecord, now: float) -> JobRecord:
    """CANCELLING → CANCELLED, once nothing works on it any more."""
    _expect(job, JobState.CANCELLING)
    return replace(job, state=JobState.CANCELLED, error=None, update_time=now)


def request_delete(job: JobRecord, now: float) -> JobRecord:
    """SUCCEEDED, FAILED, CANCELLED → DELETING. A repeated wish changes nothing."""
    if job.state is JobState.DELETING:
        return job
    _expect(job, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
    return replace(job, state=JobState.DELETING, deleted_from=job.state, generation=job.generation + 1, update_time=now)


def undo_delete(job: JobRecord, now: float) -> JobRecord:
    """DELETING → what it was before: somebody uses it."""
    _expect(job, JobState.DELETING)
    assert job.deleted_from is not None
    return replace(job, state=job.deleted_from, deleted_from=None, update_time=now)


def confirm_delete(job: JobRecord, now: float) -> JobRecord:
    """DELETING → DELETED, once nothing of it is left."""
    _expect(job, JobState.DELETING)
    return replace(job, state=JobState.DELETED, result={}, update_time=now)


def follow_deleted(job: JobRecord, tombstone: JobRecord) -> JobRecord:
    """`job`, new, as the next record after the tombstone of another of its name."""
    _expect(tombstone, JobState.DELETED)
    return replace(job, attempt=tombstone.attempt, first_attempt=tombstone.attempt + 1)


def _expect(job: JobRecord, *states: JobState) -> None:
    if job.state not in states:
        raise ValueError(f"{job.name} is {job.state}, not one of {', '.join(states)}")
