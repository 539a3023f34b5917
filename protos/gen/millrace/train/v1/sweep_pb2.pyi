import datetime

from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.rpc import status_pb2 as _status_pb2
from millrace.train.v1 import resources_pb2 as _resources_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Sweep(_message.Message):
    __slots__ = ("name", "uid", "spec", "state", "attempt", "create_time", "update_time", "error", "etag", "trials", "counts", "best_training_job", "best_checkpoint")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Sweep.State]
        STATE_PENDING: _ClassVar[Sweep.State]
        STATE_RUNNING: _ClassVar[Sweep.State]
        STATE_RECOVERING: _ClassVar[Sweep.State]
        STATE_CANCELLING: _ClassVar[Sweep.State]
        STATE_SUCCEEDED: _ClassVar[Sweep.State]
        STATE_FAILED: _ClassVar[Sweep.State]
        STATE_CANCELLED: _ClassVar[Sweep.State]
        STATE_DELETING: _ClassVar[Sweep.State]
    STATE_UNSPECIFIED: Sweep.State
    STATE_PENDING: Sweep.State
    STATE_RUNNING: Sweep.State
    STATE_RECOVERING: Sweep.State
    STATE_CANCELLING: Sweep.State
    STATE_SUCCEEDED: Sweep.State
    STATE_FAILED: Sweep.State
    STATE_CANCELLED: Sweep.State
    STATE_DELETING: Sweep.State
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    UPDATE_TIME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    TRIALS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    BEST_TRAINING_JOB_FIELD_NUMBER: _ClassVar[int]
    BEST_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    uid: str
    spec: SweepSpec
    state: Sweep.State
    attempt: int
    create_time: _timestamp_pb2.Timestamp
    update_time: _timestamp_pb2.Timestamp
    error: _status_pb2.Status
    etag: str
    trials: _containers.RepeatedCompositeFieldContainer[Trial]
    counts: TrialCounts
    best_training_job: str
    best_checkpoint: str
    def __init__(self, name: _Optional[str] = ..., uid: _Optional[str] = ..., spec: _Optional[_Union[SweepSpec, _Mapping]] = ..., state: _Optional[_Union[Sweep.State, str]] = ..., attempt: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., update_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., etag: _Optional[str] = ..., trials: _Optional[_Iterable[_Union[Trial, _Mapping]]] = ..., counts: _Optional[_Union[TrialCounts, _Mapping]] = ..., best_training_job: _Optional[str] = ..., best_checkpoint: _Optional[str] = ...) -> None: ...

class SweepSpec(_message.Message):
    __slots__ = ("base", "parameters", "num_samples", "seed", "metric", "order", "max_concurrent_trials", "asha")
    class ParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Domain
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Domain, _Mapping]] = ...) -> None: ...
    BASE_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    METRIC_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENT_TRIALS_FIELD_NUMBER: _ClassVar[int]
    ASHA_FIELD_NUMBER: _ClassVar[int]
    base: _resources_pb2.TrainingSpec
    parameters: _containers.MessageMap[str, Domain]
    num_samples: int
    seed: int
    metric: str
    order: _resources_pb2.CheckpointPolicy.Order
    max_concurrent_trials: int
    asha: Asha
    def __init__(self, base: _Optional[_Union[_resources_pb2.TrainingSpec, _Mapping]] = ..., parameters: _Optional[_Mapping[str, Domain]] = ..., num_samples: _Optional[int] = ..., seed: _Optional[int] = ..., metric: _Optional[str] = ..., order: _Optional[_Union[_resources_pb2.CheckpointPolicy.Order, str]] = ..., max_concurrent_trials: _Optional[int] = ..., asha: _Optional[_Union[Asha, _Mapping]] = ...) -> None: ...

