"""The end of versions and datasets: one version's deletion, and the sweep that takes away what nothing names any
more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from data_service.datasets import SERVICE, Datasets
from data_service.domain.dataset import Committed, outlived
from data_service.operation_pointers import operation_id, operations_before, withdraw_if_without_job, withdraw_operation
from shared import names
from shared.dataset_version.version import IMPORT_KIND, NAME_PATTERN, committed_version, live_references, markers
from shared.errors import DataLoss, FailedPrecondition, NotFound, ResourceExhausted, Unavailable, not_found
from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.registry import condemned, remove_objects, undone, while_deleting
from shared.jobs.transitions import check_etag, confirm_delete, request_delete
from shared.storage import ObjectStore

logger = logging.getLogger(__name__)


# --- Lifecycle ---
# The end of a version: its log says DELETING, nobody may use it, its files go, its log says DELETED.
#
# Whoever uses a version leaves a marker and then looks whether it is ACTIVE; here it is the other way round, so one of
# both sees the other. Once no user was found the log says so (`deleted_from` is gone), and there is no way back: of
# several that delete at the same time none can give a version back whose files another is removing. Each step can be
# done again, so what a process leaves half-way the next one finishes.


class Deletions:
    """`clock` gives seconds since the epoch."""

    def __init__(self, store: ObjectStore, jobs: Jobs, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._jobs = jobs
        self._clock = clock

    def delete(self, name: str, etag: str = "", uid: str = "") -> None:
        """Takes the version away, with its files; with `uid` given only that one, and no other of its name.

        Raises `InvalidArgument`, `NotFound`, `Conflict` when `etag` is given and not the present one, and
        `FailedPrecondition` while it is being made or somebody uses it.
        """
        names.parse("name", name, NAME_PATTERN)
        self._jobs.get(name, name)

        def decide(newest: JobRecord) -> JobRecord:
            if uid and newest.uid != uid:
                raise not_found(name)
            _check_deletable(newest, etag)
            # The time of a version's last transition is that of its commit, to which a refusal goes back.
            return request_delete(newest, newest.update_time)

        self._finish(self._jobs.transition(name, decide))

    def finish(self, name: str) -> None:
        """Takes on a deletion that was begun. Nothing to do for a version that is not DELETING.

        Raises `FailedPrecondition` where somebody uses it: then it is what it was before.
        """
        job = self._jobs.find(name)
        if job is not None and job.state is JobState.DELETING:
            self._finish(job)

    def _finish(self, job: JobRecord) -> None:
        if job.deleted_from is not None:
            references = live_references(self._store, job.name, self._clock())
            job = while_deleting(self._jobs, job, undone if references else condemned)
            if _is_undone(job):
                raise _in_use(job, references)
        self._remove_files(job)
        withdraw_operation(self._store, job)
        while_deleting(self._jobs, job, lambda newest: confirm_delete(newest, self._clock()))

    def _remove_files(self, job: JobRecord) -> None:
        """Only what was there before the log was read: later there may be a new version's files."""
        keys = [info.key for info in self._store.list(job.name) if not info.key.startswith(f"{job.name}/log/")]
        remove_objects(self._store, self._jobs, job, keys)


def _check_deletable(job: JobRecord, etag: str) -> None:
    if job.state is JobState.DELETED:
        raise not_found(job.name)
    check_etag(job, etag)
    if not job.state.final:
        operation = f"operations/{operation_id(job)}"
        raise FailedPrecondition(
            f"{job.name} is being made; cancel {operation} first, or wait for it",
            reason="VERSION_IN_CREATION",
            metadata={"resource": job.name, "operation": operation},
        )


def _is_undone(job: JobRecord) -> bool:
    """Whether this, or another that looked at the same time, found a user."""
    return job.state in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


def _in_use(job: JobRecord, references: list[str]) -> FailedPrecondition:
    shown = ", ".join(references) or "somebody"
    return FailedPrecondition(
        f"{job.name} is in use by {shown}; delete it once that has ended",
        reason="VERSION_IN_USE",
        metadata={"resource": job.name, "users": ",".join(references)},
    )


