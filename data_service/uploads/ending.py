"""The end of an upload: its log says that it is ending, no import reads it, its log says GONE, its bytes go.

Whoever begins to read an upload leaves a marker and then looks whether it is ending; here it is the other way round, so
one of both sees the other. GONE is the point of no return, before any byte is deleted: it is only said for the very
ending during which no reader was found. Meanwhile clients are told to come again.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from data_service.uploads.expiry import has_expired
from data_service.uploads.live import LiveUpload, LiveUploads
from data_service.uploads.record import (
    UploadRecord,
    UploadState,
    chunks_of,
    find_upload,
    get_upload,
    log_of,
    transition,
)
from data_service.uploads.users import live_users
from shared.errors import STORE_OUTAGES, FailedPrecondition, NotFound, not_found
from shared.storage import ObjectStore
from shared.storage.presigning import VALID_FOR

logger = logging.getLogger(__name__)

# A pass looks at so many uploads; the next one goes on behind them.
UPLOADS_A_PASS = 1000
# A marker is written before its upload: for so long it may be without one.
UPLOAD_IS_COMING_S = 3600.0
# For so long after an upload is gone its URLs may put parts, and calls in flight write chunks.
LATE_WRITES_S = VALID_FOR.total_seconds() + 600.0


class Endings:
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
        users = live_users(self._store, name) if _is_same(begun, upload) else []

        def settle(newest: UploadRecord) -> UploadRecord:
            # Others may have settled this ending, and have begun another, for which the look at users came too early.
            if not _is_same(newest, upload) or newest.ending != begun.ending:
                return newest
            return replace(newest, ending="") if users else newest.gone(time.time())

        if _is_same(transition(self._store, name, settle), upload):
            raise _in_use(name, users[0] if users else "an import")
        self._store.delete_folder(upload.chunks_prefix)
        if live := self._live.find(upload.uid, name):
            self._live.set_gone(live, time.time())
        return upload

    def check_unused(self, dataset: str, dataset_uid: str) -> None:
        """Of the dataset `datasets/{d}` with that uid. Raises `FailedPrecondition` naming one that an import reads."""
        for upload in self._of(dataset, dataset_uid):
            if users := live_users(self._store, upload.name):
                raise _in_use(upload.name, users[0])

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
