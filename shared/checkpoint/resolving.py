"""Which checkpoint a name means: one of a job by its own name, the `final` one, or of a job the best."""

from __future__ import annotations

from shared import names
from shared.checkpoint.format import not_a_model
from shared.checkpoint.pages import RegistryView
from shared.checkpoint.registry import CheckpointEntry, CheckpointRegistry
from shared.errors import FailedPrecondition, NotFound, not_found
from shared.jobs.record import JobState
from shared.log import ResourceLog
from shared.storage import ObjectStore

NAME_PATTERN = "trainingJobs/{j}/checkpoints/{c}"
# `trainingJobs/{j}/checkpoints/final` means the one at the run's last step.
FINAL = "final"


def resolve(store: ObjectStore, field_path: str, name: str) -> CheckpointEntry:
    """The checkpoint of a model that `name` means: itself, the `final` one, or the best one of a job.

    Raises `InvalidArgument` naming `field_path`, `NotFound`, and `FailedPrecondition` for a job without checkpoints,
    one that is being deleted, or a checkpoint that a user's own training function reported.
    """
    entry = resolve_any(store, field_path, name)
    if entry.is_of_program:
        raise not_a_model(entry.name, [(field_path, "is a checkpoint of a user's own training function")])
    return entry


def resolve_any(store: ObjectStore, field_path: str, name: str) -> CheckpointEntry:
    """As `resolve`, also of a checkpoint that a user's own training function reported."""
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
    """The one of that name, the best where it is empty; `…/checkpoints/final` is the newest of the run's last step."""
    if not name:
        return view.best()
    return view.find(name) or (view.final() if name.endswith(f"/{FINAL}") else None)


def _missing(name: str, field_path: str) -> NotFound:
    error = not_found(name)
    error.fields.append((field_path, "does not exist"))
    return error
