"""Finding a committed version: the log of the job that made it names its manifest.

Beside its rows lie its quality report, with statistics of the rows as they were ingested, before any transform changed
their values, and the rows that were left out. Who uses it leaves a marker at `datasets/{d}/versions/{v}/users` before
it looks at the version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shared import names
from shared.dataset_version.manifest import REPORT, Column, Manifest, Split, sha256_hex
from shared.errors import DataLoss, FailedPrecondition, MillraceError, NotFound, invalid_field, not_found
from shared.jobs import JobRecord, Jobs, JobState
from shared.reference_markers import ReferenceMarker, keep_marker, let_go, live_references, markers, put_marker, unmark
from shared.requests import OUTCOME_UNKNOWN
from shared.storage import ObjectMissing, ObjectStore

__all__ = ["ReferenceMarker", "live_references", "mark_used", "markers", "unmark", "using"]


# --- Version ---

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


# --- Attachments ---


def read_attachment(store: ObjectStore, version: DatasetVersion, path: str) -> bytes | None:
    """None where the version has none of that name. Raises `DataLoss` where it is not what was committed, and
    `NotFound` where the version was deleted meanwhile."""
    attachment = version.manifest.attachment(path)
    if attachment is None:
        return None
    try:
        data = store.get(f"{version.folder}/{path}")
    except ObjectMissing:
        check_not_deleted(store, version)
        data = b""
    if sha256_hex(data) != attachment.sha256:
        raise DataLoss(
            f"{path} of {version.name} is not what was committed",
            reason="DAMAGED_FILE",
            metadata={"resource": version.name, "file": path},
        )
    return data


def read_report(store: ObjectStore, version: DatasetVersion) -> dict[str, Any]:
    """The QualityReport as JSON; empty where the version has none. Raises as `read_attachment`."""
    data = read_attachment(store, version, REPORT)
    report: dict[str, Any] = json.loads(data) if data else {}
    return report


# --- Statistics of ingested rows ---


def ingested_nan_counts(store: ObjectStore, version: DatasetVersion, split: str) -> dict[str, int]:
    """How many NaN the rows of `split` had in each column as it was ingested.

    The quality report of the version in which a column was ingested tells it: that of the import, or of the prediction
    that added it. A column is left out where that version is gone, or has no report. Where a transform divided the rows
    anew, the NaN of all splits of the versions before it count, since it is not recorded which rows went where.

    Raises `DataLoss` for a damaged manifest or report.
    """
    counts: dict[str, int] = {}
    for one, splits in _back_to_import(store, version, split):
        ingested = _ingested_there(one)
        if not ingested:
            continue
        try:
            columns = read_report(store, one).get("columns", [])
        except NotFound:
            break
        for column in columns:
            name = column["column"]
            if name in ingested and column["split"] in splits:
                counts[name] = counts.get(name, 0) + int(column["nanCount"])
    return counts


def _back_to_import(
    store: ObjectStore, version: DatasetVersion, split: str
) -> Iterator[tuple[DatasetVersion, frozenset[str]]]:
    """The version, and those that it was made from as far as they are there, each with the splits that the rows of
    `split` were in."""
    jobs, divided = Jobs(store, IMPORT_KIND), False
    while True:
        there = frozenset(one.name for one in version.manifest.splits)
        yield version, there if divided or split not in there else frozenset([split])
        if not version.manifest.transforms:
            return
        (parent,) = version.manifest.parents
        made_by = jobs.find(version.name)
        divided = divided or made_by is None or bool(made_by.spec.get("transform", {}).get("splits"))
        before = jobs.find(parent.version)
        if before is None:
            return
        try:
            version = committed_version(store, before)
        except (NotFound, FailedPrecondition):  # it is being deleted, or one of that name is being made anew
            return
        if version.manifest_sha256 != parent.manifest_sha256:
            return


def _ingested_there(version: DatasetVersion) -> frozenset[str]:
    """The columns whose values have gone through no step before they came into this version."""
    if version.manifest.prediction is not None:
        return frozenset(version.manifest.prediction.columns)
    return frozenset() if version.manifest.transforms else frozenset(column.name for column in version.columns)


# --- Users of a version ---


def mark_used(
    store: ObjectStore, version_name: str, kind: str, uid: str, user: str, *, is_job: bool = True, now: float = 0.0
) -> DatasetVersion:
    """Keeps the version, which it returns, from being deleted. To be called before the user is made.

    `user` names a durable job of this `kind` and `uid`, whose end frees the version, or with `is_job=False` any other
    resource, which must `unmark`. Raises what `load_version` raises where the version cannot be used, and then leaves
    no marker; `Unavailable` leaves open whether there is one.
    """
    put_marker(store, version_name, kind, uid, user, is_job=is_job, now=now)
    try:
        return load_version(store, version_name)
    except MillraceError as error:
        if not isinstance(error, OUTCOME_UNKNOWN):
            let_go(store, version_name, kind, uid)
        raise


@contextmanager
def using(store: ObjectStore, version_name: str, kind: str, uid: str, user: str) -> Iterator[DatasetVersion]:
    """Marks the version, which it gives, while the body makes the job `user`; the marker stays unless that is refused.
    A refusal takes nothing from an equal call that makes the job of the same `uid`.

    After an outage the job may have been made all the same: the marker then stays, too, and a sweep settles it.
    """
    version = mark_used(store, version_name, kind, uid, user)
    try:
        yield version
    except MillraceError as error:
        if not isinstance(error, OUTCOME_UNKNOWN):
            let_go(store, version_name, kind, uid)
        raise
    keep_marker(store, version_name, kind, uid, user)
