"""The uploads in the store: each is a resource log below `datasets/{d}/uploads/{u}/log`, and its chunks beside it."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, replace

from data_service.datasets import SERVICE, Datasets
from data_service.uploads import receiving
from data_service.uploads.chunks import chain_of, stored_chain
from data_service.uploads.digests import KeptDigests, RunningDigest, catch_up
from data_service.uploads.parts import Part, PresignedPut, parts_of
from data_service.uploads.receiving import Chunk
from data_service.uploads.record import UploadRecord, UploadState, find_upload, get_upload, log_of
from data_service.uploads.users import live_users
from shared import names
from shared.errors import DataLoss, FailedPrecondition, NotFound, already_exists, invalid_field, not_found
from shared.log.resource_log import Record, State
from shared.requests import claimed
from shared.storage import ObjectStore
from shared.storage.presigning import Presigner

logger = logging.getLogger(__name__)

OPEN_FOR_S = 24 * 3600.0
COMMITTED_FOR_S = 7 * 24 * 3600.0
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Upload:
    """An upload as it is at present. `expire_time` is in seconds since the epoch."""

    record: UploadRecord
    acknowledged_size: int
    expire_time: float


class Uploads:
    """`presigner` is None where the store is not S3. The methods that are no coroutines block."""

    def __init__(self, store: ObjectStore, datasets: Datasets, presigner: Presigner | None) -> None:
        self._store = store
        self._datasets = datasets
        self._presigner = presigner
        self._digests = KeptDigests()

    def start(
        self, parent: str, upload_id: str, *, request_id: str, body_sha256: str, presigned: PresignedPut | None = None
    ) -> tuple[Upload, list[Part]]:
        """The parts are empty unless `presigned` is given; asked for again with the same id, they have new URLs.

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
        self._datasets.get(parent, "parent")
        name = f"{parent}/uploads/{upload_id or f'u-{uuid.uuid4().hex}'}"
        with claimed(self._store, SERVICE, request_id, body_sha256, name) as claim:
            record = self._create(claim.name, request_id, presigned is not None)
        assert self._presigner is not None or not ranges
        key = chain_of(record.chunks_prefix, ()).key
        parts = [
            Part(one.offset, one.size_bytes, self._presigner.put_url(key(one.offset)) if self._presigner else "")
            for one in ranges
        ]
        return self._as_it_is(record), parts

    def get(self, name: str) -> Upload:
        """Raises `InvalidArgument` and `NotFound`."""
        return self._as_it_is(get_upload(self._store, name))

    def receive(self, chunks: AsyncIterator[Chunk]) -> AsyncGenerator[int, None]:
        """See `receiving.receive`."""
        return receiving.receive(self._store, self._digests, chunks)

    def commit(self, name: str, size_bytes: int, sha256: str) -> Upload:
        """Fixes the bytes; again with the same size and digest it changes nothing.

        Raises `InvalidArgument`, `NotFound`, `FailedPrecondition` (not all bytes are there, or it was committed with
        another size or digest) and `DataLoss` (the bytes do not have that digest).
        """
        if size_bytes < 0:
            raise invalid_field("size_bytes", size_bytes, "use 0 or more")
        sha256 = sha256.lower()
        if not SHA256.fullmatch(sha256):
            raise invalid_field("sha256", sha256, "use the SHA-256 of all bytes as 64 hexadecimal digits")
        upload = get_upload(self._store, name)
        if upload.state is UploadState.OPEN:
            self._check_bytes(upload, size_bytes, sha256)

        def decide(newest: UploadRecord) -> UploadRecord:
            if newest.uid != upload.uid or newest.ending or newest.state is UploadState.GONE:
                raise not_found(name, "it was aborted meanwhile; start another upload")
            if newest.state is UploadState.COMMITTED:
                return newest
            return newest.committed(size_bytes, sha256, time.time())

        committed = self._transition(name, decide)
        if (committed.size_bytes, committed.sha256) != (size_bytes, sha256):
            raise FailedPrecondition(
                f"{name} was committed with {committed.size_bytes} bytes of SHA-256 {committed.sha256}; import that, "
                "or start another upload",
                reason="COMMITTED_OTHERWISE",
                metadata={"resource": name},
            )
        self._digests.forget(upload.uid)
        return self._as_it_is(committed)

    def abort(self, name: str) -> None:
        """Takes the upload away, with its bytes. Raises `InvalidArgument`, `NotFound`, and `FailedPrecondition` while
        an import reads it."""
        upload = get_upload(self._store, name)

        def set_ending(ending: bool) -> Callable[[UploadRecord], UploadRecord]:
            return lambda newest: replace(newest, ending=ending) if _is_same(newest, upload) else newest

        # Said before looking for users, who look here after they have left their marker: see `mark_used`.
        self._transition(name, set_ending(True))
        users = live_users(self._store, name)
        if users:
            self._transition(name, set_ending(False))
            raise FailedPrecondition(
                f"{name} is being read to make {users[0]}; wait for that import, or cancel it first",
                reason="UPLOAD_IN_USE",
                metadata={"resource": name, "user": users[0]},
            )
        self._transition(name, lambda newest: newest.gone(time.time()) if _is_same(newest, upload) else newest)
        self._digests.forget(upload.uid)
        self._store.delete_folder(upload.chunks_prefix)

    def abort_all(self, dataset: str) -> None:
        """Of `datasets/{d}`. Raises `FailedPrecondition` as soon as it meets one that an import reads."""
        for upload_id in self._store.folders(f"{dataset}/uploads"):
            name = f"{dataset}/uploads/{upload_id}"
            if find_upload(self._store, name):
                self.abort(name)

    def sweep(self, now: float) -> list[str]:
        """Takes away what has expired by `now` and no import reads, and what is left of those that are gone already.

        Returns the names of those that it took away.
        """
        expired = []
        for dataset in self._store.folders("datasets"):
            for upload_id in self._store.folders(f"datasets/{dataset}/uploads"):
                name = f"datasets/{dataset}/uploads/{upload_id}"
                if self._sweep_one(name, now):
                    expired.append(name)
        return expired

    def _sweep_one(self, name: str, now: float) -> bool:
        # In this order: an upload whose chunks are listed has its record already.
        uids = self._store.folders(f"{name}/chunks")
        upload = find_upload(self._store, name)
        for uid in uids:
            # What was written late, or put by URL, for one that is gone.
            if upload is None or uid != upload.uid:
                self._store.delete_folder(f"{name}/chunks/{uid}")
        if upload is None or (self._as_it_is(upload).expire_time > now and not upload.ending):
            return False
        try:
            self.abort(name)
        except (FailedPrecondition, NotFound):
            return False  # in use, and a later sweep takes it; or another has taken it just now
        logger.info("%s has expired", name)
        return True

    def _create(self, name: str, request_id: str, presigned: bool) -> UploadRecord:
        record = UploadRecord(
            name=name,
            uid=uuid.uuid4().hex,
            create_time=time.time(),
            update_time=time.time(),
            request_id=request_id,
            presigned=presigned,
        )
        log = log_of(self._store, name)
        before = log.head()
        is_free = before is None or UploadRecord.from_state(before.state).state is UploadState.GONE
        if is_free and log.append(before, record.as_state()):
            return record
        winner = find_upload(self._store, name)
        # A repeated call, or one of two at the same time, is answered with what the first made.
        if winner and request_id and winner.request_id == request_id:
            return winner
        raise already_exists(name)

    def _check_bytes(self, upload: UploadRecord, size_bytes: int, sha256: str) -> None:
        chain = stored_chain(self._store, upload.chunks_prefix)
        if chain.end != size_bytes:
            raise FailedPrecondition(
                f"{upload.name} has {chain.end} bytes, not {size_bytes}; "
                + ("send the rest first" if chain.end < size_bytes else "commit the size that was sent, or abort it"),
                reason="OTHER_SIZE",
                metadata={"resource": upload.name, "acknowledged_size": str(chain.end)},
            )
        # Parts that were put by URL can be put again, even after the commit: whoever reads the upload holds it against
        # the digest once more.
        digest = RunningDigest.empty() if upload.presigned else self._digests.get(upload.uid)
        catch_up(self._store, chain, digest, size_bytes)
        if digest.sha256.hexdigest() != sha256:
            raise DataLoss(
                f"the bytes of {upload.name} have the SHA-256 {digest.sha256.hexdigest()}, not {sha256}; abort the "
                "upload and send it again",
                reason="OTHER_SHA256",
                metadata={"resource": upload.name},
            )

    def _transition(self, name: str, decide: Callable[[UploadRecord], UploadRecord]) -> UploadRecord:
        """Appends what `decide` makes of the newest state; nothing where it returns that state itself."""

        def step(record: Record | None) -> State | None:
            assert record is not None
            before = UploadRecord.from_state(record.state)
            after = decide(before)
            return None if after is before else after.as_state()

        record = log_of(self._store, name).update(step)
        assert record is not None
        return UploadRecord.from_state(record.state)

    def _as_it_is(self, record: UploadRecord) -> Upload:
        if record.state is UploadState.COMMITTED:
            return Upload(record, record.size_bytes, record.update_time + COMMITTED_FOR_S)
        infos = list(self._store.list(record.chunks_prefix))
        chain = chain_of(record.chunks_prefix, ((int(one.key.rsplit("/", 1)[-1]), one.size_bytes) for one in infos))
        newest_byte = max((one.modified for one in infos), default=record.create_time)
        return Upload(record, chain.end, max(record.create_time, newest_byte) + OPEN_FOR_S)


def _is_same(newest: UploadRecord, upload: UploadRecord) -> bool:
    """Not a later one of the same id, nor taken away by somebody else."""
    return newest.uid == upload.uid and newest.state is not UploadState.GONE
