"""The chunks of an upload in the store: read in blocks, read ahead, and hashed."""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import google_crc32c

from shared.errors import Cancelled, DataLoss
from shared.storage import ObjectMissing, ObjectStore

# --- Chunks ---
# The chunks of one upload: an object each, named by the offset of its first byte.

# The size of one read from the store. Chunks that clients stream are no larger; parts put by URL may be of some GiB.
BLOCK_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class Block:
    """`length` bytes of an upload from `offset`, which are in one object from `start`."""

    key: str
    offset: int
    start: int
    length: int
    # Whether the object has no other bytes.
    whole: bool


@dataclass
class ChunkChain:
    """The consecutive chunks from byte 0: an upload's bytes as far as they have arrived."""

    prefix: str
    end: int = 0
    _blocks: list[Block] = field(default_factory=list)
    _offsets: list[int] = field(default_factory=list)

    def key(self, offset: int) -> str:
        return f"{self.prefix}/{offset:020d}"

    @property
    def blocks(self) -> list[Block]:
        return self._blocks

    def extend(self, size_bytes: int) -> None:
        """Append the chunk at `end`, with `size_bytes` bytes."""
        key = self.key(self.end)
        for start in range(0, size_bytes, BLOCK_BYTES):
            length = min(BLOCK_BYTES, size_bytes - start)
            self.add(Block(key, self.end, start, length, whole=length == size_bytes))

    def add(self, block: Block) -> None:
        """Append the block, which begins at `end`."""
        self._blocks.append(block)
        self._offsets.append(block.offset)
        self.end += block.length

    def block_index(self, offset: int) -> int:
        """Return the index of the block with the byte at `offset`, which must be below `end`."""
        return bisect_right(self._offsets, offset) - 1

    def between(self, start: int, stop: int) -> Iterator[Block]:
        """Yield the blocks with these bytes; the first and last may be partial."""
        if start >= stop:
            return
        for block in self._blocks[self.block_index(start) : self.block_index(stop - 1) + 1]:
            skipped = max(0, start - block.offset)
            length = min(block.offset + block.length, stop) - block.offset - skipped
            yield Block(
                block.key, block.offset + skipped, block.start + skipped, length, block.whole and length == block.length
            )


def chain_of_blocks(prefix: str, blocks: Iterable[Block]) -> ChunkChain:
    """Build the chain of known blocks, in any order; those after a gap are left out."""
    chain = ChunkChain(prefix)
    for block in sorted(blocks, key=lambda block: block.offset):
        if block.offset != chain.end:
            break
        chain.add(block)
    return chain


def chain_of(prefix: str, sizes: Iterable[tuple[int, int]]) -> ChunkChain:
    """Build the chain of the given objects.

    `sizes` are (offset, bytes) of the existing objects, in any order; those after a gap, or within another chunk, are
    left out.
    """
    there = dict(sizes)
    chain = ChunkChain(prefix)
    while size_bytes := there.get(chain.end, 0):
        chain.extend(size_bytes)
    return chain


def stored_chain(store: ObjectStore, prefix: str) -> ChunkChain:
    return chain_of(prefix, ((int(info.key.rsplit("/", 1)[-1]), info.size_bytes) for info in store.list(prefix)))


def read_block(store: ObjectStore, block: Block) -> bytes:
    """Read a block; raise `DataLoss` if the chunk is missing or shorter than before."""
    try:
        if not block.whole:
            return store.get_range(block.key, block.start, block.length)
        data = store.get(block.key)
    except ObjectMissing:
        raise DataLoss(
            f"the chunk of the upload at byte {block.offset} is gone; abort the upload and send it again",
            reason="CHUNK_MISSING",
            metadata={"object": block.key},
        ) from None
    if len(data) != block.length:
        raise DataLoss(
            f"the chunk of the upload at byte {block.offset} has {len(data)} bytes, it had {block.length}; abort the "
            "upload and send it again",
            reason="CHUNK_CHANGED",
            metadata={"object": block.key},
        )
    return data


# --- Blocks ahead ---
# Prefetches an upload's blocks in threads.

BLOCKS_AHEAD = 3
# The blocks that are cached, for readers that seek back and forth, as those of Parquet do.
KEPT_BLOCKS = 6