# --- Sweeper ---
# Takes away what nothing names any more, a bounded piece of it at a time.
#
# Everything that it removes was listed before the log was read that says it may go, and is named once for all
# (attempts' folders have a nonce, markers a uid): what somebody makes meanwhile is never met. So any number of sweepers
# may run.


# After a week nobody repeats a call, hoping for its first answer.
REQUEST_CLAIM_S = 7 * 24 * 3600.0
# What a writer that was killed left goes after so long: no object, and no job's last act, takes as long to write.
LEFT_FOR_S = 3600.0
# Those that have gone since are among them, so now and then all are forgotten.
TIDY_REMEMBERED = OPERATIONS_REMEMBERED = 100_000
# A pass ends after the dataset with which it has looked at so many versions; the next one goes on behind it.
VERSIONS_A_PASS = 1000
CLAIMS_A_PASS = 10_000
OPERATIONS_A_PASS = 1000


class Sweeper:
    """`sweep_uploads` is called with the time, `delete_uploads` with the name and the uid of a deleted dataset.
    `clock` gives seconds since the epoch."""

    def __init__(
        self,
        store: ObjectStore,
        datasets: Datasets,
        deletions: Deletions,
        *,
        sweep_uploads: Callable[[float], object],
        delete_uploads: Callable[[str, str], object],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._datasets = datasets
        self._deletions = deletions
        self._jobs = Jobs(store, IMPORT_KIND)
        self._sweep_uploads = sweep_uploads
        self._delete_uploads = delete_uploads
        self._clock = clock
        # The dataset that the last pass ended with, where it did not come to the end.
        self._after = ""
        # Likewise the operation.
        self._after_operation = ""
        # Operations whose job was made: it takes them with it when it is deleted.
        self._with_job: set[str] = set()
        # Committed folders in which there is nothing but what their manifests name, nor will be: looked through once.
        self._tidy: set[str] = set()

    def sweep(self) -> None:
        """One pass. What goes wrong with one resource is logged and leaves the others be; raises `Unavailable`."""
        self._run_isolated("request claims", self._sweep_claims)
        self._run_isolated("operations", self._sweep_operations)
        self._run_isolated("uploads", lambda: self._sweep_uploads(self._clock()))
        self._run_isolated(
            "torn objects", lambda: self._store.delete_unfinished("datasets", self._clock() - LEFT_FOR_S)
        )
        seen = 0
        for dataset in sorted(self._store.folders("datasets")):
            if dataset <= self._after:
                continue
            name = f"datasets/{dataset}"
            versions = [f"{name}/versions/{one}" for one in self._store.folders(f"{name}/versions")]
            self._run_isolated(name, partial(self._sweep_dataset, name, versions))
            for version in versions:
                self._run_isolated(version, partial(self._sweep_version, version))
            seen += len(versions)
            if seen >= VERSIONS_A_PASS:
                self._after = dataset
                return
        self._after = ""

    def _run_isolated(self, what: str, step: Callable[[], object]) -> None:
        try:
            step()
        except Unavailable:
            raise  # which holds for everything
        except (FailedPrecondition, ResourceExhausted) as error:
            logger.info("%s stays: %s", what, error.message)
        except Exception:
            logger.exception("%s cannot be swept; the others go on", what)

    def _sweep_claims(self) -> None:
        old = [
            info.key
            for info in self._store.list(f"requests/{SERVICE}")
            if self._clock() - info.modified > REQUEST_CLAIM_S
        ]
        for key in old[:CLAIMS_A_PASS]:
            self._store.delete(key)

    def _sweep_operations(self) -> None:
        """Those whose job was never made: whoever was to make it died, and nobody repeats its call any more."""
        old = operations_before(self._store, self._clock() - REQUEST_CLAIM_S)
        waiting = [one for one in old if one > self._after_operation and one not in self._with_job]
        for operation in waiting[:OPERATIONS_A_PASS]:
            self._after_operation = operation
            if withdraw_if_without_job(self._store, self._jobs, operation):
                logger.info("operations/%s has no job and goes", operation)
                continue
            if len(self._with_job) >= OPERATIONS_REMEMBERED:
                self._with_job.clear()
            self._with_job.add(operation)
        if len(waiting) <= OPERATIONS_A_PASS:
            self._after_operation = ""

    def _sweep_dataset(self, name: str, versions: Sequence[str]) -> None:
        jobs = [job for job in map(self._jobs.newest, versions) if job and job.state is not JobState.DELETED]
        if (uid := self._datasets.deleted_uid(name)) is not None:
            self._sweep_deleted_dataset(name, uid, jobs)
            return
        dataset = self._datasets.find(name)
        if dataset is None or dataset.retention.keeps_all:
            return
        active = {job.name: job for job in jobs if _is_active(job)}
        committed = [Committed(job.name, job.update_time) for job in active.values()]
        for version in outlived(dataset.retention, committed, self._clock()):
            if not live_references(self._store, version, self._clock()):
                logger.info("%s has outlived the retention of its dataset", version)
                # This one alone: another of its name would be the newest.
                self._run_isolated(version, partial(self._deletions.delete, version, uid=active[version].uid))

    def _sweep_deleted_dataset(self, name: str, uid: str, jobs: Sequence[JobRecord]) -> None:
        """What was made while the dataset was being deleted, and whose maker had no time to take it back, brings the
        dataset back; what was cancelled or failed goes after it."""
        if any(_is_active(job) or not job.state.final for job in jobs if job.state is not JobState.CANCELLING):
            self._datasets.unearth(name, uid)
            return
        if any(job.state is JobState.CANCELLING for job in jobs):
            return  # its maker has taken it back; should the cancel come too late, it is ACTIVE at a later pass
        for job in jobs:
            self._run_isolated(job.name, partial(self._deletions.delete, job.name, uid=job.uid))
        self._delete_uploads(name, uid)

    def _sweep_version(self, name: str) -> None:
        # In this order: whatever is listed here was written before the log said what it says below.
        attempts = [f"{name}/data/{one}" for one in self._store.folders(f"{name}/data")]
        references = markers(self._store, name)
        job = self._jobs.newest(name)
        for marker in references:
            if not marker.counts(self._store, self._clock()):
                self._store.delete(marker.key)
        if job is None or not job.state.final:
            return
        if job.state is JobState.DELETING:
            self._deletions.finish(name)
            return
        committed = job.result["manifest"].rsplit("/", 1)[0] if _is_active(job) else None
        for attempt in attempts:
            if attempt != committed:
                logger.info("%s is of no version and goes", attempt)
                self._store.delete_folder(attempt)
        if committed and committed not in self._tidy:
            self._tidy_up(job, committed)

    def _tidy_up(self, job: JobRecord, committed: str) -> None:
        """Takes away what the attempt that made the version had no time to: only what was there before the manifest
        was read, and only where that is the one that was committed."""
        before = self._clock() - LEFT_FOR_S
        found = list(self._store.list(committed))
        try:
            manifest = committed_version(self._store, job).manifest
        except (DataLoss, NotFound):
            return  # what it named nobody knows; or it was deleted just now
        paths = (*(file.path for file in manifest.files), *(one.path for one in manifest.attachments))
        named = {job.result["manifest"], *(f"{committed}/{path}" for path in paths)}
        others = [info for info in found if info.key not in named]
        for info in others:
            if info.modified < before:
                logger.info("%s is named by no manifest and goes", info.key)
                self._store.delete(info.key)
        # Later nobody writes there any more.
        if job.update_time < before and all(info.modified < before for info in others):
            if len(self._tidy) >= TIDY_REMEMBERED:
                self._tidy.clear()
            self._tidy.add(committed)


def _is_active(job: JobRecord) -> bool:
    return job.state is JobState.SUCCEEDED
