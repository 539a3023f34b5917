"""`millrace.data.v1.DataService`: convert, delegate, convert. Uploads are in their own part."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from google.longrunning import operations_pb2
from google.protobuf import json_format
from google.protobuf.empty_pb2 import Empty
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import aio

from data_service import reading
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
from data_service.datasets import (
    OPERATION_PREFIXES,
    ActiveVersion,
    Datasets,
    Versions,
    job_of_operation,
    operation_id,
    pointer_of_operation,
)
from data_service.deletion import Deletions
from data_service.reading import Preview, preview
from data_service.uploads.upload import Upload, UploadState
from data_service.uploads.uploads import Chunk, PresignedPut, UploadPart, Uploads
from data_service.version_jobs import VersionJobs
from millrace.data.v1 import data_service_pb2, data_service_pb2_grpc, quality_pb2, resources_pb2
from shared.errors import not_found
from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.registry import log_prefix
from shared.resource_log import ResourceLog, body_digest
from shared.storage import ObjectStore
from shared.streaming import UPLOADS, Slot, Slots, in_threads, operation_ids_after

# --- Uploads ---

Context = aio.ServicerContext[Any, Any]

# The limit of concurrent senders of chunks; each holds about 40 MiB.
MAX_SENDS = 32

STATES = {
    UploadState.OPEN: resources_pb2.Upload.State.STATE_OPEN,
    UploadState.COMMITTED: resources_pb2.Upload.State.STATE_COMMITTED,
}


class UploadServicerPart(data_service_pb2_grpc.DataServiceServicer):
    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        self._sends = Slots(MAX_SENDS, wording=UPLOADS)

    async def StartUpload(self, request: data_service_pb2.StartUploadRequest, context: Context) -> resources_pb2.Upload:
        upload, parts = await asyncio.to_thread(
            self._uploads.start,
            request.parent,
            request.upload_id,
            request_id=request.request_id,
            body_sha256=body_digest(request),
            presigned=_presigned_put(request),
        )
        message = upload_message(upload)
        message.presigned_parts.extend(_part_message(part) for part in parts)
        return message

    async def UploadChunks(
        self, request_iterator: AsyncIterator[data_service_pb2.UploadChunksRequest], context: Context
    ) -> AsyncIterator[data_service_pb2.UploadChunksResponse]:
        with self._sends.slot() as slot:
            async with aclosing(self._uploads.receive(_chunks(request_iterator, slot))) as sizes:
                async for size in sizes:
                    with slot.waiting():
                        yield data_service_pb2.UploadChunksResponse(acknowledged_size=size)

    async def GetUpload(self, request: data_service_pb2.GetUploadRequest, context: Context) -> resources_pb2.Upload:
        return upload_message(await asyncio.to_thread(self._uploads.get, request.name))

    async def CommitUpload(
        self, request: data_service_pb2.CommitUploadRequest, context: Context
    ) -> resources_pb2.Upload:
        # When the call ends, for whatever reason, this coroutine is cancelled; its thread, which may read for long, is
        # not, so it polls `over`.
        over = threading.Event()
        try:
            upload = await asyncio.to_thread(
                self._uploads.commit, request.name, request.size_bytes, request.sha256, over.is_set
            )
        finally:
            over.set()
        return upload_message(upload)

    async def AbortUpload(self, request: data_service_pb2.AbortUploadRequest, context: Context) -> Empty:
        await asyncio.to_thread(self._uploads.abort, request.name)
        return Empty()


def upload_message(upload: Upload) -> resources_pb2.Upload:
    record = upload.record
    return resources_pb2.Upload(
        name=record.name,
        state=STATES[record.state],
        create_time=_timestamp(record.create_time),
        expire_time=_timestamp(upload.expire_time),
        acknowledged_size=upload.acknowledged_size,
        size_bytes=record.size_bytes,
        sha256=record.sha256,
        hashed_size=upload.hashed_size,
    )


def _presigned_put(request: data_service_pb2.StartUploadRequest) -> PresignedPut | None:
    if not request.HasField("presigned"):
        return None
    return PresignedPut(request.presigned.size_bytes, request.presigned.part_size_bytes)


def _part_message(part: UploadPart) -> resources_pb2.PresignedPart:
    return resources_pb2.PresignedPart(url=part.url, offset=part.offset, size_bytes=part.size_bytes)


async def _chunks(requests: AsyncIterator[data_service_pb2.UploadChunksRequest], slot: Slot) -> AsyncIterator[Chunk]:
    given = aiter(requests)
    while True:
        with slot.waiting():
            request = await anext(given, None)
        if request is None:
            return
        yield Chunk(request.name, request.offset, request.data, request.crc32c)


def _timestamp(seconds: float) -> Timestamp:
    return Timestamp(seconds=int(seconds), nanos=int(seconds % 1 * 1_000_000) * 1000)


# --- Servicer ---


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
        version = await asyncio.to_thread(self._versions.get, request.name)
        return await asyncio.to_thread(version_message, version)

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
        return await asyncio.to_thread(self._preview_answer, version, shown)

    def _preview_answer(self, version: ActiveVersion, shown: Preview) -> data_service_pb2.PreviewVersionResponse:
        """Return the answer. Not for the event loop: the report of 5,000 columns takes seconds to convert."""
        answer = data_service_pb2.PreviewVersionResponse(
            version=version_message(version),
            arrow_ipc=shown.arrow_ipc,
            contact_sheet_png=shown.contact_sheet_png,
            report=json_format.ParseDict(self._versions.report(version), quality_pb2.QualityReport()),
        )
        bound_answer(answer)
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
            async for state in in_threads(reading.verify(self._versions.store, version.reader.version)):
                with slot.waiting():
                    yield _verified_message(state)


def _verified_message(state: reading.Verified) -> data_service_pb2.VerifyVersionResponse:
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
# How often a followed operation's progress is read, a little below the longest interval between two readings.
REPORT_INTERVAL_S = 0.9


class VersionOperations:
    """The `OperationSource` of this service."""

    def __init__(self, store: ObjectStore, jobs: Jobs, versions: Versions) -> None:
        self._store = store
        self._jobs = jobs
        self._versions = versions

    def get(self, name: str, *, brief: bool = False) -> operations_pb2.Operation:
        """Return an operation; raise `NotFound`.

        `brief`: with its version in the short form of lists.
        """
        return self.operation_of(job_of_operation(self._store, self._jobs, name), brief=brief)

    def follow(self, name: str) -> FollowedOperation:
        """Open an operation for repeated reads; raise `NotFound`."""
        return FollowedOperation(self._store, self._jobs, self, name)

    def operation_of(
        self, job: JobRecord, *, brief: bool = False, progress: Mapping[str, Any] | None = None
    ) -> operations_pb2.Operation:
        """Return the operation of a job. `progress` is its attempt's report; None: it is read."""
        version = self._versions.listed(job) if brief else self._versions.version_of(job)
        if version is None:
            raise not_found(f"operations/{operation_id(job)}")
        waiting_for = self._jobs.waiting_for(job.name) if job.state in WAITING else ""
        reported = self._jobs.progress(job.name) if progress is None else progress
        return operation_message(version, reported, waiting_for, brief=brief)

    def ids_after(self, after: str, most: int) -> Sequence[str]:
        return operation_ids_after(self._store, OPERATION_PREFIXES, after, most)

    def cancel(self, name: str) -> None:
        """Cancel an operation; a finished job stays as it is.

        Raises `NotFound`.
        """
        job = job_of_operation(self._store, self._jobs, name)
        self._jobs.cancel(job.name, job.name, uid=job.uid)


