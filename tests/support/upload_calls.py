"""Small words for tests of uploads."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable

import google_crc32c

from data_service.uploads.uploads import Chunk, Uploads
from tests.support.upload_server import DATASET


def started(uploads: Uploads, upload_id: str = "u") -> str:
    """The name of a new upload."""
    upload, _ = uploads.start(DATASET, upload_id, request_id="", body_sha256="")
    return upload.record.name


def chunk(name: str, offset: int, data: bytes) -> Chunk:
    return Chunk(name, offset, data, google_crc32c.value(data))


def send(uploads: Uploads, chunks: Iterable[Chunk]) -> list[int]:
    """One call: what it acknowledges."""

    async def given() -> AsyncIterator[Chunk]:
        for one in chunks:
            yield one

    async def call() -> list[int]:
        return [size async for size in uploads.receive(given())]

    return asyncio.run(call())


def send_all(uploads: Uploads, name: str, data: bytes, chunk_bytes: int = 4, offset: int = 0) -> list[int]:
    """All of `data` from `offset` on, in chunks."""
    return send(
        uploads,
        [chunk(name, at, data[at : at + chunk_bytes]) for at in range(offset, len(data), chunk_bytes)],
    )


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def committed(uploads: Uploads, data: bytes, upload_id: str = "u", chunk_bytes: int = 4) -> str:
    """The name of an upload that holds `data`."""
    name = started(uploads, upload_id)
    send_all(uploads, name, data, chunk_bytes)
    uploads.commit(name, len(data), sha256(data))
    return name
