"""Receives the chunks of one call.

Several are written at a time, and acknowledged in order once they are durable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from dataclasses import dataclass

import google_crc32c

from data_service.uploads.chunks import KeptDigests, RunningDigest, catch_up, read_block, stored_chain
from data_service.uploads.record import UploadRecord, UploadState, get_upload, may_end
from shared.errors import Conflict, DataLoss, FailedPrecondition, MillraceError, OutOfRange, invalid_field
from shared.storage import ObjectExists, ObjectStore

MAX_CHUNK_BYTES = 8 * 1024 * 1024
# The chunks of one call that are written concurrently; with one more, the most that it has in memory.
WRITES_IN_FLIGHT = 4
# An acknowledgement is delayed while more bytes are about to become durable, within these limits.
UNSAID_BYTES = 16 * 1024 * 1024
UNSAID_S = 0.25
# How often a call checks whether its upload was committed or aborted meanwhile.
POLL_INTERVAL_S = 2.0
# A digest that is further behind than this is left to the commit.
CATCH_UP_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Chunk:
    """One chunk.

    `name` may be empty in all but a call's first chunk; `crc32c` is that of `data`.
    """

    name: str
    offset: int
    data: bytes
    crc32c: int

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


@dataclass(frozen=True)
class _Flight:
    """A chunk that is being written.

    `written` returns False if the object already exists; None: not tried yet.
    """

    chunk: Chunk
    written: asyncio.Task[bool] | None


async def receive(store: ObjectStore, digests: KeptDigests, chunks: AsyncIterator[Chunk]) -> AsyncGenerator[int, None]:
    """Yields how many bytes from 0 are durable, after each chunk or after several.

    The end of `chunks` commits nothing, because a lost client looks the same. A cancelled call leaves only whole
    chunks.

    Raises `InvalidArgument`, `NotFound`, `DataLoss` (a chunk does not match its CRC32C), `OutOfRange` (a chunk after a
    gap), `Conflict` (other bytes are already there), `FailedPrecondition` (the upload is committed), `Unavailable` (it
    is being aborted, which may still be refused) and `ResourceExhausted` (the store is full), after all earlier chunks
    were acknowledged.
    """
    first = await anext(chunks, None)
    if first is None:
        return
    upload = await asyncio.to_thread(_open_upload, store, first.name)
    call = await asyncio.to_thread(_Call, store, digests, upload)
    waiting: asyncio.Queue[_Flight | Exception | None] = asyncio.Queue(WRITES_IN_FLIGHT - 1)
    feeding = asyncio.create_task(_feed(call, first, chunks, waiting))
    unsaid, said_at = 0, time.monotonic()
    try:
        while (item := await waiting.get()) is not None:
            if isinstance(item, Exception):
                failure: Exception | None = item
            else:
                failure = await _failure_of(call.settle(item))
                unsaid += 0 if failure else len(item.chunk.data)
            late = time.monotonic() - said_at > UNSAID_S
            if unsaid and (failure or waiting.empty() or unsaid > UNSAID_BYTES or late):
                unsaid, said_at = 0, time.monotonic()
                yield call.acknowledged
            if failure:
                raise failure
        await call.finish()
        if unsaid:
            yield call.acknowledged
    finally:
        # Writes in flight cannot be stopped, and need not: each creates a whole chunk or none. The task may take one
        # cancellation for the loss of its slot, and then waits to pass that error on. So it is cancelled until it ends.
        while not feeding.done():
            feeding.cancel()
            await asyncio.sleep(0)


async def _failure_of(settling: Awaitable[None]) -> Exception | None:
    try:
        await settling
    except MillraceError as error:
        return error
    return None


async def _feed(
    call: _Call, first: Chunk, rest: AsyncIterator[Chunk], waiting: asyncio.Queue[_Flight | Exception | None]
) -> None:
    """Starts the write of each chunk as it arrives, with fewer than `WRITES_IN_FLIGHT` in progress."""
    last: _Flight | Exception | None = None
    try:
        await waiting.put(call.launch(first))
        async for chunk in rest:
            await waiting.put(call.launch(chunk))
    except Exception as error:  # raised in order, after the earlier chunks have been settled
        last = error
    await waiting.put(last)


class _Call:
    """One call's state of its upload."""

    def __init__(self, store: ObjectStore, digests: KeptDigests, upload: UploadRecord) -> None:
        self._store = store
        self._digests = digests
        self._upload = upload
        self._chain = stored_chain(store, upload.chunks_prefix)
        # Where the next new chunk begins, once all writes in flight are durable.
        self._fed_to = self._chain.end
        # Parts put by URL may be put again: only the bytes at the commit count, and they are read then.
        self._digest = None if upload.presigned else digests.get(upload.uid)
        self._hashing: asyncio.Future[None] | None = None
        self._looked_at = time.monotonic()
        self._catch_up()

    @property
    def acknowledged(self) -> int:
        return self._chain.end

    def launch(self, chunk: Chunk) -> _Flight:
        self._check(chunk)
        is_next = chunk.offset == self._fed_to
        self._fed_to = max(self._fed_to, chunk.end)
        if not is_next:
            return _Flight(chunk, None)
        written = asyncio.create_task(asyncio.to_thread(self._write, chunk))
        # After the call has ended, its last writes' errors are dropped; a new call detects their effect.
        written.add_done_callback(lambda task: task.cancelled() or task.exception())
        return _Flight(chunk, written)

    async def settle(self, flight: _Flight) -> None:
        """Waits until the chunk, with all before it, is durable."""
        chunk = flight.chunk
        written = flight.written is not None and await flight.written
        if written and chunk.offset == self._chain.end:
            self._chain.extend(len(chunk.data))
            await self._hash(chunk)
        else:
            if self._hashing:
                await self._hashing
            await asyncio.to_thread(self._reconcile, chunk)
        if time.monotonic() - self._looked_at > POLL_INTERVAL_S:
            await asyncio.to_thread(_open_upload, self._store, self._upload.name, self._upload.uid)
            self._looked_at = time.monotonic()

    async def finish(self) -> None:
        if self._hashing:
            await self._hashing

    async def _hash(self, chunk: Chunk) -> None:
        """Hashes the chunk while the next ones are written; waits for the chunk before."""
        if self._hashing:
            await self._hashing
        if self._digest and self._digest.end == chunk.offset:
            self._hashing = asyncio.ensure_future(asyncio.to_thread(self._update, self._digest, chunk.data))

    def _update(self, digest: RunningDigest, data: bytes) -> None:
        digest.update(data)
        self._digests.keep(self._upload.uid, digest)

    def _write(self, chunk: Chunk) -> bool:
        try:
            self._store.put_if_absent(self._chain.key(chunk.offset), chunk.data)
        except ObjectExists:
            return False
        return True

    def _reconcile(self, chunk: Chunk) -> None:
        """Handles a chunk that is partly present already, from an earlier call or another client.

        The present bytes must be equal; the rest is written. Raises `Conflict`.
        """
        position, chain = chunk.offset, self._chain
        while position < chunk.end:
            durable = min(chunk.end, chain.end)
            for block in chain.between(position, durable):
                start = block.offset - chunk.offset
                if read_block(self._store, block) != chunk.data[start : start + block.length]:
                    raise self._conflict(block.offset)
            position = durable
            if position == chunk.end:
                break
            rest = chunk.data[position - chunk.offset :]
            try:
                self._store.put_if_absent(chain.key(position), rest)
                chain.extend(len(rest))
            except ObjectExists:
                size_bytes = self._store.size(chain.key(position))
                if not size_bytes:  # it was deleted again
                    raise self._conflict(position) from None
                chain.extend(size_bytes)
        self._catch_up()

    def _catch_up(self) -> None:
        if self._digest and 0 < self._chain.end - self._digest.end <= CATCH_UP_BYTES:
            catch_up(self._store, self._chain, self._digest, self._chain.end)
            self._digests.keep(self._upload.uid, self._digest)

    def _conflict(self, offset: int) -> Conflict:
        return Conflict(
            f"{self._upload.name} has other bytes at byte {offset}: another client writes to it; use an upload of your "
            "own, or abort this one and send it again",
            reason="CHUNK_MISMATCH",
            metadata={"resource": self._upload.name, "offset": str(offset)},
        )

    def _check(self, chunk: Chunk) -> None:
        if chunk.name not in ("", self._upload.name):
            raise invalid_field("name", chunk.name, f"this call writes to {self._upload.name}; use another call")
        if not 1 <= len(chunk.data) <= MAX_CHUNK_BYTES:
            raise invalid_field("data", f"{len(chunk.data)} bytes", f"use 1 to {MAX_CHUNK_BYTES} bytes")
        if chunk.offset < 0:
            raise invalid_field("offset", chunk.offset, "use 0 or more")
        if google_crc32c.value(chunk.data) != chunk.crc32c:
            raise DataLoss(
                f"the chunk at byte {chunk.offset} is not what its CRC32C says; send it again",
                reason="WRONG_CRC32C",
                metadata={"resource": self._upload.name, "offset": str(chunk.offset)},
            )
        if chunk.offset > self._fed_to:
            raise OutOfRange(
                f"the chunk begins at byte {chunk.offset}, but the next byte is {self._fed_to}; go on from there",
                reason="OFFSET_GAP",
                metadata={"resource": self._upload.name, "next_offset": str(self._fed_to)},
            )


def _open_upload(store: ObjectStore, name: str, uid: str = "") -> UploadRecord:
    """Returns the open upload.

    Raises `InvalidArgument`, `NotFound`, `FailedPrecondition` if it takes no chunks (any more), and `Unavailable` while
    it is being aborted, which may still be refused.
    """
    upload = get_upload(store, name)
    if upload.state is not UploadState.OPEN or uid not in ("", upload.uid):
        raise FailedPrecondition(
            f"{name} takes no more chunks: it was committed or aborted; start another upload",
            reason="UPLOAD_NOT_OPEN",
            metadata={"resource": name},
        )
    if upload.ending:
        raise may_end(name)
    return upload
