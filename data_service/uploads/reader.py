"""An upload as a seekable file. One that is still open is followed: reads wait for bytes that have yet to come."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from data_service.uploads.chunks import BLOCK_BYTES, Block, BlocksAhead, ChunkChain, PassingDigest, stored_chain
from data_service.uploads.record import UploadRecord, UploadState, get_upload, log_of
from shared.errors import DataLoss, FailedPrecondition
from shared.storage import ObjectStore

# --- Pins ---
# What the blocks of an upload were when they were first read, so that whatever is read later is the same.


class PinnedBlocks:
    """Holds the CRC32C of each block that was given out. Parts that clients put by URL can be written over at any time,
    even after the commit: a digest says something of bytes that are read again only as long as they are the same.

    For one upload, and for any number of files that are open on it.
    """

    def __init__(self) -> None:
        # By object and place in it: the length, and the CRC32C.
        self._known: dict[tuple[str, int], tuple[int, int]] = {}
        self._proven = False

    def holds(self, block: Block, crc32c: int) -> bool:
        """Whether the block is what it was; a first reading pins it, until the whole was proven."""
        now = (block.length, crc32c)
        if self._proven:
            return self._known.get((block.key, block.start)) == now
        return self._known.setdefault((block.key, block.start), now) == now

    def fit(self, chain: ChunkChain) -> bool:
        """Whether all pinned blocks lie in the chain as they did."""
        there = {(block.key, block.start): block.length for block in chain.blocks}
        return all(there.get(place) == length for place, (length, _) in self._known.items())

    def set_proven(self) -> None:
        """All blocks went by in order and have the committed digest together: from here on there are no others."""
        self._proven = True


# --- Reader ---
# An upload as a seekable file. One that is still open is followed: reads wait for bytes that have yet to come.

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
    pins: PinnedBlocks | None = None,
) -> BinaryIO:
    """A seekable file of the upload's bytes; close it. It needs nothing but the store.

    While the upload is open, a read past what is there waits for more, and a seek from the end waits for the commit;
    `on_wait` is called before each look at the store, and may raise to end the wait.

    A file that is read in order from its first byte to its end gave the bytes that were committed, or raises `DataLoss`
    by its end; `verify` does so for a file that was read in another order. Bytes that are read again are those that
    they were before, or it is `DataLoss`: so it is for all files that share `pins`, once one of them was verified.

    Raises `InvalidArgument` naming `field` and `NotFound`; reads raise `FailedPrecondition` where the upload was
    aborted or no byte came for `outage_timeout_s`, and `DataLoss` where bytes are missing or are not those committed.
    """
    raw = _UploadFile(store, get_upload(store, name, field), outage_timeout_s, on_wait, pins or PinnedBlocks())
    return cast(BinaryIO, io.BufferedReader(raw, BUFFER_BYTES))


def upload_size(store: ObjectStore, name: str) -> int | None:
    """In bytes; None while it is open. Raises `InvalidArgument` and `NotFound`."""
    upload = get_upload(store, name)
    return upload.size_bytes if upload.state is UploadState.COMMITTED else None


def verify(file: BinaryIO) -> None:
    """Reads what has not gone by in order, and raises `DataLoss` unless all bytes of a file that `open_upload` gave
    are those committed. Waits for the commit of an open one."""
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
        self._chain = stored_chain(store, upload.chunks_prefix)
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
        """As many bytes as the next block holds; 0 at the end."""
        wanted = memoryview(buffer).cast("B")
        if not wanted:
            return 0
        if not self._await_byte(self._position):
            self._check_digest()  # the last bytes may have been given out before the commit
            return 0
        index = self._chain.block_index(self._position)
        block = self._chain.blocks[index]
        data = self._block(index)
        self._hash(block, data)
        start = self._position - block.offset
        # What lies past the committed size came too late, and is no part of it.
        limit = self._upload.size_bytes if self._committed else self._chain.end
        count = min(len(wanted), block.length - start, limit - self._position)
        if self._committed and self._position + count == limit:
            self._check_digest()
        wanted[:count] = memoryview(data)[start : start + count]
        self._position += count
        self._given_to = max(self._given_to, self._position)
        return count

    def readall(self) -> bytes:
        # The base class would go in steps of 8 KiB.
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
        """Waits until the byte is there; False where the upload ends before it."""
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
        """Takes in what came since the last look: chunks, and the commit."""
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
            # A second client's chunk came between the commit's count and the commit.
            raise _changed(newest.name)
        self._upload = newest

    def _block(self, index: int) -> bytes:
        data, crc32c = self._blocks.read(self._chain.blocks, index)
        # Here and not as it is fetched: what nobody asks for may change.
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
        if self._digest.end > self._upload.size_bytes:  # hashed while the upload was open and there was more
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
