"""Imports, transforms and predictions as `google.longrunning.Operation`s."""

from __future__ import annotations

from google.longrunning import operations_pb2

from data_service.converters.versions import operation_message
from data_service.operation_pointers import job_of_operation, operation_id, operation_ids
from data_service.versions import Versions
from shared.errors import not_found
from shared.jobs import JobRecord, Jobs, JobState
from shared.storage import ObjectStore

# The states in which an attempt may be held back for want of room.
WAITING = (JobState.PENDING, JobState.RECOVERING)


class VersionOperations:
    """The `OperationSource` of this service."""

    def __init__(self, store: ObjectStore, jobs: Jobs, versions: Versions) -> None:
        self._store = store
        self._jobs = jobs
        self._versions = versions

    def get(self, name: str, *, brief: bool = False) -> operations_pb2.Operation:
        """`brief`: with its version as lists have it. Raises `NotFound`."""
        return self.of(job_of_operation(self._store, self._jobs, name), brief=brief)

    def of(self, job: JobRecord, *, brief: bool = False) -> operations_pb2.Operation:
        version = self._versions.listed(job) if brief else self._versions.of(job)
        if version is None:
            raise not_found(f"operations/{operation_id(job)}")
        waiting_for = self._jobs.waiting_for(job.name) if job.state in WAITING else ""
        return operation_message(version, self._jobs.progress(job.name), waiting_for, brief=brief)

    def list_ids(self) -> list[str]:
        return operation_ids(self._store)

    def cancel(self, name: str) -> None:
        """Raises `NotFound`. A job that is over stays as it is."""
        job = job_of_operation(self._store, self._jobs, name)
        self._jobs.cancel(job.name, job.name, uid=job.uid)