class FollowedOperation:
    """Reads one operation again and again, see `shared.streaming.Follower`.

    The log is read each time, the attempt's report and what the job waits for once in `REPORT_INTERVAL_S`.
    """

    def __init__(
        self,
        store: ObjectStore,
        jobs: Jobs,
        operations: VersionOperations,
        name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        pointer = pointer_of_operation(store, name)
        self._name, self._version, self._uid = name, pointer["version"], pointer["uid"]
        self._log = ResourceLog(store, log_prefix(self._version))
        self._jobs = jobs
        self._operations = operations
        self._clock = clock
        self._progress: dict[str, Any] = {}
        self._operation = operations_pb2.Operation()
        self._described_at = 0.0

    @property
    def number(self) -> int:
        return self._log.newest_known.number if self._log.newest_known else 0

    def read(self) -> operations_pb2.Operation:
        """Return the operation; raise `NotFound` once its version is deleted."""
        before = self._log.newest_known
        record = self._log.head()
        job = JobRecord.from_state(record.state) if record else None
        if job is None or job.uid != self._uid or job.state is JobState.DELETED:
            raise not_found(self._name)
        if record is not before or self._clock() - self._described_at >= REPORT_INTERVAL_S:
            # A job that waits has no attempt that reports.
            if record is not before or job.state not in WAITING:
                self._progress = self._jobs.progress(job.name)
            self._operation = self._operations.operation_of(job, progress=self._progress)
            self._described_at = self._clock()
        return self._operation
