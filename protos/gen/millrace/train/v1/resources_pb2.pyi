import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.rpc import status_pb2 as _status_pb2
from millrace.common.v1 import transform_pb2 as _transform_pb2
from millrace.train.v1 import code_bundle_pb2 as _code_bundle_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Device(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEVICE_UNSPECIFIED: _ClassVar[Device]
    DEVICE_CPU: _ClassVar[Device]
    DEVICE_GPU: _ClassVar[Device]
DEVICE_UNSPECIFIED: Device
DEVICE_CPU: Device
DEVICE_GPU: Device

class TrainingJob(_message.Message):
    __slots__ = ("name", "uid", "spec", "state", "attempt", "create_time", "update_time", "error", "progress", "latest_checkpoint", "best_checkpoint", "etag", "failures", "preemptions", "waiting_for", "device", "sweep", "sweep_parameters")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[TrainingJob.State]
        STATE_PENDING: _ClassVar[TrainingJob.State]
        STATE_RUNNING: _ClassVar[TrainingJob.State]
        STATE_RECOVERING: _ClassVar[TrainingJob.State]
        STATE_CANCELLING: _ClassVar[TrainingJob.State]
        STATE_SUCCEEDED: _ClassVar[TrainingJob.State]
        STATE_FAILED: _ClassVar[TrainingJob.State]
        STATE_CANCELLED: _ClassVar[TrainingJob.State]
        STATE_SUSPENDING: _ClassVar[TrainingJob.State]
        STATE_SUSPENDED: _ClassVar[TrainingJob.State]
        STATE_DELETING: _ClassVar[TrainingJob.State]
    STATE_UNSPECIFIED: TrainingJob.State
    STATE_PENDING: TrainingJob.State
    STATE_RUNNING: TrainingJob.State
    STATE_RECOVERING: TrainingJob.State
    STATE_CANCELLING: TrainingJob.State
    STATE_SUCCEEDED: TrainingJob.State
    STATE_FAILED: TrainingJob.State
    STATE_CANCELLED: TrainingJob.State
    STATE_SUSPENDING: TrainingJob.State
    STATE_SUSPENDED: TrainingJob.State
    STATE_DELETING: TrainingJob.State
    class SweepParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _struct_pb2.Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_struct_pb2.Value, _Mapping]] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    UPDATE_TIME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    LATEST_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    BEST_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SWEEP_FIELD_NUMBER: _ClassVar[int]
    SWEEP_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    uid: str
    spec: TrainingSpec
    state: TrainingJob.State
    attempt: int
    create_time: _timestamp_pb2.Timestamp
    update_time: _timestamp_pb2.Timestamp
    error: _status_pb2.Status
    progress: Progress
    latest_checkpoint: str
    best_checkpoint: str
    etag: str
    failures: int
    preemptions: int
    waiting_for: str
    device: Device
    sweep: str
    sweep_parameters: _containers.MessageMap[str, _struct_pb2.Value]
    def __init__(self, name: _Optional[str] = ..., uid: _Optional[str] = ..., spec: _Optional[_Union[TrainingSpec, _Mapping]] = ..., state: _Optional[_Union[TrainingJob.State, str]] = ..., attempt: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., update_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., latest_checkpoint: _Optional[str] = ..., best_checkpoint: _Optional[str] = ..., etag: _Optional[str] = ..., failures: _Optional[int] = ..., preemptions: _Optional[int] = ..., waiting_for: _Optional[str] = ..., device: _Optional[_Union[Device, str]] = ..., sweep: _Optional[str] = ..., sweep_parameters: _Optional[_Mapping[str, _struct_pb2.Value]] = ...) -> None: ...

