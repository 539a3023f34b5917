"""The end of a training job: its log says DELETING, users of its checkpoints are looked for, all that it made goes, its
log says DELETED.

Whoever uses a checkpoint leaves a marker and then looks whether the job is there; here it is the other way round, so
one of both sees the other. Once no user was found the log says so (`deleted_from` is gone), and there is no way back.
Each step can be done again, so what a process leaves half-way the next one finishes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from shared.checkpoint import CheckpointRegistry
from shared.checkpoint.references import references_of_job
from shared.errors import STORE_OUTAGES, FailedPrecondition, not_found
from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.registry import condemned, remove_objects, undone, while_deleting
from shared.jobs.transitions import check_etag, confirm_delete, request_delete
from shared.storage import ObjectStore
from train_service.jobs.inputs import release_inputs
from train_service.records.reporting import TRAIN_KIND

logger = logging.getLogger(__name__)


class Deletions:
    """`clock` gives seconds since the epoch."""

    def __init__(self, store: ObjectStore, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._jobs = Jobs(store, TRAIN_KIND)
        self._clock = clock

    def begin(self, name: str, etag: str = "", uid: str = "") -> JobRecord:
        """The job, DELETING for good; `finish` takes away what it made. With `uid` given only that job, and no later
        one of its name.

        Raises `NotFound`, `Conflict` when `etag` is given and not the present one, and `FailedPrecondition` while an
        attempt may work on it or somebody uses one of its checkpoints: then it is what it was before.
        """
        self._jobs.get(name, name)

        def decide(newest: JobRecord) -> JobRecord:
            if uid and newest.uid != uid:
                raise not_found(name, "it was deleted, and made anew")
            check_deletable(newest, etag)
            return request_delete(newest, newest.update_time)

        return self._condemn(self._jobs.transition(name, decide))

    def finish(self, name: str) -> None:
        """Takes on a deletion that was begun. Nothing to do for a job that is not DELETING.

        Raises `FailedPrecondition` where somebody uses a checkpoint: then the job is what it was before.
        """
        job = self._jobs.find(name)
        if job is None or job.state is not JobState.DELETING:
            return
        job = self._condemn(job)
        # A zombie of the last attempt cannot commit any more, nor into what a new job of this name makes.
        CheckpointRegistry(self._store, name).clear(job.attempt + 1)
        release_inputs(self._store, TRAIN_KIND, job.uid, job.spec.get("training", {}))
        if self.remove_files(job):
            while_deleting(self._jobs, job, lambda newest: confirm_delete(newest, self._clock()))
            logger.info("%s is deleted", name)

    def finish_soon(self, name: str) -> None:
        """As `finish`, in a thread; what stops it is left to the sweep."""
        in_background(self.finish, name)

    def remove_files(self, job: JobRecord) -> bool:
        """Removes all objects of the job but the logs that say that it is gone; not those of a new one of its name.

        Returns whether the log still says of this job what it said before.
        """
        # Listed before the log is read: what a new job makes is not among it.
        logs = (f"{job.name}/log/", f"{job.name}/checkpoints/log/")
        keys = [info.key for info in self._store.list(job.name) if not info.key.startswith(logs)]
        return remove_objects(self._store, self._jobs, job, keys)

    def _condemn(self, job: JobRecord) -> JobRecord:
        if job.deleted_from is None:
            return job
        references = references_of_job(self._store, job.name, self._clock())
        job = while_deleting(self._jobs, job, undone if references else condemned)
        if job.state not in (JobState.DELETING, JobState.DELETED):
            raise in_use(job, references)
        return job


def in_background(finish: Callable[[str], None], name: str) -> None:
    """Calls `finish` with `name` in a thread; whoever looks next goes on where it was stopped."""

    def run() -> None:
        try:
            finish(name)
        except (FailedPrecondition, *STORE_OUTAGES) as error:
            logger.warning("%s is not deleted yet: %s", name, error.message)
        except Exception:
            logger.exception("%s is not deleted yet", name)

    threading.Thread(target=run, name="deleting", daemon=True).start()


def check_deletable(job: JobRecord, etag: str) -> None:
    if job.state is JobState.DELETED:
        raise not_found(job.name)
    check_etag(job, etag)
    if not job.state.final:
        raise FailedPrecondition(
            f"{job.name} is {job.state}; cancel or suspend it first, or wait for its end",
            reason="JOB_AT_WORK",
            metadata={"resource": job.name},
        )


def in_use(job: JobRecord, references: dict[str, list[str]]) -> FailedPrecondition:
    everybody = sorted({holder for some in references.values() for holder in some})
    shown = "; ".join(f"{checkpoint} by {', '.join(some)}" for checkpoint, some in sorted(references.items()))
    return FailedPrecondition(
        f"{job.name} is in use: {shown or 'by somebody'}; delete it once that has ended",
        reason="JOB_IN_USE",
        metadata={"resource": job.name, "users": ",".join(everybody)},
    )
