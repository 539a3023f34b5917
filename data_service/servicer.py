"""`millrace.data.v1.DataService`: convert, delegate, convert. Uploads are in their own part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from google.longrunning import operations_pb2
from google.protobuf import json_format
from google.protobuf.empty_pb2 import Empty
from grpc import aio

from data_service import reading, verification
from data_service.convert import (
    bound_answer,
    checked_operation,
    dataset_message,
    import_spec_from,
    listed_message,
    operation_message,
    predict_spec_from,
    retention_from,
    selection_from,
    transform_spec_from,
    version_message,
)
from data_service.datasets import Datasets
from data_service.deletion import Deletions
from data_service.operation_pointers import job_of_operation, operation_id, operation_ids
from data_service.preview import preview
from data_service.uploads.servicer import UploadServicerPart
from data_service.uploads.uploads import Uploads
from data_service.version_jobs import VersionJobs
from data_service.versions import Versions
from millrace.data.v1 import data_service_pb2, quality_pb2, resources_pb2
from shared.errors import not_found
from shared.idempotency import body_digest
from shared.jobs import JobRecord, Jobs, JobState
from shared.storage import ObjectStore
from shared.streaming import Slots, in_threads

# --- Servicer ---

Context = aio.ServicerContext[Any, Any]

# The limit of concurrent streams of versions' content; each holds about 40 MiB.
MAX_READS = 32

# The requests that create a version.
VersionRequest = (
    data_service_pb2.ImportVersionRequest
    | data_service_pb2.TransformVersionRequest
    | data_service_pb2.PredictVersionRequest
)


class DataServicer(UploadServicerPart):
    def __init__(
        self,
        datasets: Datasets,
        uploads: Uploads,
        versions: Versions,
        version_jobs: VersionJobs,
        operations: VersionOperations,
        deletions: Deletions,
    ) -> None:
        super().__init__(uploads)
        self._reads = Slots(MAX_READS)
        self._datasets = datasets
        self._versions = versions
        self._version_jobs = version_jobs
        self._operations = operations
        self._deletions = deletions

    async def CreateDataset(
        self, request: data_service_pb2.CreateDatasetRequest, context: Context
    ) -> resources_pb2.Dataset:
        dataset = await asyncio.to_thread(
            self._datasets.create,
            request.dataset_id,
            display_name=request.display_name,
            description=request.description,
            request_id=request.request_id,
            body_sha256=body_digest(request),
            validate_only=request.validate_only,
            retention=retention_from(request.retention),
        )
        return dataset_message(dataset)

    async def GetDataset(self, request: data_service_pb2.GetDatasetRequest, context: Context) -> resources_pb2.Dataset:
        return dataset_message(await asyncio.to_thread(self._datasets.get, request.name))

    async def ListDatasets(
        self, request: data_service_pb2.ListDatasetsRequest, context: Context
    ) -> data_service_pb2.ListDatasetsResponse:
        found, token = await asyncio.to_thread(self._datasets.list, request.page_size, request.page_token)
        return data_service_pb2.ListDatasetsResponse(
            datasets=[dataset_message(dataset) for dataset in found], next_page_token=token
        )

    async def UpdateDataset(
        self, request: data_service_pb2.UpdateDatasetRequest, context: Context
    ) -> resources_pb2.Dataset:
        wanted = request.dataset
        dataset = await asyncio.to_thread(
            self._datasets.update,
            wanted.name,
            wanted.etag,
            request.update_mask.paths,
            display_name=wanted.display_name,
            description=wanted.description,
            retention=retention_from(wanted.retention),
        )
        return dataset_message(dataset)

    async def DeleteDataset(self, request: data_service_pb2.DeleteDatasetRequest, context: Context) -> Empty:
        await asyncio.to_thread(
            self._datasets.delete,
            request.name,
            request.etag,
            check_uploads=self._uploads.check_unused,
            delete_uploads=self._uploads.abort_all,
        )
        return Empty()

    async def ImportVersion(
        self, request: data_service_pb2.ImportVersionRequest, context: Context
    ) -> operations_pb2.Operation:
        return await self._started(self._version_jobs.start_import, import_spec_from(request), request)

    async def TransformVersion(
        self, request: data_service_pb2.TransformVersionRequest, context: Context
    ) -> operations_pb2.Operation:
        return await self._started(self._version_jobs.start_transform, transform_spec_from(request), request)

    async def PredictVersion(
        self, request: data_service_pb2.PredictVersionRequest, context: Context
    ) -> operations_pb2.Operation:
        return await self._started(self._version_jobs.start_predict, predict_spec_from(request), request)

    async def _started(
        self, start: Callable[..., JobRecord], spec: object, request: VersionRequest
    ) -> operations_pb2.Operation:
        job = await asyncio.to_thread(
            start,
            request.parent,
            request.version_id,
            spec,
            request_id=request.request_id,
            body_sha256=body_digest(request),
            validate_only=request.validate_only,
        )
        return (
            checked_operation(job)
            if request.validate_only
            else await asyncio.to_thread(self._operations.operation_of, job)
        )

    async def GetVersion(
        self, request: data_service_pb2.GetVersionRequest, context: Context
    ) -> resources_pb2.DatasetVersion:
        return version_message(await asyncio.to_thread(self._versions.get, request.name))

    async def ListVersions(
        self, request: data_service_pb2.ListVersionsRequest, context: Context
    ) -> data_service_pb2.ListVersionsResponse:
        found, token = await asyncio.to_thread(
            self._versions.list, request.parent, request.page_size, request.page_token
        )
        return listed_message(found, token)

    async def DeleteVersion(self, request: data_service_pb2.DeleteVersionRequest, context: Context) -> Empty:
        await asyncio.to_thread(self._deletions.delete, request.name, request.etag)
        return Empty()

    async def PreviewVersion(
        self, request: data_service_pb2.PreviewVersionRequest, context: Context
    ) -> data_service_pb2.PreviewVersionResponse:
        version = await asyncio.to_thread(self._versions.active, request.name)
        shown = await asyncio.to_thread(preview, version.reader, request.rows_per_split)
        report = await asyncio.to_thread(self._versions.report, version)
        answer = data_service_pb2.PreviewVersionResponse(
            version=version_message(version),
            arrow_ipc=shown.arrow_ipc,
            contact_sheet_png=shown.contact_sheet_png,
            report=json_format.ParseDict(report, quality_pb2.QualityReport()),
        )
        await asyncio.to_thread(bound_answer, answer)
        return answer

    async def ReadVersion(
        self, request: data_service_pb2.ReadVersionRequest, context: Context
    ) -> AsyncIterator[data_service_pb2.ReadVersionResponse | bytes]:
        version = await asyncio.to_thread(self._versions.active, request.name)
        with self._reads.slot() as slot:
            # The messages are already serialized: they are large, and each copy of their bytes would be expensive.
            async for message in in_threads(reading.read_stream(version.reader, selection_from(request))):
                with slot.waiting():
                    yield message

    async def ReadQuarantine(
        self, request: data_service_pb2.ReadQuarantineRequest, context: Context
    ) -> AsyncIterator[data_service_pb2.ReadQuarantineResponse]:
        version = await asyncio.to_thread(self._versions.active, request.name)
        with self._reads.slot() as slot:
            async for lines in in_threads(self._versions.quarantine(version)):
                with slot.waiting():
                    yield data_service_pb2.ReadQuarantineResponse(json_lines=lines)

    async def VerifyVersion(
        self, request: data_service_pb2.VerifyVersionRequest, context: Context
    ) -> AsyncIterator[data_service_pb2.VerifyVersionResponse]:
        version = await asyncio.to_thread(self._versions.active, request.name)
        with self._reads.slot() as slot:
            async for state in in_threads(verification.verify(self._versions.store, version.reader.version)):
                with slot.waiting():
                    yield _verified_message(state)


def _verified_message(state: verification.Verified) -> data_service_pb2.VerifyVersionResponse:
    return data_service_pb2.VerifyVersionResponse(
        files_checked=state.files_checked,
        files_total=state.files_total,
        bytes_checked=state.bytes_checked,
        rows_checked=state.rows_checked,
        damages=[data_service_pb2.Damage(path=damage.path, description=damage.description) for damage in state.damages],
    )


# --- Operations ---
# Imports, transforms and predictions as `google.longrunning.Operation`s.

# The states in which an attempt may wait for capacity.
WAITING = (JobState.PENDING, JobState.RECOVERING)


class VersionOperations:
    """The `OperationSource` of this service."""

    def __init__(self, store: ObjectStore, jobs: Jobs, versions: Versions) -> None:
        self._store = store
        self._jobs = jobs
        self._versions = versions

    def get(self, name: str, *, brief: bool = False) -> operations_pb2.Operation:
        """Returns an operation; raises `NotFound`.

        `brief`: with its version in the short form of lists.
        """
        return self.operation_of(job_of_operation(self._store, self._jobs, name), brief=brief)

    def operation_of(self, job: JobRecord, *, brief: bool = False) -> operations_pb2.Operation:
        version = self._versions.listed(job) if brief else self._versions.version_of(job)
        if version is None:
            raise not_found(f"operations/{operation_id(job)}")
        waiting_for = self._jobs.waiting_for(job.name) if job.state in WAITING else ""
        return operation_message(version, self._jobs.progress(job.name), waiting_for, brief=brief)

    def list_ids(self) -> list[str]:
        return operation_ids(self._store)

    def cancel(self, name: str) -> None:
        """Cancels an operation; a finished job stays as it is.

        Raises `NotFound`.
        """
        job = job_of_operation(self._store, self._jobs, name)
        self._jobs.cancel(job.name, job.name, uid=job.uid)
