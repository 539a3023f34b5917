import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from millrace.common.v1 import transform_pb2 as _transform_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class QualityCheck(_message.Message):
    __slots__ = ("column", "action", "not_null", "unique", "range", "one_of", "pattern", "row_count", "class_balance", "drift")
    class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ACTION_UNSPECIFIED: _ClassVar[QualityCheck.Action]
        ACTION_FAIL: _ClassVar[QualityCheck.Action]
        ACTION_QUARANTINE: _ClassVar[QualityCheck.Action]
    ACTION_UNSPECIFIED: QualityCheck.Action
    ACTION_FAIL: QualityCheck.Action
    ACTION_QUARANTINE: QualityCheck.Action
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    NOT_NULL_FIELD_NUMBER: _ClassVar[int]
    UNIQUE_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    ONE_OF_FIELD_NUMBER: _ClassVar[int]
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    CLASS_BALANCE_FIELD_NUMBER: _ClassVar[int]
    DRIFT_FIELD_NUMBER: _ClassVar[int]
    column: str
    action: QualityCheck.Action
    not_null: NotNull
    unique: Unique
    range: Range
    one_of: OneOf
    pattern: Pattern
    row_count: RowCount
    class_balance: ClassBalance
    drift: Drift
    def __init__(self, column: _Optional[str] = ..., action: _Optional[_Union[QualityCheck.Action, str]] = ..., not_null: _Optional[_Union[NotNull, _Mapping]] = ..., unique: _Optional[_Union[Unique, _Mapping]] = ..., range: _Optional[_Union[Range, _Mapping]] = ..., one_of: _Optional[_Union[OneOf, _Mapping]] = ..., pattern: _Optional[_Union[Pattern, _Mapping]] = ..., row_count: _Optional[_Union[RowCount, _Mapping]] = ..., class_balance: _Optional[_Union[ClassBalance, _Mapping]] = ..., drift: _Optional[_Union[Drift, _Mapping]] = ...) -> None: ...

