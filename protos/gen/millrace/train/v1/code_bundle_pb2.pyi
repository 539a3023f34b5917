import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CodeBundle(_message.Message):
    __slots__ = ("name", "size_bytes", "unpacked_size_bytes", "file_count", "requirements", "modules", "create_time")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNPACKED_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_COUNT_FIELD_NUMBER: _ClassVar[int]
    REQUIREMENTS_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    unpacked_size_bytes: int
    file_count: int
    requirements: _containers.RepeatedScalarFieldContainer[str]
    modules: _containers.RepeatedScalarFieldContainer[str]
    create_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., unpacked_size_bytes: _Optional[int] = ..., file_count: _Optional[int] = ..., requirements: _Optional[_Iterable[str]] = ..., modules: _Optional[_Iterable[str]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Program(_message.Message):
    __slots__ = ("code_bundle", "entry", "config_json", "data_resume", "remainder", "hang_after", "stop_within")
    class DataResume(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        DATA_RESUME_UNSPECIFIED: _ClassVar[Program.DataResume]
        DATA_RESUME_REPLAY: _ClassVar[Program.DataResume]
        DATA_RESUME_CONTINUE: _ClassVar[Program.DataResume]
    DATA_RESUME_UNSPECIFIED: Program.DataResume
    DATA_RESUME_REPLAY: Program.DataResume
    DATA_RESUME_CONTINUE: Program.DataResume
    class Remainder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REMAINDER_UNSPECIFIED: _ClassVar[Program.Remainder]
        REMAINDER_DROP: _ClassVar[Program.Remainder]
        REMAINDER_KEEP: _ClassVar[Program.Remainder]
    REMAINDER_UNSPECIFIED: Program.Remainder
    REMAINDER_DROP: Program.Remainder
    REMAINDER_KEEP: Program.Remainder
    CODE_BUNDLE_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    DATA_RESUME_FIELD_NUMBER: _ClassVar[int]
    REMAINDER_FIELD_NUMBER: _ClassVar[int]
    HANG_AFTER_FIELD_NUMBER: _ClassVar[int]
    STOP_WITHIN_FIELD_NUMBER: _ClassVar[int]
    code_bundle: str
    entry: str
    config_json: str
    data_resume: Program.DataResume
    remainder: Program.Remainder
    hang_after: _duration_pb2.Duration
    stop_within: _duration_pb2.Duration
    def __init__(self, code_bundle: _Optional[str] = ..., entry: _Optional[str] = ..., config_json: _Optional[str] = ..., data_resume: _Optional[_Union[Program.DataResume, str]] = ..., remainder: _Optional[_Union[Program.Remainder, str]] = ..., hang_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., stop_within: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
