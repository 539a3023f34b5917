"""IDX files as a source, and the file format itself, which is that of MNIST.

A file has a magic of two zeros, a value type and a rank, the dimensions, then the values. Source:
http://yann.lecun.com/exdb/mnist ("The IDX file format"). All numbers are big-endian. Headers are not trusted: memory
grows with the bytes read, not with the size that a header claims.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from data_service.formats import interface
from data_service.formats.interface import BadRowSink, IdxError, RowSource, blaming, content, is_compressed
from data_service.storage.source_files import SourceFile
from shared.dataset_version.manifest import tensor_array, tensor_field

# --- The file format ---

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
        """Return the position of a row in the file."""
        return 4 + 4 * (1 + len(self.row_shape)) + row * self.row_bytes


def read_header(stream: BinaryIO) -> IdxHeader:
    """Read and check a header; raise `IdxError`."""
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
    """Yield the rows from the stream's position on as native (N, *row_shape) arrays, `rows_per_chunk` at a time.

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
    """Read `size` bytes, or fewer at the end; a stream may return fewer at a time."""
    pieces = []
    while size > 0 and (piece := stream.read(size)):
        pieces.append(piece)
        size -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


# --- Rows of an import ---


class IdxPair:
    """Images (N, …) of uint8 and labels (N) of any integer, as the columns `image` and `label`.

    No single row is bad: an error fails the whole pair.
    """

    class_names: list[str] | None = None

    def __init__(self, images: SourceFile, labels: SourceFile) -> None:
        self._images, self._labels = images, labels
        self._rows: range | None = None
        self._header, self._label_header = self._checked_headers()
        self.row_count: int | None = self._header.row_count
        self.size_bytes = (images.size_bytes or 0) + (labels.size_bytes or 0)
        self.schema = pa.schema(
            [
                tensor_field("image", pa.uint8(), self._header.row_shape),
                pa.field("label", pa.int64(), nullable=False),
            ]
        )

    def parts(self) -> Sequence[RowSource]:
        """Divide the pair into ranges of images, unless one of the files is compressed.

        Uploads are verified first, as a whole. A header that claims other rows than its file has is never divided:
        reading the whole finds the error.
        """
        per_part = max(interface.PART_BYTES // self._header.row_bytes, 1)
        whole = range(self._header.row_count)
        if not self._can_be_divided or self._rows is not None or len(whole) <= per_part:
            return [self]
        if not (_fits(self._images, self._header) and _fits(self._labels, self._label_header)):
            return [self]
        return [self._only(whole[begin : begin + per_part]) for begin in range(0, len(whole), per_part)]

    def _only(self, rows: range) -> IdxPair:
        part = copy(self)
        part._rows, part.row_count = rows, len(rows)
        part.size_bytes = len(rows) * (self._header.row_bytes + self._label_header.row_bytes)
        return part

    def tables(self, bad: BadRowSink) -> Iterator[pa.Table]:  # noqa: ARG002 - the interface's
        for images, labels in self._chunks():
            columns = [tensor_array(images), pa.array(labels.astype(np.int64))]
            yield pa.Table.from_arrays(columns, schema=self.schema)

    def _checked_headers(self) -> tuple[IdxHeader, IdxHeader]:
        with blaming(self._images, "IDX"), content(self._images) as stream:
            images = read_header(stream)
            self._can_be_divided = not is_compressed(stream)
        with blaming(self._labels, "IDX"), content(self._labels) as stream:
            labels = read_header(stream)
            self._can_be_divided &= not is_compressed(stream)
        if images.value_type != np.uint8 or len(images.row_shape) < 2:
            raise self._images.corrupt(
                f"it holds {images.value_type} of shape {[images.row_count, *images.row_shape]}; images are uint8 of "
                "shape [rows, height, width] or [rows, height, width, channels]"
            )
        if labels.row_shape or labels.value_type.kind not in "iu":
            raise self._labels.corrupt(
                f"it holds {labels.value_type} of shape {[labels.row_count, *labels.row_shape]}; labels are integers "
                "of shape [rows]"
            )
        if images.row_count != labels.row_count:
            raise self._labels.corrupt(f"it has {labels.row_count} labels for {images.row_count} images")
        return images, labels

    def _chunks(self) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        rows = rows_per_chunk(self._header, interface.CHUNK_BYTES)
        images = _read(self._images, self._header, rows, self._rows)
        labels = _read(self._labels, self._label_header, rows, self._rows)
        with closing(images), closing(labels):
            # Both are read to their ends, where bytes after the last row are detected.
            yield from zip(images, labels, strict=True)


def _fits(file: SourceFile, header: IdxHeader) -> bool:
    """Return whether the file, once it is whole, has the size that its header claims."""
    file.wait_until_whole()
    with closing(file.open()) as opened, blaming(file, "IDX"):
        opened.seek(0, 2)
        return opened.tell() == header.size_bytes


def _read(
    file: SourceFile, header: IdxHeader, rows_at_once: int, rows: range | None
) -> Generator[np.ndarray[Any, Any], None, None]:
    """Yield all rows, or `rows`, after a header that must still be the checked one."""
    with blaming(file, "IDX"), content(file) as stream:
        if read_header(stream) != header:
            raise file.corrupt("it changed while it was read")
        if rows is None:
            yield from read_rows(stream, header, rows_at_once)
    if rows is not None:
        with blaming(file, "IDX"), content(file, begin=header.position(rows.start)) as stream:
            yield from read_rows(stream, header, rows_at_once, rows)