class TrainingSpec(_message.Message):
    __slots__ = ("dataset_version", "train_split", "validation_split", "input_column", "label_column", "transform", "model", "optimizer", "epochs", "global_batch_size", "seed", "num_workers", "threads_per_worker", "checkpoint_every_steps", "max_failures", "lanes", "task", "min_workers", "checkpoints", "max_preemptions", "initial_checkpoint", "loss", "precision", "accumulation_steps", "max_gradient_norm", "compile", "early_stopping", "metrics", "placement", "ingest", "training_step", "allow_non_finite", "target_scaling", "program", "acceleration", "group_by_length", "priority", "input_columns")
    class Task(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TASK_UNSPECIFIED: _ClassVar[TrainingSpec.Task]
        TASK_CLASSIFICATION: _ClassVar[TrainingSpec.Task]
        TASK_REGRESSION: _ClassVar[TrainingSpec.Task]
    TASK_UNSPECIFIED: TrainingSpec.Task
    TASK_CLASSIFICATION: TrainingSpec.Task
    TASK_REGRESSION: TrainingSpec.Task
    class TargetScaling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TARGET_SCALING_UNSPECIFIED: _ClassVar[TrainingSpec.TargetScaling]
        TARGET_SCALING_NONE: _ClassVar[TrainingSpec.TargetScaling]
        TARGET_SCALING_STANDARD: _ClassVar[TrainingSpec.TargetScaling]
    TARGET_SCALING_UNSPECIFIED: TrainingSpec.TargetScaling
    TARGET_SCALING_NONE: TrainingSpec.TargetScaling
    TARGET_SCALING_STANDARD: TrainingSpec.TargetScaling
    class Precision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PRECISION_UNSPECIFIED: _ClassVar[TrainingSpec.Precision]
        PRECISION_FLOAT32: _ClassVar[TrainingSpec.Precision]
        PRECISION_BFLOAT16: _ClassVar[TrainingSpec.Precision]
        PRECISION_FLOAT16: _ClassVar[TrainingSpec.Precision]
        PRECISION_TF32: _ClassVar[TrainingSpec.Precision]
    PRECISION_UNSPECIFIED: TrainingSpec.Precision
    PRECISION_FLOAT32: TrainingSpec.Precision
    PRECISION_BFLOAT16: TrainingSpec.Precision
    PRECISION_FLOAT16: TrainingSpec.Precision
    PRECISION_TF32: TrainingSpec.Precision
    class Ingest(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        INGEST_UNSPECIFIED: _ClassVar[TrainingSpec.Ingest]
        INGEST_THREADS: _ClassVar[TrainingSpec.Ingest]
        INGEST_RAY_DATA: _ClassVar[TrainingSpec.Ingest]
    INGEST_UNSPECIFIED: TrainingSpec.Ingest
    INGEST_THREADS: TrainingSpec.Ingest
    INGEST_RAY_DATA: TrainingSpec.Ingest
    DATASET_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRAIN_SPLIT_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_SPLIT_FIELD_NUMBER: _ClassVar[int]
    INPUT_COLUMN_FIELD_NUMBER: _ClassVar[int]
    LABEL_COLUMN_FIELD_NUMBER: _ClassVar[int]
    TRANSFORM_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    THREADS_PER_WORKER_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_EVERY_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_FAILURES_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    MIN_WORKERS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    MAX_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    INITIAL_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATION_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_GRADIENT_NORM_FIELD_NUMBER: _ClassVar[int]
    COMPILE_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    INGEST_FIELD_NUMBER: _ClassVar[int]
    TRAINING_STEP_FIELD_NUMBER: _ClassVar[int]
    ALLOW_NON_FINITE_FIELD_NUMBER: _ClassVar[int]
    TARGET_SCALING_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    ACCELERATION_FIELD_NUMBER: _ClassVar[int]
    GROUP_BY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    INPUT_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    dataset_version: str
    train_split: str
    validation_split: str
    input_column: str
    label_column: str
    transform: _transform_pb2.Transform
    model: Model
    optimizer: Optimizer
    epochs: int
    global_batch_size: int
    seed: int
    num_workers: int
    threads_per_worker: int
    checkpoint_every_steps: int
    max_failures: int
    lanes: int
    task: TrainingSpec.Task
    min_workers: int
    checkpoints: CheckpointPolicy
    max_preemptions: int
    initial_checkpoint: str
    loss: Loss
    precision: TrainingSpec.Precision
    accumulation_steps: int
    max_gradient_norm: float
    compile: bool
    early_stopping: EarlyStopping
    metrics: _containers.RepeatedScalarFieldContainer[str]
    placement: Placement
    ingest: TrainingSpec.Ingest
    training_step: str
    allow_non_finite: bool
    target_scaling: TrainingSpec.TargetScaling
    program: _code_bundle_pb2.Program
    acceleration: Acceleration
    group_by_length: str
    priority: int
    input_columns: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, dataset_version: _Optional[str] = ..., train_split: _Optional[str] = ..., validation_split: _Optional[str] = ..., input_column: _Optional[str] = ..., label_column: _Optional[str] = ..., transform: _Optional[_Union[_transform_pb2.Transform, _Mapping]] = ..., model: _Optional[_Union[Model, _Mapping]] = ..., optimizer: _Optional[_Union[Optimizer, _Mapping]] = ..., epochs: _Optional[int] = ..., global_batch_size: _Optional[int] = ..., seed: _Optional[int] = ..., num_workers: _Optional[int] = ..., threads_per_worker: _Optional[int] = ..., checkpoint_every_steps: _Optional[int] = ..., max_failures: _Optional[int] = ..., lanes: _Optional[int] = ..., task: _Optional[_Union[TrainingSpec.Task, str]] = ..., min_workers: _Optional[int] = ..., checkpoints: _Optional[_Union[CheckpointPolicy, _Mapping]] = ..., max_preemptions: _Optional[int] = ..., initial_checkpoint: _Optional[str] = ..., loss: _Optional[_Union[Loss, _Mapping]] = ..., precision: _Optional[_Union[TrainingSpec.Precision, str]] = ..., accumulation_steps: _Optional[int] = ..., max_gradient_norm: _Optional[float] = ..., compile: _Optional[bool] = ..., early_stopping: _Optional[_Union[EarlyStopping, _Mapping]] = ..., metrics: _Optional[_Iterable[str]] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ..., ingest: _Optional[_Union[TrainingSpec.Ingest, str]] = ..., training_step: _Optional[str] = ..., allow_non_finite: _Optional[bool] = ..., target_scaling: _Optional[_Union[TrainingSpec.TargetScaling, str]] = ..., program: _Optional[_Union[_code_bundle_pb2.Program, _Mapping]] = ..., acceleration: _Optional[_Union[Acceleration, _Mapping]] = ..., group_by_length: _Optional[str] = ..., priority: _Optional[int] = ..., input_columns: _Optional[_Iterable[str]] = ...) -> None: ...

class Acceleration(_message.Message):
    __slots__ = ("channels_last", "prefetch_batches", "algorithms", "transform_device")
    class Algorithms(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ALGORITHMS_UNSPECIFIED: _ClassVar[Acceleration.Algorithms]
        ALGORITHMS_DETERMINISTIC: _ClassVar[Acceleration.Algorithms]
        ALGORITHMS_FASTEST: _ClassVar[Acceleration.Algorithms]
    ALGORITHMS_UNSPECIFIED: Acceleration.Algorithms
    ALGORITHMS_DETERMINISTIC: Acceleration.Algorithms
    ALGORITHMS_FASTEST: Acceleration.Algorithms
    class TransformDevice(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TRANSFORM_DEVICE_UNSPECIFIED: _ClassVar[Acceleration.TransformDevice]
        TRANSFORM_DEVICE_CPU: _ClassVar[Acceleration.TransformDevice]
        TRANSFORM_DEVICE_WORKER: _ClassVar[Acceleration.TransformDevice]
    TRANSFORM_DEVICE_UNSPECIFIED: Acceleration.TransformDevice
    TRANSFORM_DEVICE_CPU: Acceleration.TransformDevice
    TRANSFORM_DEVICE_WORKER: Acceleration.TransformDevice
    CHANNELS_LAST_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_BATCHES_FIELD_NUMBER: _ClassVar[int]
    ALGORITHMS_FIELD_NUMBER: _ClassVar[int]
    TRANSFORM_DEVICE_FIELD_NUMBER: _ClassVar[int]
    channels_last: bool
    prefetch_batches: int
    algorithms: Acceleration.Algorithms
    transform_device: Acceleration.TransformDevice
    def __init__(self, channels_last: _Optional[bool] = ..., prefetch_batches: _Optional[int] = ..., algorithms: _Optional[_Union[Acceleration.Algorithms, str]] = ..., transform_device: _Optional[_Union[Acceleration.TransformDevice, str]] = ...) -> None: ...

class CheckpointPolicy(_message.Message):
    __slots__ = ("every", "keep_newest", "keep_best", "best_metric", "order")
    class Order(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ORDER_UNSPECIFIED: _ClassVar[CheckpointPolicy.Order]
        ORDER_MAXIMIZE: _ClassVar[CheckpointPolicy.Order]
        ORDER_MINIMIZE: _ClassVar[CheckpointPolicy.Order]
    ORDER_UNSPECIFIED: CheckpointPolicy.Order
    ORDER_MAXIMIZE: CheckpointPolicy.Order
    ORDER_MINIMIZE: CheckpointPolicy.Order
    EVERY_FIELD_NUMBER: _ClassVar[int]
    KEEP_NEWEST_FIELD_NUMBER: _ClassVar[int]
    KEEP_BEST_FIELD_NUMBER: _ClassVar[int]
    BEST_METRIC_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    every: _duration_pb2.Duration
    keep_newest: int
    keep_best: int
    best_metric: str
    order: CheckpointPolicy.Order
    def __init__(self, every: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., keep_newest: _Optional[int] = ..., keep_best: _Optional[int] = ..., best_metric: _Optional[str] = ..., order: _Optional[_Union[CheckpointPolicy.Order, str]] = ...) -> None: ...

class Loss(_message.Message):
    __slots__ = ("name", "kwargs", "label_smoothing")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KWARGS_FIELD_NUMBER: _ClassVar[int]
    LABEL_SMOOTHING_FIELD_NUMBER: _ClassVar[int]
    name: str
    kwargs: _struct_pb2.Struct
    label_smoothing: float
    def __init__(self, name: _Optional[str] = ..., kwargs: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., label_smoothing: _Optional[float] = ...) -> None: ...

class EarlyStopping(_message.Message):
    __slots__ = ("metric", "patience", "min_delta")
    METRIC_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_FIELD_NUMBER: _ClassVar[int]
    MIN_DELTA_FIELD_NUMBER: _ClassVar[int]
    metric: str
    patience: int
    min_delta: float
    def __init__(self, metric: _Optional[str] = ..., patience: _Optional[int] = ..., min_delta: _Optional[float] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("cpus_per_worker", "gpus_per_worker", "resources_per_worker", "accelerator_type", "strategy", "parallel", "backend", "timeout", "allow_cpu_fallback")
    class ResourcesPerWorkerEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    CPUS_PER_WORKER_FIELD_NUMBER: _ClassVar[int]
    GPUS_PER_WORKER_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_PER_WORKER_FIELD_NUMBER: _ClassVar[int]
    ACCELERATOR_TYPE_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    ALLOW_CPU_FALLBACK_FIELD_NUMBER: _ClassVar[int]
    cpus_per_worker: float
    gpus_per_worker: float
    resources_per_worker: _containers.ScalarMap[str, float]
    accelerator_type: str
    strategy: str
    parallel: str
    backend: str
    timeout: _duration_pb2.Duration
    allow_cpu_fallback: bool
    def __init__(self, cpus_per_worker: _Optional[float] = ..., gpus_per_worker: _Optional[float] = ..., resources_per_worker: _Optional[_Mapping[str, float]] = ..., accelerator_type: _Optional[str] = ..., strategy: _Optional[str] = ..., parallel: _Optional[str] = ..., backend: _Optional[str] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., allow_cpu_fallback: _Optional[bool] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("builder", "kwargs", "in_channels", "num_classes", "code_bundle", "entry")
    BUILDER_FIELD_NUMBER: _ClassVar[int]
    KWARGS_FIELD_NUMBER: _ClassVar[int]
    IN_CHANNELS_FIELD_NUMBER: _ClassVar[int]
    NUM_CLASSES_FIELD_NUMBER: _ClassVar[int]
    CODE_BUNDLE_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    builder: str
    kwargs: _struct_pb2.Struct
    in_channels: int
    num_classes: int
    code_bundle: str
    entry: str
    def __init__(self, builder: _Optional[str] = ..., kwargs: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., in_channels: _Optional[int] = ..., num_classes: _Optional[int] = ..., code_bundle: _Optional[str] = ..., entry: _Optional[str] = ...) -> None: ...

class Optimizer(_message.Message):
    __slots__ = ("name", "learning_rate", "kwargs", "schedule", "scheduler", "scheduler_kwargs")
    class Schedule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        SCHEDULE_UNSPECIFIED: _ClassVar[Optimizer.Schedule]
        SCHEDULE_CONSTANT: _ClassVar[Optimizer.Schedule]
        SCHEDULE_COSINE_WITH_WARMUP: _ClassVar[Optimizer.Schedule]
    SCHEDULE_UNSPECIFIED: Optimizer.Schedule
    SCHEDULE_CONSTANT: Optimizer.Schedule
    SCHEDULE_COSINE_WITH_WARMUP: Optimizer.Schedule
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    KWARGS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_KWARGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    learning_rate: float
    kwargs: _struct_pb2.Struct
    schedule: Optimizer.Schedule
    scheduler: str
    scheduler_kwargs: _struct_pb2.Struct
    def __init__(self, name: _Optional[str] = ..., learning_rate: _Optional[float] = ..., kwargs: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., schedule: _Optional[_Union[Optimizer.Schedule, str]] = ..., scheduler: _Optional[str] = ..., scheduler_kwargs: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("step", "total_steps", "epoch", "loss", "accuracy", "rows_per_second", "seconds_left", "data_wait_share", "checkpoint_stall_share", "metrics", "skipped_steps")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    ROWS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    DATA_WAIT_SHARE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STALL_SHARE_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_STEPS_FIELD_NUMBER: _ClassVar[int]
    step: int
    total_steps: int
    epoch: int
    loss: float
    accuracy: float
    rows_per_second: float
    seconds_left: float
    data_wait_share: float
    checkpoint_stall_share: float
    metrics: _containers.ScalarMap[str, float]
    skipped_steps: int
    def __init__(self, step: _Optional[int] = ..., total_steps: _Optional[int] = ..., epoch: _Optional[int] = ..., loss: _Optional[float] = ..., accuracy: _Optional[float] = ..., rows_per_second: _Optional[float] = ..., seconds_left: _Optional[float] = ..., data_wait_share: _Optional[float] = ..., checkpoint_stall_share: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., skipped_steps: _Optional[int] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("name", "step", "epoch", "metrics", "size_bytes", "manifest_sha256", "create_time", "attempt", "code_bundle")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_SHA256_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CODE_BUNDLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    step: int
    epoch: int
    metrics: _containers.ScalarMap[str, float]
    size_bytes: int
    manifest_sha256: str
    create_time: _timestamp_pb2.Timestamp
    attempt: int
    code_bundle: str
    def __init__(self, name: _Optional[str] = ..., step: _Optional[int] = ..., epoch: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., size_bytes: _Optional[int] = ..., manifest_sha256: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., attempt: _Optional[int] = ..., code_bundle: _Optional[str] = ...) -> None: ...
