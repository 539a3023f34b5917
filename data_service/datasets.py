"""The datasets in the store, each a resource log below `datasets/{d}/log`, and the versions of each.

The catalog says which versions a dataset has, which operation makes each, and which version follows which.

A version is the result of a durable job, and the job's log is its log. The pointer `operations/{o}/pointer.json` leads
from an operation to the version that it creates.

Of several writers that append to or replace one version, one wins: `datasets/{d}/versions/{v}/successors/{uid}/log`
names the version that follows v. A claim is taken before the job is created and holds while that job is live or has
succeeded. A job that failed, was cancelled or deleted releases the claim, and so does a refused call.

A claim without a job may be taken over after a while, though its claimant may still create the job. So each attempt
confirms the claim before it works. That appends to the same log, in which one of both comes first: a later takeover
finds the job, and a later confirmation finds the other's claim and fails.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from data_service.domain.dataset import Dataset, Retention, changed, check_fields, check_mask, check_retention
from shared import names
from shared.dataset_version import VersionReader
from shared.dataset_version.manifest import QUARANTINE, Attachment
from shared.dataset_version.pages import PageCache
from shared.dataset_version.parquet import Footers
from shared.dataset_version.version import IMPORT_KIND, NAME_PATTERN, check_not_deleted, committed_version, read_report
from shared.errors import (
    STORE_OUTAGES,
    Conflict,
    DataLoss,
    FailedPrecondition,
    MillraceError,
    NotFound,
    already_exists,
    not_found,
)
from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.index import IndexedJob, JobIndex
from shared.resource_log import OUTCOME_UNKNOWN, Record, ResourceLog, State, claimed
from shared.storage import ObjectMissing, ObjectStore

# --- Datasets ---

# The service that these request ids belong to.
SERVICE = "data"
PATTERN = "datasets/{d}"
NO_RETENTION = Retention()
# The number of versions that an error lists.
SHOWN_VERSIONS = 5


class Datasets:
    """Datasets. Without an `index` of versions, and until it has all of them, `version_names` reads each one's log."""

    def __init__(self, store: ObjectStore, index: JobIndex | None = None) -> None:
        self._store = store
        self._index = index

    def create(
        self,
        dataset_id: str,
        *,
        display_name: str,
        description: str,
        request_id: str,
        body_sha256: str,
        validate_only: bool,
        retention: Retention = NO_RETENTION,
    ) -> Dataset:
        """Create a dataset; raise `InvalidArgument` and `AlreadyExists`."""
        check_fields(dataset_id, display_name, description)
        check_retention(retention)
        request_id = names.check_request_id("request_id", request_id)
        dataset = Dataset(
            name=f"datasets/{dataset_id}",
            uid="" if validate_only else uuid.uuid4().hex,
            display_name=display_name,
            description=description,
            create_time=time.time(),
            request_id=request_id,
            retention=retention,
        )
        if validate_only:
            if self.find(dataset.name):
                raise already_exists(dataset.name)
            return dataset
        with claimed(self._store, SERVICE, request_id, body_sha256, dataset.name):
            return self._append(dataset)

    def get(self, name: str, field: str = "name") -> Dataset:
        """Return a dataset; raise `InvalidArgument` naming `field`, and `NotFound`."""
        names.parse(field, name, PATTERN)
        dataset = self.find(name)
        if dataset is None:
            raise not_found(name)
        return dataset

    def find(self, name: str) -> Dataset | None:
        """Return a dataset; None if it never existed or was deleted."""
        found = self.newest(name)
        return None if found is None or found.deleted else found

    def list(self, page_size: int, page_token: str) -> tuple[list[Dataset], str]:
        """Return one page in the order of names, and the token of the next."""
        found, next_token = names.page(self._store.folders("datasets"), page_size, page_token)
        datasets = [self.find(f"datasets/{one}") for one in found]
        return [dataset for dataset in datasets if dataset], next_token

    def update(self, name: str, etag: str, mask: Iterable[str], **values: Any) -> Dataset:
        """Change those of `display_name`, `description` and `retention` that the mask names; all three if it is empty.

        Raises `InvalidArgument`, `NotFound`, and `Conflict` if `etag` is given and not the present one.
        """
        names.parse("dataset.name", name, PATTERN)
        changes = {path: values[path] for path in check_mask(mask)}
        return self._transition(name, lambda dataset: changed(_expected(dataset, etag), changes))

    def delete(
        self,
        name: str,
        etag: str,
        *,
        check_uploads: Callable[[str, str], None],
        delete_uploads: Callable[[str, str], None],
    ) -> None:
        """Delete a dataset by a tombstone in its log.

        Calls `check_uploads` with the dataset's name and uid before, and `delete_uploads` after it.

        Raises `InvalidArgument`, `NotFound`, `Conflict` if `etag` is given and not the present one, the errors of
        `check_uploads`, and `FailedPrecondition` naming the existing versions. A version that is created at the same
        time is either seen here, or its creator sees the tombstone: see `check_still_there`.
        """
        names.parse("name", name, PATTERN)
        dataset = _expected(self.get(name), etag)
        _refuse_with_versions(name, self.version_names(name))
        check_uploads(name, dataset.uid)

        def bury(newest: Dataset) -> Dataset:
            if newest.uid != dataset.uid:
                raise not_found(name, "it was deleted meanwhile, and made anew")
            return replace(_expected(newest, etag), deleted=True, generation=newest.generation + 1)

        self._transition(name, bury)
        if there := self.version_names(name):
            self.unearth(name, dataset.uid)
            _refuse_with_versions(name, there)
        delete_uploads(name, dataset.uid)

    def check_still_there(self, name: str, uid: str) -> None:
        """Raise `NotFound` if the dataset was deleted meanwhile.

        Called after something was created in the dataset; the caller must then delete it again.
        """
        dataset = self.find(name)
        if dataset is None or dataset.uid != uid:
            raise not_found(name, "it was deleted meanwhile")

    def unearth(self, name: str, uid: str) -> None:
        """Revert the deletion of the dataset with that uid, because it has a version."""

        def decide(newest: Dataset) -> Dataset:
            return replace(newest, deleted=False) if newest.deleted and newest.uid == uid else newest

        self._transition(name, decide, tombstones=True)

    def version_names(self, name: str) -> Sequence[str]:
        """Return the names of all existing versions, in any state."""
        if (versions := self.indexed_versions(name)) is not None:
            return [version.name for version in versions]
        jobs = Jobs(self._store, IMPORT_KIND)
        there = [f"{name}/versions/{folder}" for folder in self._store.folders(f"{name}/versions")]
        return [one for one in there if jobs.find(one)]

    def indexed_versions(self, name: str) -> Sequence[JobRecord] | None:
        """Return the jobs of all existing versions by the index; None without an index that has them all."""
        within = f"{name}/versions/"
        found: MutableSequence[JobRecord] = []
        more = True
        while more:
            after = found[-1].name if found else within
            page = self._index.page(after, names.MAX_SIZE, within) if self._index else None
            if page is None:
                return None
            jobs, more = page
            found += [job.record for job in jobs]
        return found

    def _append(self, dataset: Dataset) -> Dataset:
        log = ResourceLog(self._store, f"{dataset.name}/log")
        last = log.head()
        free = last is None or Dataset.from_state(last.state).deleted
        if free and log.append(last, dataset.as_state()):
            return dataset
        winner = self.find(dataset.name)
        # Of repeated or concurrent calls, all get the result of the first.
        if winner and dataset.request_id and winner.request_id == dataset.request_id:
            return winner
        raise already_exists(dataset.name)

    def _transition(self, name: str, decide: Callable[[Dataset], Dataset], *, tombstones: bool = False) -> Dataset:
        """Append the state that `decide` returns for the newest; nothing if it returns the same object."""

        def step(record: Any) -> dict[str, Any] | None:
            before = Dataset.from_state(record.state) if record else None
            if before is None or (before.deleted and not tombstones):
                raise not_found(name)
            after = decide(before)
            return None if after is before else after.as_state()

        record = ResourceLog(self._store, f"{name}/log").update(step)
        assert record is not None
        return Dataset.from_state(record.state)

    def newest(self, name: str) -> Dataset | None:
        """Return a dataset as `find` does, but also a deleted one."""
        record = ResourceLog(self._store, f"{name}/log").head()
        return Dataset.from_state(record.state) if record else None


