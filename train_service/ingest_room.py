"""The CPUs that Ray Data needs to prepare the rows of jobs at work: Ray holds none for it, so others leave them alone.

Ray Data takes any CPU that is free at the moment; held in a placement group, its tasks could use no other.
"""

from __future__ import annotations

from shared.jobs import JobRecord, Jobs, JobState
from shared.storage import ObjectStore
from train_service.domain.spec import RAY_DATA, TrainingSpec
from train_service.reporting import TRAIN_KIND

AT_WORK = (JobState.RUNNING, JobState.CANCELLING, JobState.SUSPENDING)


def ingest_beside(store: ObjectStore, job_name: str) -> int:
    """How many other jobs have an attempt at work whose rows Ray Data prepares. Reads the state of every live job."""
    jobs = Jobs(store, TRAIN_KIND)
    live = (jobs.find(one.folder) for one in jobs.live())
    return sum(1 for job in live if job is not None and job.name != job_name and _prepares(job))


def _prepares(job: JobRecord) -> bool:
    return job.state in AT_WORK and TrainingSpec.from_config(job.spec["training"]).ingest == RAY_DATA
