"""The users of a checkpoint: markers at `trainingJobs/{j}/checkpoints/{c}/users`, each naming the used folder.

A user writes its marker and then checks that the registry still names the checkpoint. Retention and the deletion of a
job first record that it is no longer available and then look for markers. Whichever comes second sees the other.

A name refers to one of a job's checkpoints by its own name, to the `final` one, or, if it names the job, to the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared import names
from shared.checkpoint.format import not_a_model
from shared.checkpoint.registry import PAGES, CheckpointEntry, CheckpointRegistry, RegistryView
from shared.errors import FailedPrecondition, MillraceError, NotFound, not_found
from shared.jobs.transitions import JobState
from shared.reference_markers import ReferenceMarker, keep_marker, let_go, live_references, markers, put_marker, unmark
from shared.resource_log import OUTCOME_UNKNOWN, ResourceLog
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


# --- Markers of use ---

# Folders beside the checkpoints themselves.
OTHER_FOLDERS = ("log", "data", PAGES)

# A job's best may change while it is being marked; more changes than this have another cause.
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
    """Mark the checkpoint that `name` refers to, and yield it, while the body creates `holder`.

    The marker stays unless the body is refused. A refusal does not affect an equal call that creates the user of the
    same `uid`.

    `holder` names a durable job of this `kind` and `uid`, whose end frees the checkpoint; or, with `ends_in`, a
    resource whose log ends in that state. With `of_programs` it may be a program's checkpoint, too. Raises what
    `resolve` raises. After an outage the user may exist all the same: the marker then stays, too, and stops counting if
    its user does not appear.
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
    """Mark a checkpoint for a user that has it already. Return whether the registry still names it."""
    put_marker(store, name, kind, uid, holder, is_job=not ends_in, ends_in=ends_in, folder=folder)
    job_name = name.partition("/checkpoints/")[0]
    entry = CheckpointRegistry(store, job_name).find(name)
    return entry is not None and entry.folder == folder


def release(store: ObjectStore, checkpoint_name: str, kind: str, uid: str) -> None:
    """Remove a user's marker. A missing marker is no error."""
    unmark(store, checkpoint_name, kind, uid)


def references_of_job(store: ObjectStore, job_name: str, now: float) -> dict[str, list[str]]:
    """Return the names of the users by checkpoint, for every checkpoint in use."""
    root = f"{job_name}/checkpoints"
    found = {}
    for folder in store.folders(root):
        if folder not in OTHER_FOLDERS and (references := live_references(store, f"{root}/{folder}", now)):
            found[f"{root}/{folder}"] = references
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


# --- Resolution of names ---

NAME_PATTERN = "trainingJobs/{j}/checkpoints/{c}"
# `trainingJobs/{j}/checkpoints/final` refers to the checkpoint of the run's last step.
FINAL = "final"


def resolve(store: ObjectStore, field_path: str, name: str) -> CheckpointEntry:
    """Return the model's checkpoint that `name` refers to: itself, the `final` one, or a job's best.

    Raises `InvalidArgument` that names `field_path`, `NotFound`, and `FailedPrecondition` for a job without
    checkpoints, a job that is being deleted, or a checkpoint that a user's own training function reported.
    """
    entry = resolve_any(store, field_path, name)
    if entry.is_of_program:
        raise not_a_model(entry.name, [(field_path, "is a checkpoint of a user's own training function")])
    return entry


def resolve_any(store: ObjectStore, field_path: str, name: str) -> CheckpointEntry:
    """Resolve as `resolve` does, but accept a checkpoint of a user's own training function."""
    job_name, checkpoint_id = name, ""
    if name.count("/") == 3:
        job_id, checkpoint_id = names.parse(field_path, name, NAME_PATTERN)
        job_name = f"trainingJobs/{job_id}"
    else:
        names.parse(field_path, name, "trainingJobs/{j}")
    job = ResourceLog(store, f"{job_name}/log").head()
    registry = CheckpointRegistry(store, job_name)
    is_empty, chosen = registry.poll(lambda view: (view.is_empty, _meant(view, name if checkpoint_id else "")))
    if (job is None and is_empty) or (job is not None and job.state.get("state") == JobState.DELETED):
        raise _missing(job_name, field_path)
    if job is not None and job.state.get("state") == JobState.DELETING:
        raise FailedPrecondition(
            f"{job_name} is being deleted; choose another",
            reason="JOB_DELETING",
            metadata={"resource": job_name},
            fields=[(field_path, "is being deleted")],
        )
    if not checkpoint_id:
        if chosen is None:
            raise FailedPrecondition(
                f"{job_name} has no checkpoint yet; wait for its first",
                reason="NO_CHECKPOINT",
                metadata={"resource": job_name},
            )
        return chosen
    if chosen is None:
        raise _missing(name, field_path)
    return chosen


def _meant(view: RegistryView, name: str) -> CheckpointEntry | None:
    """Return the entry of that name, or the best if it is empty.

    `…/checkpoints/final` is the newest entry of the run's last step.
    """
    if not name:
        return view.best()
    return view.find(name) or (view.final() if name.endswith(f"/{FINAL}") else None)


def _missing(name: str, field_path: str) -> NotFound:
    error = not_found(name)
    error.fields.append((field_path, "does not exist"))
    return error
