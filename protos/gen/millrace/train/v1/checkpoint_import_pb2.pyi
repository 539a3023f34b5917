from millrace.common.v1 import transform_pb2 as _transform_pb2
from millrace.train.v1 import resources_pb2 as _resources_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ImportSpec(_message.Message):
    __slots__ = ("model", "task", "input", "dataset_version", "input_column", "label_column", "transform", "class_names", "names", "allow_non_finite")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    DATASET_VERSION_FIELD_NUMBER: _ClassVar[int]
    INPUT_COLUMN_FIELD_NUMBER: _ClassVar[int]
    LABEL_COLUMN_FIELD_NUMBER: _ClassVar[int]
    TRANSFORM_FIELD_NUMBER: _ClassVar[int]
    CLASS_NAMES_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    ALLOW_NON_FINITE_FIELD_NUMBER: _ClassVar[int]
    model: _resources_pb2.Model
    task: _resources_pb2.TrainingSpec.Task
    input: InputTensor
    dataset_version: str
    input_column: str
    label_column: str
    transform: _transform_pb2.Transform
    class_names: _containers.RepeatedScalarFieldContainer[str]
    names: NameMap
    allow_non_finite: bool
    def __init__(self, model: _Optional[_Union[_resources_pb2.Model, _Mapping]] = ..., task: _Optional[_Union[_resources_pb2.TrainingSpec.Task, str]] = ..., input: _Optional[_Union[InputTensor, _Mapping]] = ..., dataset_version: _Optional[str] = ..., input_column: _Optional[str] = ..., label_column: _Optional[str] = ..., transform: _Optional[_Union[_transform_pb2.Transform, _Mapping]] = ..., class_names: _Optional[_Iterable[str]] = ..., names: _Optional[_Union[NameMap, _Mapping]] = ..., allow_non_finite: _Optional[bool] = ...) -> None: ...

