"""A pipeline: the steps of one `millrace.common.v1.Transform`, applied in order to the input column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import json_format

from millrace.common.v1 import transform_pb2
from shared.errors import InvalidArgument, invalid_field
from shared.transforms.steps import Array, Normalize, Shape, Step, ToFloat


@dataclass(frozen=True)
class TensorSpec:
    """One row of a tensor: its name, numpy dtype name and shape without the batch axis."""

    name: str
    dtype: str
    shape: Shape


class Pipeline:
    """Row-wise preprocessing of one input column."""

    def __init__(self, steps: list[Step], config: dict[str, Any]) -> None:
        self._steps = steps
        # As JSON, the form in which a checkpoint keeps it.
        self.config = config

    @classmethod
    def from_proto(cls, transform: transform_pb2.Transform, input_column: str, field: str = "transform") -> Pipeline:
        """Raises `InvalidArgument` naming the step, below the path `field`."""
        steps: list[Step] = []
        for index, step in enumerate(transform.steps):
            path = f"{field}.steps[{index}]"
            if step.column not in ("", input_column):
                raise invalid_field(f"{path}.column", step.column, f"use {input_column!r} or leave it empty")
            try:
                steps.append(_step(step))
            except ValueError as error:
                raise InvalidArgument(
                    f"{path}: {error}", reason="INVALID_FIELD", metadata={"field": path}, fields=[(path, str(error))]
                ) from None
        return cls(steps, json_format.MessageToDict(transform))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], input_column: str) -> Pipeline:
        """The inverse of `config`."""
        transform = json_format.ParseDict(dict(config), transform_pb2.Transform())
        return cls.from_proto(transform, input_column)

    def output(self, given: TensorSpec, field: str = "transform") -> TensorSpec:
        """What `given` becomes. Raises `InvalidArgument` naming the step that it does not fit."""
        shape, dtype = given.shape, np.dtype(given.dtype)
        for index, step in enumerate(self._steps):
            try:
                shape, dtype = step.output(shape, dtype)
            except ValueError as error:
                path = f"{field}.steps[{index}]"
                raise InvalidArgument(
                    f"{path}: {error}", reason="INVALID_FIELD", metadata={"field": path}, fields=[(path, str(error))]
                ) from None
        return TensorSpec(given.name, dtype.name, shape)

    def __call__(self, batch: Array) -> Array:
        """The model's input for a batch of rows; the first axis is the rows'."""
        for step in self._steps:
            batch = step.apply(batch)
        return batch


def _step(step: transform_pb2.TransformStep) -> Step:
    match step.WhichOneof("op"):
        case "to_float":
            return ToFloat()
        case "normalize":
            return Normalize(tuple(step.normalize.mean), tuple(step.normalize.std))
    raise ValueError("choose one of to_float, normalize")
