"""From a `TransformStep` to the step that it describes."""

from __future__ import annotations

from collections.abc import Collection

from millrace.common.v1 import transform_pb2
from shared.transforms.problems import StepError
from shared.transforms.steps.augmentations import ColorJitter, RandomCrop, RandomFlip, RandomRotation
from shared.transforms.steps.casting import Cast
from shared.transforms.steps.columns import Drop, Rename, Select
from shared.transforms.steps.custom import Custom
from shared.transforms.steps.decoding import DecodeImage
from shared.transforms.steps.encoding import OneHotEncode, OrdinalEncode
from shared.transforms.steps.filling import FillNulls
from shared.transforms.steps.filtering import Filter
from shared.transforms.steps.images import CenterCrop, Grayscale, Resize
from shared.transforms.steps.scaling import Bucketize, MinMaxScale, Standardize
from shared.transforms.steps.step import Step
from shared.transforms.steps.tensors import Concat, Normalize, ToFloat
from shared.transforms.steps.tokenizing import Tokenize

STEPS: dict[str, type[Step]] = {
    step.op: step
    for step in (
        ToFloat,
        Normalize,
        Select,
        Drop,
        Rename,
        Cast,
        Filter,
        FillNulls,
        Standardize,
        MinMaxScale,
        OrdinalEncode,
        OneHotEncode,
        Bucketize,
        Concat,
        DecodeImage,
        Resize,
        CenterCrop,
        Grayscale,
        RandomCrop,
        RandomFlip,
        RandomRotation,
        ColorJitter,
        Custom,
        Tokenize,
    )
}


def build_step(
    message: transform_pb2.TransformStep, default_column: str, custom_allowed: Collection[str] | None
) -> Step:
    """Raises `StepError` naming the field at fault. `custom_allowed`: as in `Pipeline.from_proto`."""
    op = message.WhichOneof("op")
    if op is None:
        raise StepError(f"choose one of {', '.join(STEPS)}")
    kind = STEPS[op]
    if kind.takes_column:
        column = message.column or default_column
        if not column:
            raise StepError(f"name the column that {op} works on", "column")
    elif message.column:
        raise StepError(f"leave it empty: {op} names its columns itself", "column")
    else:
        column = ""
    step = kind.of(getattr(message, op), column)
    if isinstance(step, Custom) and custom_allowed is not None and step.function not in custom_allowed:
        allowed = ", ".join(sorted(custom_allowed)) or "none"
        raise StepError(f"{step.function!r} is not allowed here; allowed are: {allowed}", "custom.function")
    return step
