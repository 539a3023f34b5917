"""The uploads in the store, and the receipt of their chunks.

Each is a resource log below `datasets/{d}/uploads/{u}/log`, with its chunks beside it.

Several chunks of one call are written at a time, and acknowledged in order once they are durable.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import google_crc32c

from data_service.datasets import SERVICE, Datasets
from data_service.domain.dataset import Dataset
from data_service.uploads.chunks import (
    KeptDigests,
    RunningDigest,
    catch_up,
    chain_of,
    digest_of,
    read_block,
    stored_chain,
)
from data_service.uploads.upload import (
    Upload,
    UploadRecord,
    UploadState,
    as_it_is,
    chunks_of,
    find_upload,
    get_upload,
    has_expired,
    live_references,
    log_of,
    may_end,
    transition,
)
from shared import names
from shared.durable import Durable, as_state, fields_of
from shared.errors import (
    STORE_OUTAGES,
    Conflict,
    DataLoss,
    FailedPrecondition,
    MillraceError,
    NotFound,
    OutOfRange,
    already_exists,
    invalid_field,
    not_found,
)
from shared.resource_log import claimed
from shared.storage import ObjectExists, ObjectMissing, ObjectStore
from shared.storage.presigning import VALID_FOR, Presigner

# --- Uploads ---

logger = logging.getLogger(__name__)


SHA256 = re.compile(r"[0-9a-f]{64}")


class Uploads:
    """Starts, commits and aborts uploads.

    `presigner` is None if the store is not S3. Methods that are not coroutines block.
    """

    def __init__(self, store: ObjectStore, datasets: Datasets, presigner: Presigner | None) -> None:
        self._store = store
        self._datasets = datasets
        self._presigner = presigner
        self._digests = KeptDigests()
        self._live = LiveUploads(store)
        self._finisher = UploadFinisher(store)

    def start(
        self, parent: str, upload_id: str, *, request_id: str, body_sha256: str, presigned: PresignedPut | None = None
    ) -> tuple[Upload, list[UploadPart]]:
        """Start an upload.

        The parts are empty unless `presigned` is given. A repeated call with the same id gets new URLs, or no parts
        once the upload is committed.

        Raises `InvalidArgument`, `NotFound` (the dataset), `AlreadyExists`, and `FailedPrecondition` for presigned
        parts if the store is not S3.
        """
        if upload_id:
            names.check_id("upload_id", upload_id)
        request_id = names.check_request_id("request_id", request_id)
        ranges = parts_of(presigned) if presigned else []
        if presigned and self._presigner is None:
            raise FailedPrecondition(
                "presigned: the store is a local directory, which has no URLs; send the bytes with UploadChunks",
                reason="STORE_NOT_S3",
                metadata={"field": "presigned"},
            )
        dataset = self._datasets.get(parent, "parent")
        name = f"{parent}/uploads/{upload_id or f'u-{uuid.uuid4().hex}'}"
        with claimed(self._store, SERVICE, request_id, body_sha256, name) as claim:
            record = self._create(claim.name, request_id, presigned is not None, dataset.uid)
            self._keep_unless_dataset_is_gone(dataset, record)
        if record.state is UploadState.COMMITTED:
            ranges = []  # further parts would only damage it
        assert self._presigner is not None or not ranges
        key = chain_of(record.chunks_prefix, ()).key
        parts = [
            UploadPart(one.offset, one.size_bytes, self._presigner.put_url(key(one.offset)) if self._presigner else "")
            for one in ranges
        ]
        return as_it_is(self._store, record), parts

    def get(self, name: str) -> Upload:
        """Return an upload; raise `InvalidArgument` and `NotFound`."""
        upload = as_it_is(self._store, get_upload(self._store, name))
        if upload.record.state is UploadState.COMMITTED:
            return upload
        return replace(upload, hashed_size=self._digests.hashed_size(upload.record.uid))

    def receive(self, chunks: AsyncIterator[Chunk]) -> AsyncGenerator[int, None]:
        """Receive chunks; see `receiving.receive`."""
        return receive(self._store, self._digests, chunks)

    def commit(self, name: str, size_bytes: int, sha256: str, given_up: Callable[[], bool] = lambda: False) -> Upload:
        """Commit the bytes; a repeated call with the same size and digest changes nothing.

        After a failure, another call continues reading where this one stopped. Once `given_up` returns True, it stops
        at the next block.

        Raises `InvalidArgument`, `NotFound`, `FailedPrecondition` (bytes are missing, or it was committed with another
        size or digest), `DataLoss` (the bytes do not have that digest), `Unavailable` (it is being aborted, which may
        still be refused) and `Cancelled`.
        """
        if size_bytes < 0:
            raise invalid_field("size_bytes", size_bytes, "use 0 or more")
        sha256 = sha256.lower()
        if not SHA256.fullmatch(sha256):
            raise invalid_field("sha256", sha256, "use the SHA-256 of all bytes as 64 hexadecimal digits")
        upload = get_upload(self._store, name)
        if upload.state is UploadState.OPEN:
            self._check_bytes(upload, size_bytes, sha256, given_up)

        def decide(newest: UploadRecord) -> UploadRecord:
            if newest.uid != upload.uid or newest.state is UploadState.GONE:
                raise not_found(name, "it was aborted meanwhile; start another upload")
            if newest.ending:
                raise may_end(name)
            if newest.state is UploadState.COMMITTED:
                return newest
            return newest.committed(size_bytes, sha256, time.time())

        committed = transition(self._store, name, decide)
        if (committed.size_bytes, committed.sha256) != (size_bytes, sha256):
            raise FailedPrecondition(
                f"{name} was committed with {committed.size_bytes} bytes of SHA-256 {committed.sha256}; import that, "
                "or start another upload",
                reason="COMMIT_MISMATCH",
                metadata={"resource": name},
            )
        self._digests.forget(upload.uid)
        return as_it_is(self._store, committed)

    def abort(self, name: str) -> None:
        """Delete the upload with its bytes.

        Raises `InvalidArgument`, `NotFound`, and `FailedPrecondition` while an import reads it.
        """
        self._digests.forget(self._finisher.abort(name).uid)

    def check_unused(self, dataset: str, dataset_uid: str) -> None:
        """See `UploadFinisher.check_unused`."""
        self._finisher.check_unused(dataset, dataset_uid)

    def abort_all(self, dataset: str, dataset_uid: str) -> None:
        """See `UploadFinisher.abort_all`."""
        self._finisher.abort_all(dataset, dataset_uid)

    def collect(self, now: float) -> list[str]:
        """See `UploadFinisher.collect`."""
        return self._finisher.collect(now)

    def _keep_unless_dataset_is_gone(self, dataset: Dataset, record: UploadRecord) -> None:
        """Abort the upload if its dataset was deleted meanwhile; raise `NotFound` then.

        A deletion of the dataset is recorded before it looks for uploads; a start works in reverse.
        """
        if record.dataset_uid != dataset.uid:
            return  # a repeated call: the first one has checked
        try:
            self._datasets.check_still_there(dataset.name, dataset.uid)
        except NotFound:
            with suppress(FailedPrecondition, NotFound):  # an import reads it, so it expires; or it was just deleted
                self._finisher.abort(record.name, record.uid)
            raise

    def _create(self, name: str, request_id: str, presigned: bool, dataset_uid: str) -> UploadRecord:
        record = UploadRecord(
            name=name,
            uid=uuid.uuid4().hex,
            create_time=time.time(),
            update_time=time.time(),
            request_id=request_id,
            presigned=presigned,
            dataset_uid=dataset_uid,
        )
        log = log_of(self._store, name)
        before = log.head()
        is_free = before is None or UploadRecord.from_state(before.state).state is UploadState.GONE
        if is_free:
            # The marker first: an upload without one would never be swept.
            self._live.mark(record.uid, name)
            if log.append(before, record.as_state()):
                return record
            self._live.forget(record.uid, name)
        winner = find_upload(self._store, name)
        # Of repeated or concurrent calls, all get the result of the first.
        if winner and request_id and winner.request_id == request_id:
            return winner
        raise already_exists(name)

    def _check_bytes(self, upload: UploadRecord, size_bytes: int, sha256: str, given_up: Callable[[], bool]) -> None:
        parts = sorted((int(one.key.rsplit("/", 1)[-1]), one) for one in self._store.list(upload.chunks_prefix))
        chain = chain_of(upload.chunks_prefix, ((offset, one.size_bytes) for offset, one in parts))
        if chain.end != size_bytes:
            raise FailedPrecondition(
                f"{upload.name} has {chain.end} bytes, not {size_bytes}; "
                + ("send the rest first" if chain.end < size_bytes else "commit the size that was sent, or abort it"),
                reason="SIZE_MISMATCH",
                metadata={"resource": upload.name, "acknowledged_size": str(chain.end)},
            )
        objects = ""
        if upload.presigned:
            # Parts that were put by URL can be put again, even after the commit. So a digest counts for the same
            # objects only, and readers of the upload compare it with their bytes once more.
            places = str([(offset, one.size_bytes, one.modified) for offset, one in parts])
            objects = hashlib.sha256(places.encode()).hexdigest()
        digest = digest_of(self._store, chain, self._digests, upload.uid, objects, given_up)
        if digest.sha256.hexdigest() != sha256:
            # The store's times may be coarse: if a part has changed nevertheless, the next commit reads it.
            self._digests.forget(upload.uid)
            raise DataLoss(
                f"the bytes of {upload.name} have the SHA-256 {digest.sha256.hexdigest()}, not {sha256}; abort the "
                "upload and send it again",
                reason="DIGEST_MISMATCH",
                metadata={"resource": upload.name},
            )


# --- Parts ---
# Divides an upload that clients put by URL into parts.

DEFAULT_PART_BYTES = 64 * 1024 * 1024
MIN_PART_BYTES = 5 * 1024 * 1024
MAX_PART_BYTES = 5 * 1024 * 1024 * 1024
# With their URLs the parts are one message of less than 4 MiB, even if host, bucket and key have their maximum lengths.
MAX_PARTS = 2_000
_MEBIBYTE = 1024 * 1024


@dataclass(frozen=True)
class PresignedPut:
    """A client's request for presigned parts.

    A part size of 0 means 64 MiB, or more if needed to stay within `MAX_PARTS`.
    """

    size_bytes: int
    part_size_bytes: int = 0


@dataclass(frozen=True)
class UploadPart:
    """A part: `size_bytes` from `offset`, to be put to `url`."""

    offset: int
    size_bytes: int
    url: str = ""


def parts_of(presigned_put: PresignedPut) -> list[UploadPart]:
    """Return the parts without their URLs, all of one size except the last.

    Raises `InvalidArgument`.
    """
    if presigned_put.size_bytes < 1:
        raise invalid_field(
            "presigned.size_bytes", presigned_put.size_bytes, "name the size of all parts together, 1 or more"
        )
    if presigned_put.size_bytes > MAX_PARTS * MAX_PART_BYTES and not presigned_put.part_size_bytes:
        raise invalid_field(
            "presigned.size_bytes", presigned_put.size_bytes, f"use at most {MAX_PARTS * MAX_PART_BYTES}"
        )
    part_size = presigned_put.part_size_bytes or max(DEFAULT_PART_BYTES, _min_part_bytes(presigned_put.size_bytes))
    if not MIN_PART_BYTES <= part_size <= MAX_PART_BYTES:
        raise invalid_field(
            "presigned.part_size_bytes", part_size, f"use 0, or {MIN_PART_BYTES} to {MAX_PART_BYTES} bytes"
        )
    if presigned_put.size_bytes > MAX_PARTS * part_size:
        raise invalid_field(
            "presigned.part_size_bytes",
            part_size,
            f"{presigned_put.size_bytes} bytes must make at most {MAX_PARTS} parts",
        )
    return [
        UploadPart(offset, min(part_size, presigned_put.size_bytes - offset))
        for offset in range(0, presigned_put.size_bytes, part_size)
    ]


def _min_part_bytes(size_bytes: int) -> int:
    """Return the part size, in whole MiB, that gives at most `MAX_PARTS` parts."""
    return -(-size_bytes // (MAX_PARTS * _MEBIBYTE)) * _MEBIBYTE


# --- Ending ---
# The removal of an upload: its log records that it is ending, no import reads it, its log becomes GONE, its bytes are
# deleted.
#
# A reader of an upload writes a marker and then checks whether the upload is ending. The removal works in reverse, so
# one of both sees the other. GONE is the point of no return, before any byte is deleted: it is recorded only for the
# same ending during which no reader was found. Meanwhile clients get UNAVAILABLE.


# A pass covers this many uploads; the next one continues after them.
UPLOADS_A_PASS = 1000
# A marker is written before its upload: it may be without one for this time.
UPLOAD_IS_COMING_S = 3600.0
# For this time after an upload's removal its URLs may put parts, and calls in flight may write chunks.
LATE_WRITES_S = VALID_FOR.total_seconds() + 600.0


class UploadFinisher:
    """Removes uploads.

    All methods block. `collect` is not safe for several threads.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._live = LiveUploads(store)
        # The marker after which the last pass stopped; empty if it reached the end.
        self._after = ""

    def abort(self, name: str, uid: str = "") -> UploadRecord:
        """Delete the upload with its bytes.

        With `uid`, deletes only that upload, and no later one of its name. Raises `InvalidArgument`, `NotFound`, and
        `FailedPrecondition` while an import reads it.
        """
        upload = get_upload(self._store, name)
        if uid and upload.uid != uid:
            raise not_found(name, "it is gone, and another upload has its name")
        ending = uuid.uuid4().hex

        def begin(newest: UploadRecord) -> UploadRecord:
            return newest if newest.ending or not _is_same(newest, upload) else replace(newest, ending=ending)

        begun = transition(self._store, name, begin)
        references = live_references(self._store, name) if _is_same(begun, upload) else []

        def settle(newest: UploadRecord) -> UploadRecord:
            # Another process may have settled this ending and begun another one, for which the check for readers came
            # too early.
            if not _is_same(newest, upload) or newest.ending != begun.ending:
                return newest
            return replace(newest, ending="") if references else newest.gone(time.time())

        if _is_same(transition(self._store, name, settle), upload):
            raise _in_use(name, references[0] if references else "an import")
        self._store.delete_folder(upload.chunks_prefix)
        if live := self._live.find(upload.uid, name):
            self._live.set_gone(live, time.time())
        return upload

    def check_unused(self, dataset: str, dataset_uid: str) -> None:
        """Raise `FailedPrecondition` if an import reads an upload of this dataset.

        The dataset is `datasets/{d}` with that uid.
        """
        for upload in self._uploads_of(dataset, dataset_uid):
            if references := live_references(self._store, upload.name):
                raise _in_use(upload.name, references[0])

    def abort_all(self, dataset: str, dataset_uid: str) -> None:
        """Abort the uploads of this dataset, and of no later one of its name.

        Uploads that imports read stay.
        """
        for upload in self._uploads_of(dataset, dataset_uid):
            with suppress(FailedPrecondition, NotFound):  # in use; or just removed by another process
                self.abort(upload.name, upload.uid)

    def _uploads_of(self, dataset: str, dataset_uid: str) -> Iterator[UploadRecord]:
        """Yield the dataset's uploads that are not removed."""
        for key in self._live.markers(dataset):
            live = self._live.read(key)
            if live is None or live.gone_at is not None:
                continue
            upload = find_upload(self._store, live.name)
            if upload and upload.uid == live.uid and upload.dataset_uid in ("", dataset_uid):
                yield upload

    def collect(self, now: float) -> list[str]:
        """Remove uploads that have expired by `now` and no import reads, and late writes of removed ones.

        Return the names of the removed uploads.
        """
        waiting = [key for key in self._live.markers() if key > self._after]
        expired = []
        for key in waiting[:UPLOADS_A_PASS]:
            self._after = key
            try:
                live = self._live.read(key)
                if live and self._collect_one(live, now):
                    expired.append(live.name)
            except STORE_OUTAGES:
                raise  # which affects all uploads
            except Exception:
                logger.exception("the upload of %s cannot be swept; the others go on", key)
        if len(waiting) <= UPLOADS_A_PASS:
            self._after = ""
        return expired

    def _collect_one(self, live: LiveUpload, now: float) -> bool:
        if live.gone_at is not None:
            if now - live.gone_at > LATE_WRITES_S:
                self._store.delete_folder(chunks_of(live.name, live.uid))
                self._live.forget(live.uid, live.name)
            return False
        record = log_of(self._store, live.name).head()
        upload = UploadRecord.from_state(record.state) if record else None
        if upload is None or upload.uid != live.uid:
            # Not created yet, or never; or removed, and another upload has its name.
            if now - live.marked_at > UPLOAD_IS_COMING_S:
                self._settle_gone(live, now)
            return False
        if upload.state is UploadState.GONE:
            self._settle_gone(live, now)
            return False
        if not upload.ending and not has_expired(self._store, upload, now):
            return False
        try:
            self.abort(live.name, live.uid)
        except (FailedPrecondition, NotFound):
            return False  # in use, and a later collection removes it; or just removed by another process
        logger.info("%s has expired", live.name)
        return True

    def _settle_gone(self, live: LiveUpload, now: float) -> None:
        self._store.delete_folder(chunks_of(live.name, live.uid))
        self._live.set_gone(live, now)


