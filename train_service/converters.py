"""Between the protobuf contract and the service's own values."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from google.protobuf import json_format
from google.protobuf.timestamp_pb2 import Timestamp

from millrace.train.v1 import resources_pb2, train_service_pb2
from shared.checkpoint import CheckpointEntry
from shared.checkpoint.registry import best, latest
from shared.errors import invalid_field
from shared.grpc_errors import status_proto_from_record
from shared.jobs import JobRecord, JobState
from shared.model_spec import ModelSpec
from shared.transforms import Pipeline
from train_service.domain.schedule import CONSTANT, COSINE_WITH_WARMUP
from train_service.domain.spec import OptimizerSpec, TrainingSpec
from train_service.events import Event, EventKind
from train_service.training_jobs import JobView

_Schedule = resources_pb2.Optimizer.Schedule
SCHEDULES = {
    _Schedule.SCHEDULE_UNSPECIFIED: CONSTANT,
    _Schedule.SCHEDULE_CONSTANT: CONSTANT,
    _Schedule.SCHEDULE_COSINE_WITH_WARMUP: COSINE_WITH_WARMUP,
}
SCHEDULE_OF = {CONSTANT: _Schedule.SCHEDULE_CONSTANT, COSINE_WITH_WARMUP: _Schedule.SCHEDULE_COSINE_WITH_WARMUP}


def spec_from_proto(spec: resources_pb2.TrainingSpec, custom_allowed: Collection[str]) -> TrainingSpec:
    """Fills in defaults. `custom_allowed` are the functions that custom steps may name.

    Raises `InvalidArgument` for what plain values cannot hold, such as a broken transform.
    """
    if not spec.HasField("model"):
        raise invalid_field("spec.model", None, "name a builder, e.g. torchvision.resnet18")
    input_column = spec.input_column or "image"
    pipeline = Pipeline.from_proto(spec.transform, input_column, "spec.transform", custom_allowed)
    return TrainingSpec(
        dataset_version=spec.dataset_version,
        train_split=spec.train_split or "train",
        validation_split=spec.validation_split,
        input_column=input_column,
        label_column=spec.label_column or "label",
        transform=pipeline.config,
        model=ModelSpec(
            builder=spec.model.builder,
            in_channels=spec.model.in_channels,
            num_classes=spec.model.num_classes,
            kwargs=_plain(spec.model.kwargs, "spec.model.kwargs"),
        ),
        optimizer=_optimizer(spec.optimizer) if spec.HasField("optimizer") else OptimizerSpec(),
        epochs=spec.epochs,
        global_batch_size=spec.global_batch_size,
        seed=spec.seed,
        num_workers=spec.num_workers or 1,
        threads_per_worker=spec.threads_per_worker or 1,
        checkpoint_every_steps=spec.checkpoint_every_steps,
        max_failures=spec.max_failures if spec.HasField("max_failures") else 3,
        lanes=spec.lanes or 24,
    )


def spec_to_proto(spec: TrainingSpec) -> resources_pb2.TrainingSpec:
    message = resources_pb2.TrainingSpec(
        dataset_version=spec.dataset_version,
        train_split=spec.train_split,
        validation_split=spec.validation_split,
        input_column=spec.input_column,
        label_column=spec.label_column,
        model=resources_pb2.Model(
            builder=spec.model.builder, in_channels=spec.model.in_channels, num_classes=spec.model.num_classes
        ),
        optimizer=resources_pb2.Optimizer(
            name=spec.optimizer.name,
            learning_rate=spec.optimizer.learning_rate,
            schedule=SCHEDULE_OF[spec.optimizer.schedule],
        ),
        epochs=spec.epochs,
        global_batch_size=spec.global_batch_size,
        seed=spec.seed,
        num_workers=spec.num_workers,
        threads_per_worker=spec.threads_per_worker,
        checkpoint_every_steps=spec.checkpoint_every_steps,
        max_failures=spec.max_failures,
        lanes=spec.lanes,
    )
    json_format.ParseDict(spec.transform, message.transform)
    message.model.kwargs.update(spec.model.kwargs)
    message.optimizer.kwargs.update(spec.optimizer.kwargs)
    return message


def job_to_proto(view: JobView) -> resources_pb2.TrainingJob:
    record = view.record
    newest, chosen = latest(view.checkpoints), best(view.checkpoints)
    job = resources_pb2.TrainingJob(
        name=record.name,
        uid=record.uid,
        spec=spec_to_proto(TrainingSpec.from_config(record.spec["training"])),
        state=f"STATE_{record.state.value}",
        attempt=record.attempt,
        create_time=_timestamp(record.create_time),
        update_time=_timestamp(record.update_time),
        progress=resources_pb2.Progress(**view.progress) if view.progress else None,
        latest_checkpoint=newest.name if newest else "",
        best_checkpoint=chosen.name if chosen else "",
        etag=_etag(record),
    )
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
        create_time=_timestamp(entry.create_time),
        attempt=entry.attempt,
    )


def event_to_proto(event: Event) -> train_service_pb2.TrainingEvent:
    message = train_service_pb2.TrainingEvent(
        sequence=event.sequence, time=_timestamp(event.time), attempt=event.attempt
    )
    match event.kind:
        case EventKind.ATTEMPT_STARTED:
            message.attempt_started.CopyFrom(train_service_pb2.AttemptStarted(**event.payload))
        case EventKind.PROGRESS:
            message.progress.CopyFrom(resources_pb2.Progress(**event.payload))
        case EventKind.VALIDATED:
            message.validated.CopyFrom(train_service_pb2.Validated(**event.payload))
        case EventKind.CHECKPOINT_COMMITTED:
            message.checkpoint_committed.CopyFrom(checkpoint_to_proto(CheckpointEntry(**event.payload)))
        case EventKind.WARNING:
            message.warning = event.payload["text"]
    return message


def _optimizer(optimizer: resources_pb2.Optimizer) -> OptimizerSpec:
    return OptimizerSpec(
        name=optimizer.name,
        learning_rate=optimizer.learning_rate,
        kwargs=_plain(optimizer.kwargs, "spec.optimizer.kwargs"),
        # A number that this contract does not know is refused by name later.
        schedule=SCHEDULES.get(optimizer.schedule, str(optimizer.schedule)),
    )


def _plain(struct: Any, path: str) -> dict[str, Any]:
    """A Struct has only doubles; whole ones become ints, as builders and optimizers expect."""
    try:
        values = json_format.MessageToDict(struct)
    except (ValueError, json_format.Error):
        raise invalid_field(path, list(struct.keys()), "use finite numbers; JSON has no others") from None
    return {key: _whole(value) for key, value in values.items()}


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return {key: _whole(one) for key, one in value.items()} if isinstance(value, dict) else value


def _etag(record: JobRecord) -> str:
    return str(record.generation)


def _timestamp(seconds: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromNanoseconds(int(seconds * 1e9))
    return stamp
