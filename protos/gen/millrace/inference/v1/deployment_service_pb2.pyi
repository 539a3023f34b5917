import datetime

from google.longrunning import operations_pb2 as _operations_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import field_mask_pb2 as _field_mask_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.rpc import status_pb2 as _status_pb2
from millrace.common.v1 import lineage_pb2 as _lineage_pb2
from millrace.inference.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Deployment(_message.Message):
    __slots__ = ("name", "uid", "spec", "state", "operation", "lineage", "create_time", "update_time", "error", "etag", "versions", "rollout", "traffic")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Deployment.State]
        STATE_LOADING: _ClassVar[Deployment.State]
        STATE_READY: _ClassVar[Deployment.State]
        STATE_FAILED: _ClassVar[Deployment.State]
        STATE_DELETING: _ClassVar[Deployment.State]
        STATE_UNLOADED: _ClassVar[Deployment.State]
    STATE_UNSPECIFIED: Deployment.State
    STATE_LOADING: Deployment.State
    STATE_READY: Deployment.State
    STATE_FAILED: Deployment.State
    STATE_DELETING: Deployment.State
    STATE_UNLOADED: Deployment.State
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    UPDATE_TIME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    name: str
    uid: str
    spec: DeploymentSpec
    state: Deployment.State
    operation: str
    lineage: _lineage_pb2.Lineage
    create_time: _timestamp_pb2.Timestamp
    update_time: _timestamp_pb2.Timestamp
    error: _status_pb2.Status
    etag: str
    versions: _containers.RepeatedCompositeFieldContainer[ModelVersion]
    rollout: _rollout_pb2.Rollout
    traffic: Traffic
    def __init__(self, name: _Optional[str] = ..., uid: _Optional[str] = ..., spec: _Optional[_Union[DeploymentSpec, _Mapping]] = ..., state: _Optional[_Union[Deployment.State, str]] = ..., operation: _Optional[str] = ..., lineage: _Optional[_Union[_lineage_pb2.Lineage, _Mapping]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., update_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., etag: _Optional[str] = ..., versions: _Optional[_Iterable[_Union[ModelVersion, _Mapping]]] = ..., rollout: _Optional[_Union[_rollout_pb2.Rollout, _Mapping]] = ..., traffic: _Optional[_Union[Traffic, _Mapping]] = ...) -> None: ...

class Traffic(_message.Message):
    __slots__ = ("weights", "routes", "shadow")
    class WeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    weights: _containers.ScalarMap[str, int]
    routes: _containers.RepeatedCompositeFieldContainer[HeaderRoute]
    shadow: Shadow
    def __init__(self, weights: _Optional[_Mapping[str, int]] = ..., routes: _Optional[_Iterable[_Union[HeaderRoute, _Mapping]]] = ..., shadow: _Optional[_Union[Shadow, _Mapping]] = ...) -> None: ...

class HeaderRoute(_message.Message):
    __slots__ = ("header", "value", "version")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    header: str
    value: str
    version: str
    def __init__(self, header: _Optional[str] = ..., value: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class Shadow(_message.Message):
    __slots__ = ("version", "percent")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    version: str
    percent: int
    def __init__(self, version: _Optional[str] = ..., percent: _Optional[int] = ...) -> None: ...

class ModelVersion(_message.Message):
    __slots__ = ("number", "state", "weight", "lineage", "replicas")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[ModelVersion.State]
        STATE_LOADING: _ClassVar[ModelVersion.State]
        STATE_READY: _ClassVar[ModelVersion.State]
        STATE_RETIRING: _ClassVar[ModelVersion.State]
    STATE_UNSPECIFIED: ModelVersion.State
    STATE_LOADING: ModelVersion.State
    STATE_READY: ModelVersion.State
    STATE_RETIRING: ModelVersion.State
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    number: str
    state: ModelVersion.State
    weight: int
    lineage: _lineage_pb2.Lineage
    replicas: int
    def __init__(self, number: _Optional[str] = ..., state: _Optional[_Union[ModelVersion.State, str]] = ..., weight: _Optional[int] = ..., lineage: _Optional[_Union[_lineage_pb2.Lineage, _Mapping]] = ..., replicas: _Optional[int] = ...) -> None: ...

class VersionPolicy(_message.Message):
    __slots__ = ("latest", "all", "named")
    class Latest(_message.Message):
        __slots__ = ("count",)
        COUNT_FIELD_NUMBER: _ClassVar[int]
        count: int
        def __init__(self, count: _Optional[int] = ...) -> None: ...
    class All(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class Named(_message.Message):
        __slots__ = ("versions",)
        VERSIONS_FIELD_NUMBER: _ClassVar[int]
        versions: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, versions: _Optional[_Iterable[str]] = ...) -> None: ...
    LATEST_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    latest: VersionPolicy.Latest
    all: VersionPolicy.All
    named: VersionPolicy.Named
    def __init__(self, latest: _Optional[_Union[VersionPolicy.Latest, _Mapping]] = ..., all: _Optional[_Union[VersionPolicy.All, _Mapping]] = ..., named: _Optional[_Union[VersionPolicy.Named, _Mapping]] = ...) -> None: ...

class DeploymentSpec(_message.Message):
    __slots__ = ("checkpoint", "num_replicas", "threads_per_replica", "max_batch_size", "max_batch_delay", "max_queued_rows", "version_policy", "autoscaling", "cpus_per_replica", "gpus_per_replica", "allow_non_finite", "predictor")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    THREADS_PER_REPLICA_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_DELAY_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_ROWS_FIELD_NUMBER: _ClassVar[int]
    VERSION_POLICY_FIELD_NUMBER: _ClassVar[int]
    AUTOSCALING_FIELD_NUMBER: _ClassVar[int]
    CPUS_PER_REPLICA_FIELD_NUMBER: _ClassVar[int]
    GPUS_PER_REPLICA_FIELD_NUMBER: _ClassVar[int]
    ALLOW_NON_FINITE_FIELD_NUMBER: _ClassVar[int]
    PREDICTOR_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    num_replicas: int
    threads_per_replica: int
    max_batch_size: int
    max_batch_delay: _duration_pb2.Duration
    max_queued_rows: int
    version_policy: VersionPolicy
    autoscaling: Autoscaling
    cpus_per_replica: float
    gpus_per_replica: float
    allow_non_finite: bool
    predictor: str
    def __init__(self, checkpoint: _Optional[str] = ..., num_replicas: _Optional[int] = ..., threads_per_replica: _Optional[int] = ..., max_batch_size: _Optional[int] = ..., max_batch_delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_queued_rows: _Optional[int] = ..., version_policy: _Optional[_Union[VersionPolicy, _Mapping]] = ..., autoscaling: _Optional[_Union[Autoscaling, _Mapping]] = ..., cpus_per_replica: _Optional[float] = ..., gpus_per_replica: _Optional[float] = ..., allow_non_finite: _Optional[bool] = ..., predictor: _Optional[str] = ...) -> None: ...

class Autoscaling(_message.Message):
    __slots__ = ("min_replicas", "max_replicas", "rows_per_replica", "scale_up_after", "scale_down_after")
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MAX_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    ROWS_PER_REPLICA_FIELD_NUMBER: _ClassVar[int]
    SCALE_UP_AFTER_FIELD_NUMBER: _ClassVar[int]
    SCALE_DOWN_AFTER_FIELD_NUMBER: _ClassVar[int]
    min_replicas: int
    max_replicas: int
    rows_per_replica: int
    scale_up_after: _duration_pb2.Duration
    scale_down_after: _duration_pb2.Duration
    def __init__(self, min_replicas: _Optional[int] = ..., max_replicas: _Optional[int] = ..., rows_per_replica: _Optional[int] = ..., scale_up_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., scale_down_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class CreateDeploymentRequest(_message.Message):
    __slots__ = ("deployment_id", "spec", "request_id", "validate_only")
    DEPLOYMENT_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    deployment_id: str
    spec: DeploymentSpec
    request_id: str
    validate_only: bool
    def __init__(self, deployment_id: _Optional[str] = ..., spec: _Optional[_Union[DeploymentSpec, _Mapping]] = ..., request_id: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class DeploymentMetadata(_message.Message):
    __slots__ = ("deployment", "create_time")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    create_time: _timestamp_pb2.Timestamp
    def __init__(self, deployment: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GetDeploymentRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class WatchDeploymentRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListDeploymentsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListDeploymentsResponse(_message.Message):
    __slots__ = ("deployments", "next_page_token")
    DEPLOYMENTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    deployments: _containers.RepeatedCompositeFieldContainer[Deployment]
    next_page_token: str
    def __init__(self, deployments: _Optional[_Iterable[_Union[Deployment, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteDeploymentRequest(_message.Message):
    __slots__ = ("name", "etag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ...) -> None: ...

class DeleteDeploymentResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RolloutRequest(_message.Message):
    __slots__ = ("name", "spec", "etag", "request_id", "validate_only")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    name: str
    spec: _rollout_pb2.RolloutSpec
    etag: str
    request_id: str
    validate_only: bool
    def __init__(self, name: _Optional[str] = ..., spec: _Optional[_Union[_rollout_pb2.RolloutSpec, _Mapping]] = ..., etag: _Optional[str] = ..., request_id: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class RolloutMetadata(_message.Message):
    __slots__ = ("deployment", "rollout")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    rollout: _rollout_pb2.Rollout
    def __init__(self, deployment: _Optional[str] = ..., rollout: _Optional[_Union[_rollout_pb2.Rollout, _Mapping]] = ...) -> None: ...

class UpdateDeploymentRequest(_message.Message):
    __slots__ = ("deployment", "update_mask")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    deployment: Deployment
    update_mask: _field_mask_pb2.FieldMask
    def __init__(self, deployment: _Optional[_Union[Deployment, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ...) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("name", "etag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ...) -> None: ...
