"""Decodes images, and works on their pixels: uint8 (B, H, W) or (B, H, W, C), also with sizes that differ from row to
row.

Augmentations change each row by its own random numbers.

B = rows of the batch, H = height, W = width, C = channels.
"""

from __future__ import annotations

import io
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from millrace.common.v1 import transform_pb2
from shared.errors import first_line
from shared.transforms.batch import (
    Array,
    Column,
    ColumnStep,
    ColumnType,
    RaggedImages,
    RowProblem,
    ScalarType,
    Schema,
    Step,
    StepError,
    StepKeys,
    TensorType,
    scalar,
)

# --- Decoding ---

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


# --- Images ---

MAX_SIDE = 8192

Shape = tuple[int | None, ...]
# (B, draws) numbers in [0, 1) for steps that draw; None in evaluation.
Draws = NDArray[np.float64] | None


@dataclass(frozen=True)
class ImageStep(ColumnStep):
    """Base of the image steps. `draws` is the number of random numbers per row."""

    draws: ClassVar[int] = 0

    @abstractmethod
    def shape_of(self, shape: Shape) -> Shape:
        """Return one row's shape after the step; `shape` has 2 or 3 lengths. Raises `StepError`."""

    @abstractmethod
    def on_images(self, images: Array, draws: Draws) -> Array:
        """Process images of one size, each independently."""

    def output_type(self, column_type: ColumnType) -> ColumnType:
        if (
            not isinstance(column_type, TensorType)
            or column_type.dtype != "uint8"
            or len(column_type.shape) not in (2, 3)
        ):
            raise StepError(f"{self.op} needs uint8 images of shape (H, W) or (H, W, C), not {column_type}")
        return TensorType("uint8", self.shape_of(column_type.shape))

    def work(self, column: Column, keys: StepKeys | None) -> Column:
        draws = keys.uniform(self.draws) if keys is not None and self.draws else None
        if isinstance(column, np.ndarray):
            return np.ascontiguousarray(self.on_images(column, draws))
        images = []
        for row, image in enumerate(column.images):
            try:
                made = self.on_images(image[None], None if draws is None else draws[row : row + 1])[0]
            except StepError as error:
                raise RowProblem(row, f"{self.column!r} {error}") from None
            images.append(np.ascontiguousarray(made))
        shape = self.shape_of(column.shape)
        if None in shape:
            return RaggedImages(tuple(images), shape)
        return np.stack(images) if images else np.zeros((0, *(length or 0 for length in shape)), np.uint8)


@dataclass(frozen=True)
class Resize(ImageStep):
    """Resizes images with Pillow, bilinear and antialiased.

    Pillow is used instead of torchvision for three reasons. Its resizing of uint8 is fixed-point arithmetic, so it is
    the same on every machine. It needs no torch, which takes seconds to import in processes that have no other use for
    it. It resizes one row at a time, so that other rows of the batch cannot affect the result. torchvision's kernel is
    about three times as fast on photographs (375×500 to 224: 0.8 ms against 2.4 ms on one busy core), but decoding the
    JPEG takes longer than either. With `shorter_side_only` the shorter side becomes `height`; the other is rounded
    down, as in torchvision.
    """

    op: ClassVar[str] = "resize"
    height: int
    width: int
    shorter_side_only: bool = False

    @classmethod
    def from_message(cls, message: transform_pb2.Resize, column: str) -> Self:
        check_side(message.height, "resize.height")
        if message.shorter_side_only and message.width:
            raise StepError(f"{message.width}: leave it 0 with shorter_side_only", "resize.width")
        if not message.shorter_side_only:
            check_side(message.width, "resize.width")
        return cls(column, message.height, message.width, message.shorter_side_only)

    def message(self) -> transform_pb2.Resize:
        return transform_pb2.Resize(height=self.height, width=self.width, shorter_side_only=self.shorter_side_only)

    def shape_of(self, shape: Shape) -> Shape:
        if not self.shorter_side_only:
            return (self.height, self.width, *shape[2:])
        height, width = shape[:2]
        if height is None or width is None:
            return (None, None, *shape[2:])
        return (*self._size(height, width), *shape[2:])

    def on_images(self, images: Array, draws: Draws) -> Array:
        height, width = self._size(*images.shape[1:3])
        if (height, width) == images.shape[1:3]:
            return images
        out = np.empty((len(images), height, width, *images.shape[3:]), np.uint8)
        for row, image in enumerate(images):
            out[row] = by_planes(image, lambda plane: plane.resize((width, height), Image.Resampling.BILINEAR))
        return out

    def _size(self, height: int, width: int) -> tuple[int, int]:
        if not height or not width:
            raise StepError(f"is an image of {height}×{width} pixels")
        if not self.shorter_side_only:
            return self.height, self.width
        longer = max(height, width) * self.height // min(height, width)
        if longer * self.height >= PIXEL_LIMIT:
            raise StepError(f"would become {longer}×{self.height} pixels; use fewer than {PIXEL_LIMIT:,}")
        return (self.height, longer) if height <= width else (longer, self.height)


@dataclass(frozen=True)
class CenterCrop(ImageStep):
    """Crops the middle. Of an odd rest, the smaller half is cut at the top and on the left.

    Smaller images are padded with zeros.
    """

    op: ClassVar[str] = "center_crop"
    height: int
    width: int

    @classmethod
    def from_message(cls, message: transform_pb2.CenterCrop, column: str) -> Self:
        check_side(message.height, "center_crop.height")
        check_side(message.width, "center_crop.width")
        return cls(column, message.height, message.width)

    def message(self) -> transform_pb2.CenterCrop:
        return transform_pb2.CenterCrop(height=self.height, width=self.width)

    def shape_of(self, shape: Shape) -> Shape:
        return (self.height, self.width, *shape[2:])

    def on_images(self, images: Array, draws: Draws) -> Array:
        return center_crop(images, self.height, self.width)


