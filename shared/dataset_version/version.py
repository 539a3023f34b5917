"""Finding a committed version: the log of the job that made it names its manifest."""

from __future__ import annotations

from dataclasses import dataclass

from shared import names
from shared.dataset_version.manifest import Column, Manifest, Split
from shared.errors import DataLoss, FailedPrecondition, invalid_field, not_found
from shared.jobs import JobRecord, Jobs, JobState
from shared.storage import ObjectMissing, ObjectStore

# The kind of the durable job whose log is a version's log.
IMPORT_KIND = "import"
MANIFEST = "manifest.json"
NAME_PATTERN = "datasets/{d}/versions/{v}"


@dataclass(frozen=True)
class DatasetVersion:
    """A committed version, immutable. `folder` is the store's key prefix of its files."""

    name: str
    manifest: Manifest
    manifest_sha256: str
    folder: str

    @property
    def columns(self) -> list[Column]:
        return self.manifest.columns

    def split(self, name: str) -> Split:
        """Raises `InvalidArgument` naming the splits there are."""
        for split in self.manifest.splits:
            if split.name == name:
                return split
        raise invalid_field("split", name, f"use one of {', '.join(split.name for split in self.manifest.splits)}")


def load_version(store: ObjectStore, name: str) -> DatasetVersion:
    """Raises `InvalidArgument` (malformed name), `NotFound`, `FailedPrecondition` unless the version is ACTIVE, and
    `DataLoss` when its manifest is not the one that was committed."""
    names.parse("name", name, NAME_PATTERN)
    return committed_version(store, Jobs(store, IMPORT_KIND).get(name, name))


def committed_version(store: ObjectStore, job: JobRecord) -> DatasetVersion:
    """The version that `job` committed. Raises as `load_version`."""
    if job.state is not JobState.SUCCEEDED:
        raise FailedPrecondition(
            f"{job.name} is not ACTIVE: {_not_made(job)}", reason="VERSION_NOT_ACTIVE", metadata={"resource": job.name}
        )
    key, digest = job.result["manifest"], job.result["manifest_sha256"]
    try:
        data = store.get(key)
    except ObjectMissing:
        _check_there(store, job.name, key)
        raise DataLoss(
            f"the manifest of {job.name} is gone", reason="MANIFEST_MISSING", metadata={"resource": job.name}
        ) from None
    return DatasetVersion(job.name, Manifest.from_json(data, digest), digest, key.rsplit("/", 1)[0])


def _not_made(job: JobRecord) -> str:
    match job.state:
        case JobState.FAILED:
            return f"making it failed: {job.error['message']}" if job.error else "making it failed"
        case JobState.CANCELLED:
            return "making it was cancelled"
        case JobState.DELETING:
            return "it is being deleted"
    return "it is still being made"


def check_not_deleted(store: ObjectStore, version: DatasetVersion) -> None:
    """For whoever misses some of its bytes: nothing was lost where somebody took the version away. Raises `NotFound`
    where it was deleted since it was found."""
    _check_there(store, version.name, f"{version.folder}/{MANIFEST}")


def _check_there(store: ObjectStore, name: str, manifest: str) -> None:
    """`manifest` is the key of the version that is meant, and of no later one of that name."""
    job = Jobs(store, IMPORT_KIND).find(name)
    if job is None or job.state is not JobState.SUCCEEDED or job.result["manifest"] != manifest:
        raise not_found(name, "it was deleted while it was read")
