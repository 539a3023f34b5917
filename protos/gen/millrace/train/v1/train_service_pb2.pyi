import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from millrace.train.v1 import resources_pb2 as _resources_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateTrainingJobRequest(_message.Message):
    __slots__ = ("training_job_id", "spec", "request_id", "validate_only")
    TRAINING_JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    training_job_id: str
    spec: _resources_pb2.TrainingSpec
    request_id: str
    validate_only: bool
    def __init__(self, training_job_id: _Optional[str] = ..., spec: _Optional[_Union[_resources_pb2.TrainingSpec, _Mapping]] = ..., request_id: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class GetTrainingJobRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListTrainingJobsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListTrainingJobsResponse(_message.Message):
    __slots__ = ("training_jobs", "next_page_token")
    TRAINING_JOBS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    training_jobs: _containers.RepeatedCompositeFieldContainer[_resources_pb2.TrainingJob]
    next_page_token: str
    def __init__(self, training_jobs: _Optional[_Iterable[_Union[_resources_pb2.TrainingJob, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CancelTrainingJobRequest(_message.Message):
    __slots__ = ("name", "etag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ...) -> None: ...

class WatchTrainingJobRequest(_message.Message):
    __slots__ = ("name", "after_sequence")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    after_sequence: int
    def __init__(self, name: _Optional[str] = ..., after_sequence: _Optional[int] = ...) -> None: ...

class WatchTrainingJobResponse(_message.Message):
    __slots__ = ("job", "event")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    job: _resources_pb2.TrainingJob
    event: TrainingEvent
    def __init__(self, job: _Optional[_Union[_resources_pb2.TrainingJob, _Mapping]] = ..., event: _Optional[_Union[TrainingEvent, _Mapping]] = ...) -> None: ...

class TrainingEvent(_message.Message):
    __slots__ = ("sequence", "time", "attempt", "attempt_started", "progress", "validated", "checkpoint_committed", "warning")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_STARTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    VALIDATED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    time: _timestamp_pb2.Timestamp
    attempt: int
    attempt_started: AttemptStarted
    progress: _resources_pb2.Progress
    validated: Validated
    checkpoint_committed: _resources_pb2.Checkpoint
    warning: str
    def __init__(self, sequence: _Optional[int] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., attempt: _Optional[int] = ..., attempt_started: _Optional[_Union[AttemptStarted, _Mapping]] = ..., progress: _Optional[_Union[_resources_pb2.Progress, _Mapping]] = ..., validated: _Optional[_Union[Validated, _Mapping]] = ..., checkpoint_committed: _Optional[_Union[_resources_pb2.Checkpoint, _Mapping]] = ..., warning: _Optional[str] = ...) -> None: ...

class AttemptStarted(_message.Message):
    __slots__ = ("num_workers", "step", "checkpoint")
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    num_workers: int
    step: int
    checkpoint: str
    def __init__(self, num_workers: _Optional[int] = ..., step: _Optional[int] = ..., checkpoint: _Optional[str] = ...) -> None: ...

class Validated(_message.Message):
    __slots__ = ("step", "epoch", "loss", "accuracy", "row_count")
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    step: int
    epoch: int
    loss: float
    accuracy: float
    row_count: int
    def __init__(self, step: _Optional[int] = ..., epoch: _Optional[int] = ..., loss: _Optional[float] = ..., accuracy: _Optional[float] = ..., row_count: _Optional[int] = ...) -> None: ...

class ListCheckpointsRequest(_message.Message):
    __slots__ = ("parent", "page_size", "page_token")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    parent: str
    page_size: int
    page_token: str
    def __init__(self, parent: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListCheckpointsResponse(_message.Message):
    __slots__ = ("checkpoints", "next_page_token")
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    checkpoints: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Checkpoint]
    next_page_token: str
    def __init__(self, checkpoints: _Optional[_Iterable[_Union[_resources_pb2.Checkpoint, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...
