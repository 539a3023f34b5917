"""The steps: each a pure function from a batch array to a batch array, bit for bit the same at any batch size.

B = rows of the batch, H = height, W = width, C = channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
# The greatest magnitude of a mean or a std.
LARGEST = 1e30

# One row's shape, without B.
Shape = tuple[int, ...]


class Step(Protocol):
    def output(self, shape: Shape, dtype: np.dtype[Any]) -> tuple[Shape, np.dtype[Any]]:
        """One row's shape and dtype after the step. Raises `ValueError` saying what the step needs instead."""

    def apply(self, batch: Array) -> Array:
        """Works on all rows at once; never in place."""


@dataclass(frozen=True)
class ToFloat:
    """uint8 (B, H, W) → float32 (B, 1, H, W), and (B, H, W, C) → (B, C, H, W); 0..255 becomes 0..1."""

    def output(self, shape: Shape, dtype: np.dtype[Any]) -> tuple[Shape, np.dtype[Any]]:
        if dtype != np.uint8 or len(shape) not in (2, 3):
            raise ValueError(f"to_float needs uint8 images of shape (H, W) or (H, W, C), not {dtype} of {shape}")
        out = (1, *shape) if len(shape) == 2 else (shape[2], shape[0], shape[1])
        return out, np.dtype(np.float32)

    def apply(self, batch: Array) -> Array:
        channels_first = batch[:, None] if batch.ndim == 3 else batch.transpose(0, 3, 1, 2)
        return np.divide(channels_first, np.float32(255), dtype=np.float32, order="C")


@dataclass(frozen=True)
class Normalize:
    """(x - mean) / std in float32, on (B, C, H, W); one mean and one std per channel, or one for all."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.mean or len(self.mean) != len(self.std):
            raise ValueError("normalize needs as many values of std as of mean, at least one each")
        # A checkpoint keeps them as JSON, whose shortest form of the greatest float32 is beyond what reads back.
        if not (np.abs([*self.mean, *self.std]) <= LARGEST).all() or min(self.std) <= 0:
            raise ValueError(f"normalize needs finite values, up to {LARGEST:g}, and every std above 0")

    def output(self, shape: Shape, dtype: np.dtype[Any]) -> tuple[Shape, np.dtype[Any]]:
        if dtype != np.float32 or len(shape) != 3:
            raise ValueError(f"normalize needs float32 images of shape (C, H, W), not {dtype} of {shape}")
        if len(self.mean) not in (1, shape[0]):
            raise ValueError(f"normalize has {len(self.mean)} values of mean for {shape[0]} channels")
        return shape, dtype

    def apply(self, batch: Array) -> Array:
        mean = np.asarray(self.mean, np.float32).reshape(1, -1, 1, 1)
        std = np.asarray(self.std, np.float32).reshape(1, -1, 1, 1)
        centred = batch - mean
        return np.divide(centred, std, out=centred)
