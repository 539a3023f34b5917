"""Gzip, recognised by its first bytes rather than by a file's name, and bounded in what it may grow into."""

from __future__ import annotations

import gzip
import io
import zlib
from typing import BinaryIO, cast

GZIP_MAGIC = b"\x1f\x8b"
# Below so many decoded bytes nothing is refused; above, more than `MAX_RATIO` times what was read is a bomb. MNIST
# grows fivefold; deflate cannot grow more than 1,032-fold.
FREE_BYTES = 256 * 1024 * 1024
MAX_RATIO = 200


class DecompressionError(ValueError):
    """The bytes are not a whole gzip file, or grow beyond all bounds; the text says which."""


def decompressed(stream: BinaryIO) -> BinaryIO:
    """`stream` itself, or what is in it if it is gzip. Only `read(size)` of the result is to be used; it may give fewer
    bytes at a time, and none only at the end."""
    raw = _Raw(stream)
    buffered = io.BufferedReader(raw, 1024 * 1024)
    if buffered.peek(2)[:2] != GZIP_MAGIC:
        return cast(BinaryIO, buffered)
    return cast(BinaryIO, _Gunzip(buffered, raw))


class _Raw(io.RawIOBase):
    """Any object with `read` as a raw stream that counts its bytes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.bytes_read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self.bytes_read += len(data)
        return len(data)


class _Gunzip:
    """Bounds what comes out by what went in so far: the whole file's size may not be known yet."""

    def __init__(self, compressed: io.BufferedReader[_Raw], raw: _Raw) -> None:
        self._file = gzip.GzipFile(fileobj=compressed, mode="rb")
        self._raw = raw
        self._given = 0

    def read(self, size: int) -> bytes:
        try:
            data = self._file.read(size)
        except EOFError:
            raise DecompressionError("it is gzip, and ends before its end marker") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise DecompressionError(f"it is damaged gzip: {error}") from None
        self._given += len(data)
        most = max(FREE_BYTES, MAX_RATIO * self._raw.bytes_read)
        if self._given > most:
            raise DecompressionError(f"it decompresses to more than {most} bytes, {MAX_RATIO} times its size")
        return data
