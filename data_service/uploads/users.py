"""Markers of who reads an upload: `datasets/{d}/uploads/{u}/users/{kind}-{uid}.json`."""

from __future__ import annotations

import json
import time

from data_service.uploads.record import find_upload, may_end
from shared.errors import not_found
from shared.jobs import Jobs
from shared.storage import ObjectMissing, ObjectStore

# A marker is written before its job is: for so long it counts without one.
JOB_IS_COMING_S = 60.0


def mark_used(store: ObjectStore, name: str, kind: str, uid: str, folder: str) -> None:
    """Keeps the upload as long as the job `uid`, of this kind and in this folder, is not final.

    To be called before the job is made. Raises `NotFound` where the upload is gone, and `Unavailable` while it
    is being aborted, which may yet be refused.
    """
    marker = {"folder": folder, "marked_at": time.time()}
    store.put(_key(name, kind, uid), json.dumps(marker).encode())
    # Whoever takes the upload away says so first and looks for markers then: one of us sees the other.
    upload = find_upload(store, name)
    if upload is None or upload.ending:
        unmark(store, name, kind, uid)
        if upload:
            raise may_end(name)
        raise not_found(name, "it was aborted, or it has expired; send it again")


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


def _key(name: str, kind: str, uid: str) -> str:
    return f"{name}/users/{kind}-{uid}.json"
