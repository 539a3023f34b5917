"""Finds committed versions, their attachments and their users.

The log of the job that made a version names its manifest. Beside the rows lie the quality report, with statistics of
the rows as ingested, before any transform, and the rows that were left out. A user of a version puts a marker at
`datasets/{d}/versions/{v}/users` before it reads the version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shared import names
from shared.dataset_version.manifest import REPORT, DatasetVersion, Manifest, sha256_hex
from shared.errors import DataLoss, FailedPrecondition, MillraceError, NotFound, not_found
from shared.jobs import JobRecord, Jobs, JobState
from shared.reference_markers import ReferenceMarker, keep_marker, let_go, live_references, markers, put_marker, unmark
from shared.resource_log import OUTCOME_UNKNOWN
from shared.storage import ObjectMissing, ObjectStore

__all__ = ["ReferenceMarker", "live_references", "mark_used", "markers", "unmark", "using"]


# --- Version ---

# The kind of the durable job whose log is a version's log.
IMPORT_KIND = "import"
MANIFEST = "manifest.json"
NAME_PATTERN = "datasets/{d}/versions/{v}"


def load_version(store: ObjectStore, name: str) -> DatasetVersion:
    """Load an ACTIVE version by its name.

    Raises `InvalidArgument` (malformed name), `NotFound`, `FailedPrecondition` unless the version is ACTIVE, and
    `DataLoss` if its manifest is not the one that was committed.
    """
    names.parse("name", name, NAME_PATTERN)
    return committed_version(store, Jobs(store, IMPORT_KIND).get(name, name))


def committed_version(store: ObjectStore, job: JobRecord) -> DatasetVersion:
    """Return the version that `job` committed. Raises as `load_version`."""
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
    """Raise `NotFound` if the version was deleted since it was found.

    Called when some of its bytes are missing, because after a deletion nothing was lost.
    """
    _check_there(store, version.name, f"{version.folder}/{MANIFEST}")


def _check_there(store: ObjectStore, name: str, manifest: str) -> None:
    """Raise `NotFound` unless the named version still has this manifest key.

    A later version of the same name has another key.
    """
    job = Jobs(store, IMPORT_KIND).find(name)
    if job is None or job.state is not JobState.SUCCEEDED or job.result["manifest"] != manifest:
        raise not_found(name, "it was deleted while it was read")


# --- Attachments ---


def read_attachment(store: ObjectStore, version: DatasetVersion, path: str) -> bytes | None:
    """Return an attachment's bytes; None if the version has no such attachment.

    Raises `DataLoss` if it is not what was committed, and `NotFound` if the version was deleted meanwhile.
    """
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
    """Return the QualityReport as JSON; empty if the version has none. Raises as `read_attachment`."""
    data = read_attachment(store, version, REPORT)
    report: dict[str, Any] = json.loads(data) if data else {}
    return report


# --- Statistics of ingested rows ---


def ingested_nan_counts(store: ObjectStore, version: DatasetVersion, split: str) -> dict[str, int]:
    """Count the NaN that the rows of `split` had in each column when it was ingested.

    The counts come from the quality report of the version in which a column was ingested: that of the import, or of the
    prediction that added it. A column is left out if that version no longer exists or has no report. If a transform
    divided the rows anew, the NaN of all splits of earlier versions count, because it is not recorded which rows went
    where.

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
    """Yield the version and its existing ancestors, each with the splits that held the rows of `split`."""
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
        except (NotFound, FailedPrecondition):  # it is being deleted, or a new version of that name is being made
            return
        if version.manifest_sha256 != parent.manifest_sha256:
            return


def _ingested_there(version: DatasetVersion) -> frozenset[str]:
    """Return the columns that this version ingested: no earlier step has changed their values."""
    if version.manifest.prediction is not None:
        return frozenset(version.manifest.prediction.columns)
    return frozenset() if version.manifest.transforms else frozenset(column.name for column in version.columns)


# --- Users of a version ---


def mark_used(
    store: ObjectStore, version_name: str, kind: str, uid: str, user: str, *, is_job: bool = True, now: float = 0.0
) -> DatasetVersion:
    """Mark the version as used, which prevents its deletion, and return it.

    Call this before the user is created. `user` names a durable job of this `kind` and `uid`, whose end frees the
    version. With `is_job=False` it names any other resource, which must call `unmark`. Raises what `load_version`
    raises if the version cannot be used, and then leaves no marker. After `Unavailable` there may be a marker.
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
    """Mark the version as used while the body creates the job `user`, and yield it.

    The marker stays unless the job is refused. A refusal does not affect an equal call that creates the job of the same
    `uid`. After an outage the job may have been created all the same. The marker then stays, too, and the garbage
    collector resolves it.
    """
    version = mark_used(store, version_name, kind, uid, user)
    try:
        yield version
    except MillraceError as error:
        if not isinstance(error, OUTCOME_UNKNOWN):
            let_go(store, version_name, kind, uid)
        raise
    keep_marker(store, version_name, kind, uid, user)
