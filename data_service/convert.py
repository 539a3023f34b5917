"""Converts between messages and domain values.

Datasets, the requests that create versions, versions, and operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from decimal import Decimal
from itertools import islice
from typing import Any, cast

from google.longrunning import operations_pb2
from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from data_service.datasets import ActiveVersion, DamagedVersion, IndexedVersion, Version, operation_id
from data_service.domain import import_spec, splits
from data_service.domain.dataset import Dataset, Retention
from data_service.domain.import_spec import ImportSpec, Source
from data_service.domain.splits import Share, SplitRule
from data_service.domain.transform_spec import (
    DEFAULT_BATCH_SIZE,
    DEFAULT_FIT_SPLIT,
    CheckpointRef,
    PredictSpec,
    TransformSpec,
    UnsetSplit,
    Workers,
)
from data_service.reading import Selection
from millrace.data.v1 import data_service_pb2, resources_pb2
from shared import names
from shared.dataset_version import VersionReader
from shared.dataset_version.manifest import DataFile, Manifest
from shared.errors import Cancelled
from shared.grpc_errors import status_proto, status_proto_from_record
from shared.jobs import JobRecord, JobState
from shared.names import PAGE_BYTES

# --- Times ---
# Converts seconds since the epoch to `google.protobuf.Timestamp`.


def timestamp(seconds: float) -> Timestamp:
    return Timestamp(seconds=int(seconds), nanos=int(seconds % 1 * 1_000_000) * 1000)


# --- Datasets ---
# Converts datasets to messages, and requests about them to domain values.

NANOS = 1_000_000_000


def dataset_message(found: Dataset) -> resources_pb2.Dataset:
    """Convert a dataset; one that was only checked has neither uid nor etag."""
    message = resources_pb2.Dataset(
        name=found.name,
        uid=found.uid,
        display_name=found.display_name,
        description=found.description,
        create_time=timestamp(found.create_time) if found.uid else None,
        etag=found.etag if found.uid else "",
    )
    if not found.retention.keeps_all:
        message.retention.keep_newest = found.retention.keep_newest
        if found.retention.max_age_s:
            message.retention.max_age.CopyFrom(_duration(found.retention.max_age_s))
    return message


def retention_from(message: resources_pb2.Retention) -> Retention:
    age = message.max_age
    return Retention(keep_newest=message.keep_newest, max_age_s=age.seconds + age.nanos / 1e9)


def _duration(seconds: float) -> Duration:
    # Uses the decimal digits: a float times 10^9 is rounded, and a fraction may be rounded to a whole second.
    whole, nanos = divmod(round(Decimal(repr(seconds)) * NANOS), NANOS)
    return Duration(seconds=whole, nanos=nanos)


# --- Imports ---
# Converts an ImportVersionRequest to a domain value.

_APPEND, _REPLACE = data_service_pb2.Base.MODE_APPEND, data_service_pb2.Base.MODE_REPLACE
MODES = {_APPEND: "append", _REPLACE: "replace"}
_Request = data_service_pb2.ImportVersionRequest
PARTITIONINGS = {
    _Request.PARTITIONING_UNSPECIFIED: "hive",
    _Request.PARTITIONING_HIVE: "hive",
    _Request.PARTITIONING_NONE: "none",
}


def import_spec_from(request: data_service_pb2.ImportVersionRequest) -> ImportSpec:
    return ImportSpec(
        sources=[_source(source) for source in request.sources],
        hold_outs=[
            import_spec.HoldOut(from_split=out.from_split, to_split=out.to_split, fraction=out.fraction, seed=out.seed)
            for out in request.hold_outs
        ],
        column_types=[
            import_spec.ColumnType(column=column_type.column, arrow_type=column_type.arrow_type)
            for column_type in request.column_types
        ],
        bad_rows=bad_rows_from(request.bad_rows),
        checks=[json_format.MessageToDict(check) for check in request.checks],
        base=_base(request.base) if request.HasField("base") else None,
        partitioning=PARTITIONINGS.get(request.partitioning, str(request.partitioning)),
        nan_as_null=request.nan_as_null,
    )


def _source(source: data_service_pb2.ImportSource) -> Source:
    chosen = source.WhichOneof("format")
    if chosen is None:
        return Source(split=source.split, format="", uris={})
    if chosen == "idx":
        uris = {"idx.images_uri": source.idx.images_uri, "idx.labels_uri": source.idx.labels_uri}
        return Source(split=source.split, format=chosen, uris=uris)
    uris = {f"{chosen}.uri": getattr(source, chosen).uri}
    options = _csv_options(source.csv) if chosen == "csv" else None
    return Source(split=source.split, format=chosen, uris=uris, csv=options)


def _csv_options(csv: data_service_pb2.CsvSource) -> import_spec.CsvOptions:
    return import_spec.CsvOptions(
        delimiter=csv.delimiter,
        column_names=list(csv.column_names),
        null_values=list(csv.null_values),
        encoding=csv.encoding,
    )


def bad_rows_from(bad_rows: data_service_pb2.BadRows) -> import_spec.BadRows:
    quarantine = bad_rows.action == data_service_pb2.BadRows.ACTION_QUARANTINE
    return import_spec.BadRows(action="quarantine" if quarantine else "fail", max_rows=bad_rows.max_rows)


def _base(base: data_service_pb2.Base) -> import_spec.Base:
    return import_spec.Base(version=base.version, mode=MODES.get(base.mode, ""))


# --- Predictions ---
# Converts a PredictVersionRequest to a domain value.


def predict_spec_from(request: data_service_pb2.PredictVersionRequest) -> PredictSpec:
    workers = request.workers
    return PredictSpec(
        source=request.source,
        checkpoint=CheckpointRef(name=request.checkpoint, sha256=request.checkpoint_sha256),
        split=request.split,
        columns=list(request.columns),
        outputs=list(request.outputs),
        column_prefix=request.column_prefix,
        bad_rows=bad_rows_from(request.bad_rows),
        workers=Workers(
            most=workers.max_workers,
            batch_size=workers.batch_size or DEFAULT_BATCH_SIZE,
            cpus=workers.cpus or 1,
            gpus=workers.gpus,
        ),
        predictor=request.predictor,
    )


# --- Transforms ---
# Converts a TransformVersionRequest, and a ReadVersionRequest, to domain values.


def transform_spec_from(request: data_service_pb2.TransformVersionRequest) -> TransformSpec:
    return TransformSpec(
        source=request.source,
        transform=json_format.MessageToDict(request.transform),
        splits=_rule(request.splits) if request.HasField("splits") else None,
        fit_split=request.fit_split or DEFAULT_FIT_SPLIT,
        checks=[json_format.MessageToDict(check) for check in request.checks],
    )


def selection_from(request: data_service_pb2.ReadVersionRequest) -> Selection:
    return Selection(split=request.split, columns=list(request.columns), offset=request.offset, limit=request.limit)


def _rule(rule: data_service_pb2.SplitRule) -> SplitRule | UnsetSplit:
    match rule.WhichOneof("rule"):
        case "hash":
            return splits.HashSplit(
                key_columns=list(rule.hash.key_columns), shares=_shares(rule.hash.shares), seed=rule.hash.seed
            )
        case "column":
            return splits.ColumnSplit(column=rule.column.column)
        case "time":
            return splits.TimeSplit(
                column=rule.time.column,
                periods=[
                    splits.Period(split=period.split, before_ns=_nanoseconds(period)) for period in rule.time.periods
                ],
            )
        case "ratio":
            return splits.RatioSplit(shares=_shares(rule.ratio.shares), seed=rule.ratio.seed)
    return UnsetSplit()


def _shares(shares: object) -> list[Share]:
    return [Share(split=share.split, weight=share.weight) for share in shares]  # type: ignore[attr-defined]


def _nanoseconds(period: data_service_pb2.Period) -> int | None:
    return period.before.seconds * NANOS + period.before.nanos if period.HasField("before") else None


# --- Bounded answer ---
# Limits a preview to one message: long parts of the version and of its quality report are left out.

# The same limit as that of a page.
ANSWER_BYTES = PAGE_BYTES


def bound_answer(answer: data_service_pb2.PreviewVersionResponse) -> None:
    """Remove parts of the version and the report until `answer` fits `ANSWER_BYTES`.

    The least informative parts for their size are removed first, and no more than necessary. First come the `values` of
    columns and, of the version, its `files`, its `transform` and the `value_names` of columns, the largest first. Then
    come histograms, and the examples of quarantine reasons, the last ones first. Then come whole entries of columns,
    quarantine reasons and checks, the last ones first, and finally the version's columns, also from the end. The
    remaining parts are correct as they stand, and the same for equal answers. The stored report keeps everything, and
    GetVersion has the whole version.
    """
    excess = answer.ByteSize() - ANSWER_BYTES
    for message, field in _parts(answer):
        if excess <= 0:
            return
        excess += _without(message, field)
    report = answer.report
    for entries in (report.columns, report.quarantine, report.checks, answer.version.columns):
        excess = keep_first(entries, excess)


def keep_first(entries: MutableSequence[Any], excess_bytes: int) -> int:
    """Remove the last messages until `excess_bytes` are removed; return the bytes that remain to be removed."""
    keep = len(entries)
    while keep and excess_bytes > 0:
        keep -= 1
        excess_bytes -= entries[keep].ByteSize()
    del entries[keep:]
    return excess_bytes


def _parts(answer: data_service_pb2.PreviewVersionResponse) -> Iterator[tuple[Message, str]]:
    """Yield the (message, field) pairs that can be cleared, in order of removal."""
    version, report = answer.version, answer.report
    lists: list[tuple[int, Message, str]] = [
        *((sum(value.ByteSize() for value in column.values), column, "values") for column in report.columns),
        *((sum(map(len, column.value_names)), column, "value_names") for column in version.columns),
        (sum(file.ByteSize() for file in version.files), version, "files"),
        (version.transform.ByteSize(), version, "transform"),
    ]
    yield from ((message, field) for size, message, field in sorted(lists, key=lambda one: -one[0]) if size)
    for column in reversed(report.columns):
        yield from ((getattr(column, kind), "histogram") for kind in ("numbers", "times") if column.HasField(kind))
    yield from ((reason, "examples") for reason in reversed(report.quarantine))


def _without(message: Message, field: str) -> int:
    """Clear the field and return the change of the message's size, which is negative."""
    before = message.ByteSize()
    message.ClearField(field)
    return message.ByteSize() - before


