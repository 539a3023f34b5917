"""IDX, the file format of MNIST: a magic of two zeros, a value type and a rank, the dimensions, then the values.

Source: http://yann.lecun.com/exdb/mnist ("The IDX file format"). All numbers are big-endian. Headers are not trusted:
memory grows with the bytes read, not with the size that a header claims.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

VALUE_TYPES: dict[int, np.dtype[Any]] = {
    0x08: np.dtype("u1"),
    0x09: np.dtype("i1"),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}
MAX_RANK = 5
MAX_ROW_BYTES = 16 * 1024 * 1024


class IdxError(ValueError):
    """The bytes are no complete IDX file; the text says why."""


@dataclass(frozen=True)
class IdxHeader:
    """The header of an IDX file.

    `row_shape` is the shape of one row, () if rows are scalars.
    """

    value_type: np.dtype[Any]
    row_count: int
    row_shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return self.value_type.itemsize * math.prod(self.row_shape)

    @property
    def size_bytes(self) -> int:
        """The size of the whole file with this header."""
        return self.position(self.row_count)

    def position(self, row: int) -> int:
        """Returns the position of a row in the file."""
        return 4 + 4 * (1 + len(self.row_shape)) + row * self.row_bytes


def read_header(stream: BinaryIO) -> IdxHeader:
    """Reads and checks a header; raises `IdxError`."""
    magic = _read_exactly(stream, 4)
    if len(magic) < 4:
        raise IdxError(f"it ends after {len(magic)} bytes, within its magic number")
    if magic[:2] != b"\0\0" or magic[2] not in VALUE_TYPES:
        raise IdxError(f"its magic number is 0x{magic.hex()}, which no IDX file has")
    rank = magic[3]
    if not 1 <= rank <= MAX_RANK:
        raise IdxError(f"it has {rank} dimensions; 1 to {MAX_RANK} are read")
    raw = _read_exactly(stream, 4 * rank)
    if len(raw) < 4 * rank:
        raise IdxError("it ends within its header")
    row_count, *row_shape = struct.unpack(f">{rank}I", raw)
    header = IdxHeader(VALUE_TYPES[magic[2]], row_count, tuple(row_shape))
    if 0 in row_shape:
        raise IdxError(f"its rows have the shape {list(row_shape)}, which holds nothing")
    if header.row_bytes > MAX_ROW_BYTES:
        raise IdxError(f"a row takes {header.row_bytes} bytes; at most {MAX_ROW_BYTES} are read")
    return header


def read_rows(
    stream: BinaryIO, header: IdxHeader, rows_per_chunk: int, rows: range | None = None
) -> Iterator[np.ndarray[Any, Any]]:
    """Yields the rows from the stream's position on as native (N, *row_shape) arrays, `rows_per_chunk` at a time.

    They are all rows of the file, or `rows`. Raises `IdxError` if the bytes end too early or continue after the last
    row of the file.
    """
    done, stop = (0, header.row_count) if rows is None else (rows.start, rows.stop)
    while done < stop:
        wanted = min(rows_per_chunk, stop - done)
        data = _read_exactly(stream, wanted * header.row_bytes)
        if len(data) < wanted * header.row_bytes:
            have = done + len(data) // header.row_bytes
            raise IdxError(f"its header claims {header.row_count} rows, but it ends after {have}")
        values = np.frombuffer(data, header.value_type).reshape(wanted, *header.row_shape)
        yield values.astype(header.value_type.newbyteorder("="), copy=False)
        done += wanted
    if stop == header.row_count and _read_exactly(stream, 1):
        raise IdxError(f"it goes on after the {header.row_count} rows that its header claims")


def rows_per_chunk(header: IdxHeader, chunk_bytes: int) -> int:
    return max(1, chunk_bytes // header.row_bytes)


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    """Reads `size` bytes, or fewer at the end; a stream may return fewer at a time."""
    pieces = []
    while size > 0 and (piece := stream.read(size)):
        pieces.append(piece)
        size -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
