"""Takes away what no training job names any more, and finishes deletions that were begun.

What a sweep removes belongs to attempts that the registry has closed out: none of them can commit it any more. So no
clock decides, and any number of sweepers may run beside the attempts at work.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

from shared.checkpoint import CheckpointRegistry
from shared.checkpoint.references import OTHER_FOLDERS
from shared.errors import FailedPrecondition, Unavailable
from shared.jobs import JobRecord, Jobs, JobState
from shared.reference_markers import markers
from shared.storage import ObjectStore
from train_service.jobs.deletion import Deletions
from train_service.records.reporting import TRAIN_KIND

logger = logging.getLogger(__name__)

COLLECTION = "trainingJobs"
ATTEMPT_OF_DATA = re.compile(r"-a(\d+)-[0-9a-f]+$")
ATTEMPT_OF_RAY = re.compile(r"^attempt-(\d+)$")
# Logs of jobs that are over are read again only so often.
SWEEP_INTERVAL_S = 300.0


class Sweeper:
    """`clock` gives seconds since the epoch."""

    def __init__(self, store: ObjectStore, deletions: Deletions, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._jobs = Jobs(store, TRAIN_KIND)
        self._deletions = deletions
        self._clock = clock

    def sweep(self) -> None:
        """One pass. What goes wrong with one job is logged and leaves the others be; raises `Unavailable`."""
        for job_id in self._store.folders(COLLECTION):
            name = f"{COLLECTION}/{job_id}"
            try:
                self.sweep_job(name)
            except Unavailable:
                raise  # which holds for every job
            except FailedPrecondition as error:
                logger.info("%s stays: %s", name, error.message)
            except Exception:
                logger.exception("%s cannot be swept; the others go on", name)

    def sweep_job(self, name: str) -> None:
        job = self._jobs.newest(name)
        if job is None:
            return
        if job.state is JobState.DELETING:
            self._deletions.finish(name)
        elif job.state is JobState.DELETED:
            self._deletions.remove_files(job)  # what a zombie wrote after it was gone
        else:
            self._sweep_ray(job)
            self._sweep_checkpoints(job)

    def _sweep_ray(self, job: JobRecord) -> None:
        """What Ray Train left of attempts that are over; our own registry never reads it."""
        for one in self._store.folders(f"{job.name}/ray"):
            match = ATTEMPT_OF_RAY.match(one)
            if match and (int(match[1]) < job.attempt or job.state.final):
                self._store.delete_folder(f"{job.name}/ray/{one}")

    def _sweep_checkpoints(self, job: JobRecord) -> None:
        registry = CheckpointRegistry(self._store, job.name)
        # In this order: what is listed here was written before the log was read that says what is named.
        folders = [f"{registry.data_folder}/{one}" for one in self._store.folders(registry.data_folder)]
        if job.state.final:
            registry.settle()
        self._drop_dead_markers(job)
        unnamed = self._unnamed(registry, folders)
        if unnamed and job.state.final and any(_attempt(one) == job.attempt for one in unnamed):
            # The last attempt could still commit, were it a zombie; the next one will open the registry like this.
            registry.open_for(job.attempt + 1)
            unnamed = self._unnamed(registry, folders)
        if not unnamed:
            return
        open_for = registry.state().attempt
        used = self._used_folders(job.name)  # after the registry: whoever found one named before has its mark here
        for folder in unnamed:
            if _attempt(folder) < open_for and folder not in used:
                logger.info("%s is of no checkpoint and goes", folder)
                self._store.delete_folder(folder)

    def _unnamed(self, registry: CheckpointRegistry, folders: list[str]) -> list[str]:
        state = registry.read()
        named = {one.folder for one in state.checkpoints} | {one.entry.folder for one in state.retiring}
        return [folder for folder in folders if folder not in named]

    def _used_folders(self, name: str) -> set[str]:
        now = self._clock()
        return {
            marker.folder
            for checkpoint in self._marked(name)
            for marker in markers(self._store, checkpoint)
            if marker.counts(self._store, now)
        }

    def _drop_dead_markers(self, job: JobRecord) -> None:
        now = self._clock()
        for checkpoint in self._marked(job.name):
            for marker in markers(self._store, checkpoint):
                if not marker.counts(self._store, now):
                    self._store.delete(marker.key)

    def _marked(self, name: str) -> list[str]:
        root = f"{name}/checkpoints"
        return [f"{root}/{one}" for one in self._store.folders(root) if one not in OTHER_FOLDERS]


def _attempt(folder: str) -> int:
    """Of a folder with a foreign name no attempt is known: it stays."""
    match = ATTEMPT_OF_DATA.search(folder)
    return int(match[1]) if match else 2**62
