"""Starts the durable jobs that create versions: imports, transforms and predictions, and records what they refer to.

`shared.jobs.index` holds an index of the jobs that make versions, of all datasets.

Its entries are in the order of their full names, so the versions of one dataset lie side by side. An entry has the
version as a list shows it, so a page of a list reads no manifest, unless a version has so many columns that its leaf
would become large.
"""

from __future__ import annotations

import base64
import itertools
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from data_service.convert import version_message
from data_service.datasets import (
    SERVICE,
    SHOWN,
    ActiveVersion,
    Datasets,
    Versions,
    following,
    record_operation,
    withdraw_operation,
)
from data_service.domain import import_spec, transform_spec
from data_service.domain.checks import parse_checks
from data_service.domain.dataset import Dataset
from data_service.domain.import_spec import ImportSpec, UploadSource, parse_uri
from data_service.domain.transform_spec import CheckpointRef, PredictSpec, TransformSpec
from data_service.storage.source_files import s3_of
from data_service.transforms.checking import check_predict, check_transform, found_checkpoint
from data_service.uploads.upload import using as using_upload
from shared import names
from shared.checkpoint import references as checkpoint_references
from shared.dataset_version.version import IMPORT_KIND, using
from shared.errors import (
    STORE_OUTAGES,
    AlreadyExists,
    Conflict,
    FailedPrecondition,
    MillraceError,
    NotFound,
    already_exists,
    invalid_field,
    invalid_fields,
)
from shared.jobs import JobRecord, Jobs
from shared.jobs.index import JobIndex
from shared.resource_log import OUTCOME_UNKNOWN, claimed, claimed_before, uid_of
from shared.settings import OwnCode
from shared.storage import ObjectStore
from shared.storage.object_store import KEYS_A_LISTING

# --- Jobs ---

# The ids that the service assigns, from v1 to v999999999. A longer id of this form comes from a client, for example
# with a date.
NUMBERED_ID = re.compile(r"v([1-9][0-9]{0,8})")
LAST_NUMBER = 999_999_999
# The number of times in a row that other jobs may take the free id.
MAX_TURNS = 100


