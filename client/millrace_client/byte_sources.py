"""What can be uploaded: a path, an open binary file, bytes, or bytes as they come; cut into chunks of one size."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

Source = str | os.PathLike[str] | BinaryIO | bytes | Iterable[bytes]


@contextmanager
def chunks_of(source: Source, chunk_bytes: int) -> Iterator[tuple[Iterator[bytes], int | None]]:
    """The chunks, all of `chunk_bytes` but the last, and how many bytes there are, where that is known.

    An open file is read on from where it is, and left open. Raises `OSError` for a path that cannot be read.
    """
    if isinstance(source, (str, os.PathLike)):
        with Path(source).open("rb", buffering=0) as opened:
            yield _from_file(cast(BinaryIO, opened), chunk_bytes), os.fstat(opened.fileno()).st_size
    elif hasattr(source, "read"):
        file = cast(BinaryIO, source)
        yield _from_file(file, chunk_bytes), _rest_of(file)
    elif isinstance(source, (bytes, bytearray, memoryview)):
        yield _from_pieces([memoryview(source)], chunk_bytes), memoryview(source).nbytes
    else:
        yield _from_pieces(source, chunk_bytes), None


def _from_file(file: BinaryIO, chunk_bytes: int) -> Iterator[bytes]:
    def pieces() -> Iterator[bytes]:
        while piece := file.read(chunk_bytes):
            yield piece

    return _from_pieces(pieces(), chunk_bytes)


def _from_pieces(pieces: Iterable[bytes | memoryview], chunk_bytes: int) -> Iterator[bytes]:
    gathered = bytearray()
    for piece in pieces:
        if not gathered and type(piece) is bytes and len(piece) == chunk_bytes:
            yield piece  # as files give them: nothing to copy
            continue
        left = memoryview(piece).cast("B")
        while left:
            room = chunk_bytes - len(gathered)
            gathered += left[:room]
            left = left[room:]
            if len(gathered) == chunk_bytes:
                yield bytes(gathered)
                gathered.clear()
    if gathered:
        yield bytes(gathered)


def _rest_of(file: BinaryIO) -> int | None:
    if not (hasattr(file, "seekable") and file.seekable()):
        return None
    position = file.tell()
    end = file.seek(0, io.SEEK_END)
    file.seek(position)
    return end - position
