"""Thrift's compact protocol, as much of it as Parquet's headers and footers need.

Source: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
"""

from __future__ import annotations

from collections.abc import Iterator

_BOOL_TRUE, _BOOL_FALSE, _BYTE, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 6, 7, 8, 9, 10, 12
_WHOLE_NUMBERS = (4, 5, 6)
_MAX_NESTING = 16


class ThriftError(ValueError):
    """The bytes are no struct of Thrift's compact protocol."""


class CompactReader:
    """Reads one struct from the first byte on. A parser that keeps what it meets takes memory for each struct and each
    element of a list, so at most `most_values` of them are read. Raises `IndexError` at the end of the bytes, and
    `ThriftError`."""

    def __init__(self, data: bytes, most_values: int = 1_000_000) -> None:
        self._data = data
        self._values_left = most_values
        self.position = 0

    def fields(self) -> Iterator[tuple[int, int]]:
        """(number, kind) of each field of the struct that begins here; the caller takes or skips its value."""
        self._count(1)
        number = 0
        while header := self._byte():
            kind = header & 0x0F
            number = number + (header >> 4) if header >> 4 else self.zigzag()
            yield number, kind

    def whole_number(self, kind: int) -> int:
        """The value of a field of this kind."""
        if kind not in _WHOLE_NUMBERS:
            raise ThriftError("a number is none")
        return self.zigzag()

    def zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def binary(self, kind: int = _BINARY) -> bytes:
        if kind != _BINARY:
            raise ThriftError("a text is none")
        size = self._varint()
        begin = self.position
        self._advance(size)
        return self._data[begin : self.position]

    def structs(self, kind: int) -> Iterator[None]:
        """Comes to the beginning of each struct of a list; the caller takes its fields."""
        count, inner = self._list(kind)
        if inner != _STRUCT and count:
            raise ThriftError("a list holds no structs")
        for _ in range(count):
            yield

    def texts(self, kind: int) -> list[bytes]:
        count, inner = self._list(kind)
        return [self.binary(inner) for _ in range(count)]

    def skip(self, kind: int, nesting: int = 0) -> None:
        if nesting > _MAX_NESTING:
            raise ThriftError("structs lie in structs too deep")
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
            self._skip_list(kind, nesting)
        elif kind == _STRUCT:
            for _, inner in self.fields():
                self.skip(inner, nesting + 1)
        else:
            raise ThriftError("a field has an unknown kind")

    def _skip_list(self, kind: int, nesting: int) -> None:
        count, inner = self._list(kind)
        for _ in range(count):
            if inner in (_BOOL_TRUE, _BOOL_FALSE):
                self._advance(1)
            else:
                self.skip(inner, nesting + 1)

    def _list(self, kind: int) -> tuple[int, int]:
        """(number, kind) of the elements of the list that begins here."""
        if kind not in (_LIST, _SET):
            raise ThriftError("a list is none")
        header = self._byte()
        count, inner = header >> 4, header & 0x0F
        if count == 15:
            count = self._varint()
        self._count(count)
        return count, inner

    def _count(self, values: int) -> None:
        self._values_left -= values
        if self._values_left < 0:
            raise ThriftError("it holds too many values")

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ThriftError("a number goes on for too long")

    def _byte(self) -> int:
        byte = self._data[self.position]
        self.position += 1
        return byte

    def _advance(self, size: int) -> None:
        if self.position + size > len(self._data):
            raise IndexError
        self.position += size