class VersionJobs:
    """Starts version jobs.

    `import_roots` are the folders allowed for file:// sources, `custom_allowed` the functions that custom steps may
    name. `wake` is called when a job was created. `own_code` says whether models of users' own code may predict; by
    default they may not.
    """

    def __init__(
        self,
        store: ObjectStore,
        jobs: Jobs,
        datasets: Datasets,
        versions: Versions,
        *,
        import_roots: Sequence[PurePosixPath],
        custom_allowed: Collection[str],
        wake: Callable[[], None] = lambda: None,
        own_code: OwnCode | None = None,
    ) -> None:
        self._own_code = own_code or OwnCode()
        self._wake = wake
        self._store = store
        self._jobs = jobs
        self._datasets = datasets
        self._versions = versions
        self._import_roots = import_roots
        self._custom_allowed = custom_allowed

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
        """Record the import durably and return at once.

        With `validate_only` the job has no uid and is not written. Raises `InvalidArgument`, `NotFound` (the dataset,
        the base or an upload), `FailedPrecondition` (the base), `Conflict` (the base has a successor) and
        `AlreadyExists`.
        """

        def made_by() -> dict[str, Any]:
            import_spec.check(spec, self._import_roots, s3=s3_of(self._store) is not None)
            parse_checks(spec.checks)
            return {
                "import": with_base(self._versions, parent, spec).as_record(),
                # The attempt runs on a Ray node with another environment.
                "import_roots": [str(root) for root in self._import_roots],
            }

        return self._start(parent, version_id, made_by, request_id, body_sha256, validate_only)

    def start_transform(
        self,
        parent: str,
        version_id: str,
        spec: TransformSpec,
        *,
        request_id: str,
        body_sha256: str,
        validate_only: bool,
    ) -> JobRecord:
        """Start a transform, like `start_import`.

        Raises `InvalidArgument` naming the step, `NotFound`, `FailedPrecondition` (the source is not ACTIVE) and
        `AlreadyExists`.
        """

        def made_by() -> dict[str, Any]:
            transform_spec.check(spec)
            source = self._versions.active(spec.source, "source").reader.version
            check_transform(spec, source.manifest, self._custom_allowed)
            return {"transform": replace(spec, source_sha256=source.manifest_sha256).as_record()}

        return self._start(parent, version_id, made_by, request_id, body_sha256, validate_only)

    def start_predict(
        self,
        parent: str,
        version_id: str,
        spec: PredictSpec,
        *,
        request_id: str,
        body_sha256: str,
        validate_only: bool,
    ) -> JobRecord:
        """Start a prediction, like `start_import`.

        Raises `InvalidArgument` naming the column or field, `NotFound`, `FailedPrecondition` (source or checkpoint),
        `DataLoss` (the checkpoint's manifest) and `AlreadyExists`.
        """

        def made_by() -> dict[str, Any]:
            transform_spec.check_prediction(spec)
            source = self._versions.active(spec.source, "source").reader.version
            checkpoint = found_checkpoint(self._store, spec.checkpoint)
            check_predict(self._store, spec, source, checkpoint, self._custom_allowed, self._own_code)
            return {"predict": replace(spec, source_sha256=source.manifest_sha256, checkpoint=checkpoint).as_record()}

        return self._start(parent, version_id, made_by, request_id, body_sha256, validate_only)

    def _start(
        self,
        parent: str,
        version_id: str,
        made_by: Callable[[], dict[str, Any]],
        request_id: str,
        body_sha256: str,
        validate_only: bool,
    ) -> JobRecord:
        """Start a job; `made_by` checks the request and return the job's spec."""
        request_id = names.check_request_id("request_id", request_id)
        # Before the checks: the resources of a repeated call may have been deleted since its first answer.
        if not validate_only and (first := self._first_answer(parent, request_id, body_sha256)):
            return first
        spec = {**made_by(), "request_id": request_id}
        if version_id:
            names.check_id("version_id", version_id)
        dataset = self._datasets.get(parent, "parent")

        def job(name: str) -> JobRecord:
            now = time.time()
            return JobRecord(
                uid=uid_of(request_id, name),
                name=name,
                spec=spec,
                create_time=now,
                update_time=now,
                body_sha256=body_sha256,
            )

        if validate_only:
            name = f"{parent}/versions/{version_id or self._next_id(parent)}"
            if self._jobs.find(name):
                raise already_exists(name)
            return job(name)
        made = self._claim_and_create(job, parent, version_id, request_id, body_sha256)
        self._keep_unless_dataset_is_gone(dataset, made)
        self._wake()
        return made

    def _claim_and_create(
        self, make: Callable[[str], JobRecord], parent: str, version_id: str, request_id: str, body_sha256: str
    ) -> JobRecord:
        for turn in range(1, MAX_TURNS + 1):
            name = f"{parent}/versions/{version_id or self._next_id(parent)}"
            with claimed(self._store, SERVICE, request_id, body_sha256, name, turn) as claim:
                if claim.repeated and not version_id and self._is_anothers(request_id, claim.name):
                    continue
                try:
                    return self._create(make, claim.name)
                except AlreadyExists:
                    if version_id:
                        raise
                    # Another job took the free id meanwhile.
        raise Conflict(
            f"version_id: other jobs took each of the {MAX_TURNS} ids that were free in {parent}; choose an id",
            reason="NO_FREE_ID",
            metadata={"resource": parent},
        )

    def _keep_unless_dataset_is_gone(self, dataset: Dataset, job: JobRecord) -> None:
        """Cancel the job if its dataset was deleted meanwhile.

        A deletion writes its tombstone and then looks for versions again; a creation writes the version and then looks
        at the dataset. So one of them sees the other.
        """
        try:
            self._datasets.check_still_there(dataset.name, dataset.uid)
        except NotFound:
            self._jobs.cancel(job.name, job.name, uid=job.uid)
            raise

    def _create(self, make: Callable[[str], JobRecord], name: str) -> JobRecord:
        job = make(name)
        # Of repeated or concurrent calls, all get the result of the first.
        if first := self._jobs.made_by(job.spec["request_id"], name):
            return first
        record_operation(self._store, job)
        try:
            with referring(self._store, job):
                made = self._jobs.create(job.name, job)
        except MillraceError as error:
            if isinstance(error, OUTCOME_UNKNOWN):
                raise
            if first := self._jobs.made_by(job.spec["request_id"], name):
                return first
            withdraw_operation(self._store, job)
            if first := self._jobs.made_by(job.spec["request_id"], name):
                # An equal call created it just then. Each call checks after its write, so that the job keeps its
                # operation.
                record_operation(self._store, job)
                return first
            raise
        with suppress(*STORE_OUTAGES):  # it exists, unless an equal call has withdrawn it
            record_operation(self._store, made)
        return made

    def _first_answer(self, parent: str, request_id: str, body_sha256: str) -> JobRecord | None:
        turn = 1
        while name := claimed_before(self._store, SERVICE, request_id, body_sha256, turn):
            if job := self._jobs.made_by(request_id, name):
                self._datasets.get(parent, "parent")
                return job
            turn += 1
        return None

    def _is_anothers(self, request_id: str, name: str) -> bool:
        """Return whether the id belongs to another request, even if that version was deleted since.

        Of several repeated calls, one may have gone on to the next id.
        """
        newest = self._jobs.newest(name)
        return newest is not None and newest.spec.get("request_id") != request_id

    def _next_id(self, parent: str) -> str:
        found = (NUMBERED_ID.fullmatch(folder) for folder in self._store.folders(f"{parent}/versions"))
        taken = {int(match[1]) for match in found if match}
        following = 1 + max(taken, default=0)
        if following > LAST_NUMBER:
            following = next(number for number in itertools.count(1) if number not in taken)
        return f"v{following}"


