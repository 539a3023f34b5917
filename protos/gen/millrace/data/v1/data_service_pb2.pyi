import datetime

from google.longrunning import operations_pb2 as _operations_pb2
from google.protobuf import empty_pb2 as _empty_pb2
from google.protobuf import field_mask_pb2 as _field_mask_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from millrace.common.v1 import transform_pb2 as _transform_pb2
from millrace.data.v1 import quality_pb2 as _quality_pb2
from millrace.data.v1 import resources_pb2 as _resources_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateDatasetRequest(_message.Message):
    __slots__ = ("dataset_id", "display_name", "description", "request_id", "validate_only", "retention")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    display_name: str
    description: str
    request_id: str
    validate_only: bool
    retention: _resources_pb2.Retention
    def __init__(self, dataset_id: _Optional[str] = ..., display_name: _Optional[str] = ..., description: _Optional[str] = ..., request_id: _Optional[str] = ..., validate_only: _Optional[bool] = ..., retention: _Optional[_Union[_resources_pb2.Retention, _Mapping]] = ...) -> None: ...

class UpdateDatasetRequest(_message.Message):
    __slots__ = ("dataset", "update_mask")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    dataset: _resources_pb2.Dataset
    update_mask: _field_mask_pb2.FieldMask
    def __init__(self, dataset: _Optional[_Union[_resources_pb2.Dataset, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ...) -> None: ...

class DeleteDatasetRequest(_message.Message):
    __slots__ = ("name", "etag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ...) -> None: ...

class StartUploadRequest(_message.Message):
    __slots__ = ("parent", "upload_id", "request_id", "presigned")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRESIGNED_FIELD_NUMBER: _ClassVar[int]
    parent: str
    upload_id: str
    request_id: str
    presigned: PresignedParts
    def __init__(self, parent: _Optional[str] = ..., upload_id: _Optional[str] = ..., request_id: _Optional[str] = ..., presigned: _Optional[_Union[PresignedParts, _Mapping]] = ...) -> None: ...

class PresignedParts(_message.Message):
    __slots__ = ("size_bytes", "part_size_bytes")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PART_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    part_size_bytes: int
    def __init__(self, size_bytes: _Optional[int] = ..., part_size_bytes: _Optional[int] = ...) -> None: ...

class UploadChunksRequest(_message.Message):
    __slots__ = ("name", "offset", "data", "crc32c")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset: int
    data: bytes
    crc32c: int
    def __init__(self, name: _Optional[str] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., crc32c: _Optional[int] = ...) -> None: ...

class UploadChunksResponse(_message.Message):
    __slots__ = ("acknowledged_size",)
    ACKNOWLEDGED_SIZE_FIELD_NUMBER: _ClassVar[int]
    acknowledged_size: int
    def __init__(self, acknowledged_size: _Optional[int] = ...) -> None: ...

class GetUploadRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class CommitUploadRequest(_message.Message):
    __slots__ = ("name", "size_bytes", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    sha256: str
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class AbortUploadRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("parent", "version_id", "sources", "hold_outs", "request_id", "validate_only", "column_types", "bad_rows", "checks", "base", "partitioning", "nan_as_null")
    class Partitioning(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PARTITIONING_UNSPECIFIED: _ClassVar[ImportVersionRequest.Partitioning]
        PARTITIONING_HIVE: _ClassVar[ImportVersionRequest.Partitioning]
        PARTITIONING_NONE: _ClassVar[ImportVersionRequest.Partitioning]
    PARTITIONING_UNSPECIFIED: ImportVersionRequest.Partitioning
    PARTITIONING_HIVE: ImportVersionRequest.Partitioning
    PARTITIONING_NONE: ImportVersionRequest.Partitioning
    PARENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    HOLD_OUTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    COLUMN_TYPES_FIELD_NUMBER: _ClassVar[int]
    BAD_ROWS_FIELD_NUMBER: _ClassVar[int]
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    PARTITIONING_FIELD_NUMBER: _ClassVar[int]
    NAN_AS_NULL_FIELD_NUMBER: _ClassVar[int]
    parent: str
    version_id: str
    sources: _containers.RepeatedCompositeFieldContainer[ImportSource]
    hold_outs: _containers.RepeatedCompositeFieldContainer[HoldOut]
    request_id: str
    validate_only: bool
    column_types: _containers.RepeatedCompositeFieldContainer[ColumnType]
    bad_rows: BadRows
    checks: _containers.RepeatedCompositeFieldContainer[_quality_pb2.QualityCheck]
    base: Base
    partitioning: ImportVersionRequest.Partitioning
    nan_as_null: bool
    def __init__(self, parent: _Optional[str] = ..., version_id: _Optional[str] = ..., sources: _Optional[_Iterable[_Union[ImportSource, _Mapping]]] = ..., hold_outs: _Optional[_Iterable[_Union[HoldOut, _Mapping]]] = ..., request_id: _Optional[str] = ..., validate_only: _Optional[bool] = ..., column_types: _Optional[_Iterable[_Union[ColumnType, _Mapping]]] = ..., bad_rows: _Optional[_Union[BadRows, _Mapping]] = ..., checks: _Optional[_Iterable[_Union[_quality_pb2.QualityCheck, _Mapping]]] = ..., base: _Optional[_Union[Base, _Mapping]] = ..., partitioning: _Optional[_Union[ImportVersionRequest.Partitioning, str]] = ..., nan_as_null: _Optional[bool] = ...) -> None: ...

class Base(_message.Message):
    __slots__ = ("version", "mode")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[Base.Mode]
        MODE_APPEND: _ClassVar[Base.Mode]
        MODE_REPLACE: _ClassVar[Base.Mode]
    MODE_UNSPECIFIED: Base.Mode
    MODE_APPEND: Base.Mode
    MODE_REPLACE: Base.Mode
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    version: str
    mode: Base.Mode
    def __init__(self, version: _Optional[str] = ..., mode: _Optional[_Union[Base.Mode, str]] = ...) -> None: ...

class ColumnType(_message.Message):
    __slots__ = ("column", "arrow_type")
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    ARROW_TYPE_FIELD_NUMBER: _ClassVar[int]
    column: str
    arrow_type: str
    def __init__(self, column: _Optional[str] = ..., arrow_type: _Optional[str] = ...) -> None: ...

class BadRows(_message.Message):
    __slots__ = ("action", "max_rows")
    class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ACTION_UNSPECIFIED: _ClassVar[BadRows.Action]
        ACTION_FAIL: _ClassVar[BadRows.Action]
        ACTION_QUARANTINE: _ClassVar[BadRows.Action]
    ACTION_UNSPECIFIED: BadRows.Action
    ACTION_FAIL: BadRows.Action
    ACTION_QUARANTINE: BadRows.Action
    ACTION_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    action: BadRows.Action
    max_rows: int
    def __init__(self, action: _Optional[_Union[BadRows.Action, str]] = ..., max_rows: _Optional[int] = ...) -> None: ...

class ImportSource(_message.Message):
    __slots__ = ("split", "idx", "parquet", "arrow", "csv", "json_lines", "image_folder", "image_tar")
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    IDX_FIELD_NUMBER: _ClassVar[int]
    PARQUET_FIELD_NUMBER: _ClassVar[int]
    ARROW_FIELD_NUMBER: _ClassVar[int]
    CSV_FIELD_NUMBER: _ClassVar[int]
    JSON_LINES_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FOLDER_FIELD_NUMBER: _ClassVar[int]
    IMAGE_TAR_FIELD_NUMBER: _ClassVar[int]
    split: str
    idx: IdxSource
    parquet: ParquetSource
    arrow: ArrowSource
    csv: CsvSource
    json_lines: JsonLinesSource
    image_folder: ImageFolderSource
    image_tar: ImageTarSource
    def __init__(self, split: _Optional[str] = ..., idx: _Optional[_Union[IdxSource, _Mapping]] = ..., parquet: _Optional[_Union[ParquetSource, _Mapping]] = ..., arrow: _Optional[_Union[ArrowSource, _Mapping]] = ..., csv: _Optional[_Union[CsvSource, _Mapping]] = ..., json_lines: _Optional[_Union[JsonLinesSource, _Mapping]] = ..., image_folder: _Optional[_Union[ImageFolderSource, _Mapping]] = ..., image_tar: _Optional[_Union[ImageTarSource, _Mapping]] = ...) -> None: ...

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

class ArrowSource(_message.Message):
    __slots__ = ("uri",)
    URI_FIELD_NUMBER: _ClassVar[int]
    uri: str
    def __init__(self, uri: _Optional[str] = ...) -> None: ...

class CsvSource(_message.Message):
    __slots__ = ("uri", "delimiter", "column_names", "null_values", "encoding")
    URI_FIELD_NUMBER: _ClassVar[int]
    DELIMITER_FIELD_NUMBER: _ClassVar[int]
    COLUMN_NAMES_FIELD_NUMBER: _ClassVar[int]
    NULL_VALUES_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    uri: str
    delimiter: str
    column_names: _containers.RepeatedScalarFieldContainer[str]
    null_values: _containers.RepeatedScalarFieldContainer[str]
    encoding: str
    def __init__(self, uri: _Optional[str] = ..., delimiter: _Optional[str] = ..., column_names: _Optional[_Iterable[str]] = ..., null_values: _Optional[_Iterable[str]] = ..., encoding: _Optional[str] = ...) -> None: ...

class JsonLinesSource(_message.Message):
    __slots__ = ("uri",)
    URI_FIELD_NUMBER: _ClassVar[int]
    uri: str
    def __init__(self, uri: _Optional[str] = ...) -> None: ...

class ImageFolderSource(_message.Message):
    __slots__ = ("uri",)
    URI_FIELD_NUMBER: _ClassVar[int]
    uri: str
    def __init__(self, uri: _Optional[str] = ...) -> None: ...

class ImageTarSource(_message.Message):
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
    __slots__ = ("version", "rows_read", "attempt", "create_time", "rows_quarantined", "waiting_for")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROWS_READ_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    ROWS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    version: str
    rows_read: int
    attempt: int
    create_time: _timestamp_pb2.Timestamp
    rows_quarantined: int
    waiting_for: str
    def __init__(self, version: _Optional[str] = ..., rows_read: _Optional[int] = ..., attempt: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., rows_quarantined: _Optional[int] = ..., waiting_for: _Optional[str] = ...) -> None: ...

class TransformVersionRequest(_message.Message):
    __slots__ = ("parent", "version_id", "source", "transform", "splits", "fit_split", "checks", "request_id", "validate_only")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TRANSFORM_FIELD_NUMBER: _ClassVar[int]
    SPLITS_FIELD_NUMBER: _ClassVar[int]
    FIT_SPLIT_FIELD_NUMBER: _ClassVar[int]
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    parent: str
    version_id: str
    source: str
    transform: _transform_pb2.Transform
    splits: SplitRule
    fit_split: str
    checks: _containers.RepeatedCompositeFieldContainer[_quality_pb2.QualityCheck]
    request_id: str
    validate_only: bool
    def __init__(self, parent: _Optional[str] = ..., version_id: _Optional[str] = ..., source: _Optional[str] = ..., transform: _Optional[_Union[_transform_pb2.Transform, _Mapping]] = ..., splits: _Optional[_Union[SplitRule, _Mapping]] = ..., fit_split: _Optional[str] = ..., checks: _Optional[_Iterable[_Union[_quality_pb2.QualityCheck, _Mapping]]] = ..., request_id: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class SplitRule(_message.Message):
    __slots__ = ("hash", "column", "time", "ratio")
    HASH_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    hash: HashSplit
    column: ColumnSplit
    time: TimeSplit
    ratio: RatioSplit
    def __init__(self, hash: _Optional[_Union[HashSplit, _Mapping]] = ..., column: _Optional[_Union[ColumnSplit, _Mapping]] = ..., time: _Optional[_Union[TimeSplit, _Mapping]] = ..., ratio: _Optional[_Union[RatioSplit, _Mapping]] = ...) -> None: ...

class HashSplit(_message.Message):
    __slots__ = ("key_columns", "shares", "seed")
    KEY_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    key_columns: _containers.RepeatedScalarFieldContainer[str]
    shares: _containers.RepeatedCompositeFieldContainer[Share]
    seed: int
    def __init__(self, key_columns: _Optional[_Iterable[str]] = ..., shares: _Optional[_Iterable[_Union[Share, _Mapping]]] = ..., seed: _Optional[int] = ...) -> None: ...

class ColumnSplit(_message.Message):
    __slots__ = ("column",)
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    column: str
    def __init__(self, column: _Optional[str] = ...) -> None: ...

class TimeSplit(_message.Message):
    __slots__ = ("column", "periods")
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    PERIODS_FIELD_NUMBER: _ClassVar[int]
    column: str
    periods: _containers.RepeatedCompositeFieldContainer[Period]
    def __init__(self, column: _Optional[str] = ..., periods: _Optional[_Iterable[_Union[Period, _Mapping]]] = ...) -> None: ...

class Period(_message.Message):
    __slots__ = ("split", "before")
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    split: str
    before: _timestamp_pb2.Timestamp
    def __init__(self, split: _Optional[str] = ..., before: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class RatioSplit(_message.Message):
    __slots__ = ("shares", "seed")
    SHARES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    shares: _containers.RepeatedCompositeFieldContainer[Share]
    seed: int
    def __init__(self, shares: _Optional[_Iterable[_Union[Share, _Mapping]]] = ..., seed: _Optional[int] = ...) -> None: ...

class Share(_message.Message):
    __slots__ = ("split", "weight")
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    split: str
    weight: float
    def __init__(self, split: _Optional[str] = ..., weight: _Optional[float] = ...) -> None: ...

class TransformVersionMetadata(_message.Message):
    __slots__ = ("version", "phase", "rows_done", "rows_total", "rows_per_second", "attempt", "create_time", "waiting_for")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PHASE_UNSPECIFIED: _ClassVar[TransformVersionMetadata.Phase]
        PHASE_FITTING: _ClassVar[TransformVersionMetadata.Phase]
        PHASE_WRITING: _ClassVar[TransformVersionMetadata.Phase]
    PHASE_UNSPECIFIED: TransformVersionMetadata.Phase
    PHASE_FITTING: TransformVersionMetadata.Phase
    PHASE_WRITING: TransformVersionMetadata.Phase
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ROWS_DONE_FIELD_NUMBER: _ClassVar[int]
    ROWS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ROWS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    version: str
    phase: TransformVersionMetadata.Phase
    rows_done: int
    rows_total: int
    rows_per_second: float
    attempt: int
    create_time: _timestamp_pb2.Timestamp
    waiting_for: str
    def __init__(self, version: _Optional[str] = ..., phase: _Optional[_Union[TransformVersionMetadata.Phase, str]] = ..., rows_done: _Optional[int] = ..., rows_total: _Optional[int] = ..., rows_per_second: _Optional[float] = ..., attempt: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., waiting_for: _Optional[str] = ...) -> None: ...

class PredictVersionRequest(_message.Message):
    __slots__ = ("parent", "version_id", "source", "split", "checkpoint", "checkpoint_sha256", "columns", "outputs", "column_prefix", "bad_rows", "workers", "request_id", "validate_only", "predictor")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_SHA256_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    COLUMN_PREFIX_FIELD_NUMBER: _ClassVar[int]
    BAD_ROWS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    PREDICTOR_FIELD_NUMBER: _ClassVar[int]
    parent: str
    version_id: str
    source: str
    split: str
    checkpoint: str
    checkpoint_sha256: str
    columns: _containers.RepeatedScalarFieldContainer[str]
    outputs: _containers.RepeatedScalarFieldContainer[str]
    column_prefix: str
    bad_rows: BadRows
    workers: PredictionWorkers
    request_id: str
    validate_only: bool
    predictor: str
    def __init__(self, parent: _Optional[str] = ..., version_id: _Optional[str] = ..., source: _Optional[str] = ..., split: _Optional[str] = ..., checkpoint: _Optional[str] = ..., checkpoint_sha256: _Optional[str] = ..., columns: _Optional[_Iterable[str]] = ..., outputs: _Optional[_Iterable[str]] = ..., column_prefix: _Optional[str] = ..., bad_rows: _Optional[_Union[BadRows, _Mapping]] = ..., workers: _Optional[_Union[PredictionWorkers, _Mapping]] = ..., request_id: _Optional[str] = ..., validate_only: _Optional[bool] = ..., predictor: _Optional[str] = ...) -> None: ...

class PredictionWorkers(_message.Message):
    __slots__ = ("max_workers", "batch_size", "cpus", "gpus")
    MAX_WORKERS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    max_workers: int
    batch_size: int
    cpus: int
    gpus: float
    def __init__(self, max_workers: _Optional[int] = ..., batch_size: _Optional[int] = ..., cpus: _Optional[int] = ..., gpus: _Optional[float] = ...) -> None: ...

class PredictVersionMetadata(_message.Message):
    __slots__ = ("version", "phase", "rows_done", "rows_total", "rows_per_second", "attempt", "create_time", "checkpoint", "waiting_for")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PHASE_UNSPECIFIED: _ClassVar[PredictVersionMetadata.Phase]
        PHASE_CHECKING: _ClassVar[PredictVersionMetadata.Phase]
        PHASE_PREDICTING: _ClassVar[PredictVersionMetadata.Phase]
    PHASE_UNSPECIFIED: PredictVersionMetadata.Phase
    PHASE_CHECKING: PredictVersionMetadata.Phase
    PHASE_PREDICTING: PredictVersionMetadata.Phase
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ROWS_DONE_FIELD_NUMBER: _ClassVar[int]
    ROWS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ROWS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    version: str
    phase: PredictVersionMetadata.Phase
    rows_done: int
    rows_total: int
    rows_per_second: float
    attempt: int
    create_time: _timestamp_pb2.Timestamp
    checkpoint: str
    waiting_for: str
    def __init__(self, version: _Optional[str] = ..., phase: _Optional[_Union[PredictVersionMetadata.Phase, str]] = ..., rows_done: _Optional[int] = ..., rows_total: _Optional[int] = ..., rows_per_second: _Optional[float] = ..., attempt: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., checkpoint: _Optional[str] = ..., waiting_for: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("version", "arrow_ipc", "contact_sheet_png", "report")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ARROW_IPC_FIELD_NUMBER: _ClassVar[int]
    CONTACT_SHEET_PNG_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    version: _resources_pb2.DatasetVersion
    arrow_ipc: bytes
    contact_sheet_png: bytes
    report: _quality_pb2.QualityReport
    def __init__(self, version: _Optional[_Union[_resources_pb2.DatasetVersion, _Mapping]] = ..., arrow_ipc: _Optional[bytes] = ..., contact_sheet_png: _Optional[bytes] = ..., report: _Optional[_Union[_quality_pb2.QualityReport, _Mapping]] = ...) -> None: ...

class DeleteVersionRequest(_message.Message):
    __slots__ = ("name", "etag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ...) -> None: ...

class ReadQuarantineRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ReadQuarantineResponse(_message.Message):
    __slots__ = ("json_lines",)
    JSON_LINES_FIELD_NUMBER: _ClassVar[int]
    json_lines: bytes
    def __init__(self, json_lines: _Optional[bytes] = ...) -> None: ...

class VerifyVersionRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class VerifyVersionResponse(_message.Message):
    __slots__ = ("files_checked", "files_total", "bytes_checked", "rows_checked", "damages")
    FILES_CHECKED_FIELD_NUMBER: _ClassVar[int]
    FILES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_CHECKED_FIELD_NUMBER: _ClassVar[int]
    ROWS_CHECKED_FIELD_NUMBER: _ClassVar[int]
    DAMAGES_FIELD_NUMBER: _ClassVar[int]
    files_checked: int
    files_total: int
    bytes_checked: int
    rows_checked: int
    damages: _containers.RepeatedCompositeFieldContainer[Damage]
    def __init__(self, files_checked: _Optional[int] = ..., files_total: _Optional[int] = ..., bytes_checked: _Optional[int] = ..., rows_checked: _Optional[int] = ..., damages: _Optional[_Iterable[_Union[Damage, _Mapping]]] = ...) -> None: ...

class Damage(_message.Message):
    __slots__ = ("path", "description")
    PATH_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    path: str
    description: str
    def __init__(self, path: _Optional[str] = ..., description: _Optional[str] = ...) -> None: ...

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
