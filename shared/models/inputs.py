"""The input of a model on its way into `forward`: a tensor, or a dict of tensors for a model of several inputs.

The dict has a tensor for each input column, by the column's name, in the order of the specification.

B = rows of the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.transforms.records import FLOATS, RecordSpec, RowShape

Inputs = Tensor | dict[str, Tensor]

_DTYPES = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool}


def arrays_of(values: NDArray[Any]) -> NDArray[Any] | dict[str, NDArray[Any]]:
    """Return the array itself, or of records the array of each field, contiguous and writable, as torch needs it."""
    if values.dtype.names is None:
        return values
    return {name: np.require(values[name], requirements=["C", "W", "O"]) for name in values.dtype.names}


def tensors_of(values: NDArray[Any]) -> Inputs:
    """Return the input as tensors in host memory. Those of a single array share its memory."""
    arrays = arrays_of(values)
    if isinstance(arrays, dict):
        return {name: torch.from_numpy(one) for name, one in arrays.items()}
    return torch.from_numpy(arrays)


def part_of(inputs: Inputs, begin: int, end: int) -> Inputs:
    """Return the rows [begin, end) without a copy."""
    if isinstance(inputs, Tensor):
        return inputs[begin:end]
    return {name: tensor[begin:end] for name, tensor in inputs.items()}


def tensors_in(inputs: Inputs) -> list[Tensor]:
    return [inputs] if isinstance(inputs, Tensor) else list(inputs.values())


def zero_inputs(
    row_shape: RowShape, rows: int, floats: torch.dtype = torch.float32, device: torch.device | None = None
) -> Inputs:
    """Return inputs of zeros, `floats` where they have a fraction. Without `device` they are on the default device."""
    if not isinstance(row_shape, RecordSpec):
        return torch.zeros((rows, *row_shape), dtype=floats, device=device)
    return {
        one.name: torch.zeros(
            (rows, *one.shape), dtype=floats if one.dtype == FLOATS else _DTYPES[one.dtype], device=device
        )
        for one in row_shape.tensors
    }