# --- References ---
# The references of a job that creates a version: the versions, uploads and checkpoints that it reads, and the version
# that it follows.


def with_base(versions: Versions, parent: str, spec: ImportSpec) -> ImportSpec:
    """Return the spec with the digest of its base.

    Raises `InvalidArgument`, `NotFound` and `FailedPrecondition` unless the import may follow it.
    """
    base = spec.base
    if base is None:
        return spec
    if not base.version.startswith(f"{parent}/"):
        raise invalid_field("base.version", base.version, f"name a version of {parent}")
    found = versions.active(base.version, "base.version")
    if base.mode == "append":
        _check_appendable(found, spec)
    return replace(spec, base=replace(base, manifest_sha256=found.reader.version.manifest_sha256))


@contextmanager
def referring(store: ObjectStore, job: JobRecord) -> Iterator[None]:
    """Mark what `job` reads as used, and claim its place after its base, before the body creates it.

    If the body is refused, the marks are removed. Raises `NotFound` and `FailedPrecondition` if a resource was deleted,
    and `Conflict` if another version follows the base.
    """
    with ExitStack() as marks:
        if "transform" in job.spec:
            source = TransformSpec.from_record(job.spec["transform"]).source
            marks.enter_context(using(store, source, IMPORT_KIND, job.uid, job.name))
        elif "predict" in job.spec:
            predict = PredictSpec.from_record(job.spec["predict"])
            marks.enter_context(using(store, predict.source, IMPORT_KIND, job.uid, job.name))
            marks.enter_context(_using_checkpoint(store, predict.checkpoint, job))
        else:
            spec = ImportSpec.from_record(job.spec["import"])
            if spec.base:
                marks.enter_context(using(store, spec.base.version, IMPORT_KIND, job.uid, job.name))
            for upload in _uploads(spec):
                marks.enter_context(using_upload(store, upload, IMPORT_KIND, job.uid, job.name))
            if spec.base:
                base = Jobs(store, IMPORT_KIND).get(spec.base.version, spec.base.version)
                marks.enter_context(following(store, base, job))
        yield


