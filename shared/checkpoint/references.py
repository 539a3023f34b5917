"""Who uses a checkpoint: markers at `trainingJobs/{j}/checkpoints/{c}/users`, each naming the folder that is used.

A user leaves its marker and then looks whether the registry still names that checkpoint; retention and the deletion of
a job say first that it is not to be had any more and look for markers then. Whichever comes second sees the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared.checkpoint.pages import PAGES
from shared.checkpoint.registry import CheckpointEntry, CheckpointRegistry
from shared.checkpoint.resolving import resolve, resolve_any
from shared.errors import FailedPrecondition, MillraceError
from shared.reference_markers import ReferenceMarker, keep_marker, let_go, live_references, markers, put_marker, unmark
from shared.requests import OUTCOME_UNKNOWN
from shared.storage import ObjectStore

__all__ = [
    "ReferenceMarker",
    "keep",
    "live_references",
    "markers",
    "put_marker",
    "references_of_job",
    "release",
    "using",
]

# Beside the checkpoints themselves.
OTHER_FOLDERS = ("log", "data", PAGES)

# A job's best may change while it is being marked; after so many times something else is wrong.
TRIES = 20


@contextmanager
def using(
    store: ObjectStore,
    field_path: str,
    name: str,
    kind: str,
    uid: str,
    holder: str,
    *,
    ends_in: str = "",
    of_programs: bool = False,
) -> Iterator[CheckpointEntry]:
    """Marks the checkpoint that `name` means, and gives it, while the body makes `holder`; the marker stays unless the
    body is refused. A refusal takes nothing from an equal call that makes the user of the same `uid`.

    `holder` names a durable job of this `kind` and `uid`, whose end frees the checkpoint; or, with `ends_in`, a
    resource whose log ends in that state. With `of_programs` it may be a program's, too. Raises what `resolve` raises.
    After an outage the user may have been made all the same: the marker then stays, too, and counts no longer once its
    user does not appear.
    """
    look_up = resolve_any if of_programs else resolve
    entry = _marked(store, lambda: look_up(store, field_path, name), field_path, name, kind, uid, holder, ends_in)
    try:
        yield entry
    except MillraceError as error:
        if not isinstance(error, OUTCOME_UNKNOWN):
            let_go(store, entry.name, kind, uid)
        raise
    keep_marker(store, entry.name, kind, uid, holder, is_job=not ends_in, ends_in=ends_in, folder=entry.folder)


def keep(store: ObjectStore, name: str, folder: str, kind: str, uid: str, holder: str, *, ends_in: str = "") -> bool:
    """Marks a checkpoint for a user that has it already. Returns whether it is still named."""
    put_marker(store, name, kind, uid, holder, is_job=not ends_in, ends_in=ends_in, folder=folder)
    job_name = name.partition("/checkpoints/")[0]
    entry = CheckpointRegistry(store, job_name).find(name)
    return entry is not None and entry.folder == folder


def release(store: ObjectStore, checkpoint_name: str, kind: str, uid: str) -> None:
    """It is no error if it was not marked."""
    unmark(store, checkpoint_name, kind, uid)


def references_of_job(store: ObjectStore, job_name: str, now: float) -> dict[str, list[str]]:
    """Of every checkpoint that somebody uses, by its name, the names of its users."""
    root = f"{job_name}/checkpoints"
    found = {}
    for one in store.folders(root):
        if one not in OTHER_FOLDERS and (references := live_references(store, f"{root}/{one}", now)):
            found[f"{root}/{one}"] = references
    return found


def _marked(
    store: ObjectStore,
    look_up: Callable[[], CheckpointEntry],
    field_path: str,
    name: str,
    kind: str,
    uid: str,
    holder: str,
    ends_in: str,
) -> CheckpointEntry:
    entry = look_up()
    for _ in range(TRIES):
        put_marker(store, entry.name, kind, uid, holder, is_job=not ends_in, ends_in=ends_in, folder=entry.folder)
        try:
            again = look_up()
        except MillraceError as error:
            if not isinstance(error, OUTCOME_UNKNOWN):
                let_go(store, entry.name, kind, uid)
            raise
        if again.folder == entry.folder:
            return entry
        # It has been replaced, or another is the best by now.
        if again.name != entry.name:
            let_go(store, entry.name, kind, uid)
        entry = again
    let_go(store, entry.name, kind, uid)
    raise FailedPrecondition(
        f"{name} means another checkpoint each time; name one of its checkpoints", fields=[(field_path, "name one")]
    )
