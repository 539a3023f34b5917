"""An upload: its record, and its bytes as a seekable file.

The record has its state and transitions, its expiry, and the markers of the jobs that read it.

An open upload is followed: reads wait for bytes that have not arrived yet.
"""

from __future__ import annotations

import enum
import hashlib
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, BinaryIO, cast

from data_service.uploads.chunks import (
    BLOCK_BYTES,
    Block,
    BlocksAhead,
    ChunkChain,
    PassingDigest,
    chain_of,
    chain_of_blocks,
    stored_chain,
)
from shared import names
from shared.durable import Durable, as_state, fields_of
from shared.errors import STORE_OUTAGES, DataLoss, FailedPrecondition, MillraceError, Unavailable, not_found
from shared.jobs import Jobs, JobState
from shared.resource_log import OUTCOME_UNKNOWN, Record, ResourceLog, State
from shared.storage import ObjectExists, ObjectMissing, ObjectStore

# --- Record ---
# An upload's state, its transitions, and its location in the store.

NAME_PATTERN = "datasets/{d}/uploads/{u}"


class UploadState(enum.StrEnum):
    #  OPEN ──▶ COMMITTED
    #    └──────────┴──▶ GONE
    OPEN = "OPEN"
    COMMITTED = "COMMITTED"
    # The tombstone: its bytes were deleted, and its id may be used again.
    GONE = "GONE"


@dataclass(frozen=True, kw_only=True)
class UploadRecord(Durable):
    """The complete state of an upload after one transition.

    Times are seconds since the epoch.
    """

    name: str
    # Its chunks are below the uid, so that a late write for a deleted upload never appears in the next one of the same
    # id.
    uid: str
    create_time: float
    update_time: float
    state: UploadState = UploadState.OPEN
    request_id: str = ""
    # A nonce of the present attempt to remove the upload, which fails if an import reads it. Until that is settled, no
    # import may begin to read it, no byte is accepted, and it is not committed.
    ending: str = ""
    # Clients put parts into the store directly, so that a chunk may be overwritten.
    presigned: bool = False
    # The uid of the dataset in which it was started: a later dataset of the same name has another. Empty: an earlier
    # release started it.
    dataset_uid: str = ""
    # Set by the commit.
    size_bytes: int = 0
    sha256: str = ""

    def as_state(self) -> dict[str, Any]:
        state: dict[str, Any] = as_state(self)
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> UploadRecord:
        return cls(**{**fields_of(cls, state), "state": UploadState(state["state"])})

    @property
    def chunks_prefix(self) -> str:
        return chunks_of(self.name, self.uid)

    def committed(self, size_bytes: int, sha256: str, now: float) -> UploadRecord:
        return replace(self, state=UploadState.COMMITTED, size_bytes=size_bytes, sha256=sha256, update_time=now)

    def gone(self, now: float) -> UploadRecord:
        return replace(self, state=UploadState.GONE, update_time=now)


def chunks_of(name: str, uid: str) -> str:
    return f"{name}/chunks/{uid}"


def log_of(store: ObjectStore, name: str) -> ResourceLog:
    return ResourceLog(store, f"{name}/log")


def find_upload(store: ObjectStore, name: str) -> UploadRecord | None:
    """Return the upload; None if it never existed, or was deleted."""
    record = log_of(store, name).head()
    upload = UploadRecord.from_state(record.state) if record else None
    return None if upload is None or upload.state is UploadState.GONE else upload


def get_upload(store: ObjectStore, name: str, field: str = "name") -> UploadRecord:
    """Return the upload; raise `InvalidArgument` naming `field`, and `NotFound`."""
    names.parse(field, name, NAME_PATTERN)
    upload = find_upload(store, name)
    if upload is None:
        raise not_found(name, "it was never started, or aborted, or it has expired; start an upload")
    return upload


def transition(store: ObjectStore, name: str, decide: Callable[[UploadRecord], UploadRecord]) -> UploadRecord:
    """Append the state that `decide` returns for the newest; nothing if it returns the same object."""

    def step(record: Record | None) -> State | None:
        assert record is not None
        before = UploadRecord.from_state(record.state)
        after = decide(before)
        return None if after is before else after.as_state()

    record = log_of(store, name).update(step)
    assert record is not None
    return UploadRecord.from_state(record.state)


