"""Decodes images to pixels."""

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
from shared.transforms.batch import (
    Array,
    Column,
    ColumnType,
    RaggedImages,
    RowProblem,
    ScalarType,
    Schema,
    StepError,
    StepKeys,
    TensorType,
)
from shared.transforms.steps.step import ColumnStep, Step, scalar

# Encoded images that are read: Pillow knows more formats, and one of them, EPS, runs Ghostscript.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP")
# Images of at least this size are refused before decoding, because a few bytes may claim more memory than exists.
PIXEL_LIMIT = 100_000_000

# The pixels decoded side by side, 100 MB of colours. A single image may have more.
PIXELS_AT_ONCE = 32_000_000

_Mode = transform_pb2.DecodeImage.Mode


@dataclass(frozen=True)
class DecodeImage(ColumnStep):
    """Decodes bytes to uint8 (H, W, 3), or (H, W, 1) if `gray`, turned as EXIF says.

    An animation gives its first frame. Transparency is dropped, as torchvision's loaders do. Of 16 bits of grey the
    lower 8 are dropped.
    """

    op: ClassVar[str] = "decode_image"
    gray: bool = False
    # The most pixels of several rows to decode side by side; None: any number. It is no part of the step's meaning or
    # message.
    at_once: int | None = None

    @classmethod
    def from_message(cls, message: transform_pb2.DecodeImage, column: str) -> Self:
        if message.mode not in _Mode.values():
            raise StepError(f"{message.mode} is no such mode", "decode_image.mode")
        return cls(column, message.mode == _Mode.MODE_GRAY)

    def message(self) -> transform_pb2.DecodeImage:
        return transform_pb2.DecodeImage(mode=_Mode.MODE_GRAY if self.gray else _Mode.MODE_RGB)

    @property
    def _shape(self) -> tuple[int | None, ...]:
        return (None, None, 1 if self.gray else 3)

    def output_type(self, column_type: ColumnType) -> ColumnType:
        column = scalar(column_type, "decode_image needs a column of bytes")
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
    """Too many pixels to decode side by side. Fewer rows may fit."""


class ImageRefused(ValueError):
    """An image is refused. The text says why."""


def decoded(data: bytes, gray: bool, capacity: int | None = None) -> Array:
    """Decode to uint8 (H, W, 3), or (H, W, 1) if `gray`.

    Raises `ImageRefused`, and `TooManyPixels` for more than `capacity`.
    """
    with _opened(data, capacity) as image:
        pixels = np.asarray(image.convert("L" if gray else "RGB"))
    return pixels[:, :, None] if gray else pixels


def why_refused(data: bytes) -> str | None:
    """Explain why `decoded` refuses these bytes, in colour or in grey; None if it accepts them in both."""
    try:
        with _opened(data) as image:
            for mode in ("RGB", "L"):
                image.convert(mode)  # discarded at once, because it may take hundreds of megabytes
    except ImageRefused as refused:
        return str(refused)
    return None


def claimed_pixels(data: bytes) -> int:
    """Return the number of pixels by the header alone; 0 for refused bytes."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            pixels = image.width * image.height
    except Exception:  # decoding it reports the problem
        return 0
    return pixels if pixels < PIXEL_LIMIT else 0


def image_columns(steps: Iterable[Step], schema: Schema) -> list[str]:
    """Return the columns that may hold images which the steps decode."""
    if not any(isinstance(step, DecodeImage) for step in steps):
        return []
    return [name for name, one in schema.items() if isinstance(one, ScalarType) and _is_bytes(one)]


def side_by_side(columns: Iterable[pa.Array | pa.ChunkedArray], rows: int) -> list[tuple[int, int]]:
    """Cut `rows` rows into ranges [begin, end), at least one.

    The images of a range claim at most `PIXELS_AT_ONCE` together, or the range has one row.
    """
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
    """Open the image upright. Problems inside the body become `ImageRefused`, too."""
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
    except Image.DecompressionBombError:  # Pillow's own limit, checked on opening
        raise ImageRefused(f"has too many pixels; use fewer than {PIXEL_LIMIT:,}") from None
    except (ImageRefused, TooManyPixels, MemoryError):
        raise
    except Exception as error:
        # The decoders raise almost anything for broken bytes: SyntaxError, struct.error, zlib.error, …
        raise ImageRefused(f"is a broken image: {first_line(error)}") from error


def _upright(image: Image.Image) -> Image.Image:
    turned = ImageOps.exif_transpose(image)
    if turned.mode.startswith("I;16"):
        # Pillow's own conversion would clip values above 255.
        return Image.fromarray((np.asarray(turned) >> 8).astype(np.uint8))
    if turned.mode in ("I", "F"):
        raise ImageRefused(f"has pixels of 32 bits (mode {turned.mode}); save it with 8 or 16")
    return turned
