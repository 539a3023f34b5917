"""Imports as `google.longrunning.Operation`s."""

from __future__ import annotations

from google.longrunning import operations_pb2

from data_service import converters
from data_service.operation_pointers import job_of_operation, operation_ids
from data_service.versions import Versions
from shared.jobs import JobRecord, Jobs
from shared.storage import ObjectStore


class ImportOperations:
    """The `OperationSource` of this service."""

    def __init__(self, store: ObjectStore, jobs: Jobs, versions: Versions) -> None:
        self._store = store
        self._jobs = jobs
        self._versions = versions

    def get(self, name: str) -> operations_pb2.Operation:
        """Raises `NotFound`."""
        return self.of(job_of_operation(self._store, self._jobs, name))

    def of(self, job: JobRecord) -> operations_pb2.Operation:
        rows_read = int(self._jobs.progress(job.name).get("rows_read", 0))
        return converters.operation_message(self._versions.of(job), rows_read)

    def list_ids(self) -> list[str]:
        return operation_ids(self._store)

    def cancel(self, name: str) -> None:
        """Raises `NotFound`. An import that is over stays as it is."""
        job = job_of_operation(self._store, self._jobs, name)
        self._jobs.cancel(job.name, job.name)
