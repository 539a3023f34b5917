from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Lineage(_message.Message):
    __slots__ = ("dataset_version", "training_job", "checkpoint", "checkpoint_sha256", "deployment", "model_version", "code_bundle")
    DATASET_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRAINING_JOB_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_SHA256_FIELD_NUMBER: _ClassVar[int]
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CODE_BUNDLE_FIELD_NUMBER: _ClassVar[int]
    dataset_version: str
    training_job: str
    checkpoint: str
    checkpoint_sha256: str
    deployment: str
    model_version: str
    code_bundle: str
    def __init__(self, dataset_version: _Optional[str] = ..., training_job: _Optional[str] = ..., checkpoint: _Optional[str] = ..., checkpoint_sha256: _Optional[str] = ..., deployment: _Optional[str] = ..., model_version: _Optional[str] = ..., code_bundle: _Optional[str] = ...) -> None: ...
