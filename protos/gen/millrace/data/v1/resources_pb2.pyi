import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.rpc import status_pb2 as _status_pb2
from millrace.common.v1 import transform_pb2 as _transform_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Dataset(_message.Message):
    __slots__ = ("name", "uid", "display_name", "description", "create_time", "etag", "retention")
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    name: str
    uid: str
    display_name: str
    description: str
    create_time: _timestamp_pb2.Timestamp
    etag: str
    retention: Retention
    def __init__(self, name: _Optional[str] = ..., uid: _Optional[str] = ..., display_name: _Optional[str] = ..., description: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., etag: _Optional[str] = ..., retention: _Optional[_Union[Retention, _Mapping]] = ...) -> None: ...

class Retention(_message.Message):
    __slots__ = ("keep_newest", "max_age")
    KEEP_NEWEST_FIELD_NUMBER: _ClassVar[int]
    MAX_AGE_FIELD_NUMBER: _ClassVar[int]
    keep_newest: int
    max_age: _duration_pb2.Duration
    def __init__(self, keep_newest: _Optional[int] = ..., max_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DatasetVersion(_message.Message):
    __slots__ = ("name", "uid", "state", "operation", "create_time", "commit_time", "columns", "splits", "files", "row_count", "size_bytes", "manifest_sha256", "error", "etag", "parents", "transform", "quarantined_row_count", "prediction", "file_count")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[DatasetVersion.State]
        STATE_CREATING: _ClassVar[DatasetVersion.State]
        STATE_ACTIVE: _ClassVar[DatasetVersion.State]
        STATE_FAILED: _ClassVar[DatasetVersion.State]
        STATE_CANCELLED: _ClassVar[DatasetVersion.State]
        STATE_DELETING: _ClassVar[DatasetVersion.State]
    STATE_UNSPECIFIED: DatasetVersion.State
    STATE_CREATING: DatasetVersion.State
    STATE_ACTIVE: DatasetVersion.State
    STATE_FAILED: DatasetVersion.State
    STATE_CANCELLED: DatasetVersion.State
    STATE_DELETING: DatasetVersion.State
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    COMMIT_TIME_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    SPLITS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_SHA256_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    TRANSFORM_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    FILE_COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    uid: str
    state: DatasetVersion.State
    operation: str
    create_time: _timestamp_pb2.Timestamp
    commit_time: _timestamp_pb2.Timestamp
    columns: _containers.RepeatedCompositeFieldContainer[Column]
    splits: _containers.RepeatedCompositeFieldContainer[Split]
    files: _containers.RepeatedCompositeFieldContainer[File]
    row_count: int
    size_bytes: int
    manifest_sha256: str
    error: _status_pb2.Status
    etag: str
    parents: _containers.RepeatedCompositeFieldContainer[Parent]
    transform: _transform_pb2.Transform
    quarantined_row_count: int
    prediction: Prediction
    file_count: int
    def __init__(self, name: _Optional[str] = ..., uid: _Optional[str] = ..., state: _Optional[_Union[DatasetVersion.State, str]] = ..., operation: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., commit_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., columns: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., splits: _Optional[_Iterable[_Union[Split, _Mapping]]] = ..., files: _Optional[_Iterable[_Union[File, _Mapping]]] = ..., row_count: _Optional[int] = ..., size_bytes: _Optional[int] = ..., manifest_sha256: _Optional[str] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., etag: _Optional[str] = ..., parents: _Optional[_Iterable[_Union[Parent, _Mapping]]] = ..., transform: _Optional[_Union[_transform_pb2.Transform, _Mapping]] = ..., quarantined_row_count: _Optional[int] = ..., prediction: _Optional[_Union[Prediction, _Mapping]] = ..., file_count: _Optional[int] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("checkpoint", "checkpoint_sha256", "trained_on", "columns")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_SHA256_FIELD_NUMBER: _ClassVar[int]
    TRAINED_ON_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    checkpoint_sha256: str
    trained_on: str
    columns: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, checkpoint: _Optional[str] = ..., checkpoint_sha256: _Optional[str] = ..., trained_on: _Optional[str] = ..., columns: _Optional[_Iterable[str]] = ...) -> None: ...

class Parent(_message.Message):
    __slots__ = ("version", "manifest_sha256")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_SHA256_FIELD_NUMBER: _ClassVar[int]
    version: str
    manifest_sha256: str
    def __init__(self, version: _Optional[str] = ..., manifest_sha256: _Optional[str] = ...) -> None: ...

class Column(_message.Message):
    __slots__ = ("name", "arrow_type", "shape", "value_names")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARROW_TYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    VALUE_NAMES_FIELD_NUMBER: _ClassVar[int]
    name: str
    arrow_type: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    value_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., arrow_type: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., value_names: _Optional[_Iterable[str]] = ...) -> None: ...

class Split(_message.Message):
    __slots__ = ("name", "first_row_id", "row_count")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_ID_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    first_row_id: int
    row_count: int
    def __init__(self, name: _Optional[str] = ..., first_row_id: _Optional[int] = ..., row_count: _Optional[int] = ...) -> None: ...

class File(_message.Message):
    __slots__ = ("path", "split", "row_count", "size_bytes", "sha256")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    path: str
    split: str
    row_count: int
    size_bytes: int
    sha256: str
    def __init__(self, path: _Optional[str] = ..., split: _Optional[str] = ..., row_count: _Optional[int] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class Upload(_message.Message):
    __slots__ = ("name", "state", "create_time", "expire_time", "acknowledged_size", "size_bytes", "sha256", "presigned_parts", "hashed_size")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Upload.State]
        STATE_OPEN: _ClassVar[Upload.State]
        STATE_COMMITTED: _ClassVar[Upload.State]
    STATE_UNSPECIFIED: Upload.State
    STATE_OPEN: Upload.State
    STATE_COMMITTED: Upload.State
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_SIZE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    PRESIGNED_PARTS_FIELD_NUMBER: _ClassVar[int]
    HASHED_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: Upload.State
    create_time: _timestamp_pb2.Timestamp
    expire_time: _timestamp_pb2.Timestamp
    acknowledged_size: int
    size_bytes: int
    sha256: str
    presigned_parts: _containers.RepeatedCompositeFieldContainer[PresignedPart]
    hashed_size: int
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[Upload.State, str]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., acknowledged_size: _Optional[int] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ..., presigned_parts: _Optional[_Iterable[_Union[PresignedPart, _Mapping]]] = ..., hashed_size: _Optional[int] = ...) -> None: ...

class PresignedPart(_message.Message):
    __slots__ = ("url", "offset", "size_bytes")
    URL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    url: str
    offset: int
    size_bytes: int
    def __init__(self, url: _Optional[str] = ..., offset: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...
