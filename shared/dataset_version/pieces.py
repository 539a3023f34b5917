"""A Parquet file of which only some pieces are there: those that hold the columns that are wanted."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow.parquet as pq

# So many unwanted bytes are read along rather than asked around: about what S3 sends in the time of a round trip.
MAX_GAP_BYTES = 512 * 1024
# Arrow joins its reads over holes of that size, and must find the bytes of the hole.
ARROW_HOLE_BYTES = 8 * 1024

# (start, length) each.
Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Piece:
    """Bytes of a file from `start` on."""

    start: int
    data: memoryview


def wanted_ranges(groups: Mapping[int, pq.RowGroupMetaData], columns: Sequence[str]) -> list[tuple[int, int]]:
    """(start, length) of the bytes of these columns, in the order of the file; `groups` by their numbers in it.

    What lies between two of them, in a group or to the next group, comes too where it is little: one request more costs
    more than those bytes. Of groups between those that are wanted nothing comes: on the way to a few that are far apart
    it would be most of the file.
    """
    joined: list[tuple[int, int]] = []
    last = 0
    places: list[int] = []
    for number, group in sorted(groups.items()):
        places = places or _places(group, columns)
        for start, end in sorted(_span(group.column(place)) for place in places):
            gap_bytes = MAX_GAP_BYTES if number - last <= 1 else ARROW_HOLE_BYTES
            if joined and start - joined[-1][1] <= gap_bytes:
                joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
            else:
                joined.append((start, end))
            last = number
    return [(start, end - start) for start, end in joined]


class PiecesFile(io.RawIOBase):
    """The file as Arrow reads it. The pieces are in their order."""

    def __init__(self, pieces: Sequence[Piece], size_bytes: int) -> None:
        self._pieces = pieces
        self._starts = [piece.start for piece in pieces]
        self._size_bytes = size_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> memoryview:
        """A view: Arrow takes it as it takes bytes, and nothing is copied."""
        index = bisect_right(self._starts, self._position) - 1
        if index < 0:
            raise EOFError("a read before the fetched columns")
        begin = self._position - self._starts[index]
        data = self._pieces[index].data[begin : None if size < 0 else begin + size]
        self._position += len(data)
        return data


def _places(group: pq.RowGroupMetaData, columns: Sequence[str]) -> list[int]:
    """Of these columns; the same in all groups of a file."""
    names = frozenset(columns)
    return [index for index in range(group.num_columns) if group.column(index).path_in_schema in names]


def _span(column: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """Where a column of a row group begins and ends in its file."""
    start = column.dictionary_page_offset or column.data_page_offset
    return start, start + column.total_compressed_size
