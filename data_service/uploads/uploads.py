"""The uploads in the store: each is a resource log below `datasets/{d}/uploads/{u}/log`, and its chunks beside it."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from data_service.datasets import SERVICE, Datasets
from data_service.domain.dataset import Dataset
from data_service.uploads import receiving
from data_service.uploads.chunks import KeptDigests, chain_of, digest_of
from data_service.uploads.receiving import Chunk
from data_service.uploads.record import (
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
    DataLoss,
    FailedPrecondition,
    NotFound,
    already_exists,
    invalid_field,
    not_found,
)
from shared.requests import claimed
from shared.storage import ObjectMissing, ObjectStore
from shared.storage.presigning import VALID_FOR, Presigner

logger = logging.getLogger(__name__)


# --- Uploads ---
# The uploads in the store: each is a resource log below `datasets/{d}/uploads/{u}/log`, and its chunks beside it.

SHA256 = re.compile(r"[0-9a-f]{64}")


class Uploads:
    """`presigner` is None where the store is not S3. The methods that are no coroutines block."""

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
        """The parts are empty unless `presigned` is given; asked for again with the same id, they have new URLs, or are
        empty once the upload is committed.

        Raises `InvalidArgument`, `NotFound` (the dataset), `AlreadyExists`, and `FailedPrecondition` for presigned
        parts where the store is not S3.
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
            ranges = []  # whatever were put now would only damage it
        assert self._presigner is not None or not ranges
        key = chain_of(record.chunks_prefix, ()).key
        parts = [
            UploadPart(one.offset, one.size_bytes, self._presigner.put_url(key(one.offset)) if self._presigner else "")
            for one in ranges
        ]
        return as_it_is(self._store, record), parts

    def get(self, name: str) -> Upload:
        """Raises `InvalidArgument` and `NotFound`."""
        upload = as_it_is(self._store, get_upload(self._store, name))
        if upload.record.state is UploadState.COMMITTED:
            return upload
        return replace(upload, hashed_size=self._digests.hashed_size(upload.record.uid))

    def receive(self, chunks: AsyncIterator[Chunk]) -> AsyncGenerator[int, None]:
        """See `receiving.receive`."""
        return receiving.receive(self._store, self._digests, chunks)

    def commit(self, name: str, size_bytes: int, sha256: str, given_up: Callable[[], bool] = lambda: False) -> Upload:
        """Fixes the bytes; again with the same size and digest it changes nothing. After a failure, another call goes
        on reading where this one was; once `given_up`, it stops at the next block.

        Raises `InvalidArgument`, `NotFound`, `FailedPrecondition` (not all bytes are there, or it was committed with
        another size or digest), `DataLoss` (the bytes do not have that digest), `Unavailable` (it is being aborted,
        which may yet be refused) and `Cancelled`.
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
        """Takes the upload away, with its bytes. Raises `InvalidArgument`, `NotFound`, and `FailedPrecondition` while
        an import reads it."""
        self._digests.forget(self._finisher.abort(name).uid)

    def check_unused(self, dataset: str, dataset_uid: str) -> None:
        """See `UploadFinisher.check_unused`."""
        self._finisher.check_unused(dataset, dataset_uid)

    def abort_all(self, dataset: str, dataset_uid: str) -> None:
        """See `UploadFinisher.abort_all`."""
        self._finisher.abort_all(dataset, dataset_uid)

    def sweep(self, now: float) -> list[str]:
        """See `UploadFinisher.sweep`."""
        return self._finisher.sweep(now)

    def _keep_unless_dataset_is_gone(self, dataset: Dataset, record: UploadRecord) -> None:
        """A deletion of the dataset is recorded before it looks for uploads; a start does it in reverse.
        Raises `NotFound`."""
        if record.dataset_uid != dataset.uid:
            return  # a repeated call: the first one has looked
        try:
            self._datasets.check_still_there(dataset.name, dataset.uid)
        except NotFound:
            with suppress(FailedPrecondition, NotFound):  # read already, so that it expires; or taken away just now
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
        # A repeated call, or one of two at the same time, is answered with what the first made.
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
            # Parts that were put by URL can be put again, even after the commit: what was read before counts for the
            # very same objects alone, and whoever reads the upload holds it against the digest once more.
            places = str([(offset, one.size_bytes, one.modified) for offset, one in parts])
            objects = hashlib.sha256(places.encode()).hexdigest()
        digest = digest_of(self._store, chain, self._digests, upload.uid, objects, given_up)
        if digest.sha256.hexdigest() != sha256:
            # The store's times may be coarse: should a part have changed all the same, the next commit reads it.
            self._digests.forget(upload.uid)
            raise DataLoss(
                f"the bytes of {upload.name} have the SHA-256 {digest.sha256.hexdigest()}, not {sha256}; abort the "
                "upload and send it again",
                reason="DIGEST_MISMATCH",
                metadata={"resource": upload.name},
            )


# --- Parts ---
# How an upload that clients put by URL is cut into parts.

DEFAULT_PART_BYTES = 64 * 1024 * 1024
MIN_PART_BYTES = 5 * 1024 * 1024
MAX_PART_BYTES = 5 * 1024 * 1024 * 1024
# With their URLs they are one message of less than 4 MiB, also where host, bucket and key are as long as can be.
MAX_PARTS = 2_000
_MEBIBYTE = 1024 * 1024


@dataclass(frozen=True)
class PresignedPut:
    """What a client asks for; a part size of 0 means 64 MiB, or as many more as it takes for `MAX_PARTS`."""

    size_bytes: int
    part_size_bytes: int = 0


@dataclass(frozen=True)
class UploadPart:
    """`size_bytes` from `offset` on, to be put to `url`."""

    offset: int
    size_bytes: int
    url: str = ""


def parts_of(wanted: PresignedPut) -> list[UploadPart]:
    """All of one size but the last, and without their URLs. Raises `InvalidArgument`."""
    if wanted.size_bytes < 1:
        raise invalid_field("presigned.size_bytes", wanted.size_bytes, "name the size of all parts together, 1 or more")
    if wanted.size_bytes > MAX_PARTS * MAX_PART_BYTES and not wanted.part_size_bytes:
        raise invalid_field("presigned.size_bytes", wanted.size_bytes, f"use at most {MAX_PARTS * MAX_PART_BYTES}")
    part_size = wanted.part_size_bytes or max(DEFAULT_PART_BYTES, _min_part_bytes(wanted.size_bytes))
    if not MIN_PART_BYTES <= part_size <= MAX_PART_BYTES:
        raise invalid_field(
            "presigned.part_size_bytes", part_size, f"use 0, or {MIN_PART_BYTES} to {MAX_PART_BYTES} bytes"
        )
    if wanted.size_bytes > MAX_PARTS * part_size:
        raise invalid_field(
            "presigned.part_size_bytes", part_size, f"{wanted.size_bytes} bytes must make at most {MAX_PARTS} parts"
        )
    return [
        UploadPart(offset, min(part_size, wanted.size_bytes - offset))
        for offset in range(0, wanted.size_bytes, part_size)
    ]


def _min_part_bytes(size_bytes: int) -> int:
    """In whole MiB, of a part of at most `MAX_PARTS`."""
    return -(-size_bytes // (MAX_PARTS * _MEBIBYTE)) * _MEBIBYTE


# --- Ending ---
# The end of an upload: its log says that it is ending, no import reads it, its log says GONE, its bytes go.
#
# Whoever begins to read an upload leaves a marker and then looks whether it is ending; here it is the other way round,
# so one of both sees the other. GONE is the point of no return, before any byte is deleted: it is only said for the
# very ending during which no reader was found. Meanwhile clients are told to come again.


# A pass looks at so many uploads; the next one goes on behind them.
UPLOADS_A_PASS = 1000
# A marker is written before its upload: for so long it may be without one.
UPLOAD_IS_COMING_S = 3600.0
# For so long after an upload is gone its URLs may put parts, and calls in flight write chunks.
LATE_WRITES_S = VALID_FOR.total_seconds() + 600.0


class UploadFinisher:
    """All methods block. `sweep` is not for several threads."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._live = LiveUploads(store)
        # The marker that the last pass ended with, where it did not come to the end.
        self._after = ""

    def abort(self, name: str, uid: str = "") -> UploadRecord:
        """Takes the upload away, with its bytes; with `uid` given only that one, and no later one of its name.

        Raises `InvalidArgument`, `NotFound`, and `FailedPrecondition` while an import reads it.
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
            # Others may have settled this ending, and have begun another, for which the look at users came too early.
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
        """Of the dataset `datasets/{d}` with that uid. Raises `FailedPrecondition` naming one that an import reads."""
        for upload in self._of(dataset, dataset_uid):
            if references := live_references(self._store, upload.name):
                raise _in_use(upload.name, references[0])

    def abort_all(self, dataset: str, dataset_uid: str) -> None:
        """Of the dataset `datasets/{d}` with that uid, and of no later one of its name. Those that imports read
        stay."""
        for upload in self._of(dataset, dataset_uid):
            with suppress(FailedPrecondition, NotFound):  # in use; or another has taken it just now
                self.abort(upload.name, upload.uid)

    def _of(self, dataset: str, dataset_uid: str) -> Iterator[UploadRecord]:
        """The dataset's uploads that are not gone."""
        for key in self._live.markers(dataset):
            live = self._live.read(key)
            if live is None or live.gone_at is not None:
                continue
            upload = find_upload(self._store, live.name)
            if upload and upload.uid == live.uid and upload.dataset_uid in ("", dataset_uid):
                yield upload

    def sweep(self, now: float) -> list[str]:
        """Takes away what has expired by `now` and no import reads, and what was written late for those that are gone.

        Returns the names of those that it took away.
        """
        waiting = [key for key in self._live.markers() if key > self._after]
        expired = []
        for key in waiting[:UPLOADS_A_PASS]:
            self._after = key
            try:
                live = self._live.read(key)
                if live and self._sweep_one(live, now):
                    expired.append(live.name)
            except STORE_OUTAGES:
                raise  # which holds for all
            except Exception:
                logger.exception("the upload of %s cannot be swept; the others go on", key)
        if len(waiting) <= UPLOADS_A_PASS:
            self._after = ""
        return expired

    def _sweep_one(self, live: LiveUpload, now: float) -> bool:
        if live.gone_at is not None:
            if now - live.gone_at > LATE_WRITES_S:
                self._store.delete_folder(chunks_of(live.name, live.uid))
                self._live.forget(live.uid, live.name)
            return False
        record = log_of(self._store, live.name).head()
        upload = UploadRecord.from_state(record.state) if record else None
        if upload is None or upload.uid != live.uid:
            # Not made yet, or never; or gone, and there is another of its name.
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
            return False  # in use, and a later sweep takes it; or another has taken it just now
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
    """Not a later one of the same id, nor taken away by somebody else."""
    return newest.uid == upload.uid and newest.state is not UploadState.GONE


# --- Live uploads ---
# Markers `live/upload/{d}/{uid}.json` of the uploads that may still have bytes, so that a sweep need not look at all
# the uploads that there ever were.

FOLDER = "live/upload"


@dataclass(frozen=True)
class LiveUpload(Durable):
    """Times are in seconds since the epoch; `gone_at` is None as long as nobody saw that it is gone."""

    uid: str
    name: str
    marked_at: float
    gone_at: float | None = None


class LiveUploads:
    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def mark(self, uid: str, name: str) -> None:
        """To be called before the upload's log says that there is one."""
        self._put(LiveUpload(uid, name, time.time()))

    def set_gone(self, live: LiveUpload, now: float) -> None:
        self._put(replace(live, gone_at=now))

    def forget(self, uid: str, name: str) -> None:
        self._store.delete(_key(uid, name))

    def markers(self, dataset: str = "") -> list[str]:
        """The keys of all, or of those of `datasets/{d}`, sorted."""
        folder = f"{FOLDER}/{dataset.removeprefix('datasets/')}" if dataset else FOLDER
        return sorted(info.key for info in self._store.list(folder))

    def read(self, key: str) -> LiveUpload | None:
        """None where another sweep was faster."""
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