def _expected(dataset: Dataset, etag: str) -> Dataset:
    if etag and etag != dataset.etag:
        raise Conflict(
            f"{dataset.name} has etag {dataset.etag}, not {etag}; read it again",
            reason="STALE_ETAG",
            metadata={"resource": dataset.name},
        )
    return dataset


def _refuse_with_versions(name: str, there: Sequence[str]) -> None:
    if there:
        shown = ", ".join(there[:SHOWN_VERSIONS]) + (", …" if len(there) > SHOWN_VERSIONS else "")
        raise FailedPrecondition(
            f"{name} has {len(there)} version(s): {shown}; delete them first",
            reason="DATASET_HAS_VERSIONS",
            metadata={"resource": name, "versions": str(len(there))},
        )


# --- Versions ---

# What the index has of an ACTIVE version besides its record: the message that a list shows.
SHOWN = "message"
KEPT_READERS = 64
# The limit of all parsed footers together. It is enough for 600 MiB of rows with a hundred columns of doubles.
FOOTER_BYTES = 256 * 1024 * 1024
# The bytes of quarantined rows that are in memory at a time.
PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Version:
    """A version in any state.

    An ACTIVE one is an `ActiveVersion` or, if its manifest is damaged, a `DamagedVersion`.
    """

    job: JobRecord


