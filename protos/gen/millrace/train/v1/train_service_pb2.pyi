import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from millrace.train.v1 import checkpoint_import_pb2 as _checkpoint_import_pb2
from millrace.train.v1 import code_bundle_pb2 as _code_bundle_pb2
from millrace.train.v1 import resources_pb2 as _resources_pb2
from millrace.train.v1 import suggestion_pb2 as _suggestion_pb2
from millrace.train.v1 import sweep_pb2 as _sweep_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
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

class GetImportedWeightsRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("sequence", "time", "attempt", "attempt_started", "progress", "validated", "checkpoint_committed", "warning", "attempt_ended", "device_changed")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_STARTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    VALIDATED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ENDED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_CHANGED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    time: _timestamp_pb2.Timestamp
    attempt: int
    attempt_started: AttemptStarted
    progress: _resources_pb2.Progress
    validated: Validated
    checkpoint_committed: _resources_pb2.Checkpoint
    warning: str
    attempt_ended: AttemptEnded
    device_changed: DeviceChanged
    def __init__(self, sequence: _Optional[int] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., attempt: _Optional[int] = ..., attempt_started: _Optional[_Union[AttemptStarted, _Mapping]] = ..., progress: _Optional[_Union[_resources_pb2.Progress, _Mapping]] = ..., validated: _Optional[_Union[Validated, _Mapping]] = ..., checkpoint_committed: _Optional[_Union[_resources_pb2.Checkpoint, _Mapping]] = ..., warning: _Optional[str] = ..., attempt_ended: _Optional[_Union[AttemptEnded, _Mapping]] = ..., device_changed: _Optional[_Union[DeviceChanged, _Mapping]] = ...) -> None: ...

class AttemptStarted(_message.Message):
    __slots__ = ("num_workers", "step", "checkpoint")
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    num_workers: int
    step: int
    checkpoint: str
    def __init__(self, num_workers: _Optional[int] = ..., step: _Optional[int] = ..., checkpoint: _Optional[str] = ...) -> None: ...

class DeviceChanged(_message.Message):
    __slots__ = ("before", "device", "text")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    before: _resources_pb2.Device
    device: _resources_pb2.Device
    text: str
    def __init__(self, before: _Optional[_Union[_resources_pb2.Device, str]] = ..., device: _Optional[_Union[_resources_pb2.Device, str]] = ..., text: _Optional[str] = ...) -> None: ...

