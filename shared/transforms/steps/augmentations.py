"""Random changes of uint8 images in training, each row by draws of its own.

B = rows of the batch, H = height, W = width, C = channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from PIL import Image

from millrace.common.v1 import transform_pb2
from shared.transforms.batch import Array, Column
from shared.transforms.problems import StepError
from shared.transforms.randomness import StepKeys
from shared.transforms.schema import TensorType
from shared.transforms.steps.images import (
    CenterCrop,
    Draws,
    ImageStep,
    Shape,
    by_planes,
    center_crop,
    check_side,
    luma,
    padded_to,
)
from shared.transforms.steps.step import Step

MAX_PADDING = 512


@dataclass(frozen=True)
class _Augmentation(ImageStep):
    augments: ClassVar[bool] = True

    def shape_of(self, shape: Shape) -> Shape:
        return shape

    def work(self, column: Column, keys: StepKeys | None) -> Column:
        return column if keys is None else super().work(column, keys)


@dataclass(frozen=True)
class RandomCrop(ImageStep):
    """A place drawn evenly; in evaluation and serving, the centre. Images too small even with their padding get more
    of it, as in center_crop."""

    op: ClassVar[str] = "random_crop"
    augments: ClassVar[bool] = True
    draws: ClassVar[int] = 2
    height: int
    width: int
    padding: int

    @classmethod
    def of(cls, message: transform_pb2.RandomCrop, column: str) -> Self:
        check_side(message.height, "random_crop.height")
        check_side(message.width, "random_crop.width")
        if not 0 <= message.padding <= MAX_PADDING:
            raise StepError(f"{message.padding}: use 0 to {MAX_PADDING} pixels", "random_crop.padding")
        return cls(column, message.height, message.width, message.padding)

    def message(self) -> transform_pb2.RandomCrop:
        return transform_pb2.RandomCrop(height=self.height, width=self.width, padding=self.padding)

    def shape_of(self, shape: Shape) -> Shape:
        return (self.height, self.width, *shape[2:])

    def on_images(self, images: Array, draws: Draws) -> Array:
        if draws is None:
            return center_crop(images, self.height, self.width)
        around = [(0, 0), (self.padding, self.padding), (self.padding, self.padding), (0, 0)][: images.ndim]
        images = padded_to(np.pad(images, around), self.height, self.width)
        # (B, places down, places right, …, height, width), without a copy.
        windows = sliding_window_view(images, (self.height, self.width), axis=(1, 2))
        places = np.floor(draws * windows.shape[1:3]).astype(np.intp)
        crops: Array = windows[np.arange(len(images)), places[:, 0], places[:, 1]]
        return crops if crops.ndim == 3 else crops.transpose(0, 2, 3, 1)

    def serving_form(self) -> Step | None:
        return CenterCrop(self.column, self.height, self.width)


@dataclass(frozen=True)
class RandomFlip(_Augmentation):
    """Mirrored left to right, and upside down, each with its probability."""

    op: ClassVar[str] = "random_flip"
    draws: ClassVar[int] = 2
    horizontal_probability: float
    vertical_probability: float

    @classmethod
    def of(cls, message: transform_pb2.RandomFlip, column: str) -> Self:
        return cls(column, *_fractions(message, ("horizontal_probability", "vertical_probability"), "random_flip"))

    def message(self) -> transform_pb2.RandomFlip:
        return transform_pb2.RandomFlip(
            horizontal_probability=self.horizontal_probability, vertical_probability=self.vertical_probability
        )

    def on_images(self, images: Array, draws: Draws) -> Array:
        assert draws is not None
        sideways, over = (draws < (self.horizontal_probability, self.vertical_probability)).T
        out = images.copy()
        out[sideways] = out[sideways, :, ::-1]
        out[over] = out[over, ::-1]
        return out


@dataclass(frozen=True)
class RandomRotation(_Augmentation):
    """By an angle drawn evenly from -degrees to degrees, against the clock where positive."""

    op: ClassVar[str] = "random_rotation"
    draws: ClassVar[int] = 1
    degrees: float

    @classmethod
    def of(cls, message: transform_pb2.RandomRotation, column: str) -> Self:
        if not 0 < message.degrees <= 180:
            raise StepError(f"{message.degrees}: use more than 0 and at most 180", "random_rotation.degrees")
        return cls(column, message.degrees)

    def message(self) -> transform_pb2.RandomRotation:
        return transform_pb2.RandomRotation(degrees=self.degrees)

    def on_images(self, images: Array, draws: Draws) -> Array:
        assert draws is not None
        out = np.empty_like(images)
        for row, angle in enumerate(((draws[:, 0] * 2 - 1) * self.degrees).tolist()):
            out[row] = by_planes(images[row], _turn(angle))
        return out


@dataclass(frozen=True)
class ColorJitter(_Augmentation):
    """Brightness (towards black), contrast (towards the mean grey), saturation (towards the grey of each pixel), in
    this order; pixels are rounded and kept within 0..255 after each."""

    op: ClassVar[str] = "color_jitter"
    draws: ClassVar[int] = 3
    brightness: float
    contrast: float
    saturation: float

    @classmethod
    def of(cls, message: transform_pb2.ColorJitter, column: str) -> Self:
        return cls(column, *_fractions(message, ("brightness", "contrast", "saturation"), "color_jitter"))

    def message(self) -> transform_pb2.ColorJitter:
        return transform_pb2.ColorJitter(brightness=self.brightness, contrast=self.contrast, saturation=self.saturation)

    def shape_of(self, shape: Shape) -> Shape:
        if self.saturation and (len(shape) != 3 or shape[2] != 3):
            found = TensorType("uint8", shape)
            raise StepError(f"saturation needs images of shape (H, W, 3), not {found}", "color_jitter.saturation")
        return shape

    def on_images(self, images: Array, draws: Draws) -> Array:
        assert draws is not None
        strengths = (self.brightness, self.contrast, self.saturation)
        per_row = (-1, *[1] * (images.ndim - 1))
        brighter, harder, richer = (
            (1 + (2 * draws[:, place] - 1) * strength).reshape(per_row) for place, strength in enumerate(strengths)
        )
        if self.brightness:
            images = _pixels(images * brighter)
        if self.contrast:
            gray = luma(images) if images.ndim == 4 and images.shape[3] == 3 else images
            images = _blended(images, _row_means(gray).reshape(per_row), harder)
        if self.saturation:
            images = _blended(images, luma(images)[..., None].astype(np.float64), richer)
        return images


def _fractions(message: Any, names: tuple[str, ...], op: str) -> list[float]:
    """Raises `StepError` unless each is 0 to 1, and one is above 0."""
    values = [getattr(message, name) for name in names]
    for name, value in zip(names, values, strict=True):
        if not 0 <= value <= 1:
            raise StepError(f"{value}: use 0 to 1", f"{op}.{name}")
    if not any(values):
        raise StepError(f"it would change nothing; set one of {', '.join(names)} above 0", op)
    return values


def _turn(angle: float) -> Any:
    return lambda plane: plane.rotate(angle, Image.Resampling.BILINEAR)


def _row_means(images: Array) -> NDArray[np.float64]:
    """(B), of whole-number sums: exact in any order."""
    sums: NDArray[np.int64] = images.sum(axis=tuple(range(1, images.ndim)), dtype=np.int64)
    return sums / max(math.prod(images.shape[1:]), 1)


def _blended(images: Array, gray: NDArray[np.float64], factor: NDArray[np.float64]) -> Array:
    return _pixels(gray + (images - gray) * factor)


def _pixels(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)
