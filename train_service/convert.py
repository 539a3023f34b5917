"""Conversion between protobuf messages and the service's values.

This module converts jobs, checkpoints, events, the records of a run, bundles of code, suggestions, and checkpoints that
are downloaded or imported. `convert_specs` converts specifications.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import pyarrow as pa
from google.protobuf import json_format
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from millrace.train.v1 import checkpoint_import_pb2, code_bundle_pb2, resources_pb2, suggestion_pb2, train_service_pb2
from millrace.train.v1 import train_service_pb2 as pb
from millrace.train.v1.train_service_pb2 import GetCheckpointResponse
from shared.checkpoint import CheckpointEntry
from shared.code_bundle_registry import BundleRecord
from shared.dataset_version.manifest import Column, tensor_field
from shared.errors import invalid_field
from shared.grpc_errors import status_proto_from_record
from shared.jobs import JobRecord, JobState
from shared.resource_log import body_digest
from shared.transforms.batch import arrow_type_of
from train_service.convert_specs import spec_from_proto, spec_to_proto
from train_service.domain.capacity import ClusterUse
from train_service.domain.spec import attempt_device, spec_of_job
from train_service.domain.suggesting import Preparation, Suggestion
from train_service.jobs.checkpoint_import import CheckpointImportRequest, Imported, SentFile
from train_service.jobs.own_code import Header
from train_service.jobs.run_records import CheckpointListing, Coverage, FileBegin, Part
from train_service.jobs.training_jobs import JobView
from train_service.records.event_log import Event, EventKind
from train_service.records.logs import LogText
from train_service.records.metrics_log import MetricPoint

# --- Jobs, checkpoints, events ---

M = TypeVar("M", bound=Message)


def job_to_proto(view: JobView) -> resources_pb2.TrainingJob:
    record = view.record
    spec = spec_of_job(record.spec["training"], record.choices)
    job = resources_pb2.TrainingJob(
        name=record.name,
        uid=record.uid,
        spec=spec_to_proto(spec),
        state=f"STATE_{record.state.value}",
        attempt=record.attempt,
        create_time=timestamp(record.create_time),
        update_time=timestamp(record.update_time),
        progress=_known(resources_pb2.Progress, view.progress) if view.progress else None,
        latest_checkpoint=view.newest.name if view.newest else "",
        best_checkpoint=view.best.name if view.best else "",
        etag=etag(record),
        failures=record.failures,
        preemptions=record.preemptions,
        waiting_for=view.waiting_for,
        device=f"DEVICE_{attempt_device(record.choices) or 'UNSPECIFIED'}",
    )
    if trial := record.spec.get("trial"):
        job.sweep = trial["sweep"]
        set_values(job.sweep_parameters, trial["parameters"])
    if record.state is JobState.FAILED and record.error:
        job.error.CopyFrom(status_proto_from_record(record.error))
    return job


def checkpoint_to_proto(entry: CheckpointEntry) -> resources_pb2.Checkpoint:
    return resources_pb2.Checkpoint(
        name=entry.name,
        step=entry.step,
        epoch=entry.epoch,
        metrics=entry.metrics,
        size_bytes=entry.size_bytes,
        manifest_sha256=entry.manifest_sha256,
        create_time=timestamp(entry.create_time),
        attempt=entry.attempt,
        code_bundle=entry.code_bundle,
    )


def event_to_proto(event: Event) -> train_service_pb2.TrainingEvent:
    message = train_service_pb2.TrainingEvent(
        sequence=event.sequence, time=timestamp(event.time), attempt=event.attempt
    )
    match event.kind:
        case EventKind.ATTEMPT_STARTED:
            message.attempt_started.CopyFrom(_known(train_service_pb2.AttemptStarted, event.payload))
        case EventKind.PROGRESS:
            message.progress.CopyFrom(_known(resources_pb2.Progress, event.payload))
        case EventKind.VALIDATED:
            message.validated.CopyFrom(_known(train_service_pb2.Validated, event.payload))
        case EventKind.CHECKPOINT_COMMITTED:
            message.checkpoint_committed.CopyFrom(checkpoint_to_proto(CheckpointEntry.from_state(event.payload)))
        case EventKind.WARNING:
            message.warning = event.payload["text"]
        case EventKind.ATTEMPT_ENDED:
            message.attempt_ended.CopyFrom(_known(train_service_pb2.AttemptEnded, event.payload))
        case EventKind.DEVICE_CHANGED:
            message.device_changed.CopyFrom(_known(train_service_pb2.DeviceChanged, event.payload))
    return message


def _known(kind: type[M], payload: Mapping[str, Any]) -> M:
    """Return the message without later releases' fields."""
    return kind(**{name: value for name, value in payload.items() if name in kind.DESCRIPTOR.fields_by_name})


def set_values(messages: Any, values: Mapping[str, Any]) -> None:
    """Write plain values into a `map<string, google.protobuf.Value>`."""
    for path, value in values.items():
        json_format.ParseDict(value, messages[path])


def etag(record: JobRecord) -> str:
    return str(record.generation)


