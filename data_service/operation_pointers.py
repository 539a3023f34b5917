"""`operations/{o}/pointer.json`: an operation points to the version whose making it shows."""

from __future__ import annotations

import json

from shared.errors import not_found
from shared.jobs import JobRecord, Jobs, JobState
from shared.storage import ObjectMissing, ObjectStore

# The keys of a job's spec that say how it makes a version, which its operation's id begins with: other services keep
# their operations in the same store. Operations of other makers, such as predictions, begin with the first.
MAKERS = ("import", "transform")
_PREFIXES = tuple(f"{maker}-" for maker in MAKERS)


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
    return [one for one in store.folders("operations") if one.startswith(_PREFIXES)]


def operations_before(store: ObjectStore, time_s: float) -> list[str]:
    """The ids of those last recorded before that time, in seconds since the epoch, sorted."""
    recorded = [(info.key.split("/")[1], info.modified) for info in store.list("operations")]
    return sorted(one for one, modified in recorded if one.startswith(_PREFIXES) and modified < time_s)


def withdraw_if_without_job(store: ObjectStore, jobs: Jobs, operation: str) -> bool:
    """Takes the operation away where its job was never made, or was deleted; False where it has one. Only for one that
    is old: a repeated call may make its job yet."""
    try:
        pointer = json.loads(store.get(_key(operation)))
    except ObjectMissing:
        return True
    job = jobs.newest_of(pointer["version"], pointer["uid"])
    if job is not None and job.state is not JobState.DELETED:
        return False
    store.delete(_key(operation))
    return True


def _key(operation: str) -> str:
    return f"operations/{operation}/pointer.json"
