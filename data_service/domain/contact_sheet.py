"""A contact sheet: the images of some rows in a grid, each with its label, as one PNG."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

COLUMNS = 10
# The longer side of an image on the sheet, in pixels.
CELL_PX = 84
CAPTION_PX = 14
GAP_PX = 6


@dataclass(frozen=True)
class Tile:
    """`image` is uint8, (H, W) grey or (H, W, 3) colour."""

    image: np.ndarray[Any, np.dtype[np.uint8]]
    caption: str


def is_drawable(value_type: str, shape: Sequence[int]) -> bool:
    """Whether a tensor column of such rows can be drawn."""
    grey_or_colour = len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3))
    return value_type == "uint8" and grey_or_colour


def draw(sections: Sequence[tuple[str, Sequence[Tile]]]) -> bytes:
    """A PNG with one titled block for each (title, tiles)."""
    blocks = [
        (title, [_fit(tile.image) for tile in tiles], [tile.caption for tile in tiles]) for title, tiles in sections
    ]
    width = GAP_PX + COLUMNS * (CELL_PX + GAP_PX)
    row_px = CELL_PX + CAPTION_PX + GAP_PX
    height = GAP_PX + sum(CAPTION_PX + GAP_PX + math.ceil(len(images) / COLUMNS) * row_px for _, images, _ in blocks)
    sheet = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(sheet)
    top = GAP_PX
    for title, images, captions in blocks:
        pen.text((GAP_PX, top), title, fill="black")
        top += CAPTION_PX + GAP_PX
        for index, (image, caption) in enumerate(zip(images, captions, strict=True)):
            left = GAP_PX + index % COLUMNS * (CELL_PX + GAP_PX)
            upper = top + index // COLUMNS * row_px
            sheet.paste(image, (left, upper))
            pen.text((left, upper + CELL_PX + 1), caption[:14], fill="black")
        top += math.ceil(len(images) / COLUMNS) * row_px
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    return buffer.getvalue()


def _fit(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> Image.Image:
    """Whole multiples for small images, so that each pixel stays a square; smooth shrinking for large ones."""
    image = Image.fromarray(pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
    longer = max(image.size)
    if longer <= CELL_PX:
        factor = CELL_PX // longer
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    image.thumbnail((CELL_PX, CELL_PX))
    return image
