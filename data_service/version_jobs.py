"""Starting the durable jobs that make versions: imports, transforms and predictions."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from data_service.datasets import SERVICE, Datasets
from data_service.domain import import_spec, predict_spec, transform_spec
from data_service.domain.dataset import Dataset
from data_service.domain.import_spec import ImportSpec
from data_service.domain.predict_spec import PredictSpec
from data_service.domain.transform_spec import TransformSpec
from data_service.operation_pointers import record_operation, withdraw_operation
from data_service.predicting.asking import check_predict, found_checkpoint
from data_service.references import referring, with_base
from data_service.sources.source_files import s3_of
from data_service.transforming.checking import check_transform
from data_service.versions import Versions
from shared import names
from shared.errors import AlreadyExists, MillraceError, NotFound, already_exists
from shared.jobs import JobRecord, Jobs
from shared.requests import OUTCOME_UNKNOWN, claimed, claimed_before
from shared.storage import ObjectStore


class VersionJobs:
    """`import_roots` are the folders below which file:// sources may lie, `custom_allowed` the functions that custom
    steps may name; `nudge` is called when a job was made."""

    def __init__(
        self,
        store: ObjectStore,
        jobs: Jobs,
        datasets: Datasets,
        versions: Versions,
        *,
        import_roots: Sequence[PurePosixPath],
        custom_allowed: Collection[str],
        nudge: Callable[[], None] = lambda: None,
    ) -> None:
        self._nudge = nudge
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
        """Makes the import durable and returns at once. With `validate_only` the job has no uid and is not written.

        Raises `InvalidArgument`, `NotFound` (the dataset, the base or an upload), `FailedPrecondition` (the base),
        `Conflict` (the base has a successor) and `AlreadyExists`.
        """

        def made_by() -> dict[str, Any]:
            import_spec.check(spec, self._import_roots, s3=s3_of(self._store) is not None)
            return {
                "import": with_base(self._versions, parent, spec).as_record(),
                # The attempt runs on a node of Ray, whose environment is not ours.
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
        """As `start_import`. Raises `InvalidArgument` naming the step, `NotFound`, `FailedPrecondition` (the source is
        not ACTIVE) and `AlreadyExists`."""

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
        """As `start_import`. Raises `InvalidArgument` naming the column or field, `NotFound`, `FailedPrecondition`
        (source or checkpoint), `DataLoss` (the checkpoint's manifest) and `AlreadyExists`."""

        def made_by() -> dict[str, Any]:
            predict_spec.check(spec)
            source = self._versions.active(spec.source, "source").reader.version
            checkpoint = found_checkpoint(self._store, spec.checkpoint)
            check_predict(self._store, spec, source, checkpoint, self._custom_allowed)
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
        """`made_by` checks what the version shall be made of."""
        request_id = names.check_request_id("request_id", request_id)
        # Before the checks: what a repeated call names may have been deleted since it was first answered.
        if not validate_only and (first := self._first_answer(parent, request_id, body_sha256)):
            return first
        spec = {**made_by(), "request_id": request_id}
        if version_id:
            names.check_id("version_id", version_id)
        dataset = self._datasets.get(parent, "parent")

        def job(name: str) -> JobRecord:
            now = time.time()
            return JobRecord(
                uid=_uid(request_id, name),
                name=name,
                spec=spec,
                create_time=now,
                update_time=now,
                body_sha256=body_sha256,
            )

        while True:
            name = f"{parent}/versions/{version_id or self._next_id(parent)}"
            if validate_only:
                if self._jobs.find(name):
                    raise already_exists(name)
                return job(name)
            try:
                with claimed(self._store, SERVICE, request_id, body_sha256, name) as claim:
                    made = self._create(job, claim.name)
            except AlreadyExists:
                # Another job took the next free id in between.
                if version_id or not self._jobs.find(name):
                    raise
                continue
            self._keep_unless_dataset_is_gone(dataset, made)
            self._nudge()
            return made

    def _keep_unless_dataset_is_gone(self, dataset: Dataset, job: JobRecord) -> None:
        """Whoever deletes a dataset says so and then looks for versions again; whoever makes one does it the other way
        round."""
        try:
            self._datasets.check_still_there(dataset.name, dataset.uid)
        except NotFound:
            self._jobs.cancel(job.name, job.name)
            raise

    def _create(self, make: Callable[[str], JobRecord], name: str) -> JobRecord:
        job = make(name)
        # A repeated call, or one of two at the same time, is answered with what the first made.
        if first := self._made_by(job.spec["request_id"], name):
            return first
        record_operation(self._store, job)
        try:
            with referring(self._store, job):
                return self._jobs.create(job.name, job)
        except MillraceError as error:
            if isinstance(error, AlreadyExists) and (first := self._made_by(job.spec["request_id"], name)):
                return first
            if not isinstance(error, OUTCOME_UNKNOWN):
                withdraw_operation(self._store, job)
            raise

    def _first_answer(self, parent: str, request_id: str, body_sha256: str) -> JobRecord | None:
        name = claimed_before(self._store, SERVICE, request_id, body_sha256)
        job = self._made_by(request_id, name) if name else None
        if job:
            self._datasets.get(parent, "parent")
        return job

    def _made_by(self, request_id: str, name: str) -> JobRecord | None:
        there = self._jobs.find(name) if request_id else None
        return there if there and there.spec.get("request_id") == request_id else None

    def _next_id(self, parent: str) -> str:
        taken = [re.fullmatch(r"v([1-9][0-9]{0,8})", one) for one in self._store.folders(f"{parent}/versions")]
        return f"v{1 + max((int(match[1]) for match in taken if match), default=0)}"


def _uid(request_id: str, name: str) -> str:
    """The same for a call that is repeated, so that what the first one claimed and marked is the second one's too."""
    return uuid.uuid5(uuid.UUID(request_id), name).hex if request_id else uuid.uuid4().hex
