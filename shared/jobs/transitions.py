"""A job's state, the record of it that its log holds, and its legal transitions.

Transitions are pure functions on plain values. A transition that is not legal raises `ValueError`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shared.durable import Durable, as_state, fields_of
from shared.errors import Conflict, Internal, MillraceError, ResourceExhausted

# --- State and record ---


class JobState(enum.StrEnum):
    #  PENDING ──▶ RUNNING ◀──▶ RECOVERING
    #     │          │  └──▶ SUCCEEDED │
    #     │          └─────────────────┴──▶ FAILED
    #     ├──────────┴── CANCELLING ──▶ CANCELLED
    #     └──────────┴── SUSPENDING ──▶ SUSPENDED
    #  SUSPENDED, FAILED, CANCELLED ──▶ RECOVERING, where the kind of job can be resumed
    #  SUCCEEDED, FAILED, CANCELLED, SUSPENDED ◀──▶ DELETING ──▶ DELETED
    #  of a job with a `runner` any of the first six ──▶ RUNNING, and a wish to cancel ──▶ CANCELLED at once
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    CANCELLING = "CANCELLING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    SUSPENDING = "SUSPENDING"
    SUSPENDED = "SUSPENDED"
    # What it made is being taken away.
    DELETING = "DELETING"
    # A tombstone: the resource does not exist, and a new one may begin in the same log.
    DELETED = "DELETED"

    @property
    def final(self) -> bool:
        """Whether no attempt works on it, nor will unless a client resumes it."""
        return self not in LIVE


LIVE = (JobState.PENDING, JobState.RUNNING, JobState.RECOVERING, JobState.CANCELLING, JobState.SUSPENDING)


@dataclass(frozen=True, kw_only=True)
class JobRecord(Durable):
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
    # Who begins its attempts, where that is not a reconciler: somebody who is not looked after, and may be gone.
    runner: str = ""
    failures: int = 0
    max_failures: int = 3
    # Attempts whose node was taken away. They have a budget of their own.
    preemptions: int = 0
    max_preemptions: int = 100
    # Attempts in a row that found no room. They count for nothing.
    waits: int = 0
    # Counts wishes, not progress: 1 for the creation, 2 once a cancel was asked for.
    generation: int = 1
    # `MillraceError.as_record` of what ended or last disturbed it.
    error: dict[str, Any] | None = None
    # What its attempts chose for those after them, by names that the kind of job gives; it stays for the job's life.
    choices: dict[str, Any] = field(default_factory=dict)
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
    def unattended(self) -> bool:
        """Whether no reconciler looks after it as it is."""
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
    """Raises `Conflict` when `etag` is given and not that of the present wish."""
    if etag and etag != str(job.generation):
        raise Conflict(
            f"{job.name} has etag {job.generation}, not {etag}; read it again",
            reason="STALE_ETAG",
            metadata={"resource": job.name},
        )


# --- Transitions ---

# Reasons for which an attempt ends though it was well: they are no failures. Its node is taken away, which has a budget
# of its own; it makes way for one of another size, having got on; it found no room, and waits for some ever longer.
PREEMPTED, RESIZED, INSUFFICIENT_RESOURCES = "PREEMPTED", "RESIZED", "INSUFFICIENT_RESOURCES"
MAX_WAIT_S = 60.0


def begin_attempt(job: JobRecord, now: float, actor: str = "", choices: Mapping[str, Any] | None = None) -> JobRecord:
    """PENDING, RECOVERING → RUNNING under the next attempt number, in the Ray actor of that name. `choices`, where they
    are given, replace those of the job."""
    _expect(job, JobState.PENDING, JobState.RECOVERING)
    chosen = job.choices if choices is None else dict(choices)
    return replace(job, state=JobState.RUNNING, attempt=job.attempt + 1, actor=actor, choices=chosen, update_time=now)


def take_up(job: JobRecord, now: float, choices: Mapping[str, Any] | None = None) -> JobRecord:
    """A job with a `runner`, in any state but the last ones → RUNNING under the next attempt number, with nothing
    counted against it; `choices` as for `begin_attempt`. An attempt that may still be at work is overtaken by it. One
    that SUCCEEDED stays as it is."""
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
    """The attempt ended without a result: → RECOVERING, or FAILED once more were lost than allowed. What is no failure
    (see `PREEMPTED`) does not count as one; preemptions beyond their budget do.

    A job that is being cancelled or suspended has nothing to recover now: → CANCELLED, SUSPENDED.
    """
    if job.state is JobState.CANCELLING:
        return confirm_cancel(job, now)
    if job.state is JobState.SUSPENDING:
        return confirm_suspend(job, now)
    _expect(job, JobState.RUNNING)
    reason, waits, told = cause.specific_reason, job.waits, cause.as_record()
    job = replace(job, waits=0, update_time=now)
    if reason == INSUFFICIENT_RESOURCES:
        told["retry_after_s"] = min(MAX_WAIT_S, 2.0 ** min(waits, 10))
        return replace(job, state=JobState.RECOVERING, waits=waits + 1, error=told)
    if reason == RESIZED:
        return replace(job, state=JobState.RECOVERING, error=told)
    if reason == PREEMPTED and job.preemptions < job.max_preemptions:
        return replace(job, state=JobState.RECOVERING, preemptions=job.preemptions + 1, error=told)
    failures = job.failures + 1
    if failures > job.max_failures:
        # What an operator can put right is told as what it is.
        kind = ResourceExhausted if isinstance(cause, ResourceExhausted) else Internal
        error = kind(
            f"{failures} attempts were lost, {job.max_failures} may be; the last: {cause.message}",
            reason="TOO_MANY_FAILURES",
            metadata={**cause.metadata, "failures": str(failures)},
        )
        return replace(job, state=JobState.FAILED, failures=failures, error=error.as_record())
    return replace(job, state=JobState.RECOVERING, failures=failures, error=told)


def succeed(job: JobRecord, result: dict[str, Any], now: float) -> JobRecord:
    """The commit: any live state → SUCCEEDED. A cancel or suspension that came too late does not undo it."""
    _expect(job, JobState.RUNNING, JobState.RECOVERING, JobState.CANCELLING, JobState.SUSPENDING)
    return replace(job, state=JobState.SUCCEEDED, result=result, error=None, update_time=now)


def fail(job: JobRecord, error: MillraceError, now: float) -> JobRecord:
    """Any live state → FAILED: another attempt would meet the same error."""
    _expect(job, *LIVE)
    return replace(job, state=JobState.FAILED, error=error.as_record(), update_time=now)


def request_cancel(job: JobRecord, now: float) -> JobRecord:
    """A client's wish: any live state → CANCELLING, SUSPENDED → CANCELLED.

    Other states at rest and repeated wishes stay as they are. Of a job with a `runner` any live state → CANCELLED:
    there may be nobody who would confirm it, and whoever is at work on it reads that it is over.
    """
    if job.state is JobState.SUSPENDED or (job.runner and not job.state.final):
        return replace(job, state=JobState.CANCELLED, generation=job.generation + 1, error=None, update_time=now)
    if job.state.final or job.state is JobState.CANCELLING:
        return job
    return replace(job, state=JobState.CANCELLING, generation=job.generation + 1, update_time=now)


def confirm_cancel(job: JobRecord, now: float) -> JobRecord:
    """CANCELLING → CANCELLED, once nothing works on it any more."""
    _expect(job, JobState.CANCELLING)
    return replace(job, state=JobState.CANCELLED, error=None, update_time=now)


def request_suspend(job: JobRecord, now: float) -> JobRecord:
    """A client's wish: PENDING, RUNNING, RECOVERING → SUSPENDING. A repeated wish changes nothing. A job with a
    `runner` that does not run is SUSPENDED at once: nobody would confirm it."""
    if job.state in (JobState.SUSPENDING, JobState.SUSPENDED):
        return job
    _expect(job, JobState.PENDING, JobState.RUNNING, JobState.RECOVERING)
    if job.runner and job.state is not JobState.RUNNING:
        return replace(job, state=JobState.SUSPENDED, generation=job.generation + 1, error=None, update_time=now)
    return replace(job, state=JobState.SUSPENDING, generation=job.generation + 1, update_time=now)


def confirm_suspend(job: JobRecord, now: float) -> JobRecord:
    """SUSPENDING → SUSPENDED, once nothing works on it any more."""
    _expect(job, JobState.SUSPENDING)
    return replace(job, state=JobState.SUSPENDED, error=None, update_time=now)


def request_resume(job: JobRecord, now: float) -> JobRecord:
    """A client's wish: SUSPENDED, FAILED, CANCELLED → RECOVERING, with nothing counted against it; from then on it is a
    reconciler's. A job that goes on anyway stays as it is; one with a `runner` that was interrupted does not go on."""
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
    """SUCCEEDED, FAILED, CANCELLED, SUSPENDED → DELETING. A repeated wish changes nothing."""
    if job.state is JobState.DELETING:
        return job
    _expect(job, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.SUSPENDED)
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