@contextmanager
def _using_checkpoint(store: ObjectStore, checkpoint: CheckpointRef, job: JobRecord) -> Iterator[None]:
    with checkpoint_references.using(
        store, "checkpoint", checkpoint.name, IMPORT_KIND, job.uid, job.name, of_programs=True
    ) as entry:
        if entry.folder != checkpoint.folder:
            raise FailedPrecondition(
                f"checkpoint: {checkpoint.name} was written again just now; ask again",
                reason="CHECKPOINT_REPLACED",
                metadata={"resource": checkpoint.name},
            )
        yield


def _uploads(spec: ImportSpec) -> list[str]:
    sources = [parse_uri(uri) for source in spec.sources for uri in source.uris.values()]
    return sorted({source.name for source in sources if isinstance(source, UploadSource)})


def _check_appendable(base: ActiveVersion, spec: ImportSpec) -> None:
    name, manifest = base.job.name, base.reader.version.manifest
    if manifest.transforms:
        raise FailedPrecondition(
            f"base.version: {name} was made by a transform, which new rows have not gone through; append to "
            f"{manifest.parents[0].version} and transform that",
            reason="BASE_WAS_TRANSFORMED",
            metadata={"resource": name},
            fields=[("base.version", "name a version that was imported")],
        )
    splits = {split.name for split in manifest.splits}
    taken = [
        (f"hold_outs[{index}].to_split", out.to_split, f"{name} has this split; choose another")
        for index, out in enumerate(spec.hold_outs)
        if out.to_split in splits
    ]
    if taken:
        raise invalid_fields(taken)


# --- Index of versions ---

DATASETS, VERSIONS = "datasets", "versions"
# A longer message is not kept in the index. A leaf has up to 128 entries.
SHOWN_BYTES = 8 * 1024


class VersionNames:
    """The names of all versions that ever were, see `shared.jobs.index.JobNames`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def all(self) -> Sequence[str]:
        folders = ((one, self._store.folders(_parent(one))) for one in self._store.folders(DATASETS))
        return sorted(f"{_parent(dataset)}/{version}" for dataset, versions in folders for version in versions)

    def after(self, name: str, most: int) -> Sequence[str]:
        found: list[str] = []
        # Beyond every key that begins with the name and a slash.
        at = f"{name}0" if name.count("/") == 3 else DATASETS
        while len(found) < most and (keys := self._store.keys_after(DATASETS, at)):
            for key in keys:
                parts = key.split("/")
                if key <= at or len(found) == most or len(parts) < 4:
                    continue
                _, dataset, folder, version = parts[:4]
                if folder == VERSIONS and len(parts) > 4:
                    found.append(f"{_parent(dataset)}/{version}")
                    at = f"{found[-1]}0"
                elif f"{folder}/" < f"{VERSIONS}/":
                    at = _parent(dataset)
                elif folder != VERSIONS:
                    at = f"{DATASETS}/{dataset}0"
            if len(keys) < KEYS_A_LISTING:
                break
            at = max(at, keys[-1])
        return found


def open_version_index(store: ObjectStore) -> JobIndex:
    versions = Versions(store, Jobs(store, IMPORT_KIND), Datasets(store))
    return JobIndex(store, IMPORT_KIND, DATASETS, lambda job: _shown(versions, job), names=VersionNames(store))


def _shown(versions: Versions, job: JobRecord) -> dict[str, Any]:
    version = versions.listed(job)
    if not isinstance(version, ActiveVersion):
        return {}
    message = version_message(version, brief=True).SerializeToString()
    return {SHOWN: base64.b64encode(message).decode()} if len(message) <= SHOWN_BYTES else {}


def _parent(dataset: str) -> str:
    return f"{DATASETS}/{dataset}/{VERSIONS}"
