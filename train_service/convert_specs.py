"""Conversion between protobuf and plain training specifications. Defaults are filled in."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration

from millrace.train.v1 import code_bundle_pb2, resources_pb2
from shared.errors import invalid_field
from shared.jobs.retry_limits import DEFAULT_MAX_FAILURES, DEFAULT_MAX_PREEMPTIONS
from shared.model_spec import NONE, ModelSpec
from shared.transforms import Pipeline
from train_service.domain.order import default_lanes
from train_service.domain.spec import (
    BY_LOADER,
    DDP,
    DETERMINISTIC,
    DROP,
    FLOAT32,
    OWN,
    REPLAY,
    SCRIPT_SUFFIX,
    THREADS,
    Acceleration,
    CheckpointPolicy,
    EarlyStopping,
    LossSpec,
    OptimizerSpec,
    Placement,
    Program,
    TrainingSpec,
    default_best_metric,
    default_label_column,
    default_loss,
    default_metrics,
    default_task,
)
from train_service.domain.spec_rules import FIELDS_OF_OWN_LOOP, MAX_WORKERS, check_unset

# Fields that a script's own configurations may set: paths in `TrainingSpec`, and paths in the contract.
FIELDS_OF_SCRIPTS = {
    "num_workers": "num_workers",
    "min_workers": "min_workers",
    "lanes": "lanes",
    "max_failures": "max_failures",
    "max_preemptions": "max_preemptions",
    "placement.cpus_per_worker": "placement.cpus_per_worker",
    "placement.gpus_per_worker": "placement.gpus_per_worker",
    "placement.resources_per_worker": "placement.resources_per_worker",
    "placement.accelerator_type": "placement.accelerator_type",
    "placement.strategy": "placement.strategy",
    "placement.backend": "placement.backend",
    "placement.timeout_s": "placement.timeout",
    "checkpoints.keep_newest": "checkpoints.keep_newest",
    "checkpoints.keep_best": "checkpoints.keep_best",
    "checkpoints.best_metric": "checkpoints.best_metric",
    "checkpoints.maximize": "checkpoints.order",
}

NCCL = "nccl"
_Acceleration = resources_pb2.Acceleration
_Policy = resources_pb2.CheckpointPolicy
_Program = code_bundle_pb2.Program


def spec_from_proto(spec: resources_pb2.TrainingSpec, custom_allowed: Collection[str]) -> TrainingSpec:
    """Return the specification with defaults filled in.

    `custom_allowed` are the functions that custom steps may name.

    Raises `InvalidArgument` for what plain values cannot hold, such as a broken transform.
    """
    if spec.HasField("program"):
        return _program_spec_from_proto(spec)
    if not spec.HasField("model"):
        raise invalid_field(
            "spec.model", None, "name a builder, e.g. torchvision.resnet18, or an entry of your own code"
        )
    is_own = bool(spec.model.entry)
    if spec.input_column and spec.input_columns:
        raise invalid_field(
            "spec.input_column", spec.input_column, "spec.input_columns is set, too; leave one of both out"
        )
    # With several inputs, steps must name their column.
    input_column = "" if spec.input_columns else spec.input_column or "image"
    pipeline = Pipeline.from_proto(spec.transform, input_column, "spec.transform", custom_allowed)
    builder = spec.model.builder
    task = _name(resources_pb2.TrainingSpec.Task, spec.task, "TASK_", default_task(builder))
    checkpoints = _checkpoints(spec.checkpoints, default_best_metric(task))
    num_workers = spec.num_workers if spec.HasField("num_workers") else 1
    return TrainingSpec(
        dataset_version=spec.dataset_version,
        train_split=spec.train_split or "train",
        validation_split=spec.validation_split,
        input_column=input_column,
        input_columns=tuple(spec.input_columns),
        label_column=spec.label_column or default_label_column(builder),
        transform=pipeline.config,
        task=task,
        model=ModelSpec(
            builder=spec.model.builder,
            in_channels=spec.model.in_channels,
            num_classes=spec.model.num_classes,
            kwargs=_plain(spec.model.kwargs, "spec.model.kwargs"),
            code_bundle=spec.model.code_bundle,
            entry=_entry(spec.model.entry),
        ),
        initial_checkpoint=spec.initial_checkpoint,
        loss=LossSpec(
            # Only the code of a user's own model shows whether it has a loss, metrics and optimizers. Without a name
            # the check of the job fills them in.
            name=spec.loss.name or ("" if is_own else default_loss(task, builder)),
            kwargs=_plain(spec.loss.kwargs, "spec.loss.kwargs"),
            label_smoothing=spec.loss.label_smoothing,
        ),
        metrics=tuple(spec.metrics) or (() if is_own else default_metrics(task, builder)),
        optimizer=_optimizer(spec.optimizer)
        if spec.HasField("optimizer")
        else OptimizerSpec(name=OWN if is_own else OptimizerSpec.name),
        target_scaling=_name(resources_pb2.TrainingSpec.TargetScaling, spec.target_scaling, "TARGET_SCALING_", NONE),
        training_step=spec.training_step,
        precision=_name(resources_pb2.TrainingSpec.Precision, spec.precision, "PRECISION_", FLOAT32),
        accumulation_steps=spec.accumulation_steps or 1,
        max_gradient_norm=spec.max_gradient_norm,
        compile=spec.compile,
        acceleration=_acceleration(spec.acceleration),
        epochs=spec.epochs,
        global_batch_size=spec.global_batch_size,
        seed=spec.seed,
        # More workers are refused later; do not also refuse a default for lanes that the client never set.
        lanes=spec.lanes or default_lanes(min(num_workers, MAX_WORKERS)),
        ingest=_name(resources_pb2.TrainingSpec.Ingest, spec.ingest, "INGEST_", THREADS),
        num_workers=num_workers,
        min_workers=spec.min_workers,
        threads_per_worker=spec.threads_per_worker or 1,
        placement=_placement(spec.placement),
        checkpoint_every_steps=spec.checkpoint_every_steps,
        checkpoints=checkpoints,
        early_stopping=_stopping(spec.early_stopping, checkpoints) if spec.HasField("early_stopping") else None,
        allow_non_finite=spec.allow_non_finite,
        group_by_length=spec.group_by_length,
        max_failures=spec.max_failures if spec.HasField("max_failures") else DEFAULT_MAX_FAILURES,
        max_preemptions=spec.max_preemptions if spec.HasField("max_preemptions") else DEFAULT_MAX_PREEMPTIONS,
        priority=spec.priority,
    )


def _program_spec_from_proto(spec: resources_pb2.TrainingSpec) -> TrainingSpec:
    """Return the specification of a program.

    Fields that only Millrace's own loop reads must be unset, and keep their neutral values.
    """
    given = [field.name for field, _ in spec.ListFields()]
    for parent in ("checkpoints", "placement"):
        given += [f"{parent}.{field.name}" for field, _ in getattr(spec, parent).ListFields()]
    check_unset(given)
    left_open = _left_open(spec) if spec.program.entry.endswith(SCRIPT_SUFFIX) else ()
    if "num_workers" in left_open and spec.min_workers:
        remedy = "it is the fewest of spec.num_workers, which is not set; set both, or leave both to the script"
        raise invalid_field("spec.min_workers", spec.min_workers, remedy)
    num_workers = spec.num_workers if spec.HasField("num_workers") else 1
    return TrainingSpec(
        dataset_version=spec.dataset_version,
        train_split=spec.train_split or "train",
        validation_split=spec.validation_split,
        model=ModelSpec(builder="", in_channels=0, num_classes=0),
        epochs=0,
        global_batch_size=0,
        seed=spec.seed,
        lanes=spec.lanes or default_lanes(min(num_workers, MAX_WORKERS)),
        num_workers=num_workers,
        min_workers=spec.min_workers,
        threads_per_worker=spec.threads_per_worker or 1,
        placement=_placement(spec.placement),
        # A program may report any metric. Without a name the newest checkpoint is the best.
        checkpoints=_checkpoints(spec.checkpoints, ""),
        max_failures=spec.max_failures if spec.HasField("max_failures") else DEFAULT_MAX_FAILURES,
        max_preemptions=spec.max_preemptions if spec.HasField("max_preemptions") else DEFAULT_MAX_PREEMPTIONS,
        priority=spec.priority,
        program=Program(
            code_bundle=spec.program.code_bundle,
            entry=_entry(spec.program.entry),
            config_json=spec.program.config_json or "{}",
            data_resume=_name(_Program.DataResume, spec.program.data_resume, "DATA_RESUME_", REPLAY),
            remainder=_name(_Program.Remainder, spec.program.remainder, "REMAINDER_", DROP),
            hang_after_s=_seconds(spec.program.hang_after) if spec.program.HasField("hang_after") else 0.0,
            stop_within_s=_seconds(spec.program.stop_within) if spec.program.HasField("stop_within") else 300.0,
        ),
        left_open=left_open,
    )


def _entry(entry: str) -> str:
    """Return an entry as `module:name`.

    A module may be named by its file: `jobs/train.py:loop` becomes `jobs.train:loop`.
    """
    path, colon, name = entry.partition(":")
    if colon and path.endswith(SCRIPT_SUFFIX):
        return f"{path.removesuffix(SCRIPT_SUFFIX).replace('/', '.')}:{name}"
    return entry


def _left_open(spec: resources_pb2.TrainingSpec) -> tuple[str, ...]:
    """Return the fields that a script may set.

    They are paths in `TrainingSpec`, for the script's own configurations.
    """
    given = {field.name for field, _ in spec.ListFields()}
    for parent in ("checkpoints", "placement"):
        given.update(f"{parent}.{field.name}" for field, _ in getattr(spec, parent).ListFields())
    if "num_workers" in given:
        given.add("min_workers")  # 0 means `num_workers`
    if "checkpoints.best_metric" in given:
        given.add("checkpoints.order")  # a script's order is that of its own metric
    if spec.placement.backend == NCCL or given & {"placement.accelerator_type", "placement.allow_cpu_fallback"}:
        given.add("placement.gpus_per_worker")  # either field implies GPUs
    return tuple(path for path, name in FIELDS_OF_SCRIPTS.items() if name not in given)


def spec_to_proto(spec: TrainingSpec) -> resources_pb2.TrainingSpec:
    message = resources_pb2.TrainingSpec(
        dataset_version=spec.dataset_version,
        train_split=spec.train_split,
        validation_split=spec.validation_split,
        input_column=spec.input_column,
        input_columns=spec.input_columns,
        label_column=spec.label_column,
        task=f"TASK_{spec.task}",
        model=resources_pb2.Model(
            builder=spec.model.builder,
            in_channels=spec.model.in_channels,
            num_classes=spec.model.num_classes,
            code_bundle=spec.model.code_bundle,
            entry=spec.model.entry,
        ),
        initial_checkpoint=spec.initial_checkpoint,
        loss=resources_pb2.Loss(name=spec.loss.name, label_smoothing=spec.loss.label_smoothing),
        metrics=spec.metrics,
        optimizer=resources_pb2.Optimizer(
            name=spec.optimizer.name,
            learning_rate=spec.optimizer.learning_rate,
            schedule=f"SCHEDULE_{spec.optimizer.schedule}",
            scheduler=spec.optimizer.scheduler,
        ),
        target_scaling=f"TARGET_SCALING_{spec.target_scaling}",
        training_step=spec.training_step,
        precision=f"PRECISION_{spec.precision}",
        accumulation_steps=spec.accumulation_steps,
        max_gradient_norm=spec.max_gradient_norm,
        compile=spec.compile,
        acceleration=_Acceleration(
            channels_last=spec.acceleration.channels_last,
            prefetch_batches=spec.acceleration.prefetch_batches,
            algorithms=f"ALGORITHMS_{spec.acceleration.algorithms}",
            transform_device=f"TRANSFORM_DEVICE_{spec.acceleration.transform_device}",
        ),
        epochs=spec.epochs,
        global_batch_size=spec.global_batch_size,
        seed=spec.seed,
        lanes=spec.lanes,
        ingest=f"INGEST_{spec.ingest}",
        num_workers=spec.num_workers,
        min_workers=spec.min_workers,
        threads_per_worker=spec.threads_per_worker,
        placement=_placement_to_proto(spec.placement),
        checkpoint_every_steps=spec.checkpoint_every_steps,
        checkpoints=_Policy(
            every=_duration(spec.checkpoints.every_s) if spec.checkpoints.every_s else None,
            keep_newest=spec.checkpoints.keep_newest,
            keep_best=spec.checkpoints.keep_best,
            best_metric=spec.checkpoints.best_metric,
            order=_Policy.ORDER_MAXIMIZE if spec.checkpoints.maximize else _Policy.ORDER_MINIMIZE,
        ),
        group_by_length=spec.group_by_length,
        allow_non_finite=spec.allow_non_finite,
        max_failures=spec.max_failures,
        max_preemptions=spec.max_preemptions,
        priority=spec.priority,
    )
    if spec.early_stopping is not None:
        message.early_stopping.metric = spec.early_stopping.metric
        message.early_stopping.patience = spec.early_stopping.patience
        message.early_stopping.min_delta = spec.early_stopping.min_delta
    json_format.ParseDict(spec.transform, message.transform)
    for struct, values in (
        (message.model.kwargs, spec.model.kwargs),
        (message.loss.kwargs, spec.loss.kwargs),
        (message.optimizer.kwargs, spec.optimizer.kwargs),
        (message.optimizer.scheduler_kwargs, spec.optimizer.scheduler_kwargs),
    ):
        struct.update(values)
    if spec.optimizer.name == OWN:
        message.ClearField("optimizer")  # so that clients can send the message again
    if spec.program is not None:
        _set_program(message, spec.program)
    for path in spec.left_open:
        _clear(message, FIELDS_OF_SCRIPTS[path])
    return message


def _set_program(message: resources_pb2.TrainingSpec, program: Program) -> None:
    """Clear the fields that a program leaves unset. Clients can then send the message again."""
    for path in FIELDS_OF_OWN_LOOP:
        _clear(message, path)
    message.program.CopyFrom(
        _Program(
            code_bundle=program.code_bundle,
            entry=program.entry,
            config_json=program.config_json,
            data_resume=f"DATA_RESUME_{program.data_resume}",
            remainder=f"REMAINDER_{program.remainder}",
        )
    )
    if program.hang_after_s:
        message.program.hang_after.CopyFrom(_duration(program.hang_after_s))
    message.program.stop_within.CopyFrom(_duration(program.stop_within_s))


def _clear(message: resources_pb2.TrainingSpec, path: str) -> None:
    parent, _, field = path.rpartition(".")
    (getattr(message, parent) if parent else message).ClearField(field)


def maximizes(metric: str) -> bool:
    """Return whether a higher value is better. The metric's name decides: all but losses and errors."""
    return not any(part in metric.lower() for part in ("loss", "error", "mae", "mse"))


