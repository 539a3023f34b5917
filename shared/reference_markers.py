"""Markers of the users of a resource: `{resource}/users/{kind}-{uid}.json`.

A user first writes its marker and then checks that the resource still exists. A deletion is first recorded and then
checks for markers. Whichever comes second sees the other.
"""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from dataclasses import dataclass

from shared.errors import STORE_OUTAGES
from shared.jobs import Jobs, JobState
from shared.resource_log import ResourceLog
from shared.storage import ObjectExists, ObjectMissing, ObjectStore

# A marker is written before its user is created or resumed. It counts for this time without a live user.
REFERENCE_APPEARS_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class ReferenceMarker:
    """A marker of one user of a resource.

    `holder` is the user's resource name; `job_folder` is where its log is, None for a user that is no durable job.
    `ends_in` is the state in which such another user no longer uses anything; empty if its use ends only with the
    marker. `folder` is the used part of a resource that may be replaced. `marked_at` is in seconds since the epoch.
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
        """Return whether the user still lives or may yet be created.

        A user whose log is unknown counts as live.
        """
        if self.job_folder is not None:
            job = Jobs(store, self.kind).newest(
                self.job_folder
            )  # A tombstone counts as well: that job will not be created any more.
            if job is None or job.uid != self.uid:
                return self._may_appear(now)
            if job.state in (JobState.FAILED, JobState.CANCELLED):
                # A job that is resumed marks what it needs before its log says so.
                return self.marked_at > job.update_time and self._may_appear(now)
            # A suspended job will continue with what it uses.
            return not job.state.final or job.state is JobState.SUSPENDED
        if not self.ends_in:
            return True
        record = ResourceLog(store, f"{self.holder}/log").head()
        if record is None or record.state.get("uid") != self.uid:
            return self._may_appear(now)
        return bool(record.state.get("state") != self.ends_in)

    def has_holder(self, store: ObjectStore) -> bool:
        """Return whether the user exists and still uses the resource. False for a user whose log is unknown."""
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
    """Write a marker, replacing the same user's earlier one."""
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
    """Write the marker again once the user exists.

    An equal call that was refused just before may have removed the marker; see `let_go`. If the store does not answer,
    the user exists all the same.
    """
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
    """Remove a marker. A missing marker is no error."""
    store.delete(_key(resource, kind, uid))


def let_go(store: ObjectStore, resource: str, kind: str, uid: str) -> None:
    """Remove the marker of a call that was refused.

    The marker stays if an equal call, whose user has the same uid, has created that user. In an outage it stays until a
    sweep.
    """
    key = _key(resource, kind, uid)
    with suppress(ObjectMissing, *STORE_OUTAGES):
        data = store.get(key)
        marker = _marker(key, data)
        if not marker.has_holder(store):
            store.delete(key)
            # The creator of the user writes the marker again afterwards, so one of the two calls sees the other.
            if marker.has_holder(store):
                with suppress(ObjectExists):
                    store.put_if_absent(key, data)


def markers(store: ObjectStore, resource: str) -> list[ReferenceMarker]:
    """Return all markers in the order of their keys."""
    found = []
    for key in sorted(info.key for info in store.list(f"{resource}/users")):
        try:
            found.append(_marker(key, store.get(key)))
        except ObjectMissing:  # removed just now
            continue
    return found


def live_references(store: ObjectStore, resource: str, now: float) -> list[str]:
    """Return the sorted names of the users whose markers count."""
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