# --- Versions ---
# Converts versions, and the operations that create them, to messages.

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
    """Convert a version.

    `brief` is the short form of lists: without its files, value names and transform. If the columns exceed one message,
    it has only the first ones.
    """
    if isinstance(version, IndexedVersion):
        return resources_pb2.DatasetVersion.FromString(version.message)
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
        for file in () if brief else _listed_files(version.reader):
            message.files.add(
                path=file.path,
                split=file.split,
                row_count=file.row_count,
                size_bytes=file.size_bytes,
                sha256=file.sha256,
            )
    if brief:
        keep_first(message.columns, message.ByteSize() - names.PAGE_BYTES)
    return message


def listed_message(versions: Sequence[Version], next_page_token: str) -> data_service_pb2.ListVersionsResponse:
    """Return a page of versions, shortened if they exceed one message."""
    answer = data_service_pb2.ListVersionsResponse(next_page_token=next_page_token)
    size_bytes = 0
    for version in versions:
        message = version_message(version, brief=True)
        size_bytes += message.ByteSize()
        if answer.versions and size_bytes > names.PAGE_BYTES:
            answer.next_page_token = names.token_of(answer.versions[-1].name.rsplit("/", 1)[-1])
            break
        answer.versions.append(message)
    return answer


def operation_message(
    version: Version, progress: Mapping[str, Any], waiting_for: str = "", *, brief: bool = False
) -> operations_pb2.Operation:
    """Convert an operation.

    `waiting_for`: the resources that the cluster lacks for its next attempt; an attempt reports itself what it lacks.
    `brief`: with its version in the short form of lists.
    """
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
    """Return the answer to `validate_only`: the version that would be created."""
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
    if job.state is JobState.RUNNING:
        waits = progress.get("waiting_attempt") == job.attempt  # else an earlier attempt has reported
        waiting_for = str(progress.get("waiting_for", "")) if waits else ""
    if kind is _ImportMetadata:
        return _ImportMetadata(
            version=job.name,
            rows_read=int(progress.get("rows_read", 0)),
            rows_quarantined=int(progress.get("rows_quarantined", 0)),
            attempt=job.attempts_made,
            create_time=create_time,
            waiting_for=waiting_for,
        )
    made = kind(
        version=job.name,
        phase=f"PHASE_{progress.get('phase', 'UNSPECIFIED')}",
        rows_done=int(progress.get("rows_done", 0)),
        rows_total=int(progress.get("rows_total", 0)),
        rows_per_second=float(progress.get("rows_per_second", 0.0)),
        attempt=job.attempts_made,
        create_time=create_time,
        waiting_for=waiting_for,
    )
    if kind is _PredictMetadata:
        made.checkpoint = job.spec["predict"]["checkpoint"]["name"]
    return cast(_TransformMetadata | _PredictMetadata, made)


# Fewer than a page of a manifest has, so one request is enough.
MAX_LISTED_FILES = 1000


def _listed_files(reader: VersionReader) -> Iterable[DataFile]:
    """Return the files that a message names: of a version that has them in pages, the first ones."""
    manifest = reader.version.manifest
    return manifest.files if manifest.pages is None else islice(reader.files, MAX_LISTED_FILES)


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
    message.file_count = manifest.file_count
    if manifest.prediction:
        one = manifest.prediction
        message.prediction.checkpoint, message.prediction.checkpoint_sha256 = one.checkpoint, one.checkpoint_sha256
        message.prediction.trained_on = one.trained_on
        message.prediction.columns.extend(one.columns)
    elif manifest.transforms and not brief:
        json_format.ParseDict(manifest.transforms[-1], message.transform)
