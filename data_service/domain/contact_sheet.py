"""A contact sheet: the images of some rows in a grid, each with its label, as one PNG.

Images are uint8 tensors of shape (H, W) or (H, W, C), float tensors of shape (C, H, W) or (H, W, C), or the bytes of
encoded images, of the formats that an import takes. C is 1 or 3.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as kinds
from PIL import Image, ImageDraw, ImageOps

from shared.image_formats import FORMATS
from shared.value_texts import value_shown

LABEL = "label"
COLUMNS = 10
MAX_IMAGE_COLUMNS = 8
# The longer side of an image on the sheet, in pixels.
CELL_PX = 84
CAPTION_PX = 14
GAP_PX = 6
MAX_CAPTION = 14
# A file may claim to be larger than memory: none of more pixels than this is decoded.
MAX_DECODED_PX = 50_000_000
# Of one sheet, so that it takes seconds, whatever the rows hold: values whose headers are read, and pixels that are
# decoded. Of a JPEG an eighth counts, for no more is worked out of one that is shrunk while it is decoded.
MAX_HEADERS = 20_000
MAX_SHEET_PX = 200_000_000
JPEG_SHARE = 8
_BACKGROUND, _NO_IMAGE, _INK = "white", (225, 225, 225), "black"

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Tile:
    """`image` is a tensor that `is_drawable`; None where the row has none."""

    image: npt.NDArray[Any] | None
    caption: str


class _Work:
    """What is left of the work that one sheet may take."""

    def __init__(self) -> None:
        self._headers = MAX_HEADERS
        self._pixels = MAX_SHEET_PX

    def opened(self, data: bytes) -> Image.Image | None:
        """Read as far as its header; None where it is no image, or too large a one, or too many were opened."""
        if not self._headers:
            return None
        self._headers -= 1
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except Exception:
            return None
        return image if image.width * image.height <= MAX_DECODED_PX else None

    def decoded(self, data: bytes | None) -> Pixels | None:
        image = None if data is None else self.opened(data)
        if image is None:
            return None
        cost = image.width * image.height // (JPEG_SHARE if image.format == "JPEG" else 1)
        if cost > self._pixels:
            return None
        self._pixels -= cost
        try:
            image.draft("RGB", (2 * CELL_PX, 2 * CELL_PX))  # JPEG then decodes at a fraction of its size
            image.thumbnail((CELL_PX, CELL_PX))
            return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        except Exception:  # truncated, or damaged behind its header: the decoders raise nearly everything then
            return None


def contact_sheet(tables: Mapping[str, pa.Table], value_names: Mapping[str, Sequence[str]] | None = None) -> bytes:
    """A PNG of the first image columns of these rows, a block for each of them and each split; empty where no column is
    an image.

    Captions are the values of the column `label`, by their `value_names` where there are some. Depends on the rows
    alone: images beyond the work that one sheet may take are not drawn, the first ones are.
    """
    work = _Work()
    names = next(iter(tables.values())).schema.names
    images = (name for name in names if _is_image([table.column(name) for table in tables.values()], work))
    drawn = list(islice(images, MAX_IMAGE_COLUMNS))
    sections = [
        (split if len(drawn) == 1 else f"{split}, {name}", _tiles(table, name, value_names or {}, work))
        for name in drawn
        for split, table in tables.items()
    ]
    return draw(sections) if sections else b""


def is_drawable(value_type: str, shape: Sequence[int]) -> bool:
    """Whether a tensor column of such rows can be drawn."""
    if value_type == "uint8":
        return len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3))
    is_float = value_type in ("halffloat", "float", "double")
    return is_float and len(shape) == 3 and (shape[0] in (1, 3) or shape[2] in (1, 3)) and min(shape[1:]) > 0


def draw(sections: Sequence[tuple[str, Sequence[Tile]]]) -> bytes:
    """A PNG with one titled block for each (title, tiles)."""
    width = GAP_PX + COLUMNS * (CELL_PX + GAP_PX)
    row_px = CELL_PX + CAPTION_PX + GAP_PX
    height = GAP_PX + sum(CAPTION_PX + GAP_PX + math.ceil(len(tiles) / COLUMNS) * row_px for _, tiles in sections)
    sheet = Image.new("RGB", (width, height), _BACKGROUND)
    pen = ImageDraw.Draw(sheet)
    top = GAP_PX
    for title, tiles in sections:
        pen.text((GAP_PX, top), _drawable_text(title), fill=_INK)
        top += CAPTION_PX + GAP_PX
        for index, tile in enumerate(tiles):
            left = GAP_PX + index % COLUMNS * (CELL_PX + GAP_PX)
            upper = top + index // COLUMNS * row_px
            if tile.image is None:
                pen.rectangle((left, upper, left + CELL_PX - 1, upper + CELL_PX - 1), fill=_NO_IMAGE)
                pen.text((left + 4, upper + CELL_PX // 2 - 6), "no image", fill=_INK)
            else:
                image = _fit(_pixels(tile.image))
                sheet.paste(image, (left + (CELL_PX - image.width) // 2, upper + (CELL_PX - image.height) // 2))
            pen.text((left, upper + CELL_PX + 1), _drawable_text(tile.caption[:MAX_CAPTION]), fill=_INK)
        top += math.ceil(len(tiles) / COLUMNS) * row_px
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    return buffer.getvalue()


def _is_image(columns: Sequence[pa.ChunkedArray], work: _Work) -> bool:
    arrow_type = columns[0].type
    if isinstance(arrow_type, pa.FixedShapeTensorType):
        return is_drawable(str(arrow_type.value_type), arrow_type.shape)
    if not (kinds.is_binary(arrow_type) or kinds.is_large_binary(arrow_type)):
        return False
    return any(work.opened(value.as_py()) is not None for column in columns for value in column if value.is_valid)


def _tiles(table: pa.Table, column: str, value_names: Mapping[str, Sequence[str]], work: _Work) -> list[Tile]:
    values = table.column(column)
    if isinstance(values.type, pa.FixedShapeTensorType):
        images: list[npt.NDArray[Any] | None] = [value.to_numpy() for value in values]
    else:
        images = [work.decoded(value.as_py()) for value in values]
    captions = [""] * table.num_rows
    if LABEL in table.schema.names:
        captions = [_caption(value, value_names.get(LABEL, ())) for value in table.column(LABEL)]
    return [Tile(image, caption) for image, caption in zip(images, captions, strict=True)]


def _caption(value: pa.Scalar, names: Sequence[str]) -> str:
    if kinds.is_integer(value.type) and value.is_valid and 0 <= value.as_py() < len(names):
        return str(names[value.as_py()])
    return value_shown(value) if kinds.is_temporal(value.type) else str(value.as_py())


def _pixels(tensor: npt.NDArray[Any]) -> Pixels:
    """One image as bytes. Floats from 0 to 1 as they are, all others from their least to their greatest value."""
    if tensor.dtype == np.uint8:
        return tensor.view(np.uint8)
    values = np.nan_to_num(tensor.astype(np.float64), nan=0.0, posinf=1.0, neginf=0.0)
    if values.shape[0] in (1, 3) and values.shape[2] not in (1, 3):
        values = values.transpose(1, 2, 0)
    least, most = float(values.min()), float(values.max())
    if least < 0 or most > 1:
        values = (values - least) / (most - least) if most > least else np.full_like(values, 0.5)
    pixels: Pixels = np.round(values * 255).astype(np.uint8)
    return pixels


def _fit(pixels: Pixels) -> Image.Image:
    """Whole multiples for small images, so that each pixel stays a square; smooth shrinking for large ones."""
    image = Image.fromarray(pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
    longer = max(image.size)
    if longer <= CELL_PX:
        factor = CELL_PX // longer
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    image.thumbnail((CELL_PX, CELL_PX))
    return image


def _drawable_text(text: str) -> str:
    """One line of it."""
    return " ".join(text.split()) or " "
