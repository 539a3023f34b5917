"""Who uses a version: markers at `datasets/{d}/versions/{v}/users`, left before the version is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shared.dataset_version.version import DatasetVersion, load_version
from shared.errors import MillraceError
from shared.requests import OUTCOME_UNKNOWN
from shared.storage import ObjectStore
from shared.user_markers import UserMarker, keep_marker, let_go, live_users, markers, put_marker, unmark

__all__ = ["UserMarker", "live_users", "mark_used", "markers", "unmark", "using"]


def mark_used(
    store: ObjectStore, version_name: str, kind: str, uid: str, user: str, *, is_job: bool = True, now: float = 0.0
) -> DatasetVersion:
    """Keeps the version, which it returns, from being deleted. To be called before the user is made.

    `user` names a durable job of this `kind` and `uid`, whose end frees the version, or with `is_job=False` any other
    resource, which must `unmark`. Raises what `load_version` raises where the version cannot be used, and then leaves
    no marker; `Unavailable` leaves open whether there is one.
    """
    put_marker(store, version_name, kind, uid, user, is_job=is_job, now=now)
    try:
        return load_version(store, version_name)
    except MillraceError as error:
        if not isinstance(error, OUTCOME_UNKNOWN):
            let_go(store, version_name, kind, uid)
        raise


@contextmanager
def using(store: ObjectStore, version_name: str, kind: str, uid: str, user: str) -> Iterator[DatasetVersion]:
    """Marks the version, which it gives, while the body makes the job `user`; the marker stays unless that is refused.
    A refusal takes nothing from an equal call that makes the job of the same `uid`.

    After an outage the job may have been made all the same: the marker then stays, too, and a sweep settles it.
    """
    version = mark_used(store, version_name, kind, uid, user)
    try:
        yield version
    except MillraceError as error:
        if not isinstance(error, OUTCOME_UNKNOWN):
            let_go(store, version_name, kind, uid)
        raise
    keep_marker(store, version_name, kind, uid, user)