@dataclass(frozen=True)
class ActiveVersion(Version):
    reader: VersionReader


@dataclass(frozen=True)
class DamagedVersion(Version):
    error: DataLoss


@dataclass(frozen=True)
class IndexedVersion(Version):
    """An ACTIVE version as the index has it: the serialized message that a list shows."""

    message: bytes


class Versions:
    """Reads versions. Without an `index`, and until it has all versions, a list reads the log of each one."""

    def __init__(self, store: ObjectStore, jobs: Jobs, datasets: Datasets, index: JobIndex | None = None) -> None:
        self.store = store
        self._index = index
        self._jobs = jobs
        self._datasets = datasets
        self._readers = _Readers(store)

    def get(self, name: str) -> Version:
        """Return a version.

        Raises `InvalidArgument`, `NotFound`, and `DataLoss` for a damaged manifest.
        """
        names.parse("name", name, NAME_PATTERN)
        return self.version_of(self._jobs.get(name, name))

    def list(self, parent: str, page_size: int, page_token: str) -> tuple[list[Version], str]:
        """Return one page in the order of names, and the token of the next."""
        self._datasets.get(parent, "parent")
        size, after = names.checked_size(page_size), names.key_of(page_token)
        within = f"{parent}/versions/"
        if self._index and (page := self._index.page(f"{within}{after}", size, within)) is not None:
            indexed, more = page
            shown = [self._indexed(job) for job in indexed]
            last = indexed[-1].record.name.rpartition("/")[2] if more else ""
            return [version for version in shown if version], names.token_of(last) if more else ""
        found, next_token = names.page(self.store.folders(f"{parent}/versions"), page_size, page_token)
        jobs = [self._jobs.find(f"{parent}/versions/{one}") for one in found]
        versions = [self.listed(job) for job in jobs if job]
        return [version for version in versions if version], next_token

    def active(self, name: str, field: str = "name") -> ActiveVersion:
        """Return an ACTIVE version.

        Raises the errors of `get`, naming `field`, and `FailedPrecondition` if the version is not ACTIVE.
        """
        names.parse(field, name, NAME_PATTERN)
        job = self._jobs.get(name, name)
        return ActiveVersion(job, self._readers.reader_of(job))

    def version_of(self, job: JobRecord) -> Version:
        """Return the version of a job; raise `DataLoss` for a damaged manifest."""
        return ActiveVersion(job, self._readers.reader_of(job)) if job.state is JobState.SUCCEEDED else Version(job)

    def listed(self, job: JobRecord) -> Version | None:
        """Return the version for a list; None if it was just deleted.

        A damaged manifest becomes a `DamagedVersion`, so that it does not hide the other versions.
        """
        try:
            return self.version_of(job)
        except DataLoss as error:
            return DamagedVersion(job, error)
        except NotFound:
            return None

    def _indexed(self, job: IndexedJob) -> Version | None:
        message = job.shown.get(SHOWN)
        return IndexedVersion(job.record, base64.b64decode(message)) if message else self.listed(job.record)

    def report(self, version: ActiveVersion) -> dict[str, Any]:
        """Return the QualityReport as JSON.

        Raises `DataLoss`, and `NotFound` if the version is deleted meanwhile.
        """
        return read_report(self.store, version.reader.version)

    def quarantine(self, version: ActiveVersion) -> Generator[bytes, None, None]:
        """Yield the quarantined rows as JSON Lines in pieces; nothing if there are none.

        The file is read once for its digest, and again for the rows. Raises `DataLoss` before the first piece if it is
        not the committed file, and `NotFound` if the version is deleted meanwhile.
        """
        attachment = version.reader.version.manifest.attachment(QUARANTINE)
        if attachment is None:
            return
        digest = hashlib.sha256()
        for piece in self._pieces(version, attachment):
            digest.update(piece)
        if digest.hexdigest() != attachment.sha256:
            raise self._damaged(version, attachment)
        yield from self._pieces(version, attachment)

    def _pieces(self, version: ActiveVersion, attachment: Attachment) -> Iterator[bytes]:
        key = f"{version.reader.version.folder}/{attachment.path}"
        if self.store.size(key) != attachment.size_bytes:
            raise self._damaged(version, attachment)
        for start in range(0, attachment.size_bytes, PIECE_BYTES):
            try:
                yield self.store.get_range(key, start, min(PIECE_BYTES, attachment.size_bytes - start))
            except (ObjectMissing, DataLoss):
                raise self._damaged(version, attachment) from None

    def _damaged(self, version: ActiveVersion, attachment: Attachment) -> DataLoss:
        """Return the error for a damaged file; raise `NotFound` if the version was deleted meanwhile."""
        check_not_deleted(self.store, version.reader.version)
        name = version.job.name
        return DataLoss(
            f"{attachment.path} of {name} is not what was committed",
            reason="DAMAGED_FILE",
            metadata={"resource": name, "file": attachment.path},
        )


