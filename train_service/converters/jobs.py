"""From the service's own values to the protobuf contract: jobs, checkpoints, events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from millrace.train.v1 import resources_pb2, train_service_pb2
from shared.checkpoint import CheckpointEntry
from shared.grpc_errors import status_proto_from_record
from shared.jobs import JobRecord, JobState
from train_service.converters.specs import spec_to_proto
from train_service.domain.spec import attempt_device, spec_of_job
from train_service.jobs.training_jobs import JobView
from train_service.records.reporting import Event, EventKind

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
    """The message without what a later release added to it."""
    return kind(**{name: value for name, value in payload.items() if name in kind.DESCRIPTOR.fields_by_name})


def set_values(messages: Any, values: Mapping[str, Any]) -> None:
    """Plain values into a `map<string, google.protobuf.Value>`."""
    for path, value in values.items():
        json_format.ParseDict(value, messages[path])


def etag(record: JobRecord) -> str:
    return str(record.generation)


def timestamp(seconds: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromNanoseconds(int(seconds * 1e9))
    return stamp
