"""A checkpoint's file, read in ranges: several at a time, in their order, each compared with its digest.

A manifest has one digest for a file, and for a file larger than `BLOCK_BYTES` also one for each of its blocks. A block
that arrives damaged is fetched again by itself. Without digests of blocks, as in checkpoints of earlier releases, the
damage of any byte is found at the file's end.

A range that is cut off goes on where it was (`ObjectStore.get_range`), and waits as long as bytes arrive.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from shared.errors import DataLoss
from shared.storage import ObjectMissing

logger = logging.getLogger(__name__)

# Ranges on their way at a time, and the bytes of one: so a reader holds 16 MiB besides what it has handed over.
READERS = 4
PIECE_BYTES = 4 * 1024 * 1024
# The bytes of a block. They double for each `MAX_BLOCKS` blocks, because a manifest is read whole.
BLOCK_BYTES = 4 * 1024 * 1024
MAX_BLOCKS = 8192
# How often a block is fetched that does not have its digest. The damage may lie in the store, or on the way from it.
TRIES = 3


class Readable(Protocol):
    """The store's methods that reading a checkpoint needs. Both raise `ObjectMissing`."""

    def get(self, key: str) -> bytes: ...

    def get_range(self, key: str, start: int, length: int) -> bytes: ...


@dataclass(frozen=True)
class StoredFile:
    """A file in the store, as a manifest names it. `blocks` are the SHA-256 of its blocks, in their order, or empty."""

    key: str
    size_bytes: int
    sha256: str
    block_bytes: int = 0
    blocks: Sequence[str] = ()

    @classmethod
    def from_manifest(cls, folder: str, file: Mapping[str, Any]) -> StoredFile:
        blocks = file.get("blocks", {})
        return cls(
            f"{folder}/{file['path']}",
            file["size_bytes"],
            file["sha256"],
            blocks.get("size_bytes", 0),
            blocks.get("sha256", ()),
        )


def read_pieces(
    store: Readable, file: StoredFile, offset: int = 0, advanced: Callable[[], None] = lambda: None
) -> Iterator[bytes]:
    """Yield the bytes of a file from `offset` on, in pieces.

    `DataLoss` is raised instead of a damaged block. Without digests of blocks, a file that is read from its beginning
    is compared with its digest after the last piece; with an offset the reader must compare it, because it has the
    bytes before. Raises `DataLoss` also if the object is missing or too short. `advanced` is called for each piece.
    """
    if file.blocks:
        for start, piece in read_blocks(store, file, range(offset // file.block_bytes, len(file.blocks))):
            advanced()
            # A block may be larger than a piece.
            for begin in range(max(0, offset - start), len(piece), PIECE_BYTES):
                yield piece[begin : begin + PIECE_BYTES]
        return
    digest = hashlib.sha256()
    starts = range(offset, file.size_bytes, PIECE_BYTES)
    for piece in _ahead(lambda start: fetch(store, file, start, PIECE_BYTES), starts):
        if not offset:
            digest.update(piece)
        advanced()
        yield piece
    if not offset and digest.hexdigest() != file.sha256:
        raise damaged(file)


def read_blocks(store: Readable, file: StoredFile, numbers: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the bytes of each of these blocks. Raises `DataLoss` for one that stays damaged."""
    found = _ahead(lambda number: _block(store, file, number), numbers)
    for number, data in zip(numbers, found, strict=True):
        yield number * file.block_bytes, data


def _block(store: Readable, file: StoredFile, number: int) -> bytes:
    start = number * file.block_bytes
    for tries in range(1, TRIES + 1):
        data = fetch(store, file, start, file.block_bytes)
        if hashlib.sha256(data).hexdigest() == file.blocks[number]:
            return data
        logger.warning("bytes %d to %d of %s came damaged (try %d)", start, start + len(data), file.key, tries)
    raise damaged(file, f" from byte {start} to {start + len(data)}")


def fetch(store: Readable, file: StoredFile, start: int, length: int) -> bytes:
    """Return up to `length` bytes of a file from `start`, as they come. Raises `DataLoss` if it is missing."""
    try:
        return store.get_range(file.key, start, min(length, file.size_bytes - start))
    except ObjectMissing:
        raise DataLoss(f"{file.key} is missing", metadata={"file": file.key}) from None


def _ahead(fetch: Callable[[int], bytes], places: Sequence[int]) -> Iterator[bytes]:
    """Yield what is fetched for each place, in their order. While one is used, the next ones are being fetched."""
    if len(places) < 2:
        yield from map(fetch, places)
        return
    readers = ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint-ranges")
    coming: deque[Future[bytes]] = deque()
    try:
        for place in places:
            coming.append(readers.submit(fetch, place))
            if len(coming) == READERS:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    finally:
        readers.shutdown(wait=False, cancel_futures=True)


def blocks_of(data: memoryview | bytes) -> dict[str, Any]:
    """Return what a manifest says about the blocks of a file with these bytes; nothing for a small file."""
    view = memoryview(data)
    size = block_bytes_of(len(view))
    if len(view) <= size:
        return {}
    with ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint-digests") as pool:
        starts = range(0, len(view), size)
        digests = list(pool.map(lambda start: hashlib.sha256(view[start : start + size]).hexdigest(), starts))
    return {"blocks": {"size_bytes": size, "sha256": digests}}


def digests_of(file: BinaryIO) -> dict[str, Any]:
    """Return what a manifest says about a file, besides its path, which is read once and never held whole."""
    size_bytes = os.fstat(file.fileno()).st_size
    block_bytes, whole, blocks = block_bytes_of(size_bytes), hashlib.sha256(), []
    file.seek(0)
    for _ in range(0, size_bytes, block_bytes):
        block, left = hashlib.sha256(), block_bytes
        while left and (data := file.read(min(left, PIECE_BYTES))):
            block.update(data)
            whole.update(data)
            left -= len(data)
        blocks.append(block.hexdigest())
    named = {"size_bytes": size_bytes, "sha256": whole.hexdigest()}
    return named if len(blocks) < 2 else {**named, "blocks": {"size_bytes": block_bytes, "sha256": blocks}}


def block_bytes_of(size_bytes: int) -> int:
    block = BLOCK_BYTES
    while block * MAX_BLOCKS < size_bytes:
        block *= 2
    return block


def damaged(file: StoredFile, where: str = "") -> DataLoss:
    return DataLoss(f"{file.key} does not have the digest that its manifest names{where}", metadata={"file": file.key})
