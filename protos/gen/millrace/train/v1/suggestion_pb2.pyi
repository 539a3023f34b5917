from millrace.common.v1 import transform_pb2 as _transform_pb2
from millrace.train.v1 import resources_pb2 as _resources_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SuggestTrainingSpecRequest(_message.Message):
    __slots__ = ("dataset_version", "spec")
    DATASET_VERSION_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    dataset_version: str
    spec: _resources_pb2.TrainingSpec
    def __init__(self, dataset_version: _Optional[str] = ..., spec: _Optional[_Union[_resources_pb2.TrainingSpec, _Mapping]] = ...) -> None: ...

class SuggestTrainingSpecResponse(_message.Message):
    __slots__ = ("spec", "choices", "preparation")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    PREPARATION_FIELD_NUMBER: _ClassVar[int]
    spec: _resources_pb2.TrainingSpec
    choices: _containers.RepeatedCompositeFieldContainer[Choice]
    preparation: Preparation
    def __init__(self, spec: _Optional[_Union[_resources_pb2.TrainingSpec, _Mapping]] = ..., choices: _Optional[_Iterable[_Union[Choice, _Mapping]]] = ..., preparation: _Optional[_Union[Preparation, _Mapping]] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("field", "value", "reason")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    field: str
    value: str
    reason: str
    def __init__(self, field: _Optional[str] = ..., value: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Preparation(_message.Message):
    __slots__ = ("source", "transform", "splits", "split_seed", "fit_split", "request_id")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TRANSFORM_FIELD_NUMBER: _ClassVar[int]
    SPLITS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_SEED_FIELD_NUMBER: _ClassVar[int]
    FIT_SPLIT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    source: str
    transform: _transform_pb2.Transform
    splits: _containers.RepeatedCompositeFieldContainer[SplitShare]
    split_seed: int
    fit_split: str
    request_id: str
    def __init__(self, source: _Optional[str] = ..., transform: _Optional[_Union[_transform_pb2.Transform, _Mapping]] = ..., splits: _Optional[_Iterable[_Union[SplitShare, _Mapping]]] = ..., split_seed: _Optional[int] = ..., fit_split: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class SplitShare(_message.Message):
    __slots__ = ("split", "weight")
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    split: str
    weight: float
    def __init__(self, split: _Optional[str] = ..., weight: _Optional[float] = ...) -> None: ...
