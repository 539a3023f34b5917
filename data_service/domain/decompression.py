"""Gzip, recognised by its first bytes rather than by a file's name, and bounded in what it may grow into."""

from __future__ import annotations

import gzip
import io
import zlib
from typing import BinaryIO, cast

GZIP_MAGIC = b"\x1f\x8b"
# Below so many decoded bytes nothing is refused; above, more than `MAX_RATIO` times the file's size is a bomb. MNIST
# grows fivefold; deflate cannot grow more than 1,032-fold.
FREE_BYTES = 256 * 1024 * 1024
MAX_RATIO = 200


class DecompressionError(ValueError):
    """The bytes are not a whole gzip file, or grow beyond all bounds; the text says which."""


def decompressed(stream: BinaryIO, size_bytes: int) -> BinaryIO:
    """`stream` itself, or what is in it if it is gzip. `size_bytes` is the size of the file as it is stored."""
    buffered = io.BufferedReader(_Raw(stream), 1024 * 1024)
    if buffered.peek(2)[:2] != GZIP_MAGIC:
        return cast(BinaryIO, buffered)
    return cast(BinaryIO, _Gunzip(buffered, max(FREE_BYTES, MAX_RATIO * size_bytes)))


class _Raw(io.RawIOBase):
    """Any object with `read` as a raw stream."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _Gunzip:
    def __init__(self, compressed: io.BufferedReader[_Raw], most_bytes: int) -> None:
        self._file = gzip.GzipFile(fileobj=compressed, mode="rb")
        self._left = most_bytes
        self._most = most_bytes

    def read(self, size: int) -> bytes:
        try:
            data = self._file.read(size)
        except EOFError:
            raise DecompressionError("it is gzip, and ends before its end marker") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise DecompressionError(f"it is damaged gzip: {error}") from None
        self._left -= len(data)
        if self._left < 0:
            raise DecompressionError(f"it decompresses to more than {self._most} bytes, {MAX_RATIO} times its size")
        return data