def _checkpoints(policy: resources_pb2.CheckpointPolicy, default_metric: str) -> CheckpointPolicy:
    metric = policy.best_metric or default_metric
    return CheckpointPolicy(
        every_s=_seconds(policy.every) if policy.HasField("every") else 0.0,
        keep_newest=policy.keep_newest,
        keep_best=policy.keep_best or 1,
        best_metric=metric,
        maximize=maximizes(metric)
        if policy.order == _Policy.ORDER_UNSPECIFIED
        else policy.order == _Policy.ORDER_MAXIMIZE,
    )


def _stopping(stopping: resources_pb2.EarlyStopping, checkpoints: CheckpointPolicy) -> EarlyStopping:
    metric = stopping.metric or checkpoints.best_metric
    return EarlyStopping(
        metric=metric,
        maximize=checkpoints.maximize if metric == checkpoints.best_metric else maximizes(metric),
        patience=stopping.patience,
        min_delta=stopping.min_delta,
    )


def _acceleration(acceleration: resources_pb2.Acceleration) -> Acceleration:
    ahead = (
        acceleration.prefetch_batches if acceleration.HasField("prefetch_batches") else Acceleration.prefetch_batches
    )
    return Acceleration(
        channels_last=acceleration.channels_last,
        prefetch_batches=ahead,
        algorithms=_name(_Acceleration.Algorithms, acceleration.algorithms, "ALGORITHMS_", DETERMINISTIC),
        transform_device=_name(
            _Acceleration.TransformDevice, acceleration.transform_device, "TRANSFORM_DEVICE_", BY_LOADER
        ),
    )