class NotNull(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Unique(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Range(_message.Message):
    __slots__ = ("min", "max")
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    min: float
    max: float
    def __init__(self, min: _Optional[float] = ..., max: _Optional[float] = ...) -> None: ...

class OneOf(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedCompositeFieldContainer[_transform_pb2.Scalar]
    def __init__(self, values: _Optional[_Iterable[_Union[_transform_pb2.Scalar, _Mapping]]] = ...) -> None: ...

class Pattern(_message.Message):
    __slots__ = ("regex",)
    REGEX_FIELD_NUMBER: _ClassVar[int]
    regex: str
    def __init__(self, regex: _Optional[str] = ...) -> None: ...

class RowCount(_message.Message):
    __slots__ = ("split", "min", "max")
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    split: str
    min: int
    max: int
    def __init__(self, split: _Optional[str] = ..., min: _Optional[int] = ..., max: _Optional[int] = ...) -> None: ...

class ClassBalance(_message.Message):
    __slots__ = ("min_share", "max_share")
    MIN_SHARE_FIELD_NUMBER: _ClassVar[int]
    MAX_SHARE_FIELD_NUMBER: _ClassVar[int]
    min_share: float
    max_share: float
    def __init__(self, min_share: _Optional[float] = ..., max_share: _Optional[float] = ...) -> None: ...

class Drift(_message.Message):
    __slots__ = ("max_population_stability_index",)
    MAX_POPULATION_STABILITY_INDEX_FIELD_NUMBER: _ClassVar[int]
    max_population_stability_index: float
    def __init__(self, max_population_stability_index: _Optional[float] = ...) -> None: ...

class CheckResult(_message.Message):
    __slots__ = ("check", "violations", "quarantined", "observed")
    CHECK_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    check: QualityCheck
    violations: int
    quarantined: int
    observed: str
    def __init__(self, check: _Optional[_Union[QualityCheck, _Mapping]] = ..., violations: _Optional[int] = ..., quarantined: _Optional[int] = ..., observed: _Optional[str] = ...) -> None: ...

class QualityReport(_message.Message):
    __slots__ = ("columns", "checks", "quarantine", "quarantined_row_count")
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    columns: _containers.RepeatedCompositeFieldContainer[ColumnStatistics]
    checks: _containers.RepeatedCompositeFieldContainer[CheckResult]
    quarantine: _containers.RepeatedCompositeFieldContainer[QuarantineReason]
    quarantined_row_count: int
    def __init__(self, columns: _Optional[_Iterable[_Union[ColumnStatistics, _Mapping]]] = ..., checks: _Optional[_Iterable[_Union[CheckResult, _Mapping]]] = ..., quarantine: _Optional[_Iterable[_Union[QuarantineReason, _Mapping]]] = ..., quarantined_row_count: _Optional[int] = ...) -> None: ...

class QuarantineReason(_message.Message):
    __slots__ = ("reason", "row_count", "examples")
    REASON_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    reason: str
    row_count: int
    examples: _containers.RepeatedCompositeFieldContainer[QuarantinedRow]
    def __init__(self, reason: _Optional[str] = ..., row_count: _Optional[int] = ..., examples: _Optional[_Iterable[_Union[QuarantinedRow, _Mapping]]] = ...) -> None: ...

class QuarantinedRow(_message.Message):
    __slots__ = ("source", "place", "excerpt")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    EXCERPT_FIELD_NUMBER: _ClassVar[int]
    source: str
    place: str
    excerpt: str
    def __init__(self, source: _Optional[str] = ..., place: _Optional[str] = ..., excerpt: _Optional[str] = ...) -> None: ...

class ColumnStatistics(_message.Message):
    __slots__ = ("split", "column", "row_count", "null_count", "nan_count", "numbers", "times", "texts", "distinct_count", "distinct_is_exact", "values")
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    NULL_COUNT_FIELD_NUMBER: _ClassVar[int]
    NAN_COUNT_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    DISTINCT_COUNT_FIELD_NUMBER: _ClassVar[int]
    DISTINCT_IS_EXACT_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    split: str
    column: str
    row_count: int
    null_count: int
    nan_count: int
    numbers: NumberStatistics
    times: TimeStatistics
    texts: TextStatistics
    distinct_count: int
    distinct_is_exact: bool
    values: _containers.RepeatedCompositeFieldContainer[ValueCount]
    def __init__(self, split: _Optional[str] = ..., column: _Optional[str] = ..., row_count: _Optional[int] = ..., null_count: _Optional[int] = ..., nan_count: _Optional[int] = ..., numbers: _Optional[_Union[NumberStatistics, _Mapping]] = ..., times: _Optional[_Union[TimeStatistics, _Mapping]] = ..., texts: _Optional[_Union[TextStatistics, _Mapping]] = ..., distinct_count: _Optional[int] = ..., distinct_is_exact: _Optional[bool] = ..., values: _Optional[_Iterable[_Union[ValueCount, _Mapping]]] = ...) -> None: ...

class NumberStatistics(_message.Message):
    __slots__ = ("min", "max", "mean", "deviation", "quantiles", "histogram")
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    DEVIATION_FIELD_NUMBER: _ClassVar[int]
    QUANTILES_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    min: float
    max: float
    mean: float
    deviation: float
    quantiles: _containers.RepeatedScalarFieldContainer[float]
    histogram: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, min: _Optional[float] = ..., max: _Optional[float] = ..., mean: _Optional[float] = ..., deviation: _Optional[float] = ..., quantiles: _Optional[_Iterable[float]] = ..., histogram: _Optional[_Iterable[int]] = ...) -> None: ...

class TimeStatistics(_message.Message):
    __slots__ = ("min", "max", "histogram")
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    min: _timestamp_pb2.Timestamp
    max: _timestamp_pb2.Timestamp
    histogram: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, min: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., max: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., histogram: _Optional[_Iterable[int]] = ...) -> None: ...

class TextStatistics(_message.Message):
    __slots__ = ("min_bytes", "max_bytes", "mean_bytes")
    MIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEAN_BYTES_FIELD_NUMBER: _ClassVar[int]
    min_bytes: int
    max_bytes: int
    mean_bytes: float
    def __init__(self, min_bytes: _Optional[int] = ..., max_bytes: _Optional[int] = ..., mean_bytes: _Optional[float] = ...) -> None: ...

class ValueCount(_message.Message):
    __slots__ = ("value", "row_count")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    value: _transform_pb2.Scalar
    row_count: int
    def __init__(self, value: _Optional[_Union[_transform_pb2.Scalar, _Mapping]] = ..., row_count: _Optional[int] = ...) -> None: ...
