"""Conversion between protobuf messages and the service's values.

This module converts jobs, checkpoints, events, the records of a run, bundles of code, and suggestions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from millrace.train.v1 import code_bundle_pb2, resources_pb2, suggestion_pb2, train_service_pb2
from millrace.train.v1 import train_service_pb2 as pb
from shared.checkpoint import CheckpointEntry
from shared.code_bundle_registry import BundleRecord
from shared.errors import invalid_field
from shared.grpc_errors import status_proto_from_record
from shared.jobs import JobRecord, JobState
from train_service.converters.specs import spec_to_proto
from train_service.domain.capacity import ClusterUse
from train_service.domain.spec import attempt_device, spec_of_job
from train_service.domain.suggesting import Preparation, Suggestion
from train_service.jobs.own_code import Header
from train_service.jobs.run_records import Coverage
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
