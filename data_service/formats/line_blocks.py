"""Text as UTF-8 in blocks of whole lines, from any supported encoding, with a limit on a line's memory."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

BLOCK_BYTES = 1024 * 1024
# The limit of one line, and of one CSV record that spans several.
MAX_LINE_BYTES = 16 * 1024 * 1024
PYTHON_ENCODINGS = {"utf-8": "utf-8", "utf-16": "utf-16", "latin-1": "latin-1", "windows-1252": "cp1252"}


class TextError(ValueError):
    """The bytes are no text in their encoding at all; the text says why."""


@dataclass(frozen=True)
class LineBlock:
    """A block of whole lines; a file's last line may lack its end.

    `first_line` counts from 1; `first_byte` is the block's position in the text, from 0. With `too_long` it has only
    the beginning of one line that is skipped and that `first_byte` does not count.
    """

    data: bytes
    first_line: int
    first_byte: int
    too_long: bool = False


def line_blocks(stream: BinaryIO, encoding: str) -> Iterator[LineBlock]:
    """Yields the text in blocks.

    Lines end with LF, CR LF or CR. A byte-order mark is removed. Undecodable characters become bytes that are no UTF-8,
    so that their rows can be reported. Raises `TextError`.
    """
    line, byte = 1, 0
    rest = b""
    skipping = False
    for piece in _with_end(_utf8_pieces(stream, encoding)):
        data = rest + (piece or b"")
        cut = len(data) if piece is None else _end_of_lines(data)
        lines, rest = data[:cut], data[cut:]
        if skipping and lines:
            end = _end_of_first_line(lines)
            lines, skipping = lines[end:], False
            line += 1
        if lines:
            yield LineBlock(lines, line, byte)
            line += count_lines(lines)
            byte += len(lines)
        if skipping:
            rest = rest[-1:]  # a CR may be the first half of a line end
        elif len(rest) > MAX_LINE_BYTES:
            yield LineBlock(rest[:1024], line, byte, too_long=True)
            rest, skipping = rest[-1:], True


def count_lines(data: bytes) -> int:
    """Returns the number of lines, including a last one without an end."""
    ends = data.count(b"\n")
    if b"\r" in data:
        ends += data.count(b"\r") - data.count(b"\r\n")
    return ends + (not data.endswith((b"\n", b"\r")))


def split_lines(data: bytes) -> list[bytes]:
    """Splits the text into lines with their ends."""
    return data.splitlines(keepends=True)


def _with_end(pieces: Iterator[bytes]) -> Iterator[bytes | None]:
    yield from pieces
    yield None


def _end_of_lines(data: bytes) -> int:
    """Returns the position after the last complete line.

    A final CR may be followed by its LF, so it does not count.
    """
    return max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1


def _end_of_first_line(data: bytes) -> int:
    ends = [at for at in (data.find(b"\n"), data.find(b"\r")) if at >= 0]
    if not ends:
        return len(data)
    end = min(ends)
    return end + (2 if data[end : end + 2] == b"\r\n" else 1)


def _utf8_pieces(stream: BinaryIO, encoding: str) -> Iterator[bytes]:
    if encoding == "utf-8":
        first = True
        while data := stream.read(BLOCK_BYTES):
            while first and len(data) < 3 and (more := stream.read(3 - len(data))):
                data += more
            yield data.removeprefix(codecs.BOM_UTF8) if first else data
            first = False
        return
    # Lone surrogates stand for undecodable bytes, and are no UTF-8.
    errors = "surrogatepass" if encoding == "utf-16" else "surrogateescape"
    data = stream.read(BLOCK_BYTES)
    while len(data) < 2 and (more := stream.read(BLOCK_BYTES)):
        data += more
    decoder = codecs.getincrementaldecoder(_codec(encoding, data))(errors)
    try:
        yield decoder.decode(data).encode("utf-8", "surrogatepass")
        while data := stream.read(BLOCK_BYTES):
            yield decoder.decode(data).encode("utf-8", "surrogatepass")
        yield decoder.decode(b"", final=True).encode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise TextError(f"it ends within a character, or is not {encoding}") from None


def _codec(encoding: str, beginning: bytes) -> str:
    """Returns Python's name of the encoding.

    If UTF-16 lacks its byte-order mark, the zero bytes of commas and line ends show the byte order.
    """
    if encoding == "utf-16" and beginning[:2] not in (b"", codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        upper_first, lower_first = beginning[0::2].count(0), beginning[1::2].count(0)
        if upper_first == lower_first:
            raise TextError("it has no byte-order mark, so it is not known to be utf-16; put one in front")
        return "utf-16-be" if upper_first > lower_first else "utf-16-le"
    return PYTHON_ENCODINGS[encoding]