def _in_use(name: str, user: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"{name} is being read to make {user}; wait for that import, or cancel it first",
        reason="UPLOAD_IN_USE",
        metadata={"resource": name, "user": user},
    )


def _is_same(newest: UploadRecord, upload: UploadRecord) -> bool:
    """Return whether it is the same upload, not a later one of its id, and not removed."""
    return newest.uid == upload.uid and newest.state is not UploadState.GONE


# --- Live uploads ---
# Markers `live/upload/{d}/{uid}.json` of uploads that may still have bytes, so that a collection need not visit all the
# uploads that ever existed.

FOLDER = "live/upload"


@dataclass(frozen=True)
class LiveUpload(Durable):
    """The marker of one upload.

    Times are in seconds since the epoch; `gone_at` is None until its removal was noticed.
    """

    uid: str
    name: str
    marked_at: float
    gone_at: float | None = None


class LiveUploads:
    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def mark(self, uid: str, name: str) -> None:
        """Write the marker; call it before the upload's log is created."""
        self._put(LiveUpload(uid, name, time.time()))

    def set_gone(self, live: LiveUpload, now: float) -> None:
        self._put(replace(live, gone_at=now))

    def forget(self, uid: str, name: str) -> None:
        self._store.delete(_key(uid, name))

    def markers(self, dataset: str = "") -> list[str]:
        """Return the sorted keys of all markers, or of those of `datasets/{d}`."""
        folder = f"{FOLDER}/{dataset.removeprefix('datasets/')}" if dataset else FOLDER
        return sorted(info.key for info in self._store.list(folder))

    def read(self, key: str) -> LiveUpload | None:
        """Return a marker; None if another collection removed it first."""
        try:
            return LiveUpload(**fields_of(LiveUpload, json.loads(self._store.get(key))))
        except ObjectMissing:
            return None

    def find(self, uid: str, name: str) -> LiveUpload | None:
        return self.read(_key(uid, name))

    def _put(self, live: LiveUpload) -> None:
        self._store.put(_key(live.uid, live.name), json.dumps(as_state(live)).encode())


def _key(uid: str, name: str) -> str:
    return f"{FOLDER}/{name.split('/')[1]}/{uid}.json"


# --- Receiving the chunks of a call ---

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
    """Yield how many bytes from 0 are durable, after each chunk or after several.

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
    """Start the write of each chunk as it arrives, with fewer than `WRITES_IN_FLIGHT` in progress."""
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
        """Wait until the chunk, with all before it, is durable."""
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
        """Hash the chunk while the next ones are written; wait for the chunk before."""
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
        """Handle a chunk that is partly present already, from an earlier call or another client.

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
    """Return the open upload.

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
