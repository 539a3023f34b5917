"""Markers of who reads an upload: `datasets/{d}/uploads/{u}/users/{kind}-{uid}.json`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from data_service.uploads.record import find_upload, may_end
from shared.errors import STORE_OUTAGES, MillraceError, not_found
from shared.jobs import Jobs, JobState
from shared.requests import OUTCOME_UNKNOWN
from shared.storage import ObjectExists, ObjectMissing, ObjectStore

# A marker is written before its job is: for so long it counts without one.
JOB_IS_COMING_S = 60.0


def mark_used(store: ObjectStore, name: str, kind: str, uid: str, folder: str) -> None:
    """Keeps the upload as long as the job `uid`, of this kind and in this folder, is not final.

    To be called before the job is made. Raises `NotFound` where the upload is gone, and `Unavailable` while it
    is being aborted, which may yet be refused.
    """
    store.put(_key(name, kind, uid), _marker(folder))
    # Whoever takes the upload away says so first and looks for markers then: one of us sees the other.
    upload = find_upload(store, name)
    if upload is None or upload.ending:
        _let_go(store, name, kind, uid, folder)
        if upload:
            raise may_end(name)
        raise not_found(name, "it was aborted, or it has expired; send it again")


@contextmanager
def using(store: ObjectStore, name: str, kind: str, uid: str, folder: str) -> Iterator[None]:
    """As `mark_used`, while the body makes the job; the marker stays unless that is refused."""
    mark_used(store, name, kind, uid, folder)
    try:
        yield
    except MillraceError as error:
        # After an outage the job may have been made all the same; a sweep settles that.
        if not isinstance(error, OUTCOME_UNKNOWN):
            with suppress(*STORE_OUTAGES):
                _let_go(store, name, kind, uid, folder)
        raise
    # An equal call that was refused just before may have taken it away, see `_let_go`.
    with suppress(ObjectExists, *STORE_OUTAGES):
        store.put_if_absent(_key(name, kind, uid), _marker(folder))


def unmark(store: ObjectStore, name: str, kind: str, uid: str) -> None:
    """It is no error if there is no such marker."""
    store.delete(_key(name, kind, uid))


def live_users(store: ObjectStore, name: str) -> list[str]:
    """The names of what is being made from the upload at present. Markers that have had their time are removed."""
    users = []
    for info in store.list(f"{name}/users"):
        kind, _, uid = info.key.rsplit("/", 1)[-1].removesuffix(".json").rpartition("-")
        try:
            marker = json.loads(store.get(info.key))
        except ObjectMissing:  # unmarked just now
            continue
        # The tombstone of one that was deleted, too: it is not still to come.
        job = Jobs(store, kind).newest_of(marker["folder"], uid)
        if job is not None:
            is_live = not job.state.final
        else:
            is_live = time.time() - marker["marked_at"] < JOB_IS_COMING_S
        if is_live:
            users.append(marker["folder"])
        else:
            store.delete(info.key)
    return sorted(users)


def _let_go(store: ObjectStore, name: str, kind: str, uid: str, folder: str) -> None:
    """As `unmark`, for a call that was refused: where an equal call has made the job of that uid, it keeps the marker.
    Whoever makes it marks again once it is there: one of us sees the other."""
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