def _placement(placement: resources_pb2.Placement) -> Placement:
    return Placement(
        cpus_per_worker=placement.cpus_per_worker or 1.0,
        gpus_per_worker=placement.gpus_per_worker if placement.HasField("gpus_per_worker") else None,
        allow_cpu_fallback=placement.allow_cpu_fallback,
        resources_per_worker=dict(placement.resources_per_worker),
        accelerator_type=placement.accelerator_type,
        strategy=placement.strategy or "PACK",
        parallel=placement.parallel or DDP,
        backend=placement.backend,
        timeout_s=_seconds(placement.timeout) if placement.HasField("timeout") else 1800.0,
    )


def _placement_to_proto(placement: Placement) -> resources_pb2.Placement:
    return resources_pb2.Placement(
        cpus_per_worker=placement.cpus_per_worker,
        gpus_per_worker=placement.gpus_per_worker,
        allow_cpu_fallback=placement.allow_cpu_fallback,
        resources_per_worker=placement.resources_per_worker,
        accelerator_type=placement.accelerator_type,
        strategy=placement.strategy,
        parallel=placement.parallel,
        backend=placement.backend,
        timeout=_duration(placement.timeout_s),
    )


def _optimizer(optimizer: resources_pb2.Optimizer) -> OptimizerSpec:
    return OptimizerSpec(
        name=optimizer.name,
        learning_rate=optimizer.learning_rate,
        kwargs=_plain(optimizer.kwargs, "spec.optimizer.kwargs"),
        schedule=_name(resources_pb2.Optimizer.Schedule, optimizer.schedule, "SCHEDULE_", "CONSTANT"),
        scheduler=optimizer.scheduler,
        scheduler_kwargs=_plain(optimizer.scheduler_kwargs, "spec.optimizer.scheduler_kwargs"),
    )


def _name(enum: Any, number: int, prefix: str, default: str) -> str:
    """Return the enum's name without its prefix. An unknown number is returned as text, and refused later."""
    if number == 0:
        return default
    known = enum.values()
    return str(enum.Name(number)).removeprefix(prefix) if number in known else str(number)


def _seconds(duration: Duration) -> float:
    """Return the seconds of any duration. The rules refuse values out of bounds later, by name."""
    return duration.seconds + duration.nanos / 1e9


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def _plain(struct: Any, path: str) -> dict[str, Any]:
    """Return a Struct as plain values.

    A Struct has only doubles. Whole ones become ints, as builders and optimizers expect.
    """
    try:
        values = json_format.MessageToDict(struct)
    except (ValueError, json_format.Error):
        raise invalid_field(path, list(struct.keys()), "use finite numbers; JSON has no others") from None
    return {key: whole(value) for key, value in values.items()}


def whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [whole(one) for one in value]
    return {key: whole(one) for key, one in value.items()} if isinstance(value, dict) else value
