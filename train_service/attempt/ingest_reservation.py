"""The CPUs that Ray Data needs to prepare the rows of jobs at work: Ray holds none for it, so others leave them alone.

Ray Data takes any CPU that is free at the moment; held in a placement group, its tasks could use no other.
"""

from __future__ import annotations

from shared.jobs import JobRecord, Jobs, JobState
from shared.storage import ObjectStore
from train_service.domain.spec import RAY_DATA, TrainingSpec
from train_service.records.reporting import TRAIN_KIND

AT_WORK = (JobState.RUNNING, JobState.CANCELLING, JobState.SUSPENDING)


def count_concurrent_ingests(store: ObjectStore, job_name: str) -> int:
    """How many other jobs have an attempt at work whose rows Ray Data prepares. Reads the state of every live job."""
    return len(_at_work(store) - {job_name})


class IngestReservation:
    """The same for whoever asks for many jobs: it reads the live ones once between two looks, and only if asked."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._names: set[str] | None = None

    def poll(self) -> None:
        """What was read is old from here on."""
        self._names = None

    def concurrent_ingests(self, job_name: str) -> int:
        if self._names is None:
            self._names = _at_work(self._store)
        return len(self._names - {job_name})

    def begins(self, job_name: str) -> None:
        """An attempt at this job will be at work, whose rows Ray Data prepares."""
        if self._names is None:
            self._names = _at_work(self._store)
        self._names.add(job_name)


def _at_work(store: ObjectStore) -> set[str]:
    jobs = Jobs(store, TRAIN_KIND)
    live = (jobs.find(one.folder) for one in jobs.live())
    return {job.name for job in live if job is not None and _prepares(job)}


def _prepares(job: JobRecord) -> bool:
    return job.state in AT_WORK and TrainingSpec.from_config(job.spec["training"]).ingest == RAY_DATA
