"""The chunks of an upload as they lie in the store: read in blocks, read ahead, and digested."""

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
# The chunks of one upload: an object each, named by the offset at which its bytes begin.

# One read of the store. Chunks that clients stream are no larger; parts put by URL may be of some GiB.
BLOCK_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class Block:
    """`length` bytes of an upload from `offset` on, which lie in one object from `start` on."""

    key: str
    offset: int
    start: int
    length: int
    # The object has no other bytes.
    whole: bool


@dataclass
class ChunkChain:
    """The chunks that follow one another without a gap from byte 0 on: an upload's bytes as far as they are there."""

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
        """Takes in the chunk at `end`, of so many bytes."""
        key = self.key(self.end)
        for start in range(0, size_bytes, BLOCK_BYTES):
            length = min(BLOCK_BYTES, size_bytes - start)
            self._blocks.append(Block(key, self.end + start, start, length, whole=length == size_bytes))
            self._offsets.append(self.end + start)
        self.end += size_bytes

    def block_index(self, offset: int) -> int:
        """The block that holds the byte at `offset`, which must be below `end`."""
        return bisect_right(self._offsets, offset) - 1

    def between(self, start: int, stop: int) -> Iterator[Block]:
        """The blocks that hold these bytes, the first and last in part."""
        if start >= stop:
            return
        for block in self._blocks[self.block_index(start) : self.block_index(stop - 1) + 1]:
            skipped = max(0, start - block.offset)
            length = min(block.offset + block.length, stop) - block.offset - skipped
            yield Block(
                block.key, block.offset + skipped, block.start + skipped, length, block.whole and length == block.length
            )


def chain_of(prefix: str, sizes: Iterable[tuple[int, int]]) -> ChunkChain:
    """`sizes` are (offset, bytes) of the objects there are, in any order; those after a gap, or within another chunk,
    are left out."""
    there = dict(sizes)
    chain = ChunkChain(prefix)
    while size_bytes := there.get(chain.end, 0):
        chain.extend(size_bytes)
    return chain


def stored_chain(store: ObjectStore, prefix: str) -> ChunkChain:
    return chain_of(prefix, ((int(info.key.rsplit("/", 1)[-1]), info.size_bytes) for info in store.list(prefix)))


def read_block(store: ObjectStore, block: Block) -> bytes:
    """Raises `DataLoss` where the chunk is gone or shorter than it was."""
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
# An upload's blocks, fetched by threads before they are asked for.

BLOCKS_AHEAD = 3
# Those last read, for files whose readers go back and forth, as those of Parquet do.
KEPT_BLOCKS = 6


class BlocksAhead:
    """Reads ahead where blocks are asked for in their order. Not for several threads at once."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(BLOCKS_AHEAD, thread_name_prefix="upload-read")
        self._kept: OrderedDict[int, Future[tuple[bytes, int]]] = OrderedDict()
        self._last_index = -1

    def read(self, blocks: Sequence[Block], index: int) -> tuple[bytes, int]:
        """The bytes of `blocks[index]` and their CRC32C. Raises as `read_block`."""
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
        """Forgets what was read: there are other blocks now."""
        self._kept.clear()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._kept.clear()


def read_ahead(store: ObjectStore, blocks: Iterable[Block]) -> Generator[bytes]:
    """The bytes of each block, in order; `BLOCKS_AHEAD` more are fetched meanwhile. Raises as `read_block`."""
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
# SHA-256 of uploads: as their bytes arrive, so that a commit need not read them again, and as they are read.

KEPT_DIGESTS = 1024


@dataclass
class RunningDigest:
    """Of the bytes from 0 to `end`."""

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
    """SHA-256 of bytes as they go by, in a thread beside the reading of the next."""

    def __init__(self) -> None:
        self.end = 0
        self._sha256 = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload-hash")
        self._last: Future[None] | None = None

    def update(self, data: memoryview) -> None:
        if self._last:
            self._last.result()  # at most one block waits
        self.end += len(data)
        self._last = self._thread.submit(self._sha256.update, data)

    def hexdigest(self) -> str:
        if self._last:
            self._last.result()
        return self._sha256.hexdigest()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class KeptDigests:
    """The digests of the uploads last written in this process, by their uid; merely a saving of time.

    `objects` names the very objects that the bytes lie in, for uploads whose objects can be written over; a digest is
    of no use once these are others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[str, RunningDigest]] = OrderedDict()

    def get(self, uid: str, objects: str = "") -> RunningDigest:
        """A copy that is the caller's own; the empty digest where none is kept."""
        with self._lock:
            of, kept = self._kept.get(uid, ("", None))
            return kept.copy() if kept and of == objects else RunningDigest.empty()

    def hashed_size(self, uid: str) -> int:
        """The bytes from 0 on that the digest is of."""
        with self._lock:
            _, kept = self._kept.get(uid, ("", None))
            return kept.end if kept else 0

    def keep(self, uid: str, digest: RunningDigest, objects: str = "") -> None:
        """Unless one of the same objects that goes further is kept: both are of the same bytes."""
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
    """Reads the bytes up to `end` that the digest has not seen. Raises `DataLoss` where some are missing."""
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
    """Of the whole chain, from where the digest that is kept ends; each block that is read is kept in turn, so that
    another call goes on where this one failed.

    Raises `DataLoss` where some bytes are missing, and `Cancelled` at the next block once nobody waits any more.
    """
    digest = kept.get(uid, objects)
    with closing(read_ahead(store, chain.between(digest.end, chain.end))) as pieces:
        for piece in pieces:
            digest.update(piece)
            kept.keep(uid, digest, objects)
            if given_up() and digest.end < chain.end:
                raise Cancelled("nobody waits for the digest of the upload any more; commit it again")
    return digest
