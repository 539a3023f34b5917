"""Which checkpoints of a job count: a resource log of its own, so that a stale attempt cannot add to it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from shared import names
from shared.errors import FailedPrecondition, not_found
from shared.log import Record, ResourceLog
from shared.storage import ObjectStore

# Higher is better.
BEST_METRIC = "validation_accuracy"


@dataclass(frozen=True, kw_only=True)
class CheckpointEntry:
    """`name` is `trainingJobs/{j}/checkpoints/{c}`; `create_time` in seconds since the epoch."""

    name: str
    folder: str
    manifest_sha256: str
    step: int
    epoch: int
    attempt: int
    size_bytes: int
    create_time: float
    metrics: dict[str, float] = field(default_factory=dict)


class CheckpointRegistry:
    """The committed checkpoints of the job `trainingJobs/{j}`."""

    def __init__(self, store: ObjectStore, job_name: str) -> None:
        self._log = ResourceLog(store, f"{job_name}/checkpoints/log")
        self.data_folder = f"{job_name}/checkpoints/data"

    def entries(self) -> list[CheckpointEntry]:
        """Oldest first."""
        return _entries(self._log.head())

    def fence(self, attempt: int) -> list[CheckpointEntry]:
        """Opens the registry for `attempt` and closes it to earlier ones. Returns the entries."""
        return _entries(self._log.fence(attempt, {"checkpoints": []}))

    def commit(self, entry: CheckpointEntry) -> None:
        """Makes it count. Raises `StaleAttempt` when a later attempt has opened the registry.

        A checkpoint of the same name is replaced: it is of the same position, written by an earlier attempt.
        """

        def add(head: Record | None) -> dict[str, Any]:
            kept = [one for one in _entries(head) if one.name != entry.name]
            return {"checkpoints": [asdict(one) for one in (*kept, entry)]}

        self._log.update(add, attempt=entry.attempt)


def latest(entries: list[CheckpointEntry]) -> CheckpointEntry | None:
    """The one furthest on."""
    return max(entries, key=lambda entry: entry.step, default=None)


def best(entries: list[CheckpointEntry]) -> CheckpointEntry | None:
    """The highest validation accuracy, of equals the later; without any, the one furthest on."""
    # A run that diverged may have measured NaN.
    measured = [entry for entry in entries if math.isfinite(entry.metrics.get(BEST_METRIC, math.nan))]
    return max(measured, key=lambda entry: (entry.metrics[BEST_METRIC], entry.step), default=latest(entries))


def resolve(store: ObjectStore, field_path: str, name: str) -> CheckpointEntry:
    """The checkpoint that `name` means: itself, or the best one of a job.

    Raises `InvalidArgument` naming `field_path`, `NotFound`, and `FailedPrecondition` for a job without checkpoints.
    """
    job_name = name
    if name.count("/") == 3:
        job_id, _ = names.parse(field_path, name, "trainingJobs/{j}/checkpoints/{c}")
        job_name = f"trainingJobs/{job_id}"
    else:
        names.parse(field_path, name, "trainingJobs/{j}")
    entries = CheckpointRegistry(store, job_name).entries()
    if not entries and ResourceLog(store, f"{job_name}/log").head() is None:
        raise not_found(job_name)
    if name == job_name:
        chosen = best(entries)
        if chosen is None:
            raise FailedPrecondition(
                f"{job_name} has no checkpoint yet; wait for its first",
                reason="NO_CHECKPOINT",
                metadata={"resource": job_name},
            )
        return chosen
    for entry in entries:
        if entry.name == name:
            return entry
    raise not_found(name)


def _entries(record: Record | None) -> list[CheckpointEntry]:
    return [CheckpointEntry(**one) for one in record.state["checkpoints"]] if record else []