class Domain(_message.Message):
    __slots__ = ("grid", "choice", "uniform", "log_uniform", "integers")
    GRID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    UNIFORM_FIELD_NUMBER: _ClassVar[int]
    LOG_UNIFORM_FIELD_NUMBER: _ClassVar[int]
    INTEGERS_FIELD_NUMBER: _ClassVar[int]
    grid: Values
    choice: Values
    uniform: Range
    log_uniform: Range
    integers: IntegerRange
    def __init__(self, grid: _Optional[_Union[Values, _Mapping]] = ..., choice: _Optional[_Union[Values, _Mapping]] = ..., uniform: _Optional[_Union[Range, _Mapping]] = ..., log_uniform: _Optional[_Union[Range, _Mapping]] = ..., integers: _Optional[_Union[IntegerRange, _Mapping]] = ...) -> None: ...

class Values(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedCompositeFieldContainer[_struct_pb2.Value]
    def __init__(self, values: _Optional[_Iterable[_Union[_struct_pb2.Value, _Mapping]]] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("low", "high")
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    low: float
    high: float
    def __init__(self, low: _Optional[float] = ..., high: _Optional[float] = ...) -> None: ...

class IntegerRange(_message.Message):
    __slots__ = ("low", "high")
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    low: int
    high: int
    def __init__(self, low: _Optional[int] = ..., high: _Optional[int] = ...) -> None: ...

class Asha(_message.Message):
    __slots__ = ("grace_period", "reduction_factor", "max_t")
    GRACE_PERIOD_FIELD_NUMBER: _ClassVar[int]
    REDUCTION_FACTOR_FIELD_NUMBER: _ClassVar[int]
    MAX_T_FIELD_NUMBER: _ClassVar[int]
    grace_period: int
    reduction_factor: float
    max_t: int
    def __init__(self, grace_period: _Optional[int] = ..., reduction_factor: _Optional[float] = ..., max_t: _Optional[int] = ...) -> None: ...

class Trial(_message.Message):
    __slots__ = ("number", "training_job", "parameters", "state", "stopped_early", "last_value", "best_value", "best_checkpoint", "epochs_done", "epochs", "error", "deleted")
    class ParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _struct_pb2.Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_struct_pb2.Value, _Mapping]] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TRAINING_JOB_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STOPPED_EARLY_FIELD_NUMBER: _ClassVar[int]
    LAST_VALUE_FIELD_NUMBER: _ClassVar[int]
    BEST_VALUE_FIELD_NUMBER: _ClassVar[int]
    BEST_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_DONE_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    number: int
    training_job: str
    parameters: _containers.MessageMap[str, _struct_pb2.Value]
    state: _resources_pb2.TrainingJob.State
    stopped_early: bool
    last_value: float
    best_value: float
    best_checkpoint: str
    epochs_done: int
    epochs: int
    error: _status_pb2.Status
    deleted: bool
    def __init__(self, number: _Optional[int] = ..., training_job: _Optional[str] = ..., parameters: _Optional[_Mapping[str, _struct_pb2.Value]] = ..., state: _Optional[_Union[_resources_pb2.TrainingJob.State, str]] = ..., stopped_early: _Optional[bool] = ..., last_value: _Optional[float] = ..., best_value: _Optional[float] = ..., best_checkpoint: _Optional[str] = ..., epochs_done: _Optional[int] = ..., epochs: _Optional[int] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., deleted: _Optional[bool] = ...) -> None: ...

class TrialCounts(_message.Message):
    __slots__ = ("total", "pending", "running", "succeeded", "stopped_early", "failed", "cancelled")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    SUCCEEDED_FIELD_NUMBER: _ClassVar[int]
    STOPPED_EARLY_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    total: int
    pending: int
    running: int
    succeeded: int
    stopped_early: int
    failed: int
    cancelled: int
    def __init__(self, total: _Optional[int] = ..., pending: _Optional[int] = ..., running: _Optional[int] = ..., succeeded: _Optional[int] = ..., stopped_early: _Optional[int] = ..., failed: _Optional[int] = ..., cancelled: _Optional[int] = ...) -> None: ...