class BlocksAhead:
    """Prefetches blocks that are read in order.

    Not safe for several threads.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(BLOCKS_AHEAD, thread_name_prefix="upload-read")
        self._kept: OrderedDict[int, Future[tuple[bytes, int]]] = OrderedDict()
        self._last_index = -1

    def read(self, blocks: Sequence[Block], index: int) -> tuple[bytes, int]:
        """Return the bytes of `blocks[index]` and their CRC32C; raise the errors of `read_block`."""
        ahead = BLOCKS_AHEAD if index in (self._last_index, self._last_index + 1) else 0
        self._last_index = index
        for one in range(index, min(index + ahead + 1, len(blocks))):
            if one not in self._kept:
                self._kept[one] = self._threads.submit(_fetch, self._store, blocks[one])
        self._kept.move_to_end(index)
        while len(self._kept) > KEPT_BLOCKS:
            _, oldest = self._kept.popitem(last=False)
            oldest.cancel()
        return self._kept[index].result()

    def clear(self) -> None:
        """Clear the cache, because the blocks have changed."""
        self._kept.clear()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._kept.clear()


def read_ahead(store: ObjectStore, blocks: Iterable[Block]) -> Generator[bytes]:
    """Yield the bytes of each block, in order, while `BLOCKS_AHEAD` more are fetched.

    Raises the errors of `read_block`.
    """
    threads = ThreadPoolExecutor(BLOCKS_AHEAD, thread_name_prefix="upload-hash-read")
    coming: deque[Future[bytes]] = deque()
    try:
        for block in blocks:
            coming.append(threads.submit(read_block, store, block))
            if len(coming) > BLOCKS_AHEAD:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _fetch(store: ObjectStore, block: Block) -> tuple[bytes, int]:
    data = read_block(store, block)
    return data, google_crc32c.value(data)


# --- Digests ---
# SHA-256 of uploads: computed as bytes arrive, so that a commit need not read them again, and as they are read.

KEPT_DIGESTS = 1024


@dataclass
class RunningDigest:
    """The digest of the bytes from 0 to `end`."""

    end: int
    sha256: Any

    @classmethod
    def empty(cls) -> RunningDigest:
        return cls(0, hashlib.sha256())

    def update(self, data: bytes) -> None:
        self.sha256.update(data)
        self.end += len(data)

    def copy(self) -> RunningDigest:
        return RunningDigest(self.end, self.sha256.copy())


class PassingDigest:
    """Computes the SHA-256 of passing bytes, in a thread that runs while the next are read."""

    def __init__(self) -> None:
        self.end = 0
        self._sha256 = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload-hash")
        self._last: Future[None] | None = None

    def update(self, data: memoryview) -> None:
        if self._last:
            self._last.result()  # at most one block is pending
        self.end += len(data)
        self._last = self._thread.submit(self._sha256.update, data)

    def hexdigest(self) -> str:
        if self._last:
            self._last.result()
        return self._sha256.hexdigest()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class KeptDigests:
    """Caches the digests of the uploads last written in this process, by uid; it only saves time.

    `objects` identifies the objects with the bytes, for uploads whose objects can be overwritten; a digest is invalid
    once these have changed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[str, RunningDigest]] = OrderedDict()

    def get(self, uid: str, objects: str = "") -> RunningDigest:
        """Return a copy of the cached digest; an empty digest if there is none."""
        with self._lock:
            of, kept = self._kept.get(uid, ("", None))
            return kept.copy() if kept and of == objects else RunningDigest.empty()

    def hashed_size(self, uid: str) -> int:
        """Return the number of bytes from 0 that the cached digest covers."""
        with self._lock:
            _, kept = self._kept.get(uid, ("", None))
            return kept.end if kept else 0

    def keep(self, uid: str, digest: RunningDigest, objects: str = "") -> None:
        """Cache a digest, unless a longer one of the same objects is cached."""
        with self._lock:
            of, kept = self._kept.get(uid, ("", None))
            if kept is None or of != objects or kept.end < digest.end:
                self._kept[uid] = (objects, digest.copy())
            self._kept.move_to_end(uid)
            while len(self._kept) > KEPT_DIGESTS:
                self._kept.popitem(last=False)

    def forget(self, uid: str) -> None:
        with self._lock:
            self._kept.pop(uid, None)


def catch_up(store: ObjectStore, chain: ChunkChain, digest: RunningDigest, end: int) -> None:
    """Update the digest with the bytes up to `end`; raise `DataLoss` if some are missing."""
    for block in chain.between(digest.end, end):
        digest.update(read_block(store, block))


def digest_of(
    store: ObjectStore,
    chain: ChunkChain,
    kept: KeptDigests,
    uid: str,
    objects: str = "",
    given_up: Callable[[], bool] = lambda: False,
) -> RunningDigest:
    """Return the digest of the whole chain.

    Continues the cached digest. Each block that is read updates the cache, so that another call continues where this
    one failed. Raises `DataLoss` if bytes are missing, and `Cancelled` at the next block once `given_up` returns True.
    """
    digest = kept.get(uid, objects)
    with closing(read_ahead(store, chain.between(digest.end, chain.end))) as pieces:
        for piece in pieces:
            digest.update(piece)
            kept.keep(uid, digest, objects)
            if given_up() and digest.end < chain.end:
                raise Cancelled("no call waits for the digest of the upload any more; commit it again")
    return digest
