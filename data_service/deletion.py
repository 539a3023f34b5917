"""Deletes versions and datasets.

One version's deletion, and the garbage collection that removes unreferenced objects.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from data_service.datasets import (
    SERVICE,
    Datasets,
    operation_id,
    operations_before,
    withdraw_if_without_job,
    withdraw_operation,
)
from data_service.domain.dataset import Committed, outlived
from shared import names
from shared.dataset_version.pages import open_files
from shared.dataset_version.version import IMPORT_KIND, NAME_PATTERN, committed_version, live_references, markers
from shared.errors import DataLoss, FailedPrecondition, NotFound, ResourceExhausted, Unavailable, not_found
from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.index import IndexedJob, JobIndex
from shared.jobs.registry import condemned, remove_objects, undone, while_deleting
from shared.jobs.transitions import check_etag, confirm_delete, request_delete
from shared.storage import ObjectStore

logger = logging.getLogger(__name__)


# --- Lifecycle ---
# The deletion of a version: its log becomes DELETING, its use is refused, its files are deleted, its log becomes
# DELETED.
#
# A user of a version writes a marker and then checks that it is ACTIVE. The deletion works in reverse, so one of both
# sees the other. Once no user was found, the log records it (`deleted_from` is cleared), and the deletion cannot be
# undone: of several concurrent deletions, none can restore a version whose files another is removing. Each step can be
# repeated, so the next process completes what another left unfinished.


class Deletions:
    """Deletes versions; `clock` returns seconds since the epoch."""

    def __init__(self, store: ObjectStore, jobs: Jobs, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._jobs = jobs
        self._clock = clock

    def delete(self, name: str, etag: str = "", uid: str = "") -> None:
        """Delete the version with its files.

        With `uid`, deletes only that version, and no other of its name. Raises `InvalidArgument`, `NotFound`,
        `Conflict` if `etag` is given and not the present one, and `FailedPrecondition` while it is being created or in
        use.
        """
        names.parse("name", name, NAME_PATTERN)
        self._jobs.get(name, name)

        def decide(newest: JobRecord) -> JobRecord:
            if uid and newest.uid != uid:
                raise not_found(name)
            _check_deletable(newest, etag)
            # A refused deletion restores the state, so the time stays that of the last transition: the commit.
            return request_delete(newest, newest.update_time)

        self._finish(self._jobs.transition(name, decide))

    def finish(self, name: str) -> None:
        """Continue a deletion that was begun.

        Does nothing for a version that is not DELETING. Raises `FailedPrecondition` if it is in use; it then has its
        former state again.
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
        """Remove the files listed before the log is read: later ones may belong to a new version."""
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
    """Return whether this deletion, or a concurrent one, found a user."""
    return job.state in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


def _in_use(job: JobRecord, references: list[str]) -> FailedPrecondition:
    shown = ", ".join(references) or "another resource"
    return FailedPrecondition(
        f"{job.name} is in use by {shown}; delete it once that has ended",
        reason="VERSION_IN_USE",
        metadata={"resource": job.name, "users": ",".join(references)},
    )


# --- Garbage collector ---
# Removes unreferenced objects, a bounded amount in each pass.
#
# Every object was listed before the log was read that allows its removal, and has a unique name (attempts' folders have
# a nonce, markers a uid). So objects that are created meanwhile are never removed, and any number of collectors may
# run.


# After a week no client repeats a call to get its first answer.
REQUEST_CLAIM_S = 7 * 24 * 3600.0
# The age at which objects of a killed writer are removed: writing an object, or a job's last step, never takes as long.
ORPHAN_GRACE_PERIOD_S = 3600.0
# These sets also have entries that no longer exist, so each is cleared when it reaches its limit.
TIDY_REMEMBERED = OPERATIONS_REMEMBERED = 100_000
# A pass ends after the dataset with which it has seen this many versions; the next pass continues after it.
VERSIONS_A_PASS = 1000
# How many versions of all that ever were a pass reads in turns.
VERSIONS_IN_TURNS = 200
CLAIMS_A_PASS = 10_000
OPERATIONS_A_PASS = 1000