class _Readers:
    """Caches the last used readers.

    A committed version never changes, so its manifest is read once. Footers are cached while they fit `FOOTER_BYTES`.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, VersionReader] = OrderedDict()
        self._footers = Footers(FOOTER_BYTES)
        self._pages = PageCache()

    def reader_of(self, job: JobRecord) -> VersionReader:
        """Return the reader of a job's version.

        Checks the job's state first: a version in deletion has no reader.
        """
        manifest = job.result.get("manifest", "")  # the manifest's folder has a nonce, so the key is unique
        with self._lock:
            known = self._kept.get(manifest)
            if known and job.state is JobState.SUCCEEDED:
                self._kept.move_to_end(manifest)
                return known
        reader = VersionReader(self._store, committed_version(self._store, job), self._footers, pages=self._pages)
        with self._lock:
            self._kept[manifest] = reader
            while len(self._kept) > KEPT_READERS:
                self._kept.popitem(last=False)
        return reader


# --- Operations that make versions ---

# The keys of a job's spec that begin its operation's id, since other services keep their operations in the same store.
# Operations of other kinds, such as predictions, begin with the first.
MAKERS = ("import", "transform")
OPERATION_PREFIXES = tuple(f"{maker}-" for maker in MAKERS)


def operation_id(job: JobRecord) -> str:
    maker = next((one for one in MAKERS if one in job.spec), MAKERS[0])
    return f"{maker}-{job.uid}"


def record_operation(store: ObjectStore, job: JobRecord) -> None:
    """Record the operation; call it before the job is created, so that every job has its operation."""
    store.put(_pointer_key(operation_id(job)), json.dumps({"version": job.name, "uid": job.uid}).encode())


def withdraw_operation(store: ObjectStore, job: JobRecord) -> None:
    store.delete(_pointer_key(operation_id(job)))


def job_of_operation(store: ObjectStore, jobs: Jobs, name: str) -> JobRecord:
    """Return the job of an operation.

    Raises `NotFound`, even if the job's creator died before it created the job.
    """
    pointer = pointer_of_operation(store, name)
    job = jobs.find(pointer["version"])
    if job is None or job.uid != pointer["uid"]:
        raise not_found(name)
    return job


def pointer_of_operation(store: ObjectStore, name: str) -> dict[str, str]:
    """Return the name of the `version` that an operation makes, and its job's `uid`; raise `NotFound`."""
    try:
        pointer: dict[str, str] = json.loads(store.get(_pointer_key(name.removeprefix("operations/"))))
    except ObjectMissing:
        raise not_found(name) from None
    return pointer


