"""`operations/{o}/pointer.json`: an operation points to the version whose making it shows."""

from __future__ import annotations

import json

from shared.errors import not_found
from shared.jobs import JobRecord, Jobs
from shared.storage import ObjectMissing, ObjectStore

# The keys of a job's spec that say how it makes a version, which its operation's id begins with: other services keep
# their operations in the same store.
MAKERS = ("import", "transform")


def operation_id(job: JobRecord) -> str:
    maker = next((one for one in MAKERS if one in job.spec), MAKERS[0])
    return f"{maker}-{job.uid}"


def record_operation(store: ObjectStore, job: JobRecord) -> None:
    """To be called before the job is made, so that no job is without its operation."""
    store.put(_key(operation_id(job)), json.dumps({"version": job.name, "uid": job.uid}).encode())


def withdraw_operation(store: ObjectStore, job: JobRecord) -> None:
    store.delete(_key(operation_id(job)))


def job_of_operation(store: ObjectStore, jobs: Jobs, name: str) -> JobRecord:
    """Raises `NotFound`; also where whoever was to make the job died before it did."""
    try:
        pointer = json.loads(store.get(_key(name.removeprefix("operations/"))))
    except ObjectMissing:
        raise not_found(name) from None
    job = jobs.find(pointer["version"])
    if job is None or job.uid != pointer["uid"]:
        raise not_found(name)
    return job


def operation_ids(store: ObjectStore) -> list[str]:
    return [one for one in store.folders("operations") if one.startswith(tuple(f"{maker}-" for maker in MAKERS))]


def _key(operation: str) -> str:
    return f"operations/{operation}/pointer.json"
