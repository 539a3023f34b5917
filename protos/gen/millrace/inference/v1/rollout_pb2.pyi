import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Rollout(_message.Message):
    __slots__ = ("state", "version", "operation", "spec", "step", "create_time", "step_time", "end_time", "error", "compared")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Rollout.State]
        STATE_LOADING: _ClassVar[Rollout.State]
        STATE_SHIFTING: _ClassVar[Rollout.State]
        STATE_SUCCEEDED: _ClassVar[Rollout.State]
        STATE_ROLLED_BACK: _ClassVar[Rollout.State]
        STATE_UNDONE: _ClassVar[Rollout.State]
        STATE_COMPARING: _ClassVar[Rollout.State]
    STATE_UNSPECIFIED: Rollout.State
    STATE_LOADING: Rollout.State
    STATE_SHIFTING: Rollout.State
    STATE_SUCCEEDED: Rollout.State
    STATE_ROLLED_BACK: Rollout.State
    STATE_UNDONE: Rollout.State
    STATE_COMPARING: Rollout.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    COMPARED_FIELD_NUMBER: _ClassVar[int]
    state: Rollout.State
    version: str
    operation: str
    spec: RolloutSpec
    step: int
    create_time: _timestamp_pb2.Timestamp
    step_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    error: _status_pb2.Status
    compared: Compared
    def __init__(self, state: _Optional[_Union[Rollout.State, str]] = ..., version: _Optional[str] = ..., operation: _Optional[str] = ..., spec: _Optional[_Union[RolloutSpec, _Mapping]] = ..., step: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., step_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., compared: _Optional[_Union[Compared, _Mapping]] = ...) -> None: ...

class RolloutSpec(_message.Message):
    __slots__ = ("checkpoint", "steps", "limits", "allow_new_signature", "comparison")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    ALLOW_NEW_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    COMPARISON_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    steps: _containers.RepeatedCompositeFieldContainer[RolloutStep]
    limits: RolloutLimits
    allow_new_signature: bool
    comparison: Comparison
    def __init__(self, checkpoint: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[RolloutStep, _Mapping]]] = ..., limits: _Optional[_Union[RolloutLimits, _Mapping]] = ..., allow_new_signature: _Optional[bool] = ..., comparison: _Optional[_Union[Comparison, _Mapping]] = ...) -> None: ...

class Comparison(_message.Message):
    __slots__ = ("dataset_version", "split", "max_rows", "min_agreement", "max_difference")
    DATASET_VERSION_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    MIN_AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    MAX_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    dataset_version: str
    split: str
    max_rows: int
    min_agreement: float
    max_difference: float
    def __init__(self, dataset_version: _Optional[str] = ..., split: _Optional[str] = ..., max_rows: _Optional[int] = ..., min_agreement: _Optional[float] = ..., max_difference: _Optional[float] = ...) -> None: ...

class Compared(_message.Message):
    __slots__ = ("rows", "agreement", "difference", "refused", "refused_by_one")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_BY_ONE_FIELD_NUMBER: _ClassVar[int]
    rows: int
    agreement: float
    difference: float
    refused: int
    refused_by_one: int
    def __init__(self, rows: _Optional[int] = ..., agreement: _Optional[float] = ..., difference: _Optional[float] = ..., refused: _Optional[int] = ..., refused_by_one: _Optional[int] = ...) -> None: ...

class RolloutStep(_message.Message):
    __slots__ = ("percent", "interval")
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    percent: int
    interval: _duration_pb2.Duration
    def __init__(self, percent: _Optional[int] = ..., interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RolloutLimits(_message.Message):
    __slots__ = ("max_error_share", "max_p99_latency", "max_p99_ratio", "min_requests", "window")
    MAX_ERROR_SHARE_FIELD_NUMBER: _ClassVar[int]
    MAX_P99_LATENCY_FIELD_NUMBER: _ClassVar[int]
    MAX_P99_RATIO_FIELD_NUMBER: _ClassVar[int]
    MIN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    max_error_share: float
    max_p99_latency: _duration_pb2.Duration
    max_p99_ratio: float
    min_requests: int
    window: _duration_pb2.Duration
    def __init__(self, max_error_share: _Optional[float] = ..., max_p99_latency: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_p99_ratio: _Optional[float] = ..., min_requests: _Optional[int] = ..., window: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
