"""A job's state, and the record of it that its log holds."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.durable import Durable, as_state, fields_of
from shared.errors import Conflict


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
