"""Answers in words: the names of labels, and classifications, whose strings Triton's clients know to read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from inference_service.domain.request_parameters import RequestedOutput
from inference_service.domain.signature import TensorSpec
from inference_service.domain.tensors import Array
from shared.errors import invalid_field


def check_classifiable(wanted: Sequence[TensorSpec], requested: Sequence[RequestedOutput]) -> None:
    """Raises `InvalidArgument` naming an output whose rows are no lists of numbers; `wanted` are those `requested`."""
    for index, (spec, asked) in enumerate(zip(wanted, requested, strict=False)):
        if asked.top and (len(spec.shape) < 2 or spec.datatype == "BYTES"):
            remedy = f"output {spec.name!r} has no classes, it is {spec}; ask for one that has, or without this"
            raise invalid_field(f"outputs[{index}].parameters.classification", asked.top, remedy)


def named(labels: Array, class_names: Sequence[str]) -> Array:
    """`labels` (B), from 0, to (B) bytes objects, UTF-8; empty for a class that has no name."""
    names = np.empty(len(class_names) + 1, object)
    names[:] = [*(name.encode() for name in class_names), b""]
    found: Array = names[np.minimum(labels, len(class_names))]
    return found


def classified(values: Array, top: int, class_names: Sequence[str] = ()) -> Array:
    """`values` (B, …) to (B, min(top, numbers of a row)) bytes objects, "value:index", the greatest number first; of
    equal numbers the first one first, NaN last. "value:index:name" for the numbers that have a name."""
    rows = values.reshape(len(values), -1)
    top = min(top, rows.shape[1])
    greatest = np.argsort(-rows.astype(np.float64), axis=1, kind="stable")[:, :top]
    chosen = np.take_along_axis(rows, greatest, axis=1)
    shape = "%f:%d" if np.issubdtype(rows.dtype, np.floating) else "%s:%d"
    names = [f":{name}" for name in class_names[: rows.shape[1]]] + [""] * (rows.shape[1] - len(class_names))
    strings = np.empty(greatest.shape, object)
    for row, (numbers, indices) in enumerate(zip(chosen.tolist(), greatest.tolist(), strict=True)):
        pairs = zip(numbers, indices, strict=True)
        strings[row] = [(shape % pair + names[pair[1]]).encode() for pair in pairs]
    return strings
