"""Between the wire's messages and the domain's values."""

from __future__ import annotations

from google.longrunning import operations_pb2
from google.protobuf.timestamp_pb2 import Timestamp

from data_service.domain import dataset, import_spec
from data_service.domain.import_spec import ImportSpec, Source
from data_service.operation_pointers import operation_id
from data_service.reading import Selection
from data_service.versions import ActiveVersion, Version
from millrace.data.v1 import data_service_pb2, resources_pb2
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
}


def dataset_message(found: dataset.Dataset) -> resources_pb2.Dataset:
    """A dataset that was only checked has neither uid nor etag."""
    return resources_pb2.Dataset(
        name=found.name,
        uid=found.uid,
        display_name=found.display_name,
        description=found.description,
        create_time=_timestamp(found.create_time) if found.uid else None,
        etag=str(found.generation) if found.uid else "",
    )


def import_spec_from(request: data_service_pb2.ImportVersionRequest) -> ImportSpec:
    return ImportSpec(
        sources=[_source(source) for source in request.sources],
        hold_outs=[
            import_spec.HoldOut(from_split=one.from_split, to_split=one.to_split, fraction=one.fraction, seed=one.seed)
            for one in request.hold_outs
        ],
    )


def selection_from(request: data_service_pb2.ReadVersionRequest) -> Selection:
    return Selection(split=request.split, columns=list(request.columns), offset=request.offset, limit=request.limit)


def version_message(version: Version) -> resources_pb2.DatasetVersion:
    job = version.job
    message = resources_pb2.DatasetVersion(
        name=job.name,
        uid=job.uid,
        state=VERSION_STATES[job.state],
        operation=f"operations/{operation_id(job)}",
        create_time=_timestamp(job.create_time),
        etag=str(job.generation),
    )
    if job.state is JobState.FAILED and job.error:
        message.error.CopyFrom(status_proto_from_record(job.error))
    if isinstance(version, ActiveVersion):
        message.commit_time.CopyFrom(_timestamp(job.update_time))
        message.manifest_sha256 = version.reader.version.manifest_sha256
        _add_manifest(message, version.reader.version.manifest)
    return message


def operation_message(version: Version, rows_read: int) -> operations_pb2.Operation:
    job = version.job
    operation = operations_pb2.Operation(name=f"operations/{operation_id(job)}", done=job.state.final)
    operation.metadata.Pack(
        data_service_pb2.ImportVersionMetadata(
            version=job.name, rows_read=rows_read, attempt=job.attempts_made, create_time=_timestamp(job.create_time)
        )
    )
    if job.state is JobState.SUCCEEDED:
        operation.response.Pack(version_message(version))
    elif job.state is JobState.FAILED and job.error:
        operation.error.CopyFrom(status_proto_from_record(job.error))
    elif job.state is JobState.CANCELLED:
        operation.error.CopyFrom(status_proto(Cancelled(f"{job.name} was cancelled", metadata={"resource": job.name})))
    return operation


def checked_operation(job: JobRecord) -> operations_pb2.Operation:
    """What `validate_only` answers: which version would be made."""
    operation = operations_pb2.Operation()
    operation.metadata.Pack(data_service_pb2.ImportVersionMetadata(version=job.name))
    return operation


def _source(source: data_service_pb2.ImportSource) -> Source:
    chosen = source.WhichOneof("format") or ""
    if chosen == "idx":
        uris = {"idx.images_uri": source.idx.images_uri, "idx.labels_uri": source.idx.labels_uri}
    elif chosen == "parquet":
        uris = {"parquet.uri": source.parquet.uri}
    else:
        uris = {}
    return Source(split=source.split, format=chosen, uris=uris)


def _add_manifest(message: resources_pb2.DatasetVersion, manifest: Manifest) -> None:
    message.row_count = manifest.row_count
    message.size_bytes = manifest.size_bytes
    for column in manifest.columns:
        message.columns.add(name=column.name, arrow_type=column.arrow_type, shape=column.shape)
    for split in manifest.splits:
        message.splits.add(name=split.name, first_row_id=split.first_row_id, row_count=split.row_count)
    for file in manifest.files:
        message.files.add(
            path=file.path,
            split=file.split,
            row_count=file.row_count,
            size_bytes=file.size_bytes,
            sha256=file.sha256,
        )


def _timestamp(seconds: float) -> Timestamp:
    return Timestamp(seconds=int(seconds), nanos=int(seconds % 1 * 1_000_000) * 1000)