class AttemptEnded(_message.Message):
    __slots__ = ("cause", "text", "ranks")
    class Cause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CAUSE_UNSPECIFIED: _ClassVar[AttemptEnded.Cause]
        CAUSE_FAILURE: _ClassVar[AttemptEnded.Cause]
        CAUSE_HUNG: _ClassVar[AttemptEnded.Cause]
        CAUSE_PREEMPTED: _ClassVar[AttemptEnded.Cause]
        CAUSE_RESIZED: _ClassVar[AttemptEnded.Cause]
        CAUSE_SUSPENDED: _ClassVar[AttemptEnded.Cause]
        CAUSE_CANCELLED: _ClassVar[AttemptEnded.Cause]
    CAUSE_UNSPECIFIED: AttemptEnded.Cause
    CAUSE_FAILURE: AttemptEnded.Cause
    CAUSE_HUNG: AttemptEnded.Cause
    CAUSE_PREEMPTED: AttemptEnded.Cause
    CAUSE_RESIZED: AttemptEnded.Cause
    CAUSE_SUSPENDED: AttemptEnded.Cause
    CAUSE_CANCELLED: AttemptEnded.Cause
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    cause: AttemptEnded.Cause
    text: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, cause: _Optional[_Union[AttemptEnded.Cause, str]] = ..., text: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class Validated(_message.Message):
    __slots__ = ("step", "epoch", "loss", "accuracy", "row_count", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    step: int
    epoch: int
    loss: float
    accuracy: float
    row_count: int
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., epoch: _Optional[int] = ..., loss: _Optional[float] = ..., accuracy: _Optional[float] = ..., row_count: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class SuspendTrainingJobRequest(_message.Message):
    __slots__ = ("name", "etag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ...) -> None: ...

class ResumeTrainingJobRequest(_message.Message):
    __slots__ = ("name", "etag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ...) -> None: ...

class DeleteTrainingJobRequest(_message.Message):
    __slots__ = ("name", "etag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ...) -> None: ...

class GetCoverageRequest(_message.Message):
    __slots__ = ("name", "epoch", "checkpoint", "shard")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    name: str
    epoch: int
    checkpoint: str
    shard: str
    def __init__(self, name: _Optional[str] = ..., epoch: _Optional[int] = ..., checkpoint: _Optional[str] = ..., shard: _Optional[str] = ...) -> None: ...

class Coverage(_message.Message):
    __slots__ = ("training_job", "epoch", "checkpoint", "row_count", "seen_once", "missing", "repeated", "missing_row_ids", "repeated_row_ids", "epoch_done", "skipped", "skipped_row_ids", "skipped_steps", "witness", "shard")
    class Witness(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        WITNESS_UNSPECIFIED: _ClassVar[Coverage.Witness]
        WITNESS_OPTIMIZER: _ClassVar[Coverage.Witness]
        WITNESS_GIVEN: _ClassVar[Coverage.Witness]
        WITNESS_INDICES: _ClassVar[Coverage.Witness]
        WITNESS_NONE: _ClassVar[Coverage.Witness]
    WITNESS_UNSPECIFIED: Coverage.Witness
    WITNESS_OPTIMIZER: Coverage.Witness
    WITNESS_GIVEN: Coverage.Witness
    WITNESS_INDICES: Coverage.Witness
    WITNESS_NONE: Coverage.Witness
    TRAINING_JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    SEEN_ONCE_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    REPEATED_FIELD_NUMBER: _ClassVar[int]
    MISSING_ROW_IDS_FIELD_NUMBER: _ClassVar[int]
    REPEATED_ROW_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_DONE_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_ROW_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_STEPS_FIELD_NUMBER: _ClassVar[int]
    WITNESS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    training_job: str
    epoch: int
    checkpoint: str
    row_count: int
    seen_once: int
    missing: int
    repeated: int
    missing_row_ids: _containers.RepeatedScalarFieldContainer[int]
    repeated_row_ids: _containers.RepeatedScalarFieldContainer[int]
    epoch_done: bool
    skipped: int
    skipped_row_ids: _containers.RepeatedScalarFieldContainer[int]
    skipped_steps: int
    witness: Coverage.Witness
    shard: str
    def __init__(self, training_job: _Optional[str] = ..., epoch: _Optional[int] = ..., checkpoint: _Optional[str] = ..., row_count: _Optional[int] = ..., seen_once: _Optional[int] = ..., missing: _Optional[int] = ..., repeated: _Optional[int] = ..., missing_row_ids: _Optional[_Iterable[int]] = ..., repeated_row_ids: _Optional[_Iterable[int]] = ..., epoch_done: _Optional[bool] = ..., skipped: _Optional[int] = ..., skipped_row_ids: _Optional[_Iterable[int]] = ..., skipped_steps: _Optional[int] = ..., witness: _Optional[_Union[Coverage.Witness, str]] = ..., shard: _Optional[str] = ...) -> None: ...

class ListMetricsRequest(_message.Message):
    __slots__ = ("name", "after_step", "page_size", "page_token")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AFTER_STEP_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    after_step: int
    page_size: int
    page_token: str
    def __init__(self, name: _Optional[str] = ..., after_step: _Optional[int] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListMetricsResponse(_message.Message):
    __slots__ = ("points", "next_page_token")
    POINTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    points: _containers.RepeatedCompositeFieldContainer[MetricPoint]
    next_page_token: str
    def __init__(self, points: _Optional[_Iterable[_Union[MetricPoint, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class MetricPoint(_message.Message):
    __slots__ = ("step", "epoch", "attempt", "time", "values")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    step: int
    epoch: int
    attempt: int
    time: _timestamp_pb2.Timestamp
    values: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., epoch: _Optional[int] = ..., attempt: _Optional[int] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class StreamLogsRequest(_message.Message):
    __slots__ = ("name", "attempt", "rank", "follow")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    name: str
    attempt: int
    rank: int
    follow: bool
    def __init__(self, name: _Optional[str] = ..., attempt: _Optional[int] = ..., rank: _Optional[int] = ..., follow: _Optional[bool] = ...) -> None: ...

class StreamLogsResponse(_message.Message):
    __slots__ = ("attempt", "rank", "text")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    rank: int
    text: str
    def __init__(self, attempt: _Optional[int] = ..., rank: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

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

class GetCheckpointRequest(_message.Message):
    __slots__ = ("name", "manifest_sha256", "path", "offset")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_SHA256_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    name: str
    manifest_sha256: str
    path: str
    offset: int
    def __init__(self, name: _Optional[str] = ..., manifest_sha256: _Optional[str] = ..., path: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class GetCheckpointResponse(_message.Message):
    __slots__ = ("header", "file", "chunk")
    class Header(_message.Message):
        __slots__ = ("checkpoint", "file_count", "size_bytes")
        CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
        FILE_COUNT_FIELD_NUMBER: _ClassVar[int]
        SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
        checkpoint: _resources_pb2.Checkpoint
        file_count: int
        size_bytes: int
        def __init__(self, checkpoint: _Optional[_Union[_resources_pb2.Checkpoint, _Mapping]] = ..., file_count: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...
    class File(_message.Message):
        __slots__ = ("path", "size_bytes", "sha256", "offset")
        PATH_FIELD_NUMBER: _ClassVar[int]
        SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
        SHA256_FIELD_NUMBER: _ClassVar[int]
        OFFSET_FIELD_NUMBER: _ClassVar[int]
        path: str
        size_bytes: int
        sha256: str
        offset: int
        def __init__(self, path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: GetCheckpointResponse.Header
    file: GetCheckpointResponse.File
    chunk: bytes
    def __init__(self, header: _Optional[_Union[GetCheckpointResponse.Header, _Mapping]] = ..., file: _Optional[_Union[GetCheckpointResponse.File, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class GetClusterUseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClusterUse(_message.Message):
    __slots__ = ("time", "nodes", "cpus", "gpus", "free_cpus", "free_gpus", "holders")
    class Holder(_message.Message):
        __slots__ = ("job", "deployment_uid", "description", "cpus", "gpus")
        JOB_FIELD_NUMBER: _ClassVar[int]
        DEPLOYMENT_UID_FIELD_NUMBER: _ClassVar[int]
        DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
        CPUS_FIELD_NUMBER: _ClassVar[int]
        GPUS_FIELD_NUMBER: _ClassVar[int]
        job: str
        deployment_uid: str
        description: str
        cpus: float
        gpus: float
        def __init__(self, job: _Optional[str] = ..., deployment_uid: _Optional[str] = ..., description: _Optional[str] = ..., cpus: _Optional[float] = ..., gpus: _Optional[float] = ...) -> None: ...
    TIME_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    FREE_CPUS_FIELD_NUMBER: _ClassVar[int]
    FREE_GPUS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    time: _timestamp_pb2.Timestamp
    nodes: int
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float
    holders: _containers.RepeatedCompositeFieldContainer[ClusterUse.Holder]
    def __init__(self, time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., nodes: _Optional[int] = ..., cpus: _Optional[float] = ..., gpus: _Optional[float] = ..., free_cpus: _Optional[float] = ..., free_gpus: _Optional[float] = ..., holders: _Optional[_Iterable[_Union[ClusterUse.Holder, _Mapping]]] = ...) -> None: ...

class CreateSweepRequest(_message.Message):
    __slots__ = ("sweep_id", "spec", "request_id", "validate_only")
    SWEEP_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    sweep_id: str
    spec: _sweep_pb2.SweepSpec
    request_id: str
    validate_only: bool
    def __init__(self, sweep_id: _Optional[str] = ..., spec: _Optional[_Union[_sweep_pb2.SweepSpec, _Mapping]] = ..., request_id: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class GetSweepRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListSweepsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSweepsResponse(_message.Message):
    __slots__ = ("sweeps", "next_page_token")
    SWEEPS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sweeps: _containers.RepeatedCompositeFieldContainer[_sweep_pb2.Sweep]
    next_page_token: str
    def __init__(self, sweeps: _Optional[_Iterable[_Union[_sweep_pb2.Sweep, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CancelSweepRequest(_message.Message):
    __slots__ = ("name", "etag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ...) -> None: ...

class DeleteSweepRequest(_message.Message):
    __slots__ = ("name", "etag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ...) -> None: ...

class CreateCodeBundleRequest(_message.Message):
    __slots__ = ("header", "chunk")
    class Header(_message.Message):
        __slots__ = ("sha256", "size_bytes")
        SHA256_FIELD_NUMBER: _ClassVar[int]
        SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
        sha256: str
        size_bytes: int
        def __init__(self, sha256: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: CreateCodeBundleRequest.Header
    chunk: bytes
    def __init__(self, header: _Optional[_Union[CreateCodeBundleRequest.Header, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class GetCodeBundleRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListCodeBundlesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListCodeBundlesResponse(_message.Message):
    __slots__ = ("code_bundles", "next_page_token")
    CODE_BUNDLES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    code_bundles: _containers.RepeatedCompositeFieldContainer[_code_bundle_pb2.CodeBundle]
    next_page_token: str
    def __init__(self, code_bundles: _Optional[_Iterable[_Union[_code_bundle_pb2.CodeBundle, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteCodeBundleRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteCodeBundleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
