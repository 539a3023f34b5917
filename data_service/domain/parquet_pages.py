"""Parquet's pages by their headers, without decoding them.

Source: https://github.com/apache/parquet-format (parquet.thrift, PageHeader) and Thrift's compact protocol. A decoder
takes memory for the size that a page's header claims, and never writes beyond it: so the claim is to be bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

MAX_HEADER_BYTES = 16 * 1024 * 1024
FIRST_READ_BYTES = 512
_MAX_NESTING = 16
_BOOL_TRUE, _BOOL_FALSE, _BYTE, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 6, 7, 8, 9, 10, 12

_WHOLE_NUMBERS = (4, 5, 6)
_DATA_PAGES = (5, 8)  # the fields of PageHeader for data pages of both versions

ReadAt = Callable[[int, int], bytes]


class PageError(ValueError):
    """The bytes are no row of pages; the text says what is wrong with them."""


@dataclass(frozen=True)
class Page:
    """Sizes as the header claims them. `values` counts those of nested lists, and nulls; 0 for a dictionary's page."""

    uncompressed_bytes: int
    compressed_bytes: int
    header_bytes: int
    values: int


def pages(read_at: ReadAt, begin: int, size: int) -> Iterator[Page]:
    """The pages of one column chunk, which has `size` bytes from `begin` on. `read_at(position, size)` gives the file's
    bytes there, fewer only at its end. Raises `PageError`."""
    position, end = begin, begin + size
    while position < end:
        page = _page(read_at, position, end)
        yield page
        position += page.header_bytes + page.compressed_bytes
    if position > end:
        raise PageError("a page goes on after its column's end")


def _page(read_at: ReadAt, position: int, end: int) -> Page:
    size = FIRST_READ_BYTES
    while True:
        data = read_at(position, min(size, end - position))
        try:
            return _parsed(data)
        except IndexError:
            if size >= min(MAX_HEADER_BYTES, end - position) or len(data) < min(size, end - position):
                raise PageError("it ends within a page's header") from None
            size *= 8


def _parsed(data: bytes) -> Page:
    reader = _Compact(data)
    sizes, values = {}, 0
    for field, kind in reader.fields():
        if field in (2, 3) and kind in _WHOLE_NUMBERS:
            sizes[field] = reader.zigzag()
        elif field in _DATA_PAGES and kind == _STRUCT:
            values = _values(reader)
        else:
            reader.skip(kind)
    uncompressed, compressed = sizes.get(2, -1), sizes.get(3, -1)
    if uncompressed < 0 or compressed < 0 or values < 0:
        raise PageError("a page's header is damaged")
    return Page(uncompressed, compressed, reader.position, values)


def _values(reader: _Compact) -> int:
    """Of a DataPageHeader or a DataPageHeaderV2, which begin alike."""
    values = -1
    for field, kind in reader.fields():
        if field == 1 and kind in _WHOLE_NUMBERS:
            values = reader.zigzag()
        else:
            reader.skip(kind)
    return values


class _Compact:
    """Thrift's compact protocol, as much of it as skipping needs. Raises `IndexError` at the end of the bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def fields(self) -> Iterator[tuple[int, int]]:
        """(number, kind) of each field of the struct that begins here; the caller takes or skips its value."""
        number = 0
        while header := self._byte():
            kind = header & 0x0F
            number = number + (header >> 4) if header >> 4 else self.zigzag()
            yield number, kind

    def zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def skip(self, kind: int, nesting: int = 0) -> None:
        if nesting > _MAX_NESTING:
            raise PageError("a page's header is damaged")
        if kind in (_BOOL_TRUE, _BOOL_FALSE):
            return
        if kind == _BYTE:
            self._advance(1)
        elif kind <= _I64:
            self._varint()
        elif kind == _DOUBLE:
            self._advance(8)
        elif kind == _BINARY:
            self._advance(self._varint())
        elif kind in (_LIST, _SET):
            self._skip_list(nesting)
        elif kind == _STRUCT:
            for _, inner in self.fields():
                self.skip(inner, nesting + 1)
        else:
            raise PageError("a page's header is damaged")

    def _skip_list(self, nesting: int) -> None:
        header = self._byte()
        count, kind = header >> 4, header & 0x0F
        if count == 15:
            count = self._varint()
        for _ in range(count):
            if kind in (_BOOL_TRUE, _BOOL_FALSE):
                self._advance(1)
            else:
                self.skip(kind, nesting + 1)

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise PageError("a page's header is damaged")

    def _byte(self) -> int:
        byte = self._data[self.position]
        self.position += 1
        return byte

    def _advance(self, size: int) -> None:
        if self.position + size > len(self._data):
            raise IndexError
        self.position += size
