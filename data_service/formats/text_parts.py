"""Divides a text file into parts of whole lines, or of whole records, and reads one of them.

Only UTF-8 that is not compressed can be divided: any other text can be decoded from its first byte on alone. The places
of the cuts are found while the whole file is read for another purpose, such as type inference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from data_service.formats import interface
from data_service.formats.interface import LineBlock, TextPlace, content, is_compressed, line_blocks
from data_service.storage.source_files import SourceFile


@dataclass(frozen=True)
class TextPart:
    """The lines from `begin` up to the file's byte `end`, which begins a line, too; None for the end of the file.

    `row_count` is the number of its well-formed rows.
    """

    begin: TextPlace
    end: int | None
    row_count: int
    size_bytes: int

    @property
    def is_first(self) -> bool:
        return self.begin.file_byte == 0


@dataclass(frozen=True)
class OpenText:
    """The blocks of a text, and whether it can be divided."""

    blocks: Iterator[LineBlock]
    can_be_divided: bool


@contextmanager
def opened_text(file: SourceFile, encoding: str, part: TextPart | None = None) -> Iterator[OpenText]:
    """Opens the text; of a part from its beginning on.

    A block ends at the part's end. The blocks after it are there for records that seem to go on.
    """
    begin = TextPlace() if part is None else part.begin
    with content(file, begin=max(begin.file_byte - 1, 0)) as stream:
        if begin.file_byte and stream.read(1) not in (b"\n", b"\r"):
            raise file.corrupt("it changed while it was read")
        blocks = line_blocks(stream, encoding, begin)
        if part is not None and part.end is not None:
            blocks = _cut(blocks, part.end)
        yield OpenText(blocks, encoding == "utf-8" and not is_compressed(stream))


def _cut(blocks: Iterator[LineBlock], end: int) -> Iterator[LineBlock]:
    """Divides the block in which a line begins at the file's byte `end`."""
    for block in blocks:
        size = end - block.file_byte
        if block.too_long or not 0 < size < len(block.data):
            yield block
            continue
        first, rest = block.data[:size], block.data[size:]
        yield LineBlock(first, block.first_line, block.first_byte, file_byte=block.file_byte)
        lines = interface.count_lines(first)
        yield LineBlock(rest, block.first_line + lines, block.first_byte + size, file_byte=end)


class PartCutter:
    """Chooses the cuts of one text while it is read from its first byte to its last."""

    def __init__(self) -> None:
        self._begin = TextPlace()
        self._parts: list[TextPart] = []
        self._row_count = 0
        self._bytes_read = 0

    @property
    def row_count(self) -> int:
        """The rows since the last cut."""
        return self._row_count

    def add(self, row_count: int) -> None:
        """Adds rows that follow the last place."""
        self._row_count += row_count

    def pass_place(self, place: TextPlace) -> None:
        """Cuts at this place if the part that ends here is large enough. No row is read both before and after it."""
        self._bytes_read = place.file_byte
        size_bytes = place.file_byte - self._begin.file_byte
        # Only a byte-order mark may come before line 1.
        if size_bytes >= interface.PART_BYTES and place.first_line > 1:
            self._parts.append(TextPart(self._begin, place.file_byte, self._row_count, size_bytes))
            self._begin, self._row_count = place, 0

    def parts(self, file: SourceFile) -> list[TextPart]:
        """Returns the parts of the file, which has been read to its end."""
        size_bytes = max((file.size_bytes or self._bytes_read) - self._begin.file_byte, 0)
        return [*self._parts, TextPart(self._begin, None, self._row_count, size_bytes)]
