"""HTTP/1.1 messages as they go by: their heads, and where their bodies end (RFC 9112)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

PIECE_BYTES = 16 * 1024


@dataclass(frozen=True)
class Head:
    """Of a request, or of a response to a request of `method`."""

    raw: bytes
    method: str
    # 0 for a request.
    status: int
    # By name in small letters.
    fields: dict[str, str]

    @property
    def is_interim(self) -> bool:
        return 100 <= self.status < 200

    @property
    def path(self) -> str:
        """Of a request, with its query."""
        return self.raw.split(b" ", 2)[1].decode("latin-1")

    @property
    def closes(self) -> bool:
        return self.fields.get("connection", "").lower() == "close"


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """None where the connection ended before it."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    is_response = first.startswith("HTTP/")
    return Head(raw, "" if is_response else first.split()[0], int(first.split()[1]) if is_response else 0, fields)


async def body_pieces(head: Head, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The body's bytes as they are on the wire, chunk sizes and all."""
    if head.status and (head.method == "HEAD" or head.status in (204, 304)):
        return
    if "chunked" in head.fields.get("transfer-encoding", "").lower():
        async for piece in _chunks(reader):
            yield piece
    elif "content-length" in head.fields:
        async for piece in _exactly(reader, int(head.fields["content-length"])):
            yield piece
    elif head.status:  # until the server closes
        while piece := await reader.read(PIECE_BYTES):
            yield piece


async def _exactly(reader: asyncio.StreamReader, size_bytes: int) -> AsyncIterator[bytes]:
    while size_bytes:
        piece = await reader.read(min(size_bytes, PIECE_BYTES))
        if not piece:
            raise EOFError("the connection ended within a body")
        size_bytes -= len(piece)
        yield piece


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        line = await reader.readuntil(b"\r\n")
        yield line
        size_bytes = int(line.split(b";")[0], 16)
        async for piece in _exactly(reader, size_bytes):
            yield piece
        if size_bytes == 0:
            break
        yield await reader.readuntil(b"\r\n")
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        yield line
    yield line