@dataclass(frozen=True)
class Grayscale(ImageStep):
    """Converts (H, W, 3) to (H, W, 1) by ITU-R 601-2 luma, as Pillow's `L`."""

    op: ClassVar[str] = "grayscale"

    @classmethod
    def from_message(cls, message: Any, column: str) -> Self:
        return cls(column)

    def shape_of(self, shape: Shape) -> Shape:
        if len(shape) != 3 or shape[2] != 3:
            raise StepError(f"grayscale needs images of shape (H, W, 3), not {TensorType('uint8', shape)}")
        return (*shape[:2], 1)

    def on_images(self, images: Array, draws: Draws) -> Array:
        return luma(images)[..., None]


def check_side(pixels: int, at: str) -> None:
    """Raise `StepError` unless the side has 1 to 8,192 pixels."""
    if not 1 <= pixels <= MAX_SIDE:
        raise StepError(f"{pixels}: use 1 to {MAX_SIDE} pixels", at)


def center_crop(images: Array, height: int, width: int) -> Array:
    """Crop (B, H, W, …) to (B, height, width, …)."""
    images = padded_to(images, height, width)
    top, left = (images.shape[1] - height) // 2, (images.shape[2] - width) // 2
    return images[:, top : top + height, left : left + width]


def padded_to(images: Array, height: int, width: int) -> Array:
    """Pad (B, H, W, …) with zeros if it is smaller. Of an odd rest, the smaller half goes to the top and left."""
    missing = [max(wanted - given, 0) for wanted, given in zip((height, width), images.shape[1:3], strict=True)]
    if not any(missing):
        return images
    around = [(0, 0), *((one // 2, one - one // 2) for one in missing), *[(0, 0)] * (images.ndim - 3)]
    return np.pad(images, around)


def luma(images: Array) -> NDArray[np.uint8]:
    """Convert (…, 3) to (…) by the integer formula of Pillow's `L`: 0.299 R + 0.587 G + 0.114 B."""
    red, green, blue = (images[..., channel].astype(np.uint32) for channel in range(3))
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).astype(np.uint8)


def by_planes(image: Array, work: Any) -> Array:
    """Apply a Pillow operation to (H, W) or (H, W, C): 1 and 3 channels together, others one by one."""
    if image.ndim == 3 and image.shape[2] != 3:
        planes = [np.asarray(work(Image.fromarray(image[..., channel]))) for channel in range(image.shape[2])]
        return np.stack(planes, axis=-1)
    return np.asarray(work(Image.fromarray(image)))


# --- Augmentations ---

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
    """Crops at a uniformly drawn position; in evaluation and serving, the centre.

    Images that are too small even with their padding get more padding, as in center_crop.
    """

    op: ClassVar[str] = "random_crop"
    augments: ClassVar[bool] = True
    draws: ClassVar[int] = 2
    height: int
    width: int
    padding: int

    @classmethod
    def from_message(cls, message: transform_pb2.RandomCrop, column: str) -> Self:
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
        # (B, positions down, positions right, …, height, width), without a copy.
        windows = sliding_window_view(images, (self.height, self.width), axis=(1, 2))
        places = np.floor(draws * windows.shape[1:3]).astype(np.intp)
        crops: Array = windows[np.arange(len(images)), places[:, 0], places[:, 1]]
        return crops if crops.ndim == 3 else crops.transpose(0, 2, 3, 1)

    def serving_form(self) -> Step | None:
        return CenterCrop(self.column, self.height, self.width)


@dataclass(frozen=True)
class RandomFlip(_Augmentation):
    """Mirrors images left to right and upside down, each with its probability."""

    op: ClassVar[str] = "random_flip"
    draws: ClassVar[int] = 2
    horizontal_probability: float
    vertical_probability: float

    @classmethod
    def from_message(cls, message: transform_pb2.RandomFlip, column: str) -> Self:
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
    """Rotates by an angle drawn uniformly from -degrees to degrees; positive angles are anticlockwise."""

    op: ClassVar[str] = "random_rotation"
    draws: ClassVar[int] = 1
    degrees: float

    @classmethod
    def from_message(cls, message: transform_pb2.RandomRotation, column: str) -> Self:
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
    """Changes brightness (towards black), contrast (towards the mean grey) and saturation (towards each pixel's grey).

    They are applied in this order. Pixels are rounded and clipped to 0..255 after each.
    """

    op: ClassVar[str] = "color_jitter"
    draws: ClassVar[int] = 3
    brightness: float
    contrast: float
    saturation: float

    @classmethod
    def from_message(cls, message: transform_pb2.ColorJitter, column: str) -> Self:
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
    """Return the fields. Raises `StepError` unless each is 0 to 1, and one is above 0."""
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
    """Return the rows' means, (B), of integer sums, which are exact in any order."""
    sums: NDArray[np.int64] = images.sum(axis=tuple(range(1, images.ndim)), dtype=np.int64)
    return sums / max(math.prod(images.shape[1:]), 1)


def _blended(images: Array, gray: NDArray[np.float64], factor: NDArray[np.float64]) -> Array:
    return _pixels(gray + (images - gray) * factor)


def _pixels(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)