class GarbageCollector:
    """Removes unreferenced objects.

    `collect_uploads` is called with the time, `delete_uploads` with the name and the uid of a deleted dataset. `clock`
    returns seconds since the epoch. Without an `index`, and until it has all versions, each version that ever was is
    swept; with it, those that are not settled, and the others in turns.
    """

    def __init__(
        self,
        store: ObjectStore,
        datasets: Datasets,
        deletions: Deletions,
        *,
        collect_uploads: Callable[[float], object],
        delete_uploads: Callable[[str, str], object],
        clock: Callable[[], float] = time.time,
        index: JobIndex | None = None,
    ) -> None:
        self._index = index
        self._store = store
        self._datasets = datasets
        self._deletions = deletions
        self._jobs = Jobs(store, IMPORT_KIND)
        self._collect_uploads = collect_uploads
        self._delete_uploads = delete_uploads
        self._clock = clock
        # The dataset after which the last pass stopped; empty if it reached the end.
        self._after = ""
        # The operation after which the last pass stopped.
        self._after_operation = ""
        # Operations with a job: the job's deletion removes them.
        self._with_job: set[str] = set()
        # Committed folders that have only objects that their manifests name, and will get no others: they are checked
        # once.
        self._tidy: set[str] = set()
        # The version after which the last pass over those that are not settled stopped.
        self._after_version = ""

    def collect(self) -> None:
        """Run one pass.

        An error with one resource is logged and does not affect the others; raises `Unavailable`.
        """
        self._run_isolated("request claims", self._collect_claims)
        self._run_isolated("operations", self._collect_operations)
        self._run_isolated("uploads", lambda: self._collect_uploads(self._clock()))
        self._run_isolated(
            "torn objects", lambda: self._store.delete_unfinished("datasets", self._clock() - ORPHAN_GRACE_PERIOD_S)
        )
        unsettled = self._index.unsettled() if self._index else None
        if self._index is not None and unsettled is not None:
            self._collect_unsettled(self._index, unsettled)
            for dataset in self._store.folders("datasets"):
                name = f"datasets/{dataset}"
                self._run_isolated(name, partial(self._collect_dataset, name, None))
            return
        seen = 0
        for dataset in sorted(self._store.folders("datasets")):
            if dataset <= self._after:
                continue
            name = f"datasets/{dataset}"
            versions = [f"{name}/versions/{folder}" for folder in self._store.folders(f"{name}/versions")]
            self._run_isolated(name, partial(self._collect_dataset, name, versions))
            for version in versions:
                self._run_isolated(version, partial(self._collect_version, version))
            seen += len(versions)
            if seen >= VERSIONS_A_PASS:
                self._after = dataset
                return
        self._after = ""

    def _collect_unsettled(self, index: JobIndex, unsettled: Iterable[IndexedJob]) -> None:
        """Collect the garbage of unsettled versions, at most `VERSIONS_A_PASS`, and of some of all others in turns."""
        collected: set[str] = set()
        settled: list[IndexedJob] = []
        for version in unsettled:
            name = version.record.name
            if name <= self._after_version:
                continue
            if len(collected) == VERSIONS_A_PASS:
                break
            collected.add(name)
            self._after_version = name
            if self._run_isolated(name, partial(self._collect_version, name)) and self._is_settled(version.record):
                settled.append(version)
        else:
            self._after_version = ""
        index.settle(settled)
        for name in index.check(VERSIONS_IN_TURNS):
            if name not in collected:
                self._run_isolated(name, partial(self._collect_version, name))

    def _is_settled(self, job: JobRecord) -> bool:
        """Return whether a collection that has succeeded leaves nothing to do about a version, unless it changes."""
        is_over = job.state.final and job.state is not JobState.DELETING
        is_tidy = not _is_active(job) or job.result["manifest"].rsplit("/", 1)[0] in self._tidy
        return is_over and is_tidy and self._clock() - job.update_time > ORPHAN_GRACE_PERIOD_S

    def _run_isolated(self, what: str, step: Callable[[], object]) -> bool:
        """Run a step. Return whether it succeeded."""
        try:
            step()
        except Unavailable:
            raise  # which affects all resources
        except (FailedPrecondition, ResourceExhausted) as error:
            logger.info("%s stays: %s", what, error.message)
        except Exception:
            logger.exception("%s cannot be swept; the others go on", what)
        else:
            return True
        return False

    def _collect_claims(self) -> None:
        old = [
            info.key
            for info in self._store.list(f"requests/{SERVICE}")
            if self._clock() - info.modified > REQUEST_CLAIM_S
        ]
        self._store.delete_all(old[:CLAIMS_A_PASS])

    def _collect_operations(self) -> None:
        """Remove operations whose job was never created.

        Their creator died, and no client repeats the call any more.
        """
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

    def _collect_dataset(self, name: str, versions: Sequence[str] | None) -> None:
        """Collect the garbage of a dataset.

        `versions` are the names of all that ever were; None: the index has them.
        """
        dataset = self._datasets.newest(name)
        if dataset is None or (not dataset.deleted and dataset.retention.keeps_all):
            return
        indexed = self._datasets.indexed_versions(name) if versions is None else None
        if versions is None and indexed is None:
            return  # the index is being built anew: the next pass reads the logs
        found = indexed if indexed is not None else map(self._jobs.newest, versions or ())
        jobs = [job for job in found if job and job.state is not JobState.DELETED]
        if self._datasets.newest(name) != dataset:
            return  # the versions may be of another dataset that has the name now
        if dataset.deleted:
            self._collect_deleted_dataset(name, dataset.uid, jobs)
            return
        active = {job.name: job for job in jobs if _is_active(job)}
        committed = [Committed(job.name, job.update_time) for job in active.values()]
        for version in outlived(dataset.retention, committed, self._clock()):
            if not live_references(self._store, version, self._clock()):
                logger.info("%s has outlived the retention of its dataset", version)
                # With the uid, since another version of this name would be the newest.
                self._run_isolated(version, partial(self._deletions.delete, version, uid=active[version].uid))

    def _collect_deleted_dataset(self, name: str, uid: str, jobs: Sequence[JobRecord]) -> None:
        """Settle versions in a deleted dataset.

        A version that was created during the deletion, and whose creator died before it could cancel it, restores the
        dataset. Cancelled and failed versions are deleted with it.
        """
        if any(_is_active(job) or not job.state.final for job in jobs if job.state is not JobState.CANCELLING):
            self._datasets.unearth(name, uid)
            return
        if any(job.state is JobState.CANCELLING for job in jobs):
            return  # its creator has cancelled it; if that comes too late, a later pass sees it ACTIVE
        for job in jobs:
            self._run_isolated(job.name, partial(self._deletions.delete, job.name, uid=job.uid))
        self._delete_uploads(name, uid)

    def _collect_version(self, name: str) -> None:
        # In this order: the objects listed here were written before the log had the state read below.
        attempts = [f"{name}/data/{folder}" for folder in self._store.folders(f"{name}/data")]
        references = markers(self._store, name)
        job = self._jobs.newest(name)
        self._store.delete_all([one.key for one in references if not one.counts(self._store, self._clock())])
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
        """Remove leftovers of the attempt that created the version.

        Removes only objects listed before the manifest was read, and only if that is the committed manifest.
        """
        before = self._clock() - ORPHAN_GRACE_PERIOD_S
        found = list(self._store.list(committed))
        try:
            version = committed_version(self._store, job)
            files = open_files(self._store, version)
            named = {job.result["manifest"]}
            named.update(f"{committed}/{attachment.path}" for attachment in version.manifest.attachments)
            named.update(f"{committed}/{path}" for path in files.page_paths())
            named.update(f"{committed}/{path}" for page in files.pages() for path in page.paths())
        except (DataLoss, NotFound):
            return  # the manifest's names are unknown, or the version was just deleted
        others = [info for info in found if info.key not in named]
        leftovers = [info.key for info in others if info.modified < before]
        for key in leftovers:
            logger.info("%s is named by no manifest and goes", key)
        self._store.delete_all(leftovers)
        # After that, no process writes there any more.
        if job.update_time < before and all(info.modified < before for info in others):
            if len(self._tidy) >= TIDY_REMEMBERED:
                self._tidy.clear()
            self._tidy.add(committed)


def _is_active(job: JobRecord) -> bool:
    return job.state is JobState.SUCCEEDED
