"""Image files whose decoders fail in ways of their own."""

from __future__ import annotations

import io
import struct

from PIL import Image

ENTRY_BYTES = 12
STRIP_OFFSETS, ASCII = 273, 2


def tiff_with_a_text_for_its_offsets() -> bytes:
    """Open as an image of 6×4; Pillow fails with a TypeError once its pixels are read."""
    file = io.BytesIO()
    Image.new("RGB", (6, 4)).save(file, "TIFF")
    data = bytearray(file.getvalue())
    (tags,) = struct.unpack_from("<I", data, 4)
    entries = range(tags + 2, len(data), ENTRY_BYTES)
    strips = next(at for at in entries if struct.unpack_from("<H", data, at) == (STRIP_OFFSETS,))
    struct.pack_into("<H", data, strips + 2, ASCII)
    return bytes(data)