def timestamp(seconds: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromNanoseconds(int(seconds * 1e9))
    return stamp


# --- Coverage, metrics and logs ---


def coverage_to_proto(coverage: Coverage) -> pb.Coverage:
    return pb.Coverage(
        training_job=coverage.training_job,
        epoch=coverage.epoch,
        checkpoint=coverage.checkpoint,
        epoch_done=coverage.epoch_done,
        skipped_steps=coverage.skipped_steps,
        witness=f"WITNESS_{coverage.witness}",
        shard=coverage.shard,
        **asdict(coverage.counts),
    )


def point_to_proto(point: MetricPoint) -> pb.MetricPoint:
    time = Timestamp()
    time.FromNanoseconds(int(point.time * 1e9))
    return pb.MetricPoint(step=point.step, epoch=point.epoch, attempt=point.attempt, time=time, values=point.values)


def use_to_proto(use: ClusterUse, names: Mapping[str, str], seen_at: float) -> pb.ClusterUse:
    """Return the message. `names` are the jobs' names by the names of their attempts' actors."""
    return pb.ClusterUse(
        time=timestamp(seen_at) if seen_at else None,
        nodes=use.nodes,
        cpus=use.cpus,
        gpus=use.gpus,
        free_cpus=use.free_cpus,
        free_gpus=use.free_gpus,
        holders=[
            pb.ClusterUse.Holder(
                job=names.get(holder.attempt, ""),
                deployment_uid=holder.deployment_uid,
                description=holder.what or (f"an attempt, {holder.attempt}" if holder.attempt else ""),
                cpus=holder.cpus,
                gpus=holder.gpus,
            )
            for holder in use.holders
        ],
    )


def log_to_proto(log: LogText) -> pb.StreamLogsResponse:
    return pb.StreamLogsResponse(attempt=log.attempt, rank=log.rank, text=log.text)


# --- Bundles of code ---


async def parts_from_proto(requests: AsyncIterator[Any]) -> AsyncIterator[Header | bytes]:
    async for request in requests:
        if request.WhichOneof("content") == "header":
            yield Header(request.header.sha256, request.header.size_bytes)
        else:
            yield request.chunk


def bundle_to_proto(record: BundleRecord) -> code_bundle_pb2.CodeBundle:
    return code_bundle_pb2.CodeBundle(
        name=record.name,
        size_bytes=record.size_bytes,
        unpacked_size_bytes=record.unpacked_size_bytes,
        file_count=record.file_count,
        requirements=record.requirements,
        modules=record.modules,
        create_time=timestamp(record.create_time),
    )


# --- Suggestions ---


def given_from_proto(spec: resources_pb2.TrainingSpec) -> dict[str, Any]:
    """Return the fields that are set, as JSON. Raises `InvalidArgument` for values that JSON does not hold."""
    try:
        given: dict[str, Any] = json_format.MessageToDict(spec, preserving_proto_field_name=True)
    except (ValueError, json_format.Error) as error:
        raise invalid_field("spec", "a number", f"use finite numbers in its kwargs: {error}") from None
    given.pop("dataset_version", None)
    return given


def suggestion_to_proto(suggestion: Suggestion) -> suggestion_pb2.SuggestTrainingSpecResponse:
    response = suggestion_pb2.SuggestTrainingSpecResponse(
        choices=[
            suggestion_pb2.Choice(field=choice.field, value=choice.value, reason=choice.reason)
            for choice in suggestion.choices
        ],
        preparation=_preparation(suggestion.preparation) if suggestion.preparation else None,
    )
    json_format.ParseDict(suggestion.spec, response.spec)
    return response


def _preparation(preparation: Preparation) -> suggestion_pb2.Preparation:
    message = suggestion_pb2.Preparation(
        source=preparation.source,
        splits=[suggestion_pb2.SplitShare(split=split, weight=weight) for split, weight in preparation.shares.items()],
        split_seed=preparation.seed if preparation.shares else 0,
        fit_split=preparation.fit_split,
        request_id=preparation.request_id,
    )
    json_format.ParseDict({"steps": preparation.steps}, message.transform)
    return message


# --- Checkpoints ---

MAX_CHUNK_BYTES = 1024 * 1024


def part_to_protos(part: Part) -> Iterator[GetCheckpointResponse]:
    """Yield a part's messages, with bytes cut into chunks."""
    if isinstance(part, CheckpointListing):
        header = GetCheckpointResponse.Header(
            checkpoint=checkpoint_to_proto(part.entry),
            file_count=len(part.files),
            size_bytes=sum(one.size_bytes for one in part.files),
        )
        yield GetCheckpointResponse(header=header)
    elif isinstance(part, FileBegin):
        file = GetCheckpointResponse.File(
            path=part.file.path, size_bytes=part.file.size_bytes, sha256=part.file.sha256, offset=part.offset
        )
        yield GetCheckpointResponse(file=file)
    else:
        for start in range(0, len(part), MAX_CHUNK_BYTES):
            yield GetCheckpointResponse(chunk=part[start : start + MAX_CHUNK_BYTES])


# --- Imports ---

MAX_DIMENSIONS = 8
MAX_NUMBERS = 1 << 31
# Limits of a name map, whose rules may be costly expressions.
MAX_RULES = 100
MAX_RULE = 1_000


async def import_parts_from_proto(
    requests: AsyncIterator[Any], custom_allowed: Collection[str]
) -> AsyncIterator[CheckpointImportRequest | bytes]:
    async for request in requests:
        if request.WhichOneof("content") == "header":
            yield _request(request.header, custom_allowed)
        else:
            yield request.chunk


def imported_to_proto(imported: Imported) -> checkpoint_import_pb2.ImportCheckpointResponse:
    report = report_to_proto(imported.report)
    if imported.view is None or imported.view.newest is None:
        return checkpoint_import_pb2.ImportCheckpointResponse(report=report)
    return checkpoint_import_pb2.ImportCheckpointResponse(
        training_job=job_to_proto(imported.view),
        checkpoint=checkpoint_to_proto(imported.view.newest),
        report=report,
    )


def sources_to_proto(sources: Mapping[str, Any]) -> checkpoint_import_pb2.ImportedWeights:
    files = [checkpoint_import_pb2.ImportedFile(**file) for file in sources["files"]]
    return checkpoint_import_pb2.ImportedWeights(files=files, report=report_to_proto(sources["report"]))


def report_to_proto(report: Mapping[str, Any]) -> checkpoint_import_pb2.ImportReport:
    kind = checkpoint_import_pb2.ImportReport
    return kind(
        format=report["format"],
        key=report["key"],
        fits=report["fits"],
        fitted_count=report["fitted_count"],
        fitted=[kind.Fitted(**one) for one in report["fitted"]],
        missing_count=report["missing_count"],
        missing=report["missing"],
        missing_allowed_count=report["missing_allowed_count"],
        unexpected_count=report["unexpected_count"],
        unexpected=report["unexpected"],
        dropped_count=report["dropped_count"],
        misfit_count=report["misfits_count"],
        misfits=[kind.Misfit(**misfit) for misfit in report["misfits"]],
        non_finite_count=report["non_finite_count"],
        non_finite=[kind.NonFinite(**one) for one in report["non_finite"]],
        other_count=report["others_count"],
        others=report["others"],
    )


def _request(header: Any, custom_allowed: Collection[str]) -> CheckpointImportRequest:
    asked = header.spec
    given = _column(asked.input) if asked.HasField("input") else None
    training = resources_pb2.TrainingSpec(
        dataset_version=asked.dataset_version,
        input_column=asked.input_column or (given.name if given else ""),
        label_column=asked.label_column,
        transform=asked.transform,
        task=asked.task,
        model=asked.model if asked.HasField("model") else None,
        allow_non_finite=asked.allow_non_finite,
    )
    return CheckpointImportRequest(
        job_id=header.training_job_id,
        spec=spec_from_proto(training, custom_allowed),
        input_column=given,
        class_names=tuple(asked.class_names),
        names=_names(asked.names),
        files=[SentFile(file.path, file.size_bytes, file.sha256) for file in header.files],
        request_id=header.request_id,
        digest=body_digest(header),
        validate_only=header.validate_only,
    )


def _column(given: Any) -> Column:
    spelling = given.dtype or "float32"
    try:
        value_type = arrow_type_of(spelling)
    except ValueError:
        value_type = pa.null()
    if not (pa.types.is_integer(value_type) or pa.types.is_floating(value_type)):
        raise invalid_field("spec.input.dtype", spelling, "use a type of numbers, such as float32 or uint8")
    shape = tuple(given.shape)
    numbers = 1
    for size in shape:
        numbers *= size
    if not 1 <= len(shape) <= MAX_DIMENSIONS or min(shape) < 1 or numbers > MAX_NUMBERS:
        remedy = f"use 1 to {MAX_DIMENSIONS} sizes from 1 up, of at most {MAX_NUMBERS:,} numbers"
        raise invalid_field("spec.input.shape", list(shape)[: MAX_DIMENSIONS + 1], remedy)
    name = given.name or "image"
    return Column(name=name, arrow_type=str(tensor_field(name, value_type, shape).type), shape=list(shape))


def _names(names: Any) -> dict[str, Any]:
    for path, texts in (("drop", names.drop), ("allow_missing", names.allow_missing), ("renames", names.renames)):
        if len(texts) > MAX_RULES:
            raise invalid_field(f"spec.names.{path}", f"{len(texts)} of them", f"use at most {MAX_RULES}")
    renames = [{"prefix": one.prefix, "pattern": one.pattern, "replacement": one.replacement} for one in names.renames]
    for index, rename in enumerate(renames):
        if not rename["prefix"] and not rename["pattern"]:
            raise invalid_field(f"spec.names.renames[{index}]", "", "give a prefix or a pattern")
    texts = [names.key, *names.drop, *names.allow_missing, *(text for one in renames for text in one.values())]
    if any(len(text) > MAX_RULE for text in texts):
        raise invalid_field("spec.names", "a longer text", f"use at most {MAX_RULE:,} characters for each")
    return {
        "key": names.key,
        "renames": renames,
        "drop": list(names.drop),
        "allow_missing": list(names.allow_missing),
    }
