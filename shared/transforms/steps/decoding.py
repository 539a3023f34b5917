"""Encoded images to pixels."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds
from PIL import Image, ImageOps, UnidentifiedImageError

from millrace.common.v1 import transform_pb2
from shared.errors import first_line
from shared.transforms.batch import Array, Column, RaggedImages, StepKeys
from shared.transforms.schema import ColumnType, RowProblem, ScalarType, Schema, StepError, TensorType
from shared.transforms.steps.step import ColumnStep, Step, scalar

# Encoded images that are read: Pillow knows more formats, and one of them, EPS, runs Ghostscript.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP")
# As many or more are refused before any is decoded: a few bytes may claim far more memory than there is.
PIXEL_LIMIT = 100_000_000

# Of rows that are decoded side by side: 100 MB of colours. One image alone may have more.
PIXELS_AT_ONCE = 32_000_000

_Mode = transform_pb2.DecodeImage.Mode


@dataclass(frozen=True)
class DecodeImage(ColumnStep):
    """Bytes → uint8 (H, W, 3), or (H, W, 1) where `gray`; turned as EXIF says. Of animations, the first frame.

    Transparency is left out, as torchvision's loaders do; 16 bits of grey lose their lower 8.
    """

    op: ClassVar[str] = "decode_image"
    gray: bool = False
    # So many pixels of several rows may be decoded side by side; None: any number. It is none of the step's meaning,
    # and no part of its message.
    at_once: int | None = None

    @classmethod
    def of(cls, message: transform_pb2.DecodeImage, column: str) -> Self:
        if message.mode not in _Mode.values():
            raise StepError(f"{message.mode} is no such mode", "decode_image.mode")
        return cls(column, message.mode == _Mode.MODE_GRAY)

    def message(self) -> transform_pb2.DecodeImage:
        return transform_pb2.DecodeImage(mode=_Mode.MODE_GRAY if self.gray else _Mode.MODE_RGB)

    @property
    def _shape(self) -> tuple[int | None, ...]:
        return (None, None, 1 if self.gray else 3)

    def output_type(self, given: ColumnType) -> ColumnType:
        column = scalar(given, "decode_image needs a column of bytes")
        if not _is_bytes(column):
            raise StepError(f"decode_image needs a column of bytes, not {column}")
        return TensorType("uint8", self._shape)

    def work(self, column: Column, keys: StepKeys | None) -> Column:
        images = []
        capacity = self.at_once if len(column) > 1 else None
        for row, data in enumerate(column):
            if not data.is_valid:
                raise RowProblem(row, f"{self.column!r} is null, and holds no image; filter such rows out")
            try:
                images.append(decoded(data.as_py(), self.gray, capacity))
                capacity = capacity and max(capacity - math.prod(images[-1].shape[:2]), 1)
            except ImageRefused as error:
                raise RowProblem(row, f"{self.column!r} {error}") from None
        return RaggedImages(tuple(images), self._shape)


class TooManyPixels(Exception):
    """Of rows that were to be decoded side by side; fewer of them may do."""


class ImageRefused(ValueError):
    """The text says what is wrong with the image."""


def decoded(data: bytes, gray: bool, capacity: int | None = None) -> Array:
    """uint8 (H, W, 3), or (H, W, 1) where `gray`. Raises `ImageRefused`, and `TooManyPixels` for more than
    `capacity`."""
    with _opened(data, capacity) as image:
        pixels = np.asarray(image.convert("L" if gray else "RGB"))
    return pixels[:, :, None] if gray else pixels


def why_refused(data: bytes) -> str | None:
    """What `decoded` would say of these bytes, in colour or in grey; None where it takes them in both."""
    try:
        with _opened(data) as image:
            for mode in ("RGB", "L"):
                image.convert(mode)  # and let go of: one of them may take hundreds of megabytes
    except ImageRefused as refused:
        return str(refused)
    return None


def claimed_pixels(data: bytes) -> int:
    """How many would be decoded, by the header alone; 0 of what is refused."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            pixels = image.width * image.height
    except Exception:  # decoding it tells why
        return 0
    return pixels if pixels < PIXEL_LIMIT else 0


def image_columns(steps: Iterable[Step], given: Schema) -> list[str]:
    """The columns that may hold images which the steps decode; of other bytes no pixels are counted."""
    if not any(isinstance(step, DecodeImage) for step in steps):
        return []
    return [name for name, one in given.items() if isinstance(one, ScalarType) and _is_bytes(one)]


def side_by_side(columns: Iterable[pa.Array | pa.ChunkedArray], rows: int) -> list[tuple[int, int]]:
    """Cuts so many rows into stretches [begin, end), at least one: of rows whose images in these columns claim at most
    `PIXELS_AT_ONCE` together, or of one row."""
    pixels = [0] * rows
    for column in columns:
        for row, data in enumerate(column):
            pixels[row] += claimed_pixels(data.as_py()) if data.is_valid else 0
    ends, begin, claimed = [], 0, 0
    for row, more in enumerate(pixels):
        if row > begin and claimed + more > PIXELS_AT_ONCE:
            ends.append(row)
            begin, claimed = row, 0
        claimed += more
    return list(pairwise([0, *ends, rows]))


def _is_bytes(column: ScalarType) -> bool:
    return bool(kinds.is_binary(column.arrow_type) or kinds.is_large_binary(column.arrow_type))


@contextmanager
def _opened(data: bytes, capacity: int | None = None) -> Iterator[Image.Image]:
    """The image as it stands upright; what goes wrong with it within, too, is an `ImageRefused`."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height >= PIXEL_LIMIT:
                raise ImageRefused(f"has {width}×{height} pixels; use fewer than {PIXEL_LIMIT:,}")
            if capacity is not None and width * height > capacity:
                raise TooManyPixels
            image.load()
            yield _upright(image)
    except UnidentifiedImageError:
        raise ImageRefused(f"is no image of the formats {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:  # Pillow's own limit, which it checks on opening
        raise ImageRefused(f"has too many pixels; use fewer than {PIXEL_LIMIT:,}") from None
    except (ImageRefused, TooManyPixels, MemoryError):
        raise
    except Exception as error:
        # The decoders raise nearly everything at bytes that are broken: SyntaxError, struct.error, zlib.error, …
        raise ImageRefused(f"is a broken image: {first_line(error)}") from error


def _upright(image: Image.Image) -> Image.Image:
    turned = ImageOps.exif_transpose(image)
    if turned.mode.startswith("I;16"):
        # Pillow's own conversion would cut everything above 255 off.
        return Image.fromarray((np.asarray(turned) >> 8).astype(np.uint8))
    if turned.mode in ("I", "F"):
        raise ImageRefused(f"has pixels of 32 bits (mode {turned.mode}); save it with 8 or 16")
    return turned
