"""The way of a job through DELETING, for whoever takes away what it made.

Users leave a marker and then look whether the job is there; a deletion says DELETING first and looks for users then, so
one of both sees the other. While `deleted_from` is set there is a way back (`undone`); once no user was found the log
says so (`condemned`), and there is none: of several that delete at the same time none can give back what another is
removing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shared.jobs.record import JobRecord, JobState
from shared.jobs.registry import Jobs
from shared.jobs.transitions import undo_delete
from shared.storage import ObjectStore

# So many objects are deleted between two looks at the log.
KEYS_BETWEEN_POLLS = 32


def while_deleting(jobs: Jobs, job: JobRecord, decide: Callable[[JobRecord], JobRecord]) -> JobRecord:
    """Appends what `decide` makes of the newest state, while it is this same job and DELETING."""

    def step(newest: JobRecord) -> JobRecord:
        deleting = newest.uid == job.uid and newest.state is JobState.DELETING
        return decide(newest) if deleting else newest

    return jobs.transition(job.name, step)


def remove_objects(store: ObjectStore, jobs: Jobs, job: JobRecord, keys: Sequence[str]) -> bool:
    """Deletes `keys`, which were listed before, while the log says of this same job what it said when `job` was read.

    The log is read again as it goes on: where another process has finished the deletion, a new job of the name may have
    made objects of the same keys. Returns whether all of them are gone.
    """
    for start in range(0, max(1, len(keys)), KEYS_BETWEEN_POLLS):
        now = jobs.newest(job.name)
        if now is None or now.uid != job.uid or now.state is not job.state:
            return False
        for key in keys[start : start + KEYS_BETWEEN_POLLS]:
            store.delete(key)
    return True


def undone(job: JobRecord) -> JobRecord:
    """What it was before, with the time that it had; as it is where there is no way back."""
    return undo_delete(job, job.update_time) if job.deleted_from is not None else job


def condemned(job: JobRecord) -> JobRecord:
    """DELETING for good."""
    return replace(job, deleted_from=None) if job.deleted_from is not None else job
