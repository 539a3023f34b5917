from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Transform(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[TransformStep]
    def __init__(self, steps: _Optional[_Iterable[_Union[TransformStep, _Mapping]]] = ...) -> None: ...

class TransformStep(_message.Message):
    __slots__ = ("column", "to_float", "normalize")
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    TO_FLOAT_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    column: str
    to_float: ToFloat
    normalize: Normalize
    def __init__(self, column: _Optional[str] = ..., to_float: _Optional[_Union[ToFloat, _Mapping]] = ..., normalize: _Optional[_Union[Normalize, _Mapping]] = ...) -> None: ...

class ToFloat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Normalize(_message.Message):
    __slots__ = ("mean", "std")
    MEAN_FIELD_NUMBER: _ClassVar[int]
    STD_FIELD_NUMBER: _ClassVar[int]
    mean: _containers.RepeatedScalarFieldContainer[float]
    std: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, mean: _Optional[_Iterable[float]] = ..., std: _Optional[_Iterable[float]] = ...) -> None: ...
