"""Markers of who uses a version: `datasets/{d}/versions/{v}/users/{kind}-{uid}.json`.

A user leaves its marker and then looks whether the version is ACTIVE; whoever deletes the version says so first and
looks for markers then. Whichever comes second sees the other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from shared.dataset_version.version import load_version
from shared.errors import MillraceError, Unavailable
from shared.jobs import Jobs
from shared.requests import OUTCOME_UNKNOWN
from shared.storage import ObjectMissing, ObjectStore

# A marker is written before its job is: for so long it counts without one.
JOB_APPEARS_WITHIN_S = 600.0


@dataclass(frozen=True)
class UserMarker:
    """`user` is a resource's name; `job_folder` is where its log is, None for a user that is no durable job.
    `marked_at` is in seconds since the epoch."""

    key: str
    kind: str
    uid: str
    user: str
    job_folder: str | None
    marked_at: float

    def counts(self, store: ObjectStore, now: float) -> bool:
        """Whether the user still lives: its job is not final, or may yet be made. One that is no job is believed."""
        if self.job_folder is None:
            return True
        job = Jobs(store, self.kind).newest(self.job_folder)  # its tombstone, too: it is not still to come
        if job is None or job.uid != self.uid:
            return now - self.marked_at < JOB_APPEARS_WITHIN_S
        return not job.state.final


def mark_used(
    store: ObjectStore, version_name: str, kind: str, uid: str, user: str, *, is_job: bool = True, now: float = 0.0
) -> None:
    """Keeps the version from being deleted. To be called before the user is made.

    `user` names a durable job of this `kind` and `uid`, whose end frees the version, or with `is_job=False` any other
    resource, which must `unmark`. Raises what `load_version` raises where the version cannot be used, and then leaves
    no marker; `Unavailable` leaves open whether there is one.
    """
    marker = {"user": user, "kind": kind, "uid": uid, "marked_at": now or time.time()}
    if is_job:
        marker["job_folder"] = user
    store.put(_key(version_name, kind, uid), json.dumps(marker).encode())
    try:
        load_version(store, version_name)
    except MillraceError as error:
        if not isinstance(error, OUTCOME_UNKNOWN):
            _let_go(store, version_name, kind, uid)
        raise


def unmark(store: ObjectStore, version_name: str, kind: str, uid: str) -> None:
    """It is no error if there is no such marker."""
    store.delete(_key(version_name, kind, uid))


@contextmanager
def using(store: ObjectStore, version_name: str, kind: str, uid: str, user: str) -> Iterator[None]:
    """Marks the version while the body makes the job `user`; the marker stays unless the body is refused.

    After an outage the job may have been made all the same: the marker then stays, too, and a sweep settles it.
    """
    mark_used(store, version_name, kind, uid, user)
    try:
        yield
    except MillraceError as error:
        if not isinstance(error, OUTCOME_UNKNOWN):
            _let_go(store, version_name, kind, uid)
        raise


def markers(store: ObjectStore, version_name: str) -> list[UserMarker]:
    """All that there are, in the order of their keys."""
    found = []
    for key in sorted(info.key for info in store.list(f"{version_name}/users")):
        try:
            marker = json.loads(store.get(key))
        except ObjectMissing:  # let go just now
            continue
        kind, _, uid = key.rsplit("/", 1)[-1].removesuffix(".json").rpartition("-")
        found.append(UserMarker(key, kind, uid, marker["user"], marker.get("job_folder"), marker.get("marked_at", 0.0)))
    return found


def live_users(store: ObjectStore, version_name: str, now: float) -> list[str]:
    """The names of those whose markers count, sorted."""
    return sorted({marker.user for marker in markers(store, version_name) if marker.counts(store, now)})


def _let_go(store: ObjectStore, version_name: str, kind: str, uid: str) -> None:
    with suppress(Unavailable):  # then the marker stays until a sweep
        unmark(store, version_name, kind, uid)


def _key(version_name: str, kind: str, uid: str) -> str:
    return f"{version_name}/users/{kind}-{uid}.json"
