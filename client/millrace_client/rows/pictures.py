"""Image files as the pixels that a model takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt

from millrace_client.rows.typed import BadInput, Tensor

if TYPE_CHECKING:
    from PIL import Image

# How pixels of so many channels are called; () has none.
_MODES: dict[tuple[int, ...], str] = {(): "L", (1,): "L", (3,): "RGB", (4,): "RGBA", (-1,): "RGB"}


def takes_pixels(tensor: Tensor) -> bool:
    """Whether its rows are uint8 of shape (H, W) or (H, W, channels)."""
    return tensor.datatype == "UINT8" and len(tensor.shape) in (3, 4) and tuple(tensor.shape[3:]) in _MODES


def pixels_of(image: Path | BinaryIO, shape: Sequence[int], name: str) -> npt.NDArray[np.uint8]:
    """uint8 of `shape`, that of one row of an input that `takes_pixels`; other sizes are resized to it.

    Raises `BadInput`, which calls the image `name`.
    """
    from PIL import Image

    height, width, *channels = shape
    try:
        with Image.open(image) as opened:
            converted = opened.convert(_MODES[tuple(channels)])
            if height > 0 and width > 0 and converted.size != (width, height):
                converted = converted.resize((width, height), Image.Resampling.BILINEAR)
    # The decoders raise nearly everything at bytes that are broken: struct.error, TypeError, zlib.error, …
    except Exception as error:
        raise BadInput(f"{name} is no image that can be read: {error}", remedy="use a PNG or a JPEG") from None
    return _array(converted, one_channel=channels == [1])


def is_picture(path: Path) -> bool:
    """By its first bytes. Raises `OSError` where it cannot be read at all."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path):
            return True
    except UnidentifiedImageError:
        return False
    except OSError:
        raise
    except Exception:
        return True  # reading it tells what is wrong with it


def _array(image: Image.Image, *, one_channel: bool) -> npt.NDArray[np.uint8]:
    pixels = np.asarray(image, dtype=np.uint8)
    return pixels[..., None] if one_channel else pixels