def operations_before(store: ObjectStore, time_s: float) -> list[str]:
    """Return the sorted ids of operations last recorded before `time_s`, in seconds since the epoch."""
    recorded = [(info.key.split("/")[1], info.modified) for info in store.list("operations")]
    return sorted(one for one, modified in recorded if one.startswith(OPERATION_PREFIXES) and modified < time_s)


def withdraw_if_without_job(store: ObjectStore, jobs: Jobs, operation: str) -> bool:
    """Remove the operation if its job was never created, or was deleted; return False if it has one.

    Only for old operations, since a repeated call may still create the job.
    """
    try:
        pointer = json.loads(store.get(_pointer_key(operation)))
    except ObjectMissing:
        return True
    job = jobs.newest_of(pointer["version"], pointer["uid"])
    if job is not None and job.state is not JobState.DELETED:
        return False
    store.delete(_pointer_key(operation))
    return True


def _pointer_key(operation: str) -> str:
    return f"operations/{operation}/pointer.json"


# --- Successors ---

# A claimant creates its job at once. A claim without a job after this time was left by a process that died in between.
JOB_APPEARS_TIMEOUT_S = 60.0
# A deleted job has left a tombstone, so it is not still to come.
GIVE_FREE = (JobState.FAILED, JobState.CANCELLED, JobState.DELETING, JobState.DELETED)
FREE: State = {"version": "", "uid": ""}


@contextmanager
def following(store: ObjectStore, base: JobRecord, successor: JobRecord) -> Iterator[None]:
    """Make `successor` the version that follows `base`, while the body creates its job.

    The claim is released if the body is refused, but not if an outage leaves it unknown whether the job was created.
    Raises `Conflict` if another version follows already, or is about to.
    """
    log = _log(store, base)
    _append_claim(store, log, base, successor)
    try:
        yield
    except MillraceError as error:
        if not isinstance(error, OUTCOME_UNKNOWN):
            with suppress(*STORE_OUTAGES):  # otherwise the claim expires after a minute without a job
                log.update(lambda newest: FREE if newest and newest.state["uid"] == successor.uid else None)
        raise


def confirm_follows(store: ObjectStore, base: JobRecord, successor: JobRecord) -> None:
    """Confirm the claim of `successor`, before its attempt works.

    Raises `Conflict` if another version has taken its place.
    """
    _append_claim(store, _log(store, base), base, successor, confirmed=True)


def _log(store: ObjectStore, base: JobRecord) -> ResourceLog:
    return ResourceLog(store, f"{base.name}/successors/{base.uid}/log")


def _append_claim(
    store: ObjectStore, log: ResourceLog, base: JobRecord, successor: JobRecord, *, confirmed: bool = False
) -> None:
    jobs = Jobs(store, IMPORT_KIND)

    def decide(newest: Record | None) -> State | None:
        if newest is not None and newest.state["uid"] != successor.uid and _holds(jobs, newest):
            raise Conflict(
                f"base.version: {newest.state['version']} already follows {base.name}; read it, and decide again",
                reason="BASE_HAS_SUCCESSOR",
                metadata={"resource": base.name, "successor": newest.state["version"]},
            )
        is_own = newest is not None and newest.state["uid"] == successor.uid
        if newest is not None and is_own and (newest.state.get("confirmed", False) or not confirmed):
            return None  # a repeated call, or a later attempt
        return {"version": successor.name, "uid": successor.uid, "confirmed": confirmed}

    log.update(decide)


def _holds(jobs: Jobs, claim: Record) -> bool:
    if not claim.state["uid"]:
        return False
    job = jobs.newest_of(claim.state["version"], claim.state["uid"])
    if job is None:
        return time.time() - claim.time < JOB_APPEARS_TIMEOUT_S
    return job.state not in GIVE_FREE
