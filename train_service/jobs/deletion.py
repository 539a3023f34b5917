"""Deletion of training jobs, and what protects inputs.

The module has the deletion of a job, the garbage collector, and references to a job's inputs.

A deletion has these steps: the job's log records DELETING, references to its checkpoints are looked up, all its objects
are deleted, and the log records DELETED.

A user of a checkpoint first writes a reference marker and then checks that the job exists. A deletion does the reverse,
so at least one sees the other. If there is no reference, the log records that (`deleted_from` is cleared), and
the deletion is final. Each step can be repeated, so the next process finishes what another left unfinished.

The garbage collector deletes objects that no training job names any more, and finishes deletions that were started.
These objects belong to attempts that the registry has closed out, so no attempt can commit them any more. So the
collector needs no clock, and any number of collectors may run while attempts are at work.

A job's inputs are protected: the dataset version and the initial checkpoint while the job is at work, the bundle of a
user's own code until the job is deleted.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from shared.checkpoint import CheckpointRegistry
from shared.checkpoint import references as checkpoint_references
from shared.checkpoint.references import OTHER_FOLDERS, references_of_job
from shared.code_bundle_registry import release_bundle, using_bundle
from shared.dataset_version import DatasetVersion
from shared.dataset_version.version import unmark, using
from shared.errors import STORE_OUTAGES, FailedPrecondition, Unavailable, not_found
from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.index import IndexedJob, JobIndex
from shared.jobs.registry import condemned, remove_objects, undone, while_deleting
from shared.jobs.transitions import check_etag, confirm_delete, request_delete
from shared.reference_markers import markers
from shared.storage import ObjectStore
from train_service.checkpoints.fine_tuning import FIELD
from train_service.domain.spec import TrainingSpec
from train_service.records.event_log import TRAIN_KIND, gather_ended

# --- Deletion of a job ---

logger = logging.getLogger(__name__)


class Deletions:
    """Deletion of training jobs. `clock` returns seconds since the epoch."""

    def __init__(self, store: ObjectStore, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._jobs = Jobs(store, TRAIN_KIND)
        self._clock = clock

    def begin(self, name: str, etag: str = "", uid: str = "") -> JobRecord:
        """Start a deletion.

        The job moves to DELETING for good. `finish` then deletes its objects.

        With `uid`, only the job with that uid is deleted, not a later one of its name.

        Raises `NotFound`, and `Conflict` if `etag` is given and not the present one. Raises `FailedPrecondition` while
        an attempt may be at work or a checkpoint is in use; the job then keeps its state.
        """
        self._jobs.get(name, name)

        def decide(newest: JobRecord) -> JobRecord:
            if uid and newest.uid != uid:
                raise not_found(name, "it was deleted, and made anew")
            check_deletable(newest, etag)
            return request_delete(newest, newest.update_time)

        return self._condemn(self._jobs.transition(name, decide))

    def finish(self, name: str) -> None:
        """Finish a deletion that was started.

        If the job is not DELETING, the function does nothing.

        Raises `FailedPrecondition` if a checkpoint is in use; the job then returns to its former state.
        """
        job = self._jobs.find(name)
        if job is None or job.state is not JobState.DELETING:
            return
        job = self._condemn(job)
        # A stale process of the last attempt can no longer commit, not even into a new job of this name.
        CheckpointRegistry(self._store, name).clear(job.attempt + 1)
        release_inputs(self._store, TRAIN_KIND, job.uid, job.spec.get("training", {}))
        if self.remove_files(job):
            while_deleting(self._jobs, job, lambda newest: confirm_delete(newest, self._clock()))
            logger.info("%s is deleted", name)

    def finish_soon(self, name: str) -> None:
        """Run `finish` in a thread. If it fails, the garbage collector finishes the deletion later."""
        in_background(self.finish, name)

    def remove_files(self, job: JobRecord) -> bool:
        """Remove all objects of a deleted job.

        The logs that record its deletion stay.

        Objects of a new job with the same name stay. Return whether the log still has the same state of this job.
        """
        # List the keys before the log is read, so that they exclude the objects of a new job.
        logs = (f"{job.name}/log/", f"{job.name}/checkpoints/log/")
        keys = [info.key for info in self._store.list(job.name) if not info.key.startswith(logs)]
        return remove_objects(self._store, self._jobs, job, keys)

    def _condemn(self, job: JobRecord) -> JobRecord:
        if job.deleted_from is None:
            return job
        references = references_of_job(self._store, job.name, self._clock())
        job = while_deleting(self._jobs, job, undone if references else condemned)
        if job.state not in (JobState.DELETING, JobState.DELETED):
            raise in_use(job, references)
        return job


def in_background(finish: Callable[[str], None], name: str) -> None:
    """Call `finish` with `name` in a thread. If it fails, a later call finishes the deletion."""

    def run() -> None:
        try:
            finish(name)
        except (FailedPrecondition, *STORE_OUTAGES) as error:
            logger.warning("%s is not deleted yet: %s", name, error.message)
        except Exception:
            logger.exception("%s is not deleted yet", name)

    threading.Thread(target=run, name="deleting", daemon=True).start()


def check_deletable(job: JobRecord, etag: str) -> None:
    if job.state is JobState.DELETED:
        raise not_found(job.name)
    check_etag(job, etag)
    if not job.state.final:
        raise FailedPrecondition(
            f"{job.name} is {job.state}; cancel or suspend it first, or wait for its end",
            reason="JOB_AT_WORK",
            metadata={"resource": job.name},
        )


def in_use(job: JobRecord, references: dict[str, list[str]]) -> FailedPrecondition:
    everybody = sorted({holder for some in references.values() for holder in some})
    shown = "; ".join(f"{checkpoint} by {', '.join(some)}" for checkpoint, some in sorted(references.items()))
    return FailedPrecondition(
        f"{job.name} is in use: {shown or 'by somebody'}; delete it once that has ended",
        reason="JOB_IN_USE",
        metadata={"resource": job.name, "users": ",".join(everybody)},
    )


# --- Garbage collector ---

COLLECTION = "trainingJobs"
ATTEMPT_OF_DATA = re.compile(r"-a(\d+)-[0-9a-f]+$")
ATTEMPT_OF_RAY = re.compile(r"^attempt-(\d+)$")
# How often the logs of finished jobs are read again.
COLLECT_INTERVAL_S = 300.0
# A job that ended longer ago is swept in turns: no process of its attempts writes any more.
SETTLED_AFTER_S = 3600.0
# How many jobs of all that ever were a collection reads in turns.
JOBS_IN_TURNS = 200
# So many settled jobs are marked at once.
JOBS_AT_ONCE = 256


class GarbageCollector:
    """Collector of orphaned objects and unfinished deletions. `clock` returns seconds since the epoch."""

    def __init__(
        self,
        store: ObjectStore,
        deletions: Deletions,
        clock: Callable[[], float] = time.time,
        index: JobIndex | None = None,
    ) -> None:
        """Without an `index`, and until it has all jobs, each collection reads every job."""
        self._store = store
        self._jobs = Jobs(store, TRAIN_KIND)
        self._deletions = deletions
        self._index = index
        self._clock = clock

    def collect(self) -> None:
        """Collect the garbage of all jobs that are not settled, and of some others in turns.

        A failure with one job is logged and does not affect the others. Raises `Unavailable`.
        """
        unsettled = self._index.unsettled() if self._index else None
        if self._index is None or unsettled is None:
            for job_id in self._store.folders(COLLECTION):
                self._collect_alone(f"{COLLECTION}/{job_id}")
            return
        settled: list[IndexedJob] = []
        swept: set[str] = set()
        for job in unsettled:
            swept.add(job.record.name)
            if self._collect_alone(job.record.name) and self._is_settled(job.record):
                settled.append(job)
            if len(settled) == JOBS_AT_ONCE:
                self._index.settle(settled)
                settled = []
        self._index.settle(settled)
        for name in self._index.check(JOBS_IN_TURNS):
            if name not in swept:
                self._collect_alone(name)

    def _collect_alone(self, name: str) -> bool:
        """Collect the garbage of one job. Return whether that succeeded."""
        try:
            self.collect_job(name)
        except Unavailable:
            raise  # it holds for every job
        except FailedPrecondition as error:
            logger.info("%s stays: %s", name, error.message)
        except Exception:
            logger.exception("%s cannot be swept; the others go on", name)
        else:
            return True
        return False

    def _is_settled(self, job: JobRecord) -> bool:
        is_over = job.state.final and job.state is not JobState.DELETING
        return is_over and self._clock() - job.update_time > SETTLED_AFTER_S

    def collect_job(self, name: str) -> None:
        job = self._jobs.newest(name)
        if job is None:
            return
        if job.state is JobState.DELETING:
            self._deletions.finish(name)
        elif job.state is JobState.DELETED:
            self._deletions.remove_files(job)  # a stale process may have written them after the deletion
        else:
            self._collect_ray(job)
            self._collect_checkpoints(job)
            if job.state.final:
                # Stops where the job is resumed or deleted meanwhile.
                gather_ended(self._store, name, partial(remove_objects, self._store, self._jobs, job))

    def _collect_ray(self, job: JobRecord) -> None:
        """Delete Ray Train's files of finished attempts. Millrace's registry never reads them."""
        for folder in self._store.folders(f"{job.name}/ray"):
            match = ATTEMPT_OF_RAY.match(folder)
            if match and (int(match[1]) < job.attempt or job.state.final):
                self._store.delete_folder(f"{job.name}/ray/{folder}")

    def _collect_checkpoints(self, job: JobRecord) -> None:
        registry = CheckpointRegistry(self._store, job.name)
        # Keep this order: every folder listed here was written before the log is read that says which folders are
        # named.
        folders = [f"{registry.data_folder}/{one}" for one in self._store.folders(registry.data_folder)]
        if job.state.final:
            registry.settle()
        self._drop_dead_markers(job)
        unnamed = self._unnamed(registry, folders)
        if unnamed and job.state.final and any(_attempt(one) == job.attempt for one in unnamed):
            # A stale process of the last attempt could still commit. Open the registry for the next attempt, as that
            # attempt will.
            registry.open_for(job.attempt + 1)
            unnamed = self._unnamed(registry, folders)
        if not unnamed:
            return
        open_for = registry.state().attempt
        used = self._used_folders(job.name)  # read last: a reader that saw a named folder has marked it by now
        for folder in unnamed:
            if _attempt(folder) < open_for and folder not in used:
                logger.info("%s is of no checkpoint and goes", folder)
                self._store.delete_folder(folder)

    def _unnamed(self, registry: CheckpointRegistry, folders: list[str]) -> list[str]:
        state = registry.read()
        named = {checkpoint.folder for checkpoint in state.checkpoints} | {one.entry.folder for one in state.retiring}
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
            found = markers(self._store, checkpoint)
            self._store.delete_all([marker.key for marker in found if not marker.counts(self._store, now)])

    def _marked(self, name: str) -> list[str]:
        root = f"{name}/checkpoints"
        return [f"{root}/{folder}" for folder in self._store.folders(root) if folder not in OTHER_FOLDERS]


def _attempt(folder: str) -> int:
    """Return the attempt that wrote a folder. A folder with an unknown name counts as new and stays."""
    match = ATTEMPT_OF_DATA.search(folder)
    return int(match[1]) if match else 2**62


# --- Inputs of a job ---


@contextlib.contextmanager
def using_inputs(store: ObjectStore, kind: str, job: JobRecord, spec: TrainingSpec) -> Iterator[DatasetVersion | None]:
    """Mark a job's inputs as in use.

    The inputs are those of `spec`, and the body creates `job`, a job of this kind.

    Yields the dataset version, or None for a program that names none. The marks stay unless the body fails.
    """
    with contextlib.ExitStack() as stack:
        version = None
        if spec.dataset_version or spec.program is None:
            version = stack.enter_context(using(store, spec.dataset_version, kind, job.uid, job.name))
        if spec.program is not None:
            stack.enter_context(using_bundle(store, spec.program.code_bundle, kind, job.uid, job.name))
        if spec.model.is_own:
            bundle, field = spec.model.code_bundle, "spec.model.code_bundle"
            stack.enter_context(using_bundle(store, bundle, kind, job.uid, job.name, field=field))
        if spec.initial_checkpoint:
            mark = checkpoint_references.using(store, FIELD, spec.initial_checkpoint, kind, job.uid, job.name)
            stack.enter_context(mark)
        yield version


def release_inputs(store: ObjectStore, kind: str, uid: str, training: Mapping[str, Any]) -> None:
    """Remove a deleted job's marks.

    The marks have no effect any more, but would be read for ever. `training` is the plain form of the specification.
    """
    if version := training.get("dataset_version"):
        unmark(store, version, kind, uid)
    if program := training.get("program"):
        release_bundle(store, program["code_bundle"], kind, uid)
    if bundle := training.get("model", {}).get("code_bundle"):
        release_bundle(store, bundle, kind, uid)
    if initial := training.get("initial_checkpoint"):
        checkpoint_references.release(store, initial, kind, uid)
