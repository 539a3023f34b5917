"""The end of a version: its log says DELETING, nobody may use it, its files go, its log says DELETED.

Whoever uses a version leaves a marker and then looks whether it is ACTIVE; here it is the other way round, so one of
both sees the other. Once no user was found the log says so (`deleted_from` is gone), and there is no way back: of
several that delete at the same time none can give a version back whose files another is removing. Each step can be
done again, so what a process leaves half-way the next one finishes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from data_service.operation_pointers import operation_id, withdraw_operation
from shared import names
from shared.dataset_version.version import NAME_PATTERN, live_users
from shared.errors import FailedPrecondition, not_found
from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.deletion import condemned, remove_objects, undone, while_deleting
from shared.jobs.record import check_etag
from shared.jobs.transitions import confirm_delete, request_delete
from shared.storage import ObjectStore


class Deletions:
    """`clock` gives seconds since the epoch."""

    def __init__(self, store: ObjectStore, jobs: Jobs, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._jobs = jobs
        self._clock = clock

    def delete(self, name: str, etag: str = "", uid: str = "") -> None:
        """Takes the version away, with its files; with `uid` given only that one, and no other of its name.

        Raises `InvalidArgument`, `NotFound`, `Conflict` when `etag` is given and not the present one, and
        `FailedPrecondition` while it is being made or somebody uses it.
        """
        names.parse("name", name, NAME_PATTERN)
        self._jobs.get(name, name)

        def decide(newest: JobRecord) -> JobRecord:
            if uid and newest.uid != uid:
                raise not_found(name)
            _check_deletable(newest, etag)
            # The time of a version's last transition is that of its commit, to which a refusal goes back.
            return request_delete(newest, newest.update_time)

        self._finish(self._jobs.transition(name, decide))

    def finish(self, name: str) -> None:
        """Takes on a deletion that was begun. Nothing to do for a version that is not DELETING.

        Raises `FailedPrecondition` where somebody uses it: then it is what it was before.
        """
        job = self._jobs.find(name)
        if job is not None and job.state is JobState.DELETING:
            self._finish(job)

    def _finish(self, job: JobRecord) -> None:
        if job.deleted_from is not None:
            users = live_users(self._store, job.name, self._clock())
            job = while_deleting(self._jobs, job, undone if users else condemned)
            if _is_undone(job):
                raise _in_use(job, users)
        self._remove_files(job)
        withdraw_operation(self._store, job)
        while_deleting(self._jobs, job, lambda newest: confirm_delete(newest, self._clock()))

    def _remove_files(self, job: JobRecord) -> None:
        """Only what was there before the log was read: later there may be a new version's files."""
        keys = [info.key for info in self._store.list(job.name) if not info.key.startswith(f"{job.name}/log/")]
        remove_objects(self._store, self._jobs, job, keys)


def _check_deletable(job: JobRecord, etag: str) -> None:
    if job.state is JobState.DELETED:
        raise not_found(job.name)
    check_etag(job, etag)
    if not job.state.final:
        operation = f"operations/{operation_id(job)}"
        raise FailedPrecondition(
            f"{job.name} is being made; cancel {operation} first, or wait for it",
            reason="VERSION_IN_CREATION",
            metadata={"resource": job.name, "operation": operation},
        )


def _is_undone(job: JobRecord) -> bool:
    """Whether this, or another that looked at the same time, found a user."""
    return job.state in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


def _in_use(job: JobRecord, users: list[str]) -> FailedPrecondition:
    shown = ", ".join(users) or "somebody"
    return FailedPrecondition(
        f"{job.name} is in use by {shown}; delete it once that has ended",
        reason="VERSION_IN_USE",
        metadata={"resource": job.name, "users": ",".join(users)},
    )
