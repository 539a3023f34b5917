"""The versions of datasets: a version is what a durable import job makes, and that job's log is its log."""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from data_service.datasets import SERVICE, Datasets
from data_service.domain import import_spec
from data_service.domain.import_spec import ImportSpec
from data_service.operation_pointers import record_operation, withdraw_operation
from data_service.source_files import s3_of
from shared import names, paging
from shared.dataset_version import VersionReader
from shared.dataset_version.version import NAME_PATTERN, committed_version
from shared.errors import AlreadyExists, already_exists
from shared.jobs import JobRecord, Jobs, JobState
from shared.requests import claimed
from shared.storage import ObjectStore

KEPT_READERS = 64


@dataclass(frozen=True)
class Version:
    """In any state; an ACTIVE one is an `ActiveVersion`."""

    job: JobRecord


@dataclass(frozen=True)
class ActiveVersion(Version):
    reader: VersionReader


class Versions:
    """`import_roots` are the folders below which file:// sources may lie."""

    def __init__(
        self, store: ObjectStore, jobs: Jobs, datasets: Datasets, import_roots: Sequence[PurePosixPath]
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._datasets = datasets
        self._import_roots = import_roots
        self._readers = _Readers(store)

    def start_import(
        self,
        parent: str,
        version_id: str,
        spec: ImportSpec,
        *,
        request_id: str,
        body_sha256: str,
        validate_only: bool,
    ) -> JobRecord:
        """Makes the import durable and returns at once. With `validate_only` the job has no uid and is not written.

        Raises `InvalidArgument`, `NotFound` (the dataset) and `AlreadyExists`.
        """
        import_spec.check(spec, self._import_roots, s3=s3_of(self._store) is not None)
        request_id = names.check_request_id("request_id", request_id)
        if version_id:
            names.check_id("version_id", version_id)
        self._datasets.get(parent, "parent")
        while True:
            name = f"{parent}/versions/{version_id or self._next_id(parent)}"
            job = self._job(name, spec, request_id, body_sha256)
            if validate_only:
                if self._jobs.find(name):
                    raise already_exists(name)
                return job
            try:
                with claimed(self._store, SERVICE, request_id, body_sha256, name) as claim:
                    return self._create(self._job(claim.name, spec, request_id, body_sha256))
            except AlreadyExists:
                # Another import took the next free id in between.
                if version_id or not self._jobs.find(name):
                    raise

    def get(self, name: str) -> Version:
        """Raises `InvalidArgument`, `NotFound`, and `DataLoss` for a damaged manifest."""
        names.parse("name", name, NAME_PATTERN)
        return self.of(self._jobs.get(name, name))

    def list(self, parent: str, page_size: int, page_token: str) -> tuple[list[Version], str]:
        """One page in the order of names, and the token of the next."""
        self._datasets.get(parent, "parent")
        found, next_token = paging.page(self._store.folders(f"{parent}/versions"), page_size, page_token)
        jobs = [self._jobs.find(f"{parent}/versions/{one}") for one in found]
        return [self.of(job) for job in jobs if job], next_token

    def active(self, name: str) -> ActiveVersion:
        """Raises as `get`, and `FailedPrecondition` unless the version is ACTIVE."""
        names.parse("name", name, NAME_PATTERN)
        job = self._jobs.get(name, name)
        return ActiveVersion(job, self._readers.of(job))

    def of(self, job: JobRecord) -> Version:
        """Raises `DataLoss` for a damaged manifest."""
        return ActiveVersion(job, self._readers.of(job)) if job.state is JobState.SUCCEEDED else Version(job)

    def _job(self, name: str, spec: ImportSpec, request_id: str, body_sha256: str) -> JobRecord:
        return JobRecord(
            uid=uuid.uuid4().hex,
            name=name,
            spec={
                "import": spec.as_record(),
                # The attempt runs on a node of Ray, whose environment is not ours.
                "import_roots": [str(root) for root in self._import_roots],
                "request_id": request_id,
            },
            create_time=time.time(),
            update_time=time.time(),
            body_sha256=body_sha256,
        )

    def _create(self, job: JobRecord) -> JobRecord:
        record_operation(self._store, job)
        try:
            return self._jobs.create(job.name, job)
        except AlreadyExists:
            withdraw_operation(self._store, job)
            winner = self._jobs.find(job.name)
            # A repeated call, or one of two at the same time, is answered with what the first made.
            if winner and job.spec["request_id"] and winner.spec["request_id"] == job.spec["request_id"]:
                return winner
            raise

    def _next_id(self, parent: str) -> str:
        taken = [re.fullmatch(r"v([1-9][0-9]{0,8})", one) for one in self._store.folders(f"{parent}/versions")]
        return f"v{1 + max((int(match[1]) for match in taken if match), default=0)}"


class _Readers:
    """The readers last used: a committed version never changes, so its manifest and footers are read once."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, VersionReader] = OrderedDict()

    def of(self, job: JobRecord) -> VersionReader:
        with self._lock:
            known = self._kept.get(job.uid)
            if known:
                self._kept.move_to_end(job.uid)
                return known
        reader = VersionReader(self._store, committed_version(self._store, job))
        with self._lock:
            self._kept[job.uid] = reader
            while len(self._kept) > KEPT_READERS:
                self._kept.popitem(last=False)
        return reader