class InputTensor(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class NameMap(_message.Message):
    __slots__ = ("key", "renames", "drop", "allow_missing")
    class Rename(_message.Message):
        __slots__ = ("prefix", "pattern", "replacement")
        PREFIX_FIELD_NUMBER: _ClassVar[int]
        PATTERN_FIELD_NUMBER: _ClassVar[int]
        REPLACEMENT_FIELD_NUMBER: _ClassVar[int]
        prefix: str
        pattern: str
        replacement: str
        def __init__(self, prefix: _Optional[str] = ..., pattern: _Optional[str] = ..., replacement: _Optional[str] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    RENAMES_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    ALLOW_MISSING_FIELD_NUMBER: _ClassVar[int]
    key: str
    renames: _containers.RepeatedCompositeFieldContainer[NameMap.Rename]
    drop: _containers.RepeatedScalarFieldContainer[str]
    allow_missing: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, key: _Optional[str] = ..., renames: _Optional[_Iterable[_Union[NameMap.Rename, _Mapping]]] = ..., drop: _Optional[_Iterable[str]] = ..., allow_missing: _Optional[_Iterable[str]] = ...) -> None: ...

class ImportReport(_message.Message):
    __slots__ = ("format", "key", "fits", "fitted_count", "fitted", "missing_count", "missing", "missing_allowed_count", "unexpected_count", "unexpected", "dropped_count", "misfit_count", "misfits", "non_finite_count", "non_finite", "other_count", "others")
    class Fitted(_message.Message):
        __slots__ = ("source", "target", "widened_from")
        SOURCE_FIELD_NUMBER: _ClassVar[int]
        TARGET_FIELD_NUMBER: _ClassVar[int]
        WIDENED_FROM_FIELD_NUMBER: _ClassVar[int]
        source: str
        target: str
        widened_from: str
        def __init__(self, source: _Optional[str] = ..., target: _Optional[str] = ..., widened_from: _Optional[str] = ...) -> None: ...
    class Misfit(_message.Message):
        __slots__ = ("source", "target", "in_file", "in_model")
        SOURCE_FIELD_NUMBER: _ClassVar[int]
        TARGET_FIELD_NUMBER: _ClassVar[int]
        IN_FILE_FIELD_NUMBER: _ClassVar[int]
        IN_MODEL_FIELD_NUMBER: _ClassVar[int]
        source: str
        target: str
        in_file: str
        in_model: str
        def __init__(self, source: _Optional[str] = ..., target: _Optional[str] = ..., in_file: _Optional[str] = ..., in_model: _Optional[str] = ...) -> None: ...
    class NonFinite(_message.Message):
        __slots__ = ("source", "count")
        SOURCE_FIELD_NUMBER: _ClassVar[int]
        COUNT_FIELD_NUMBER: _ClassVar[int]
        source: str
        count: int
        def __init__(self, source: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    FITS_FIELD_NUMBER: _ClassVar[int]
    FITTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    FITTED_FIELD_NUMBER: _ClassVar[int]
    MISSING_COUNT_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    MISSING_ALLOWED_COUNT_FIELD_NUMBER: _ClassVar[int]
    UNEXPECTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    UNEXPECTED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_COUNT_FIELD_NUMBER: _ClassVar[int]
    MISFIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    MISFITS_FIELD_NUMBER: _ClassVar[int]
    NON_FINITE_COUNT_FIELD_NUMBER: _ClassVar[int]
    NON_FINITE_FIELD_NUMBER: _ClassVar[int]
    OTHER_COUNT_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    format: str
    key: str
    fits: bool
    fitted_count: int
    fitted: _containers.RepeatedCompositeFieldContainer[ImportReport.Fitted]
    missing_count: int
    missing: _containers.RepeatedScalarFieldContainer[str]
    missing_allowed_count: int
    unexpected_count: int
    unexpected: _containers.RepeatedScalarFieldContainer[str]
    dropped_count: int
    misfit_count: int
    misfits: _containers.RepeatedCompositeFieldContainer[ImportReport.Misfit]
    non_finite_count: int
    non_finite: _containers.RepeatedCompositeFieldContainer[ImportReport.NonFinite]
    other_count: int
    others: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, format: _Optional[str] = ..., key: _Optional[str] = ..., fits: _Optional[bool] = ..., fitted_count: _Optional[int] = ..., fitted: _Optional[_Iterable[_Union[ImportReport.Fitted, _Mapping]]] = ..., missing_count: _Optional[int] = ..., missing: _Optional[_Iterable[str]] = ..., missing_allowed_count: _Optional[int] = ..., unexpected_count: _Optional[int] = ..., unexpected: _Optional[_Iterable[str]] = ..., dropped_count: _Optional[int] = ..., misfit_count: _Optional[int] = ..., misfits: _Optional[_Iterable[_Union[ImportReport.Misfit, _Mapping]]] = ..., non_finite_count: _Optional[int] = ..., non_finite: _Optional[_Iterable[_Union[ImportReport.NonFinite, _Mapping]]] = ..., other_count: _Optional[int] = ..., others: _Optional[_Iterable[str]] = ...) -> None: ...

class ImportedFile(_message.Message):
    __slots__ = ("path", "size_bytes", "sha256")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    path: str
    size_bytes: int
    sha256: str
    def __init__(self, path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class ImportedWeights(_message.Message):
    __slots__ = ("files", "report")
    FILES_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[ImportedFile]
    report: ImportReport
    def __init__(self, files: _Optional[_Iterable[_Union[ImportedFile, _Mapping]]] = ..., report: _Optional[_Union[ImportReport, _Mapping]] = ...) -> None: ...

class ImportCheckpointRequest(_message.Message):
    __slots__ = ("header", "chunk")
    class Header(_message.Message):
        __slots__ = ("training_job_id", "spec", "files", "request_id", "validate_only")
        TRAINING_JOB_ID_FIELD_NUMBER: _ClassVar[int]
        SPEC_FIELD_NUMBER: _ClassVar[int]
        FILES_FIELD_NUMBER: _ClassVar[int]
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
        training_job_id: str
        spec: ImportSpec
        files: _containers.RepeatedCompositeFieldContainer[ImportedFile]
        request_id: str
        validate_only: bool
        def __init__(self, training_job_id: _Optional[str] = ..., spec: _Optional[_Union[ImportSpec, _Mapping]] = ..., files: _Optional[_Iterable[_Union[ImportedFile, _Mapping]]] = ..., request_id: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: ImportCheckpointRequest.Header
    chunk: bytes
    def __init__(self, header: _Optional[_Union[ImportCheckpointRequest.Header, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class ImportCheckpointResponse(_message.Message):
    __slots__ = ("training_job", "checkpoint", "report")
    TRAINING_JOB_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    training_job: _resources_pb2.TrainingJob
    checkpoint: _resources_pb2.Checkpoint
    report: ImportReport
    def __init__(self, training_job: _Optional[_Union[_resources_pb2.TrainingJob, _Mapping]] = ..., checkpoint: _Optional[_Union[_resources_pb2.Checkpoint, _Mapping]] = ..., report: _Optional[_Union[ImportReport, _Mapping]] = ...) -> None: ...
