"""An upload as a seekable file.

An open upload is followed: reads wait for bytes that have not arrived yet.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, BinaryIO, cast

from data_service.uploads.chunks import (
    BLOCK_BYTES,
    Block,
    BlocksAhead,
    ChunkChain,
    PassingDigest,
    chain_of_blocks,
    stored_chain,
)
from data_service.uploads.record import UploadRecord, UploadState, get_upload, log_of
from shared.errors import DataLoss, FailedPrecondition, Unavailable
from shared.storage import ObjectMissing, ObjectStore

# --- Pins ---
# Pins the blocks of an upload at their first read, so that later reads give the same bytes.


# Pins of fewer blocks travel with what they are pinned for. A terabyte has 130,000 blocks, whose pins take 12 MB.
FEW_BLOCKS = 64
# The uploads whose kept pins a process remembers.
REMEMBERED = 4


class PinnedBlocks:
    """Remembers the CRC32C of each block that was read.

    Parts that clients put by URL can be overwritten at any time, even after the commit: a digest is valid for bytes
    that are read again only if they are unchanged. Serves one upload, and any number of files that are open on it.

    Pins that were kept in the store travel as the name of the object and its digest. `found` reads them in the other
    process.
    """

    def __init__(self) -> None:
        # By (object, start in it): the block, and the CRC32C.
        self._known: dict[tuple[str, int], tuple[Block, int]] = {}
        self._proven = False
        self._chain: ChunkChain | None = None
        # The object that has them, and its digest.
        self._kept: tuple[str, str] | None = None

    def holds(self, block: Block, crc32c: int) -> bool:
        """Returns whether the block is unchanged.

        A first read pins it, until the whole upload was verified.
        """
        place = (block.key, block.start)
        if not self._proven:
            self._known.setdefault(place, (block, crc32c))
        pinned, pinned_crc32c = self._known.get(place, (None, 0))
        return pinned is not None and (pinned.length, pinned_crc32c) == (block.length, crc32c)

    def fit(self, chain: ChunkChain) -> bool:
        """Returns whether all pinned blocks are unchanged in the chain."""
        there = {(block.key, block.start): block.length for block in chain.blocks}
        return all(there.get(place) == block.length for place, (block, _) in self._known.items())

    def chain(self, prefix: str) -> ChunkChain | None:
        """Returns the chunks with this prefix of an upload that was verified; None if they have to be listed."""
        if not self._proven:
            return None
        if self._chain is None:
            own = (block for block, _ in self._known.values() if block.key.startswith(f"{prefix}/"))
            self._chain = chain_of_blocks(prefix, own)
        return self._chain if self._chain.prefix == prefix else None

    def keep(self, store: ObjectStore, key: str) -> None:
        """Writes the pins as an object, unless they are few. Later pins are not in it."""
        if len(self._known) <= FEW_BLOCKS:
            return
        blocks = [
            [block.key, block.offset, block.start, block.length, block.whole, crc32c]
            for block, crc32c in self._known.values()
        ]
        data = json.dumps({"proven": self._proven, "blocks": blocks}, separators=(",", ":")).encode()
        store.put(key, data)
        self._kept = key, hashlib.sha256(data).hexdigest()

    def found(self, store: ObjectStore) -> PinnedBlocks:
        """Returns these pins, or those that are kept in the store. Raises `DataLoss` and `Unavailable`."""
        if self._known or self._kept is None:
            return self
        return _kept_pins(store, *self._kept)

    def __getstate__(self) -> dict[str, Any]:
        known = {} if self._kept else self._known
        return {"_known": known, "_proven": self._proven, "_chain": None, "_kept": self._kept}

    def set_proven(self) -> None:
        """Marks the upload as verified; further blocks are then refused.

        All blocks were read in order and have the committed digest together.
        """
        self._proven = True


@lru_cache(maxsize=REMEMBERED)
def _kept_pins(store: ObjectStore, key: str, sha256: str) -> PinnedBlocks:
    """Returns the same pins for all parts that a process works on."""
    try:
        data = store.get(key)
    except ObjectMissing:
        # The folder of an attempt goes when another attempt has taken its place.
        raise Unavailable(f"{key}, which has the checksums of an upload's blocks, is gone") from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise DataLoss(
            f"{key}, which has the checksums of an upload's blocks, was altered; import the upload again",
            metadata={"object": key},
        )
    kept, pins = json.loads(data), PinnedBlocks()
    for *block, crc32c in kept["blocks"]:
        pins.holds(Block(*block), crc32c)
    if kept["proven"]:
        pins.set_proven()
    return pins


# --- Reader ---

OUTAGE_TIMEOUT_S = 600.0
FIRST_POLL_S = 0.02
LONGEST_POLL_S = 0.5
BUFFER_BYTES = 256 * 1024


def open_upload(
    store: ObjectStore,
    name: str,
    *,
    outage_timeout_s: float = OUTAGE_TIMEOUT_S,
    on_wait: Callable[[], None] = lambda: None,
    field: str = "name",
    uid: str = "",
    pins: PinnedBlocks | None = None,
) -> BinaryIO:
    """Opens a seekable file of the upload's bytes; the caller must close it.

    It needs only the store. While the upload is open, a read past the available bytes waits for more, and a seek from
    the end waits for the commit. `on_wait` is called before each poll of the store, and may raise to end the wait.

    A file that is read in order from its first byte to its end returns the committed bytes, or raises `DataLoss` by its
    end; `verify` does that for a file that was read in another order. Bytes that are read again are unchanged, or raise
    `DataLoss`; that holds for all files that share `pins`, once one of them was verified.

    Raises `InvalidArgument` naming `field`, `NotFound`, and `FailedPrecondition` if another upload has taken the place
    of the one with `uid`. Reads raise `FailedPrecondition` if the upload was aborted or no byte arrived for
    `outage_timeout_s`, and `DataLoss` if bytes are missing or are not the committed ones.
    """
    upload = get_upload(store, name, field)
    if uid and upload.uid != uid:
        raise _abandoned(name, "it was aborted")
    raw = _UploadFile(store, upload, outage_timeout_s, on_wait, pins or PinnedBlocks())
    return cast(BinaryIO, io.BufferedReader(raw, BUFFER_BYTES))


def verify(file: BinaryIO) -> None:
    """Verifies a file of `open_upload` by reading the bytes that were not read in order.

    Raises `DataLoss` unless all bytes are the committed ones. Waits for the commit of an open upload.
    """
    raw = cast(io.BufferedReader, file).raw
    assert isinstance(raw, _UploadFile)
    raw.verify()


class _UploadFile(io.RawIOBase):
    def __init__(
        self,
        store: ObjectStore,
        upload: UploadRecord,
        outage_timeout_s: float,
        on_wait: Callable[[], None],
        pins: PinnedBlocks,
    ) -> None:
        self._store = store
        self._log = log_of(store, upload.name)
        self._upload = upload
        self._outage_timeout_s = outage_timeout_s
        self._on_wait = on_wait
        self._pins = pins
        chain = pins.chain(upload.chunks_prefix)
        self._chain = stored_chain(store, upload.chunks_prefix) if chain is None else chain
        self._position = 0
        self._given_to = 0
        self._blocks = BlocksAhead(store)
        self._digest = PassingDigest()
        self._verified = False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: None}[whence]
        position = (self._size() if base is None else base) + offset
        if position < 0:
            raise ValueError(f"seek to byte {position}")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        """Reads as many bytes as the next block has; 0 at the end."""
        wanted = memoryview(buffer).cast("B")
        if not wanted:
            return 0
        if not self._await_byte(self._position):
            self._check_digest()  # the last bytes may have been read before the commit
            return 0
        index = self._chain.block_index(self._position)
        block = self._chain.blocks[index]
        data = self._block(index)
        self._hash(block, data)
        start = self._position - block.offset
        # Bytes beyond the committed size came too late, and do not belong to it.
        limit = self._upload.size_bytes if self._committed else self._chain.end
        count = min(len(wanted), block.length - start, limit - self._position)
        if self._committed and self._position + count == limit:
            self._check_digest()
        wanted[:count] = memoryview(data)[start : start + count]
        self._position += count
        self._given_to = max(self._given_to, self._position)
        return count

    def readall(self) -> bytes:
        # The base class would read in steps of 8 KiB.
        pieces = []
        while piece := self.read(BLOCK_BYTES):
            pieces.append(piece)
        return b"".join(pieces)

    def verify(self) -> None:
        while not self._verified:
            if not self._await_byte(self._digest.end):
                self._check_digest()
                return
            end = self._digest.end
            index = self._chain.block_index(end)
            self._hash(self._chain.blocks[index], self._block(index))
            if self._digest.end == end:  # pinned blocks do not move
                raise _changed(self._upload.name)

    def close(self) -> None:
        if not self.closed:
            self._blocks.close()
            self._digest.close()
        super().close()

    @property
    def _committed(self) -> bool:
        return self._upload.state is UploadState.COMMITTED

    def _size(self) -> int:
        self._wait_until(lambda: self._committed)
        return self._upload.size_bytes

    def _await_byte(self, offset: int) -> bool:
        """Waits until the byte has arrived; returns False if the upload ends before it."""
        self._wait_until(lambda: self._committed or offset < self._chain.end)
        if not self._committed:
            return True
        if offset < self._upload.size_bytes and offset >= self._chain.end:
            self._chain = stored_chain(self._store, self._upload.chunks_prefix)
            self._blocks.clear()  # a part that was put again may have moved the others
            if not self._pins.fit(self._chain):
                raise _changed(self._upload.name)
            if offset >= self._chain.end:
                raise DataLoss(
                    f"{self._upload.name} has {self._upload.size_bytes} bytes, but what begins at byte "
                    f"{self._chain.end} is gone; abort the upload and send it again",
                    reason="CHUNK_MISSING",
                    metadata={"resource": self._upload.name},
                )
        return offset < self._upload.size_bytes

    def _wait_until(self, happened: Callable[[], bool]) -> None:
        give_up_at = time.monotonic() + self._outage_timeout_s
        pause_s = FIRST_POLL_S
        while not happened():
            self._on_wait()
            end = self._chain.end
            self._poll()
            if self._chain.end > end:
                give_up_at, pause_s = time.monotonic() + self._outage_timeout_s, FIRST_POLL_S
            elif not happened():
                if time.monotonic() > give_up_at:
                    raise _abandoned(self._upload.name, f"no byte came for {self._outage_timeout_s:.0f} s")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_POLL_S)

    def _poll(self) -> None:
        """Checks for changes since the last poll: chunks, and the commit."""
        grown = False
        while size_bytes := self._store.size(self._chain.key(self._chain.end)):
            self._chain.extend(size_bytes)
            grown = True
        if grown:
            return
        record = self._log.head()
        newest = UploadRecord.from_state(record.state) if record else None
        if newest is None or newest.state is UploadState.GONE or newest.uid != self._upload.uid:
            raise _abandoned(self._upload.name, "it was aborted")
        if newest.state is UploadState.COMMITTED and newest.size_bytes < self._given_to:
            # A second client's chunk arrived between the commit's count and the commit.
            raise _changed(newest.name)
        self._upload = newest

    def _block(self, index: int) -> bytes:
        data, crc32c = self._blocks.read(self._chain.blocks, index)
        # Checked here and not at the fetch, because prefetched blocks that are not read may change.
        if not self._pins.holds(self._chain.blocks[index], crc32c):
            raise _changed(self._upload.name)
        return data

    def _hash(self, block: Block, data: bytes) -> None:
        if block.offset != self._digest.end:
            return
        end = block.offset + block.length
        if self._committed:
            end = min(end, self._upload.size_bytes)
        self._digest.update(memoryview(data)[: end - block.offset])

    def _check_digest(self) -> None:
        if self._verified or self._digest.end < self._upload.size_bytes:
            return
        if self._digest.end > self._upload.size_bytes:  # hashed while the upload was open and had more bytes
            self._digest.close()
            self._digest = PassingDigest()
            self.verify()
            return
        if self._digest.hexdigest() != self._upload.sha256:
            raise _changed(self._upload.name)
        self._verified = True
        self._pins.set_proven()


def _changed(name: str) -> DataLoss:
    return DataLoss(
        f"the bytes of {name} are not those that were committed; abort the upload and send it again",
        reason="UPLOAD_CHANGED",
        metadata={"resource": name},
    )


def _abandoned(name: str, why: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"{name} was not committed: {why}; send it again",
        reason="UPLOAD_ABANDONED",
        metadata={"resource": name},
    )