def may_end(name: str) -> Unavailable:
    """Return the error for an upload whose removal is not settled yet."""
    return Unavailable(
        f"{name} is being aborted, unless an import reads it; try again, it is known in a moment",
        reason="UPLOAD_ENDING",
        metadata={"resource": name},
        retry_after_s=0.5,
    )


# --- Expiry ---
# An upload's present state: its bytes so far, and its expiry.

OPEN_FOR_S = 24 * 3600.0
COMMITTED_FOR_S = 7 * 24 * 3600.0


@dataclass(frozen=True)
class Upload:
    """An upload at present.

    `expire_time` is in seconds since the epoch; `hashed_size` is the number of bytes from 0 whose digest this process
    has.
    """

    record: UploadRecord
    acknowledged_size: int
    expire_time: float
    hashed_size: int = 0


def as_it_is(store: ObjectStore, record: UploadRecord) -> Upload:
    if record.state is UploadState.COMMITTED:
        return Upload(record, record.size_bytes, record.update_time + COMMITTED_FOR_S, hashed_size=record.size_bytes)
    infos = list(store.list(record.chunks_prefix))
    chain = chain_of(record.chunks_prefix, ((int(info.key.rsplit("/", 1)[-1]), info.size_bytes) for info in infos))
    newest_byte = max((one.modified for one in infos), default=record.create_time)
    return Upload(record, chain.end, max(record.create_time, newest_byte) + OPEN_FOR_S)


def has_expired(store: ObjectStore, record: UploadRecord, now: float) -> bool:
    """Return whether an OPEN or COMMITTED upload has expired.

    The chunks of a recent one are not listed.
    """
    return record.create_time + OPEN_FOR_S <= now and as_it_is(store, record).expire_time <= now


# --- Users ---
# Markers of an upload's readers: `datasets/{d}/uploads/{u}/users/{kind}-{uid}.json`.

# A marker is written before its job: without a job it counts for this time.
JOB_IS_COMING_S = 60.0


def mark_used(store: ObjectStore, name: str, kind: str, uid: str, folder: str) -> None:
    """Keep the upload while the job `uid`, of this kind and in this folder, is not final.

    Call it before the job is created. Raises `NotFound` if the upload was deleted, and `Unavailable` while it is being
    aborted, which may still be refused.
    """
    store.put(_key(name, kind, uid), _marker(folder))
    # A removal records its ending first and then looks for markers, so one of both sees the other.
    upload = find_upload(store, name)
    if upload is None or upload.ending:
        _let_go(store, name, kind, uid, folder)
        if upload:
            raise may_end(name)
        raise not_found(name, "it was aborted, or it has expired; send it again")


@contextmanager
def using(store: ObjectStore, name: str, kind: str, uid: str, folder: str) -> Iterator[None]:
    """Mark the upload like `mark_used`, while the body creates the job.

    The marker is removed if the body is refused.
    """
    mark_used(store, name, kind, uid, folder)
    try:
        yield
    except MillraceError as error:
        # After an outage the job may exist nevertheless; the garbage collector settles that.
        if not isinstance(error, OUTCOME_UNKNOWN):
            with suppress(*STORE_OUTAGES):
                _let_go(store, name, kind, uid, folder)
        raise
    # An equal call that was refused just before may have removed the marker, see `_let_go`.
    with suppress(ObjectExists, *STORE_OUTAGES):
        store.put_if_absent(_key(name, kind, uid), _marker(folder))


def unmark(store: ObjectStore, name: str, kind: str, uid: str) -> None:
    """Remove a marker; a missing one is no error."""
    store.delete(_key(name, kind, uid))


def live_references(store: ObjectStore, name: str) -> list[str]:
    """Return the names of the live jobs that read the upload; remove outdated markers."""
    references = []
    for info in store.list(f"{name}/users"):
        kind, _, uid = info.key.rsplit("/", 1)[-1].removesuffix(".json").rpartition("-")
        try:
            marker = json.loads(store.get(info.key))
        except ObjectMissing:  # unmarked just now
            continue
        # Includes the tombstone of a deleted job, which is not still to come.
        job = Jobs(store, kind).newest_of(marker["folder"], uid)
        if job is not None:
            is_live = not job.state.final
        else:
            is_live = time.time() - marker["marked_at"] < JOB_IS_COMING_S
        if is_live:
            references.append(marker["folder"])
        else:
            store.delete(info.key)
    return sorted(references)


