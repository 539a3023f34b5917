"""Reads the versions of datasets.

A version is the result of a durable job, and the job's log is its log.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from data_service.datasets import Datasets
from shared import names, paging
from shared.dataset_version import VersionReader
from shared.dataset_version.manifest import QUARANTINE, Attachment
from shared.dataset_version.reader import Footers
from shared.dataset_version.version import NAME_PATTERN, check_not_deleted, committed_version, read_report
from shared.errors import DataLoss, NotFound
from shared.jobs import JobRecord, Jobs, JobState
from shared.storage import ObjectMissing, ObjectStore

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


class Versions:
    def __init__(self, store: ObjectStore, jobs: Jobs, datasets: Datasets) -> None:
        self.store = store
        self._jobs = jobs
        self._datasets = datasets
        self._readers = _Readers(store)

    def get(self, name: str) -> Version:
        """Returns a version.

        Raises `InvalidArgument`, `NotFound`, and `DataLoss` for a damaged manifest.
        """
        names.parse("name", name, NAME_PATTERN)
        return self.version_of(self._jobs.get(name, name))

    def list(self, parent: str, page_size: int, page_token: str) -> tuple[list[Version], str]:
        """Returns one page in the order of names, and the token of the next."""
        self._datasets.get(parent, "parent")
        found, next_token = paging.page(self.store.folders(f"{parent}/versions"), page_size, page_token)
        jobs = [self._jobs.find(f"{parent}/versions/{one}") for one in found]
        versions = [self.listed(job) for job in jobs if job]
        return [version for version in versions if version], next_token

    def active(self, name: str, field: str = "name") -> ActiveVersion:
        """Returns an ACTIVE version.

        Raises the errors of `get`, naming `field`, and `FailedPrecondition` if the version is not ACTIVE.
        """
        names.parse(field, name, NAME_PATTERN)
        job = self._jobs.get(name, name)
        return ActiveVersion(job, self._readers.reader_of(job))

    def version_of(self, job: JobRecord) -> Version:
        """Returns the version of a job; raises `DataLoss` for a damaged manifest."""
        return ActiveVersion(job, self._readers.reader_of(job)) if job.state is JobState.SUCCEEDED else Version(job)

    def listed(self, job: JobRecord) -> Version | None:
        """Returns the version for a list; None if it was just deleted.

        A damaged manifest becomes a `DamagedVersion`, so that it does not hide the other versions.
        """
        try:
            return self.version_of(job)
        except DataLoss as error:
            return DamagedVersion(job, error)
        except NotFound:
            return None

    def report(self, version: ActiveVersion) -> dict[str, Any]:
        """Returns the QualityReport as JSON.

        Raises `DataLoss`, and `NotFound` if the version is deleted meanwhile.
        """
        return read_report(self.store, version.reader.version)

    def quarantine(self, version: ActiveVersion) -> Generator[bytes, None, None]:
        """Yields the quarantined rows as JSON Lines in pieces; nothing if there are none.

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
        """Returns the error for a damaged file; raises `NotFound` if the version was deleted meanwhile."""
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

    def reader_of(self, job: JobRecord) -> VersionReader:
        """Returns the reader of a job's version.

        Checks the job's state first: a version in deletion has no reader.
        """
        manifest = job.result.get("manifest", "")  # the manifest's folder has a nonce, so the key is unique
        with self._lock:
            known = self._kept.get(manifest)
            if known and job.state is JobState.SUCCEEDED:
                self._kept.move_to_end(manifest)
                return known
        reader = VersionReader(self._store, committed_version(self._store, job), self._footers)
        with self._lock:
            self._kept[manifest] = reader
            while len(self._kept) > KEPT_READERS:
                self._kept.popitem(last=False)
        return reader
