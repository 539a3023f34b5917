"""The pointers `operations/{o}/pointer.json` from operations to the versions that they create."""

from __future__ import annotations

import json

from shared.errors import not_found
from shared.jobs import JobRecord, Jobs, JobState
from shared.storage import ObjectMissing, ObjectStore

# The keys of a job's spec that begin its operation's id, since other services keep their operations in the same store.
# Operations of other kinds, such as predictions, begin with the first.
MAKERS = ("import", "transform")
_PREFIXES = tuple(f"{maker}-" for maker in MAKERS)


def operation_id(job: JobRecord) -> str:
    maker = next((one for one in MAKERS if one in job.spec), MAKERS[0])
    return f"{maker}-{job.uid}"


def record_operation(store: ObjectStore, job: JobRecord) -> None:
    """Records the operation; call it before the job is created, so that every job has its operation."""
    store.put(_pointer_key(operation_id(job)), json.dumps({"version": job.name, "uid": job.uid}).encode())


def withdraw_operation(store: ObjectStore, job: JobRecord) -> None:
    store.delete(_pointer_key(operation_id(job)))


def job_of_operation(store: ObjectStore, jobs: Jobs, name: str) -> JobRecord:
    """Returns the job of an operation.

    Raises `NotFound`, even if the job's creator died before it created the job.
    """
    try:
        pointer = json.loads(store.get(_pointer_key(name.removeprefix("operations/"))))
    except ObjectMissing:
        raise not_found(name) from None
    job = jobs.find(pointer["version"])
    if job is None or job.uid != pointer["uid"]:
        raise not_found(name)
    return job


def operation_ids(store: ObjectStore) -> list[str]:
    return [folder for folder in store.folders("operations") if folder.startswith(_PREFIXES)]


def operations_before(store: ObjectStore, time_s: float) -> list[str]:
    """Returns the sorted ids of operations last recorded before `time_s`, in seconds since the epoch."""
    recorded = [(info.key.split("/")[1], info.modified) for info in store.list("operations")]
    return sorted(one for one, modified in recorded if one.startswith(_PREFIXES) and modified < time_s)


def withdraw_if_without_job(store: ObjectStore, jobs: Jobs, operation: str) -> bool:
    """Removes the operation if its job was never created, or was deleted; returns False if it has one.

    Only for old operations, since a repeated call may still create the job.
    """
    try:
        pointer = json.loads(store.get(_pointer_key(operation)))
    except ObjectMissing:
        return True
    job = jobs.newest_of(pointer["version"], pointer["uid"])
    if job is not None and job.state is not JobState.DELETED:
        return False
    store.delete(_pointer_key(operation))
    return True


def _pointer_key(operation: str) -> str:
    return f"operations/{operation}/pointer.json"
