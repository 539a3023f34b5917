"""Parquet's pages by their headers, without decoding them.

Source: https://github.com/apache/parquet-format (parquet.thrift, PageHeader). A decoder takes memory for the size
that a page's header claims, and never writes beyond it: so the claim is to be bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from data_service.domain.thrift_compact import _STRUCT, CompactReader, ThriftError

MAX_HEADER_BYTES = 16 * 1024 * 1024
FIRST_READ_BYTES = 512
_WHOLE_NUMBERS = (4, 5, 6)
# The fields of PageHeader for data pages of both versions, and in each that of the encoding.
_DATA_PAGES = {5: 2, 8: 4}
DELTA_LENGTH_BYTE_ARRAY, DELTA_BYTE_ARRAY = 6, 7

ReadAt = Callable[[int, int], bytes]


class PageError(ValueError):
    """The bytes are no row of pages; the text says what is wrong with them."""


@dataclass(frozen=True)
class Page:
    """Sizes as the header claims them. `values` counts those of nested lists, and nulls; 0 for a dictionary's page.
    `encoding` is Parquet's number of it; -1 for a dictionary's page."""

    uncompressed_bytes: int
    compressed_bytes: int
    header_bytes: int
    values: int
    encoding: int


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
        except ThriftError:
            raise PageError("a page's header is damaged") from None
        except IndexError:
            if size >= min(MAX_HEADER_BYTES, end - position) or len(data) < min(size, end - position):
                raise PageError("it ends within a page's header") from None
            size *= 8


def _parsed(data: bytes) -> Page:
    reader = CompactReader(data)
    sizes, values, encoding = {}, 0, -1
    for field, kind in reader.fields():
        if field in (2, 3) and kind in _WHOLE_NUMBERS:
            sizes[field] = reader.zigzag()
        elif field in _DATA_PAGES and kind == _STRUCT:
            values, encoding = _values(reader, _DATA_PAGES[field])
        else:
            reader.skip(kind)
    uncompressed, compressed = sizes.get(2, -1), sizes.get(3, -1)
    if uncompressed < 0 or compressed < 0 or values < 0:
        raise PageError("a page's header is damaged")
    return Page(uncompressed, compressed, reader.position, values, encoding)


def _values(reader: CompactReader, encoding_field: int) -> tuple[int, int]:
    """(number, encoding) of a DataPageHeader or a DataPageHeaderV2, which begin alike."""
    values = encoding = -1
    for field, kind in reader.fields():
        if field == 1 and kind in _WHOLE_NUMBERS:
            values = reader.zigzag()
        elif field == encoding_field and kind in _WHOLE_NUMBERS:
            encoding = reader.zigzag()
        else:
            reader.skip(kind)
    return values, encoding
