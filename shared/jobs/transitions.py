"""A job's state, its record in the log, and its legal transitions.

Transitions are pure functions on plain values. A transition that is not legal raises `ValueError`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shared.durable import Durable, as_state, fields_of
from shared.errors import Conflict, Internal, MillraceError, ResourceExhausted
from shared.jobs.retry_limits import DEFAULT_MAX_FAILURES, DEFAULT_MAX_PREEMPTIONS

# --- State and record ---


class JobState(enum.StrEnum):
    #  PENDING ──▶ RUNNING ◀──▶ RECOVERING
    #     │          │  └──▶ SUCCEEDED │
    #     │          └─────────────────┴──▶ FAILED
    #     ├──────────┴── CANCELLING ──▶ CANCELLED
    #     └──────────┴── SUSPENDING ──▶ SUSPENDED
    #  SUSPENDED, FAILED, CANCELLED ──▶ RECOVERING, where the kind of job can be resumed
    #  SUCCEEDED, FAILED, CANCELLED, SUSPENDED ◀──▶ DELETING ──▶ DELETED
    #  a job with a `runner`: any of the first six ──▶ RUNNING, and a request to cancel ──▶ CANCELLED at once
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    CANCELLING = "CANCELLING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    SUSPENDING = "SUSPENDING"
    SUSPENDED = "SUSPENDED"
    # The objects of the job are being removed.
    DELETING = "DELETING"
    # A tombstone: the resource does not exist, and a new one may begin in the same log.
    DELETED = "DELETED"

    @property
    def final(self) -> bool:
        """Whether no attempt is running, nor will unless a client resumes the job."""
        return self not in LIVE


LIVE = (JobState.PENDING, JobState.RUNNING, JobState.RECOVERING, JobState.CANCELLING, JobState.SUSPENDING)


@dataclass(frozen=True, kw_only=True)
class JobRecord(Durable):
    """The whole state of a job after one transition. Times are seconds since the epoch."""

    uid: str
    # The resource that the job is or makes, e.g. `trainingJobs/j`.
    name: str
    # The request, as JSON-able values; never changes.
    spec: dict[str, Any]
    create_time: float
    update_time: float
    body_sha256: str = ""
    state: JobState = JobState.PENDING
    # The number of the current or last attempt; `first_attempt - 1` before the first.
    attempt: int = 0
    # Above 1 if a deleted job's log continues: an attempt of the old job must not pass for one of the new.
    first_attempt: int = 1
    # The Ray actor of the present or last attempt; empty before the first.
    actor: str = ""
    # The program that begins the job's attempts instead of a reconciler. It is not supervised, and may have ended.
    runner: str = ""
    failures: int = 0
    max_failures: int = DEFAULT_MAX_FAILURES
    # Attempts whose node was taken away. They have their own budget.
    preemptions: int = 0
    max_preemptions: int = DEFAULT_MAX_PREEMPTIONS
    # Consecutive attempts that found no room. They are not failures.
    waits: int = 0
    # Counts clients' requests, not progress: 1 for the creation, 2 after a request to cancel.
    generation: int = 1
    # `MillraceError.as_record` of the error that ended or last disturbed the job.
    error: dict[str, Any] | None = None
    # Choices of the attempts for later ones, by names that the kind of job defines; kept for the job's life.
    choices: dict[str, Any] = field(default_factory=dict)
    # The result that the successful attempt committed.
    result: dict[str, Any] = field(default_factory=dict)
    # While DELETING: the state to return to if the deletion is refused.
    deleted_from: JobState | None = None

    @property
    def begin_after(self) -> float:
        """When the next attempt may begin. The last error may request a delay, as that of a full store does."""
        if self.state is not JobState.RECOVERING or self.error is None:
            return 0.0
        return self.update_time + (self.error.get("retry_after_s") or 0.0)

    @property
    def unattended(self) -> bool:
        """Whether no reconciler attends to the job in this state."""
        return self.state.final or bool(self.runner)

    @property
    def attempts_made(self) -> int:
        return self.attempt - self.first_attempt + 1

    def as_state(self) -> dict[str, Any]:
        state: dict[str, Any] = as_state(self)
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> JobRecord:
        deleted_from = state.get("deleted_from")
        return cls(
            **{
                **fields_of(cls, state),
                "state": JobState(state["state"]),
                "deleted_from": JobState(deleted_from) if deleted_from else None,
            }
        )


def check_etag(job: JobRecord, etag: str) -> None:
    """Raise `Conflict` if `etag` is given and not the current generation."""
    if etag and etag != str(job.generation):
        raise Conflict(
            f"{job.name} has etag {job.generation}, not {etag}; read it again",
            reason="STALE_ETAG",
            metadata={"resource": job.name},
        )


# --- Transitions ---

# Reasons for which a healthy attempt ends; they are no failures. PREEMPTED: its node is taken away, which has its own
# budget. RESIZED: it made progress, and another size replaces it. INSUFFICIENT_RESOURCES: it found no room, and the
# next one waits with growing delays.
PREEMPTED, RESIZED, INSUFFICIENT_RESOURCES = "PREEMPTED", "RESIZED", "INSUFFICIENT_RESOURCES"
MAX_WAIT_S = 60.0


def begin_attempt(job: JobRecord, now: float, actor: str = "", choices: Mapping[str, Any] | None = None) -> JobRecord:
    """PENDING, RECOVERING → RUNNING under the next attempt number, in the Ray actor of that name.

    `choices`, if given, replace those of the job.
    """
    _expect(job, JobState.PENDING, JobState.RECOVERING)
    chosen = job.choices if choices is None else dict(choices)
    return replace(job, state=JobState.RUNNING, attempt=job.attempt + 1, actor=actor, choices=chosen, update_time=now)


def take_up(job: JobRecord, now: float, choices: Mapping[str, Any] | None = None) -> JobRecord:
    """A job with a `runner`, in any state but the last ones → RUNNING under the next attempt number.

    Its counters are reset; `choices` as for `begin_attempt`. An attempt that may still be running is superseded. A job
    that SUCCEEDED stays as it is.
    """
    if job.state is JobState.SUCCEEDED:
        return job
    if not job.runner:
        raise ValueError(f"{job.name} has a reconciler")
    _expect(job, *LIVE, JobState.FAILED, JobState.CANCELLED, JobState.SUSPENDED)
    return replace(
        job,
        state=JobState.RUNNING,
        attempt=job.attempt + 1,
        choices=job.choices if choices is None else dict(choices),
        failures=0,
        preemptions=0,
        waits=0,
        error=None,
        generation=job.generation + 1 if job.state.final else job.generation,
        update_time=now,
    )


def lose_attempt(job: JobRecord, cause: MillraceError, now: float) -> JobRecord:
    """RUNNING → RECOVERING after an attempt without a result, or FAILED after too many failures.

    Reasons that are no failures (see `PREEMPTED`) do not count; preemptions beyond their budget do. A job that is being
    cancelled or suspended does not recover: → CANCELLED, SUSPENDED.
    """
    if job.state is JobState.CANCELLING:
        return confirm_cancel(job, now)
    if job.state is JobState.SUSPENDING:
        return confirm_suspend(job, now)
    _expect(job, JobState.RUNNING)
    reason, waits, record = cause.specific_reason, job.waits, cause.as_record()
    job = replace(job, waits=0, update_time=now)
    if reason == INSUFFICIENT_RESOURCES:
        record["retry_after_s"] = min(MAX_WAIT_S, 2.0 ** min(waits, 10))
        return replace(job, state=JobState.RECOVERING, waits=waits + 1, error=record)
    if reason == RESIZED:
        return replace(job, state=JobState.RECOVERING, error=record)
    if reason == PREEMPTED and job.preemptions < job.max_preemptions:
        return replace(job, state=JobState.RECOVERING, preemptions=job.preemptions + 1, error=record)
    failures = job.failures + 1
    if failures > job.max_failures:
        # An error that an operator can fix keeps its kind.
        kind = ResourceExhausted if isinstance(cause, ResourceExhausted) else Internal
        error = kind(
            f"{failures} attempts were lost, {job.max_failures} may be; the last: {cause.message}",
            reason="TOO_MANY_FAILURES",
            metadata={**cause.metadata, "failures": str(failures)},
        )
        return replace(job, state=JobState.FAILED, failures=failures, error=error.as_record())
    return replace(job, state=JobState.RECOVERING, failures=failures, error=record)


def succeed(job: JobRecord, result: dict[str, Any], now: float) -> JobRecord:
    """Commit the result: any live state → SUCCEEDED. A later cancel or suspension does not undo it."""
    _expect(job, JobState.RUNNING, JobState.RECOVERING, JobState.CANCELLING, JobState.SUSPENDING)
    return replace(job, state=JobState.SUCCEEDED, result=result, error=None, update_time=now)


def fail(job: JobRecord, error: MillraceError, now: float) -> JobRecord:
    """Any live state → FAILED: another attempt would meet the same error."""
    _expect(job, *LIVE)
    return replace(job, state=JobState.FAILED, error=error.as_record(), update_time=now)


def request_cancel(job: JobRecord, now: float) -> JobRecord:
    """A client's request: any live state → CANCELLING, SUSPENDED → CANCELLED.

    Other states at rest and repeated requests change nothing. A job with a `runner` goes from any live state to
    CANCELLED: there may be no process to confirm it, and a running one reads that the job is final.
    """
    if job.state is JobState.SUSPENDED or (job.runner and not job.state.final):
        return replace(job, state=JobState.CANCELLED, generation=job.generation + 1, error=None, update_time=now)
    if job.state.final or job.state is JobState.CANCELLING:
        return job
    return replace(job, state=JobState.CANCELLING, generation=job.generation + 1, update_time=now)


def confirm_cancel(job: JobRecord, now: float) -> JobRecord:
    """CANCELLING → CANCELLED, once no process works on the job any more."""
    _expect(job, JobState.CANCELLING)
    return replace(job, state=JobState.CANCELLED, error=None, update_time=now)


def request_suspend(job: JobRecord, now: float) -> JobRecord:
    """A client's request: PENDING, RUNNING, RECOVERING → SUSPENDING. A repeated request changes nothing.

    A job with a `runner` that is not running becomes SUSPENDED at once, because no process would confirm it.
    """
    if job.state in (JobState.SUSPENDING, JobState.SUSPENDED):
        return job
    _expect(job, JobState.PENDING, JobState.RUNNING, JobState.RECOVERING)
    if job.runner and job.state is not JobState.RUNNING:
        return replace(job, state=JobState.SUSPENDED, generation=job.generation + 1, error=None, update_time=now)
    return replace(job, state=JobState.SUSPENDING, generation=job.generation + 1, update_time=now)


def confirm_suspend(job: JobRecord, now: float) -> JobRecord:
    """SUSPENDING → SUSPENDED, once no process works on the job any more."""
    _expect(job, JobState.SUSPENDING)
    return replace(job, state=JobState.SUSPENDED, error=None, update_time=now)


def request_resume(job: JobRecord, now: float) -> JobRecord:
    """A client's request: SUSPENDED, FAILED, CANCELLED → RECOVERING, with all counters reset.

    From then on a reconciler begins its attempts. A job that continues anyway stays as it is; an interrupted job with a
    `runner` does not continue by itself.
    """
    interrupted = job.runner and job.state is JobState.RECOVERING
    if job.state in (JobState.PENDING, JobState.RUNNING, JobState.RECOVERING) and not interrupted:
        return job
    _expect(job, JobState.SUSPENDED, JobState.FAILED, JobState.CANCELLED, JobState.RECOVERING)
    return replace(
        job,
        state=JobState.RECOVERING,
        failures=0,
        preemptions=0,
        waits=0,
        error=None,
        runner="",
        generation=job.generation + 1,
        update_time=now,
    )


def request_delete(job: JobRecord, now: float) -> JobRecord:
    """SUCCEEDED, FAILED, CANCELLED, SUSPENDED → DELETING. A repeated request changes nothing."""
    if job.state is JobState.DELETING:
        return job
    _expect(job, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.SUSPENDED)
    return replace(job, state=JobState.DELETING, deleted_from=job.state, generation=job.generation + 1, update_time=now)


def undo_delete(job: JobRecord, now: float) -> JobRecord:
    """DELETING → the state before: the job is in use."""
    _expect(job, JobState.DELETING)
    assert job.deleted_from is not None
    return replace(job, state=job.deleted_from, deleted_from=None, update_time=now)


def confirm_delete(job: JobRecord, now: float) -> JobRecord:
    """DELETING → DELETED, once all its objects are removed."""
    _expect(job, JobState.DELETING)
    return replace(job, state=JobState.DELETED, result={}, update_time=now)


def follow_deleted(job: JobRecord, tombstone: JobRecord) -> JobRecord:
    """Return `job`, new, as the next record after the tombstone of another job of its name."""
    _expect(tombstone, JobState.DELETED)
    return replace(job, attempt=tombstone.attempt, first_attempt=tombstone.attempt + 1)


def _expect(job: JobRecord, *states: JobState) -> None:
    if job.state not in states:
        raise ValueError(f"{job.name} is {job.state}, not one of {', '.join(states)}")
