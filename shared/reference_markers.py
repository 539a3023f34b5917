"""Markers of who uses a resource: `{resource}/users/{kind}-{uid}.json`.

A user leaves its marker and then looks whether the resource is still there; whoever takes the resource away says so
first and looks for markers then. Whichever comes second sees the other.
"""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from dataclasses import dataclass

from shared.errors import STORE_OUTAGES
from shared.jobs import Jobs, JobState
from shared.log import ResourceLog
from shared.storage import ObjectExists, ObjectMissing, ObjectStore

# A marker is written before its user is, or before that goes on: for so long it counts without one.
REFERENCE_APPEARS_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class ReferenceMarker:
    """`holder` is a resource's name; `job_folder` is where its log is, None for a user that is no durable job.

    `ends_in` is the state in which such another user uses nothing more; empty where only taking the marker away ends
    its use. `folder` is the part of the resource that is used, where it may be replaced. `marked_at` is in seconds
    since the epoch.
    """

    key: str
    kind: str
    uid: str
    holder: str
    job_folder: str | None
    marked_at: float
    ends_in: str = ""
    folder: str = ""

    def counts(self, store: ObjectStore, now: float) -> bool:
        """Whether the user still lives, or may yet be made. One whose log we do not know is believed."""
        if self.job_folder is not None:
            job = Jobs(store, self.kind).newest(self.job_folder)  # its tombstone, too: it is not still to come
            if job is None or job.uid != self.uid:
                return self._may_appear(now)
            if job.state in (JobState.FAILED, JobState.CANCELLED):
                # One that is resumed marks what it needs before its log says that it goes on.
                return self.marked_at > job.update_time and self._may_appear(now)
            # One that is suspended waits to go on with what it uses.
            return not job.state.final or job.state is JobState.SUSPENDED
        if not self.ends_in:
            return True
        record = ResourceLog(store, f"{self.holder}/log").head()
        if record is None or record.state.get("uid") != self.uid:
            return self._may_appear(now)
        return bool(record.state.get("state") != self.ends_in)

    def has_holder(self, store: ObjectStore) -> bool:
        """Whether the user was made, and uses it still. Never of one whose log we do not know."""
        return bool(self.job_folder is not None or self.ends_in) and self.counts(store, math.inf)

    def _may_appear(self, now: float) -> bool:
        return now - self.marked_at < REFERENCE_APPEARS_TIMEOUT_S


def put_marker(
    store: ObjectStore,
    resource: str,
    kind: str,
    uid: str,
    holder: str,
    *,
    is_job: bool = True,
    ends_in: str = "",
    folder: str = "",
    now: float = 0.0,
) -> None:
    """Writes it, over the same user's earlier one."""
    data = _data(kind, uid, holder, is_job, ends_in, folder, now)
    store.put(_key(resource, kind, uid), data)


def keep_marker(
    store: ObjectStore,
    resource: str,
    kind: str,
    uid: str,
    holder: str,
    *,
    is_job: bool = True,
    ends_in: str = "",
    folder: str = "",
) -> None:
    """Once the user is made: an equal call that was refused just before may have taken the marker away, see `let_go`.
    The user is there all the same where the store cannot be asked."""
    with suppress(ObjectExists, *STORE_OUTAGES):
        store.put_if_absent(_key(resource, kind, uid), _data(kind, uid, holder, is_job, ends_in, folder))


def _data(kind: str, uid: str, holder: str, is_job: bool, ends_in: str, folder: str, now: float = 0.0) -> bytes:
    marker: dict[str, object] = {"user": holder, "kind": kind, "uid": uid, "marked_at": now or time.time()}
    if is_job:
        marker["job_folder"] = holder
    if ends_in:
        marker["ends_in"] = ends_in
    if folder:
        marker["folder"] = folder
    return json.dumps(marker).encode()


def unmark(store: ObjectStore, resource: str, kind: str, uid: str) -> None:
    """It is no error if there is no such marker."""
    store.delete(_key(resource, kind, uid))


def let_go(store: ObjectStore, resource: str, kind: str, uid: str) -> None:
    """As `unmark`, for a call that was refused: where an equal call, whose user has the same uid, has made that, it
    keeps the marker. In an outage the marker stays until a sweep."""
    key = _key(resource, kind, uid)
    with suppress(ObjectMissing, *STORE_OUTAGES):
        data = store.get(key)
        marker = _marker(key, data)
        if not marker.has_holder(store):
            store.delete(key)
            # Whoever makes its user marks again once that is there: one of us sees the other.
            if marker.has_holder(store):
                with suppress(ObjectExists):
                    store.put_if_absent(key, data)


def markers(store: ObjectStore, resource: str) -> list[ReferenceMarker]:
    """All that there are, in the order of their keys."""
    found = []
    for key in sorted(info.key for info in store.list(f"{resource}/users")):
        try:
            found.append(_marker(key, store.get(key)))
        except ObjectMissing:  # let go just now
            continue
    return found


def live_references(store: ObjectStore, resource: str, now: float) -> list[str]:
    """The names of those whose markers count, sorted."""
    return sorted({marker.holder for marker in markers(store, resource) if marker.counts(store, now)})


def _marker(key: str, data: bytes) -> ReferenceMarker:
    marker = json.loads(data)
    kind, _, uid = key.rsplit("/", 1)[-1].removesuffix(".json").rpartition("-")
    return ReferenceMarker(
        key,
        kind,
        uid,
        marker["user"],
        marker.get("job_folder"),
        marker.get("marked_at", 0.0),
        marker.get("ends_in", ""),
        marker.get("folder", ""),
    )


def _key(resource: str, kind: str, uid: str) -> str:
    return f"{resource}/users/{kind}-{uid}.json"
