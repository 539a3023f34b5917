import datetime

from google.longrunning import operations_pb2 as _operations_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from millrace.data.v1 import resources_pb2 as _resources_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateDatasetRequest(_message.Message):
    __slots__ = ("dataset_id", "display_name", "description", "request_id", "validate_only")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    display_name: str
    description: str
    request_id: str
    validate_only: bool
    def __init__(self, dataset_id: _Optional[str] = ..., display_name: _Optional[str] = ..., description: _Optional[str] = ..., request_id: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class GetDatasetRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListDatasetsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListDatasetsResponse(_message.Message):
    __slots__ = ("datasets", "next_page_token")
    DATASETS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    datasets: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Dataset]
    next_page_token: str
    def __init__(self, datasets: _Optional[_Iterable[_Union[_resources_pb2.Dataset, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ImportVersionRequest(_message.Message):
    __slots__ = ("parent", "version_id", "sources", "hold_outs", "request_id", "validate_only")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    HOLD_OUTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    parent: str
    version_id: str
    sources: _containers.RepeatedCompositeFieldContainer[ImportSource]
    hold_outs: _containers.RepeatedCompositeFieldContainer[HoldOut]
    request_id: str
    validate_only: bool
    def __init__(self, parent: _Optional[str] = ..., version_id: _Optional[str] = ..., sources: _Optional[_Iterable[_Union[ImportSource, _Mapping]]] = ..., hold_outs: _Optional[_Iterable[_Union[HoldOut, _Mapping]]] = ..., request_id: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class ImportSource(_message.Message):
    __slots__ = ("split", "idx", "parquet")
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    IDX_FIELD_NUMBER: _ClassVar[int]
    PARQUET_FIELD_NUMBER: _ClassVar[int]
    split: str
    idx: IdxSource
    parquet: ParquetSource
    def __init__(self, split: _Optional[str] = ..., idx: _Optional[_Union[IdxSource, _Mapping]] = ..., parquet: _Optional[_Union[ParquetSource, _Mapping]] = ...) -> None: ...

class IdxSource(_message.Message):
    __slots__ = ("images_uri", "labels_uri")
    IMAGES_URI_FIELD_NUMBER: _ClassVar[int]
    LABELS_URI_FIELD_NUMBER: _ClassVar[int]
    images_uri: str
    labels_uri: str
    def __init__(self, images_uri: _Optional[str] = ..., labels_uri: _Optional[str] = ...) -> None: ...

class ParquetSource(_message.Message):
    __slots__ = ("uri",)
    URI_FIELD_NUMBER: _ClassVar[int]
    uri: str
    def __init__(self, uri: _Optional[str] = ...) -> None: ...

class HoldOut(_message.Message):
    __slots__ = ("from_split", "to_split", "fraction", "seed")
    FROM_SPLIT_FIELD_NUMBER: _ClassVar[int]
    TO_SPLIT_FIELD_NUMBER: _ClassVar[int]
    FRACTION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    from_split: str
    to_split: str
    fraction: float
    seed: int
    def __init__(self, from_split: _Optional[str] = ..., to_split: _Optional[str] = ..., fraction: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...

class ImportVersionMetadata(_message.Message):
    __slots__ = ("version", "rows_read", "attempt", "create_time")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROWS_READ_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    version: str
    rows_read: int
    attempt: int
    create_time: _timestamp_pb2.Timestamp
    def __init__(self, version: _Optional[str] = ..., rows_read: _Optional[int] = ..., attempt: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GetVersionRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListVersionsRequest(_message.Message):
    __slots__ = ("parent", "page_size", "page_token")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    parent: str
    page_size: int
    page_token: str
    def __init__(self, parent: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListVersionsResponse(_message.Message):
    __slots__ = ("versions", "next_page_token")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[_resources_pb2.DatasetVersion]
    next_page_token: str
    def __init__(self, versions: _Optional[_Iterable[_Union[_resources_pb2.DatasetVersion, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class PreviewVersionRequest(_message.Message):
    __slots__ = ("name", "rows_per_split")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROWS_PER_SPLIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    rows_per_split: int
    def __init__(self, name: _Optional[str] = ..., rows_per_split: _Optional[int] = ...) -> None: ...

class PreviewVersionResponse(_message.Message):
    __slots__ = ("version", "arrow_ipc", "contact_sheet_png")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ARROW_IPC_FIELD_NUMBER: _ClassVar[int]
    CONTACT_SHEET_PNG_FIELD_NUMBER: _ClassVar[int]
    version: _resources_pb2.DatasetVersion
    arrow_ipc: bytes
    contact_sheet_png: bytes
    def __init__(self, version: _Optional[_Union[_resources_pb2.DatasetVersion, _Mapping]] = ..., arrow_ipc: _Optional[bytes] = ..., contact_sheet_png: _Optional[bytes] = ...) -> None: ...

class ReadVersionRequest(_message.Message):
    __slots__ = ("name", "split", "columns", "offset", "limit")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    split: str
    columns: _containers.RepeatedScalarFieldContainer[str]
    offset: int
    limit: int
    def __init__(self, name: _Optional[str] = ..., split: _Optional[str] = ..., columns: _Optional[_Iterable[str]] = ..., offset: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class ReadVersionResponse(_message.Message):
    __slots__ = ("arrow_ipc",)
    ARROW_IPC_FIELD_NUMBER: _ClassVar[int]
    arrow_ipc: bytes
    def __init__(self, arrow_ipc: _Optional[bytes] = ...) -> None: ...