def _let_go(store: ObjectStore, name: str, kind: str, uid: str, folder: str) -> None:
    """Remove the marker of a refused call, unless an equal call has created the job.

    The creator of the job marks the upload again afterwards, so one of both sees the other.
    """
    if not _is_made(store, kind, uid, folder):
        unmark(store, name, kind, uid)
        if _is_made(store, kind, uid, folder):
            with suppress(ObjectExists):
                store.put_if_absent(_key(name, kind, uid), _marker(folder))


def _is_made(store: ObjectStore, kind: str, uid: str, folder: str) -> bool:
    job = Jobs(store, kind).newest(folder)
    return job is not None and job.uid == uid and job.state is not JobState.DELETED


def _marker(folder: str) -> bytes:
    return json.dumps({"folder": folder, "marked_at": time.time()}).encode()


def _key(name: str, kind: str, uid: str) -> str:
    return f"{name}/users/{kind}-{uid}.json"


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
        """Return whether the block is unchanged.

        A first read pins it, until the whole upload was verified.
        """
        place = (block.key, block.start)
        if not self._proven:
            self._known.setdefault(place, (block, crc32c))
        pinned, pinned_crc32c = self._known.get(place, (None, 0))
        return pinned is not None and (pinned.length, pinned_crc32c) == (block.length, crc32c)

    def fit(self, chain: ChunkChain) -> bool:
        """Return whether all pinned blocks are unchanged in the chain."""
        there = {(block.key, block.start): block.length for block in chain.blocks}
        return all(there.get(place) == block.length for place, (block, _) in self._known.items())

    def chain(self, prefix: str) -> ChunkChain | None:
        """Return the chunks with this prefix of an upload that was verified; None if they have to be listed."""
        if not self._proven:
            return None
        if self._chain is None:
            own = (block for block, _ in self._known.values() if block.key.startswith(f"{prefix}/"))
            self._chain = chain_of_blocks(prefix, own)
        return self._chain if self._chain.prefix == prefix else None

    def keep(self, store: ObjectStore, key: str) -> None:
        """Write the pins as an object, unless they are few. Later pins are not in it."""
        if len(self._known) <= FEW_BLOCKS:
            return
        blocks = [
            [block.key, block.offset, block.start, block.length, block.whole, crc32c]
            for block, crc32c in self._known.values()
        ]
        data = json.dumps({"proven": self._proven, "blocks": blocks}, separators=(",", ":")).encode()
        store.put(key, data)
        self._kept = key, hashlib.sha256(data).hexdigest()

    def forget_kept(self) -> None:
        """Have the pins travel again: the object that `keep` wrote is about to go."""
        self._kept = None

    def found(self, store: ObjectStore) -> PinnedBlocks:
        """Return these pins, or those that are kept in the store. Raises `DataLoss` and `Unavailable`."""
        if self._known or self._kept is None:
            return self
        return _kept_pins(store, *self._kept)

    def __getstate__(self) -> dict[str, Any]:
        known = {} if self._kept else self._known
        return {"_known": known, "_proven": self._proven, "_chain": None, "_kept": self._kept}

    @property
    def are_proven(self) -> bool:
        return self._proven

    def set_proven(self) -> None:
        """Mark the upload as verified; further blocks are then refused.

        All blocks were read in order and have the committed digest together.
        """
        self._proven = True


@lru_cache(maxsize=REMEMBERED)
def _kept_pins(store: ObjectStore, key: str, sha256: str) -> PinnedBlocks:
    """Return the same pins for all parts that a process works on."""
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
    """Open a seekable file of the upload's bytes; the caller must close it.

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
    """Verify a file of `open_upload` by reading the bytes that were not read in order.

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
        """Read as many bytes as the next block has; 0 at the end."""
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
        # Once another file with these pins was verified, each block is compared with its pin as it is read.
        while not self._verified and not self._pins.are_proven:
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
        """Wait until the byte has arrived; return False if the upload ends before it."""
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
        """Check for changes since the last poll: chunks, and the commit."""
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
