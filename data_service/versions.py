"""The versions of datasets, to be read: a version is what a durable job makes, and that job's log is its log."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from data_service.datasets import Datasets
from shared import names, paging
from shared.dataset_version import VersionReader
from shared.dataset_version.attachments import read_attachment, read_report
from shared.dataset_version.manifest import QUARANTINE
from shared.dataset_version.version import NAME_PATTERN, committed_version
from shared.errors import DataLoss
from shared.jobs import JobRecord, Jobs, JobState
from shared.storage import ObjectStore

KEPT_READERS = 64


@dataclass(frozen=True)
class Version:
    """In any state; an ACTIVE one is an `ActiveVersion` or, where its manifest is damaged, a `DamagedVersion`."""

    job: JobRecord


@dataclass(frozen=True)
class ActiveVersion(Version):
    reader: VersionReader


@dataclass(frozen=True)
class DamagedVersion(Version):
    error: DataLoss


class Versions:
    def __init__(self, store: ObjectStore, jobs: Jobs, datasets: Datasets) -> None:
        self.store = store
        self._jobs = jobs
        self._datasets = datasets
        self._readers = _Readers(store)

    def get(self, name: str) -> Version:
        """Raises `InvalidArgument`, `NotFound`, and `DataLoss` for a damaged manifest."""
        names.parse("name", name, NAME_PATTERN)
        return self.of(self._jobs.get(name, name))

    def list(self, parent: str, page_size: int, page_token: str) -> tuple[list[Version], str]:
        """One page in the order of names, and the token of the next."""
        self._datasets.get(parent, "parent")
        found, next_token = paging.page(self.store.folders(f"{parent}/versions"), page_size, page_token)
        jobs = [self._jobs.find(f"{parent}/versions/{one}") for one in found]
        return [self._listed(job) for job in jobs if job], next_token

    def active(self, name: str, field: str = "name") -> ActiveVersion:
        """Raises as `get`, naming `field`, and `FailedPrecondition` unless the version is ACTIVE."""
        names.parse(field, name, NAME_PATTERN)
        job = self._jobs.get(name, name)
        return ActiveVersion(job, self._readers.of(job))

    def of(self, job: JobRecord) -> Version:
        """Raises `DataLoss` for a damaged manifest."""
        return ActiveVersion(job, self._readers.of(job)) if job.state is JobState.SUCCEEDED else Version(job)

    def report(self, version: ActiveVersion) -> dict[str, Any]:
        """Its QualityReport as JSON. Raises `DataLoss`."""
        return read_report(self.store, version.reader.version)

    def quarantine(self, version: ActiveVersion) -> bytes:
        """The rows that were left out, as JSON Lines; empty where there are none. Raises `DataLoss`."""
        return read_attachment(self.store, version.reader.version, QUARANTINE) or b""

    def _listed(self, job: JobRecord) -> Version:
        """One damaged manifest must not hide all the other versions."""
        try:
            return self.of(job)
        except DataLoss as error:
            return DamagedVersion(job, error)


class _Readers:
    """The readers last used: a committed version never changes, so its manifest and footers are read once."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, VersionReader] = OrderedDict()

    def of(self, job: JobRecord) -> VersionReader:
        """Looks at the job's state first: what is being deleted has a reader no more."""
        manifest = job.result.get("manifest", "")  # whose folder has a nonce
        with self._lock:
            known = self._kept.get(manifest)
            if known and job.state is JobState.SUCCEEDED:
                self._kept.move_to_end(manifest)
                return known
        reader = VersionReader(self._store, committed_version(self._store, job))
        with self._lock:
            self._kept[manifest] = reader
            while len(self._kept) > KEPT_READERS:
                self._kept.popitem(last=False)
        return reader
