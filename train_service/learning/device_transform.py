"""The last steps of a transform on a rank's device: bit for bit what the loader would make of the same images.

Draws are made on the host, from the keys of the rows, as the loader makes them. Products and quotients are torch's own
kernels, one after another, so none is fused into another with a rounding less; and a division is by a tensor, for by a
number torch multiplies with its reciprocal.

B = rows of the batch, H = height, W = width, C = channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from shared.transforms import RowKeys
from shared.transforms.steps.images import CenterCrop, ColorJitter, ImageStep, RandomCrop, RandomFlip
from shared.transforms.steps.step import Step
from shared.transforms.steps.tensors import Normalize, ToFloat

# (B, draws) numbers of [0, 1).
Draws = NDArray[np.float64]
NONE = np.empty((0, 0))


class DeviceTransform:
    """`steps` with their places in the whole transform, from which augmentations draw."""

    def __init__(self, steps: Sequence[tuple[int, Step]]) -> None:
        self._steps = list(steps)

    def __call__(self, images: Tensor, keys: RowKeys | None = None) -> Tensor:
        """uint8 (B, H, W) or (B, H, W, C) as the step before gave them → float32 (B, C, H', W'). With `keys`, those of
        the rows, augmentations act."""
        for place, step in self._steps:
            count = step.draws if isinstance(step, ImageStep) else 0
            if not count:
                images = ON_DEVICE[type(step)](step, images, NONE)
            elif keys is not None:
                images = ON_DEVICE[type(step)](step, images, keys.at(place).uniform(count))
            elif isinstance(step, RandomCrop):
                images = _center_crop(step, images, NONE)
        return images


def _center_crop(step: CenterCrop | RandomCrop, images: Tensor, _draws: Draws) -> Tensor:
    images = _padded_to(images, step.height, step.width)
    top, left = (images.shape[1] - step.height) // 2, (images.shape[2] - step.width) // 2
    return images[:, top : top + step.height, left : left + step.width]


def _random_crop(step: RandomCrop, images: Tensor, draws: Draws) -> Tensor:
    images = _padded(images, (step.padding,) * 2, (step.padding,) * 2)
    images = _padded_to(images, step.height, step.width)
    choices = (images.shape[1] - step.height + 1, images.shape[2] - step.width + 1)
    top, left = _moved(np.floor(draws * choices).astype(np.int64).T, images.device)
    down = top[:, None] + torch.arange(step.height, device=images.device)
    right = left[:, None] + torch.arange(step.width, device=images.device)
    rows = torch.arange(len(images), device=images.device)
    return images[rows[:, None, None], down[:, :, None], right[:, None, :]]


def _random_flip(step: RandomFlip, images: Tensor, draws: Draws) -> Tensor:
    chosen = (draws < (step.horizontal_probability, step.vertical_probability)).T
    sideways, over = _moved(chosen, images.device).reshape(2, -1, *[1] * (images.dim() - 1))
    images = torch.where(sideways, images.flip(2), images)
    return torch.where(over, images.flip(1), images)


def _color_jitter(step: ColorJitter, images: Tensor, draws: Draws) -> Tensor:
    strengths = (step.brightness, step.contrast, step.saturation)
    factors = np.stack([1 + (2 * draws[:, place] - 1) * one for place, one in enumerate(strengths)])
    brighter, harder, richer = _moved(factors, images.device).reshape(3, -1, *[1] * (images.dim() - 1))
    if step.brightness:
        images = _pixels(images.double() * brighter)
    if step.contrast:
        gray = _luma(images) if images.dim() == 4 and images.shape[3] == 3 else images
        sums = gray.flatten(1).sum(1, dtype=torch.int64).double()
        means = sums / torch.full_like(sums, max(math.prod(gray.shape[1:]), 1))
        images = _blended(images, means.reshape(brighter.shape), harder)
    if step.saturation:
        images = _blended(images, _luma(images)[..., None].double(), richer)
    return images


def _to_float(_step: ToFloat, images: Tensor, _draws: Draws) -> Tensor:
    channels_first = images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2)
    return channels_first.float() / torch.full((1,), 255.0, device=images.device)


def _normalize(step: Normalize, images: Tensor, _draws: Draws) -> Tensor:
    mean, std = (
        _moved(np.asarray(one, np.float32).reshape(1, -1, 1, 1), images.device) for one in (step.mean, step.std)
    )
    return (images - mean) / std


# What each step is on a device; a step that is not here is the loader's.
ON_DEVICE: dict[type[Step], Callable[[Any, Tensor, Draws], Tensor]] = {
    CenterCrop: _center_crop,
    RandomCrop: _random_crop,
    RandomFlip: _random_flip,
    ColorJitter: _color_jitter,
    ToFloat: _to_float,
    Normalize: _normalize,
}


def _padded_to(images: Tensor, height: int, width: int) -> Tensor:
    down, right = (max(wanted - given, 0) for wanted, given in zip((height, width), images.shape[1:3], strict=True))
    return _padded(images, (down // 2, down - down // 2), (right // 2, right - right // 2))


def _padded(images: Tensor, down: tuple[int, int], right: tuple[int, int]) -> Tensor:
    """With zeros above and below, left and right."""
    if not any((*down, *right)):
        return images
    last = (0, 0) if images.dim() == 4 else ()
    return F.pad(images, (*last, *right, *down))


def _luma(images: Tensor) -> Tensor:
    """(…, 3) → (…), as the loader's."""
    red, green, blue = images.long().unbind(-1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).to(torch.uint8)


def _blended(images: Tensor, gray: Tensor, factor: Tensor) -> Tensor:
    return _pixels(gray + (images.double() - gray) * factor)


def _pixels(values: Tensor) -> Tensor:
    return values.round().clamp(0, 255).to(torch.uint8)


def _moved(values: NDArray[Any], device: torch.device) -> Tensor:
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
