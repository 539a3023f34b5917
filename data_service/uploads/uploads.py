"""The uploads in the store: each is a resource log below `datasets/{d}/uploads/{u}/log`, and its chunks beside it."""

from __future__ import annotations

import hashlib
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace

from data_service.datasets import SERVICE, Datasets
from data_service.domain.dataset import Dataset
from data_service.uploads import receiving
from data_service.uploads.chunks import chain_of
from data_service.uploads.digests import KeptDigests, digest_of
from data_service.uploads.ending import Endings
from data_service.uploads.expiry import Upload, as_it_is
from data_service.uploads.live import LiveUploads
from data_service.uploads.parts import Part, PresignedPut, parts_of
from data_service.uploads.receiving import Chunk
from data_service.uploads.record import UploadRecord, UploadState, find_upload, get_upload, log_of, may_end, transition
from shared import names
from shared.errors import DataLoss, FailedPrecondition, NotFound, already_exists, invalid_field, not_found
from shared.requests import claimed
from shared.storage import ObjectStore
from shared.storage.presigning import Presigner

SHA256 = re.compile(r"[0-9a-f]{64}")


class Uploads:
    """`presigner` is None where the store is not S3. The methods that are no coroutines block."""

    def __init__(self, store: ObjectStore, datasets: Datasets, presigner: Presigner | None) -> None:
        self._store = store
        self._datasets = datasets
        self._presigner = presigner
        self._digests = KeptDigests()
        self._live = LiveUploads(store)
        self._endings = Endings(store)

    def start(
        self, parent: str, upload_id: str, *, request_id: str, body_sha256: str, presigned: PresignedPut | None = None
    ) -> tuple[Upload, list[Part]]:
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
            Part(one.offset, one.size_bytes, self._presigner.put_url(key(one.offset)) if self._presigner else "")
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
                reason="COMMITTED_OTHERWISE",
                metadata={"resource": name},
            )
        self._digests.forget(upload.uid)
        return as_it_is(self._store, committed)

    def abort(self, name: str) -> None:
        """Takes the upload away, with its bytes. Raises `InvalidArgument`, `NotFound`, and `FailedPrecondition` while
        an import reads it."""
        self._digests.forget(self._endings.abort(name).uid)

    def check_unused(self, dataset: str, dataset_uid: str) -> None:
        """See `Endings.check_unused`."""
        self._endings.check_unused(dataset, dataset_uid)

    def abort_all(self, dataset: str, dataset_uid: str) -> None:
        """See `Endings.abort_all`."""
        self._endings.abort_all(dataset, dataset_uid)

    def sweep(self, now: float) -> list[str]:
        """See `Endings.sweep`."""
        return self._endings.sweep(now)

    def _keep_unless_dataset_is_gone(self, dataset: Dataset, record: UploadRecord) -> None:
        """A deletion of the dataset is recorded before it looks for uploads; a start does it in reverse.
        Raises `NotFound`."""
        if record.dataset_uid != dataset.uid:
            return  # a repeated call: the first one has looked
        try:
            self._datasets.check_still_there(dataset.name, dataset.uid)
        except NotFound:
            with suppress(FailedPrecondition, NotFound):  # read already, so that it expires; or taken away just now
                self._endings.abort(record.name, record.uid)
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
                reason="OTHER_SIZE",
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
                reason="OTHER_SHA256",
                metadata={"resource": upload.name},
            )
