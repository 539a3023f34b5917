"""Versions, and the operations that make them, as messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from google.longrunning import operations_pb2
from google.protobuf import json_format

from data_service.bounded_answer import keep_first
from data_service.converters.times import timestamp
from data_service.operation_pointers import operation_id
from data_service.versions import ActiveVersion, DamagedVersion, Version
from millrace.data.v1 import data_service_pb2, resources_pb2
from shared import paging
from shared.dataset_version.manifest import Manifest
from shared.errors import Cancelled
from shared.grpc_errors import status_proto, status_proto_from_record
from shared.jobs import JobRecord, JobState

State = resources_pb2.DatasetVersion.State

VERSION_STATES = {
    JobState.PENDING: State.STATE_CREATING,
    JobState.RUNNING: State.STATE_CREATING,
    JobState.RECOVERING: State.STATE_CREATING,
    JobState.CANCELLING: State.STATE_CREATING,
    JobState.SUCCEEDED: State.STATE_ACTIVE,
    JobState.FAILED: State.STATE_FAILED,
    JobState.CANCELLED: State.STATE_CANCELLED,
    JobState.DELETING: State.STATE_DELETING,
}


def version_message(version: Version, *, brief: bool = False) -> resources_pb2.DatasetVersion:
    """`brief`: as lists have it, without its files, the names of values and its transform; and of columns that are more
    than one message may have the first ones."""
    job = version.job
    message = resources_pb2.DatasetVersion(
        name=job.name,
        uid=job.uid,
        state=VERSION_STATES[job.state],
        operation=f"operations/{operation_id(job)}",
        create_time=timestamp(job.create_time),
        etag=str(job.generation),
    )
    if job.state is JobState.FAILED and job.error:
        message.error.CopyFrom(status_proto_from_record(job.error))
    if isinstance(version, DamagedVersion):
        message.error.CopyFrom(status_proto(version.error))
    if isinstance(version, ActiveVersion):
        message.commit_time.CopyFrom(timestamp(job.update_time))
        message.manifest_sha256 = version.reader.version.manifest_sha256
        _add_manifest(message, version.reader.version.manifest, brief)
    if brief:
        keep_first(message.columns, message.ByteSize() - paging.PAGE_BYTES)
    return message


def listed_message(versions: Sequence[Version], next_page_token: str) -> data_service_pb2.ListVersionsResponse:
    """A page, cut short where the versions are more than one message may have."""
    answer = data_service_pb2.ListVersionsResponse(next_page_token=next_page_token)
    size_bytes = 0
    for version in versions:
        message = version_message(version, brief=True)
        size_bytes += message.ByteSize()
        if answer.versions and size_bytes > paging.PAGE_BYTES:
            answer.next_page_token = paging.token_of(answer.versions[-1].name.rsplit("/", 1)[-1])
            break
        answer.versions.append(message)
    return answer


def operation_message(
    version: Version, progress: Mapping[str, Any], waiting_for: str = "", *, brief: bool = False
) -> operations_pb2.Operation:
    """`waiting_for`: what the cluster lacks for it. `brief`: with its version as lists have it."""
    job = version.job
    operation = operations_pb2.Operation(name=f"operations/{operation_id(job)}", done=job.state.final)
    operation.metadata.Pack(_metadata(job, progress, waiting_for))
    if isinstance(version, ActiveVersion):
        operation.response.Pack(version_message(version, brief=brief))
    elif isinstance(version, DamagedVersion):
        operation.error.CopyFrom(status_proto(version.error))
    elif job.state is JobState.FAILED and job.error:
        operation.error.CopyFrom(status_proto_from_record(job.error))
    elif job.state is JobState.CANCELLED:
        operation.error.CopyFrom(status_proto(Cancelled(f"{job.name} was cancelled", metadata={"resource": job.name})))
    elif job.state.final:
        deleted = Cancelled(f"{job.name} is being deleted", reason="DELETED", metadata={"resource": job.name})
        operation.error.CopyFrom(status_proto(deleted))
    return operation


def checked_operation(job: JobRecord) -> operations_pb2.Operation:
    """What `validate_only` answers: which version would be made."""
    operation = operations_pb2.Operation()
    operation.metadata.Pack(_metadata_type(job)(version=job.name))
    return operation


_ImportMetadata = data_service_pb2.ImportVersionMetadata
_TransformMetadata = data_service_pb2.TransformVersionMetadata
_PredictMetadata = data_service_pb2.PredictVersionMetadata


def _metadata_type(job: JobRecord) -> type[_ImportMetadata | _TransformMetadata | _PredictMetadata]:
    if "predict" in job.spec:
        return _PredictMetadata
    return _TransformMetadata if "transform" in job.spec else _ImportMetadata


def _metadata(
    job: JobRecord, progress: Mapping[str, Any], waiting_for: str
) -> _ImportMetadata | _TransformMetadata | _PredictMetadata:
    create_time = timestamp(job.create_time)
    kind: Any = _metadata_type(job)
    if kind is _ImportMetadata:
        return _ImportMetadata(
            version=job.name,
            rows_read=int(progress.get("rows_read", 0)),
            rows_quarantined=int(progress.get("rows_quarantined", 0)),
            attempt=job.attempts_made,
            create_time=create_time,
        )
    made = kind(
        version=job.name,
        phase=f"PHASE_{progress.get('phase', 'UNSPECIFIED')}",
        rows_done=int(progress.get("rows_done", 0)),
        rows_total=int(progress.get("rows_total", 0)),
        rows_per_second=float(progress.get("rows_per_second", 0.0)),
        attempt=job.attempts_made,
        create_time=create_time,
    )
    if kind is _PredictMetadata:
        made.checkpoint = job.spec["predict"]["checkpoint"]["name"]
        made.waiting_for = waiting_for
    return cast(_TransformMetadata | _PredictMetadata, made)


def _add_manifest(message: resources_pb2.DatasetVersion, manifest: Manifest, brief: bool) -> None:
    message.row_count = manifest.row_count
    message.size_bytes = manifest.size_bytes
    message.quarantined_row_count = manifest.quarantined_row_count
    for parent in manifest.parents:
        message.parents.add(version=parent.version, manifest_sha256=parent.manifest_sha256)
    for column in manifest.columns:
        message.columns.add(
            name=column.name,
            arrow_type=column.arrow_type,
            shape=column.shape,
            value_names=() if brief else column.value_names,
        )
    for split in manifest.splits:
        message.splits.add(name=split.name, first_row_id=split.first_row_id, row_count=split.row_count)
    for file in () if brief else manifest.files:
        message.files.add(
            path=file.path,
            split=file.split,
            row_count=file.row_count,
            size_bytes=file.size_bytes,
            sha256=file.sha256,
        )
    if manifest.prediction:
        one = manifest.prediction
        message.prediction.checkpoint, message.prediction.checkpoint_sha256 = one.checkpoint, one.checkpoint_sha256
        message.prediction.trained_on = one.trained_on
        message.prediction.columns.extend(one.columns)
    elif manifest.transforms and not brief:
        json_format.ParseDict(manifest.transforms[-1], message.transform)
