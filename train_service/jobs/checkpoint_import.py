"""Imports of weights as checkpoints.

The weights are received as a stream, read in a child process, and committed as a checkpoint.

The checkpoint belongs to a training job that has SUCCEEDED. It is listed, resolved, kept and deleted like the
checkpoint of a run.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from shared import names
from shared.checkpoint import CheckpointContent, CheckpointEntry, CheckpointRegistry
from shared.checkpoint.format import WEIGHTS, write_weights
from shared.code_bundle_registry import digest_of, using_bundle
from shared.code_packing import requirements_of_folder
from shared.dataset_version import DatasetVersion, load_version
from shared.dataset_version.manifest import Column
from shared.errors import (
    STORE_OUTAGES,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    MillraceError,
    ResourceExhausted,
    already_exists,
    invalid_field,
    not_found,
)
from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.transitions import begin_attempt, fail, succeed
from shared.resource_log import claimed, claimed_before, uid_of
from shared.storage import ObjectStore
from shared.transforms.records import only_tensor
from train_service.domain import spec_rules
from train_service.domain.spec import TrainingSpec
from train_service.jobs.deletion import Deletions
from train_service.jobs.own_code import Limits, ask_in_child, unpack_bundle
from train_service.jobs.training_jobs import COLLECTION, JobView, TrainingJobs
from train_service.jobs.weights_child import REPORT, take_report, take_weights
from train_service.loading.preprocessing import (
    Preprocessing,
    check_padding,
    check_prepared,
    class_names,
    ingested_columns,
    with_vocabulary,
)
from train_service.records.event_log import TRAIN_KIND

logger = logging.getLogger(__name__)

MAX_CHUNK_BYTES = 1024 * 1024
# Limit for all files of one import, which are on the service's disk twice for a while.
MAX_BYTES = 64 * 1024**3
MAX_FILES = 1_000
MAX_PATH = 240
# The runner of the job's only attempt. No reconciler manages the job.
RUNNER = "import"
IMPORTED = "imported"
MAX_SHOWN = 8
GIB = 1024**3
# Memory that building a model takes besides its weights, and the slowest expected disk.
BASE_MEMORY_BYTES = 4 * GIB
BASE_S, BYTES_PER_S = 90.0, 25 * 1024**2
# On a busy machine, the child may take this many times as long.
BUSY_FACTOR = 4


@dataclass(frozen=True)
class SentFile:
    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class CheckpointImportRequest:
    """The request in the first message.

    `spec` is the specification of the checkpoint's job. `input_column` is the column of an input tensor, or None if
    `spec.dataset_version` has the columns. `names` is `NameMap` as plain values.
    """

    job_id: str
    spec: TrainingSpec
    input_column: Column | None
    class_names: Sequence[str]
    names: Mapping[str, Any]
    files: Sequence[SentFile]
    request_id: str
    digest: str
    validate_only: bool


@dataclass(frozen=True)
class Imported:
    """The result of an import. `report` is written by `weights_child`. Without `view` no job was created."""

    report: Mapping[str, Any]
    view: JobView | None = None


@dataclass(frozen=True)
class _Home:
    """The checkpoint's description of its model's rows."""

    ingested: Sequence[Column]
    transforms: Sequence[dict[str, Any]]
    class_names: Sequence[str]
    manifest_sha256: str = ""


class CheckpointImports:
    """Imports of checkpoints.

    `spool` is the folder for incoming files; the default is the system's folder. `limits` are the child's limits; the
    default follows from the size of the files.
    """

    def __init__(
        self,
        store: ObjectStore,
        training: TrainingJobs,
        deletions: Deletions,
        spool: Path | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._store = store
        self._training = training
        self._deletions = deletions
        self._jobs = Jobs(store, TRAIN_KIND)
        self._spool = spool
        self._limits = limits

    async def receive(self, parts: AsyncIterator[CheckpointImportRequest | bytes]) -> Imported:
        """Receive files and import them.

        One chunk is in memory at a time.

        Raises the errors that `ImportCheckpoint` lists. After any error, and if the caller disconnects, no checkpoint
        is created and the spooled files are removed.
        """
        header = await anext(parts, None)
        if not isinstance(header, CheckpointImportRequest):
            raise invalid_field("header", None, "send it first, then the chunks")
        if first := await asyncio.to_thread(self._first_answer, header):
            return first
        request, home = await asyncio.to_thread(self._checked, header)
        with tempfile.TemporaryDirectory(
            prefix="millrace-import-", dir=self._spool, ignore_cleanup_errors=True
        ) as made:
            folder = Path(made)
            _check_capacity(folder, request.files)
            (folder / "files").mkdir()
            await _spool_files(request.files, parts, folder / "files")
            return await asyncio.to_thread(self._finish, request, home, folder)

    def sources(self, name: str) -> dict[str, Any]:
        """Return `files` and `report` of an imported job. Raises `InvalidArgument` and `NotFound`."""
        names.parse("name", name, f"{COLLECTION}/{{j}}")
        imported: dict[str, Any] | None = self._jobs.get(name, name).spec.get("import")
        if imported is None:
            raise not_found(name, "it was trained, not imported")
        return imported

    def _first_answer(self, request: CheckpointImportRequest) -> Imported | None:
        names.check_id("training_job_id", request.job_id)
        request_id = names.check_request_id("request_id", request.request_id)
        if request.validate_only:
            return None
        name = claimed_before(self._store, TRAIN_KIND, request_id, request.digest)
        job = self._jobs.made_by(request_id, name) if name else None
        return self._answer(job) if job else None

    def _answer(self, job: JobRecord) -> Imported:
        if job.state is not JobState.SUCCEEDED or "import" not in job.spec:
            raise FailedPrecondition(
                f"{job.name} is {job.state}: the import that began it did not end; cancel and delete it, then import "
                "with a new request_id",
                reason="IMPORT_CUT_OFF",
                metadata={"resource": job.name},
            )
        return Imported(job.spec["import"]["report"], self._training.get(job.name))

    def _checked(self, request: CheckpointImportRequest) -> tuple[CheckpointImportRequest, _Home]:
        """Check the header before any bytes are received.

        Return the request with its specification completed: by the caller's own model, or by the tokenizer of a text
        model's input.
        """
        if not request.validate_only and self._training.exists(f"{COLLECTION}/{request.job_id}"):
            raise already_exists(f"{COLLECTION}/{request.job_id}")
        _check_files(request.files)
        spec = request.spec
        # An import has neither epochs nor a batch size.
        spec_rules.check(replace(spec, epochs=1, global_batch_size=2))
        if (request.input_column is None) == (not spec.dataset_version):
            raise invalid_field("spec.input", spec.dataset_version, "give either input or dataset_version")
        columns: Sequence[Column]
        version: DatasetVersion | None = None
        if request.input_column is not None:
            columns = [request.input_column]
        else:
            names.parse("spec.dataset_version", spec.dataset_version, "datasets/{d}/versions/{v}")
            version = load_version(self._store, spec.dataset_version)
            columns = version.columns
        prepared = check_prepared(spec, columns)
        if spec.model.is_own:
            spec = self._training.own_models.settled_for_weights(spec, prepared.shape)
            spec_rules.check(replace(spec, epochs=1, global_batch_size=2))
        else:
            if version is not None:
                spec = with_vocabulary(spec, version)
            self._training.check_outputs(spec, only_tensor(prepared))
            check_padding(spec)
        if version is None:
            home = _Home(columns, [], request.class_names)
        else:
            has_label = any(column.name == spec.label_column for column in columns)
            named = request.class_names or (class_names(spec, version) if has_label else ())
            home = _Home(ingested_columns(version), version.manifest.transforms, named, version.manifest_sha256)
        if request.class_names and len(request.class_names) != spec.model.num_classes:
            remedy = f"name all {spec.model.num_classes} classes, or none"
            raise invalid_field("spec.class_names", f"{len(request.class_names)} names", remedy)
        transform = Preprocessing(spec, columns).config
        return replace(request, spec=spec), replace(home, transforms=[*home.transforms, transform])

    def _finish(self, request: CheckpointImportRequest, home: _Home, folder: Path) -> Imported:
        report = self._read(request, folder)
        problem = _problem(report, allow_non_finite=request.spec.allow_non_finite)
        report["fits"] = problem is None
        if request.validate_only:
            return Imported(report)
        if problem is not None:
            raise problem
        job = self._new_job(request, report)
        with (
            claimed(self._store, TRAIN_KIND, request.request_id, request.digest, job.name) as claim,
            self._using_code(job, request.spec),
        ):
            if claim.repeated and (first := self._jobs.made_by(request.request_id, claim.name)):
                return self._answer(first)
            made = self._jobs.create(job.name, job)
            # The attempt number must be above those of deleted jobs of this name.
            job = self._jobs.transition(
                made.name, lambda newest: begin_attempt(newest, time.time()), attempt=made.attempt + 1
            )
            try:
                self._commit(job, request, home, folder / WEIGHTS)
            except BaseException as error:
                self._take_back(job, error)
                raise
        return Imported(report, self._training.get(job.name))

    @contextmanager
    def _using_code(self, job: JobRecord, spec: TrainingSpec) -> Iterator[None]:
        """Mark the bundle of the caller's own model as used by `job`, which the body creates."""
        if not spec.model.is_own:
            yield
            return
        with using_bundle(
            self._store, spec.model.code_bundle, TRAIN_KIND, job.uid, job.name, field="spec.model.code_bundle"
        ):
            yield

    def _read(self, request: CheckpointImportRequest, folder: Path) -> dict[str, Any]:
        work = folder / "work"
        work.mkdir()
        model = request.spec.model
        question: dict[str, Any] = {
            "weights": {
                "files": str(folder / "files"),
                "names": dict(request.names),
                "model": replace(model, task=request.spec.task).as_config(),
                "allow_non_finite": request.spec.allow_non_finite,
                "report": str(work / REPORT),
                "output": str(work / WEIGHTS),
            }
        }
        if model.is_own:
            code = folder / "code"
            unpack_bundle(self._store, digest_of("spec.model.code_bundle", model.code_bundle), code)
            question["weights"]["folder"] = str(code)
            module, _, function = model.entry.partition(":")
            question |= {"folder": str(code), "module": module, "function": function}
        size_bytes = sum(file.size_bytes for file in request.files)
        limits = self._limits or Limits(
            # Files are mapped, so they count as memory once they are read.
            memory_bytes=BASE_MEMORY_BYTES + 2 * size_bytes,
            cpu_s=BASE_S + size_bytes / BYTES_PER_S,
            idle_s=BASE_S + size_bytes / BYTES_PER_S,
            wall_s=BUSY_FACTOR * (BASE_S + size_bytes / BYTES_PER_S),
            # float16 weights are written as float32, which takes twice the bytes.
            file_bytes=4 * GIB + 2 * size_bytes,
        )
        with (
            self._packages(Path(question["folder"]) if model.is_own else None) as packages,
            self._training.own_models.import_place() if model.is_own else nullcontext(),
        ):
            answer = ask_in_child({**question, "packages": str(packages or "")}, work, limits)
        if problem := answer["problem"]:
            if model.is_own and answer.get("field"):
                raise invalid_field("spec.model.entry", model.entry, problem)
            raise invalid_field("header.files", request.files[0].path, problem)
        try:
            report = take_report(work)
            if _problem(report, allow_non_finite=request.spec.allow_non_finite) is None:
                take_weights(work, report, folder / WEIGHTS)
        except ValueError as error:
            if not model.is_own:
                raise Internal(f"the child that reads weights left no answer: {error}") from error
            logger.warning("the code of %s changed the answer of its check: %s", model.entry, error)
            remedy = "its code has written the answer of its check itself; leave that to the check"
            raise invalid_field("spec.model.entry", model.entry, remedy) from None
        return report

    def _packages(self, code: Path | None) -> AbstractContextManager[Path | None]:
        """Provide the folder with what the unpacked `code` requires and the image lacks."""
        requirements = requirements_of_folder(code) if code else []
        return self._training.own_models.environments.opened(requirements)

    def _new_job(self, request: CheckpointImportRequest, report: Mapping[str, Any]) -> JobRecord:
        now, name = time.time(), f"{COLLECTION}/{request.job_id}"
        imported = {"files": [asdict(file) for file in request.files], "report": dict(report)}
        return JobRecord(
            uid=uid_of(request.request_id, name),
            name=name,
            spec={"training": request.spec.as_config(), "request_id": request.request_id, "import": imported},
            body_sha256=request.digest,
            create_time=now,
            update_time=now,
            runner=RUNNER,
        )

    def _commit(self, job: JobRecord, request: CheckpointImportRequest, home: _Home, weights: Path) -> None:
        registry = CheckpointRegistry(self._store, job.name)
        registry.open_for(job.attempt, request.spec.checkpoints.ranking)
        folder = f"{registry.data_folder}/{IMPORTED}-a{job.attempt}-{uuid.uuid4().hex}"
        content = CheckpointContent(
            training_job=job.name,
            dataset_version=request.spec.dataset_version,
            dataset_manifest_sha256=home.manifest_sha256,
            step=0,
            epoch=0,
            seed=request.spec.seed,
            metrics={},
            model=replace(request.spec.model, task=request.spec.task),
            ingested=home.ingested,
            transforms=home.transforms,
            input_column=request.spec.input_column,
            class_names=home.class_names,
            imported=[asdict(file) for file in request.files],
        )
        digest, size_bytes = write_weights(self._store, folder, content, weights)
        entry = CheckpointEntry(
            name=f"{job.name}/checkpoints/{IMPORTED}",
            folder=folder,
            manifest_sha256=digest,
            step=0,
            epoch=0,
            attempt=job.attempt,
            size_bytes=size_bytes,
            create_time=time.time(),
            final=True,
            code_bundle=content.model.code_bundle,
            model_entry=content.model.entry,
        )
        registry.commit(entry)
        self._jobs.transition(job.name, lambda newest: succeed(newest, {}, time.time()))

    def _take_back(self, job: JobRecord, error: BaseException) -> None:
        """Delete a job whose import failed.

        Its checkpoint could not be committed. If the store is unavailable, the job stays.
        """
        cause = error if isinstance(error, MillraceError) else Internal("the import was cut off")
        try:
            self._jobs.transition(job.name, lambda newest: fail(newest, cause, time.time()))
            self._deletions.begin(job.name, uid=job.uid)
            self._deletions.finish(job.name)
        except (*STORE_OUTAGES, FailedPrecondition) as left:
            logger.warning("%s is left of an import that failed: %s", job.name, left.message)


def _check_files(files: Sequence[SentFile]) -> None:
    if not files:
        raise invalid_field("header.files", [], "name the files whose bytes follow")
    if len(files) > MAX_FILES:
        raise invalid_field("header.files", f"{len(files)} files", f"send at most {MAX_FILES:,}")
    seen = set()
    for index, file in enumerate(files):
        path = PurePosixPath(file.path)
        plain = file.path == "/".join(path.parts) and ".." not in path.parts and file.path.isprintable()
        if not file.path or not plain or "\\" in file.path or len(file.path.encode()) > MAX_PATH:
            remedy = f"use a relative path of at most {MAX_PATH} bytes without . and .."
            raise invalid_field(f"header.files[{index}].path", file.path, remedy)
        if file.path in seen or any(str(parent) in seen for parent in path.parents):
            raise invalid_field(
                f"header.files[{index}].path", file.path, "another file has this path, or lies above it"
            )
        seen.add(file.path)
        if file.size_bytes < 1:
            raise invalid_field(f"header.files[{index}].size_bytes", file.size_bytes, "use 1 or more")
    size_bytes = sum(one.size_bytes for one in files)
    if size_bytes > MAX_BYTES:
        raise ResourceExhausted(
            f"header.files: an import has at most {MAX_BYTES:,} bytes, not {size_bytes:,}",
            reason="IMPORT_TOO_LARGE",
            metadata={"max_size_bytes": str(MAX_BYTES)},
        )


def _check_capacity(folder: Path, files: Sequence[SentFile]) -> None:
    """Raise `ResourceExhausted` if the disk cannot hold the files and the output.

    The output of float16 files is twice as large as the files.
    """
    needed, free = 3 * sum(file.size_bytes for file in files), shutil.disk_usage(folder).free
    if needed > free:
        raise ResourceExhausted(
            f"the service's disk has {free:,} bytes free below {folder.parent} and needs {needed:,} for a while; free "
            "some, or set TMPDIR to a larger disk",
            reason="SPOOL_FULL",
            retry_after_s=30.0,
        )


async def _spool_files(
    files: Sequence[SentFile], parts: AsyncIterator[CheckpointImportRequest | bytes], folder: Path
) -> None:
    rest = memoryview(b"")
    for one in files:
        place = folder / one.path
        place.parent.mkdir(parents=True, exist_ok=True)
        digest, missing = hashlib.sha256(), one.size_bytes
        with place.open("xb") as file:
            while missing:
                if not rest:
                    part = await anext(parts, b"")
                    if isinstance(part, CheckpointImportRequest):
                        raise invalid_field("header", part.job_id, "send it once, before the chunks")
                    if len(part) > MAX_CHUNK_BYTES:
                        remedy = f"send at most {MAX_CHUNK_BYTES} bytes in a message"
                        raise invalid_field("chunk", f"{len(part)} bytes", remedy)
                    if not part:
                        remedy = f"{missing:,} of its {one.size_bytes:,} bytes did not come; send as many as it says"
                        raise invalid_field("header.files", one.path, remedy)
                    rest = memoryview(part)
                taken, rest = rest[:missing], rest[missing:]
                await asyncio.to_thread(_write, file, digest, taken)
                missing -= len(taken)
        if digest.hexdigest() != one.sha256:
            remedy = f"the bytes that came have {digest.hexdigest()}; send them again"
            raise invalid_field("header.files", f"{one.path} with SHA-256 {one.sha256}", remedy)
    beyond: CheckpointImportRequest | bytes | None = await anext(parts, None)
    if rest or beyond is not None:
        raise invalid_field("header.files", f"{len(files)} files", "more bytes came; send as many as they have")


def _write(file: Any, digest: Any, data: memoryview) -> None:
    digest.update(data)
    file.write(data)


def _problem(report: Mapping[str, Any], *, allow_non_finite: bool) -> InvalidArgument | None:
    """Return the error that the weights cause, if any.

    The error keeps them from becoming a checkpoint, and names remedies.
    """
    problems = []
    lacking = report["missing_count"] - report["missing_allowed_count"]
    if not report["fitted_count"]:
        problems.append(
            "none of the tensors has the name and shape of one of the model's; rename them by spec.names.renames"
        )
    if lacking:
        allowed = set(report["missing_allowed"])
        listed = _listed([one for one in report["missing"] if one not in allowed], lacking)
        problems.append(f"{listed} missing; name them in spec.names.allow_missing to start them anew")
    if report["unexpected_count"]:
        listed = _listed(report["unexpected"], report["unexpected_count"])
        problems.append(f"{listed} unexpected; rename them by spec.names.renames, or name them in spec.names.drop")
    if report["misfits_count"]:
        misfits = [
            f"{misfit['source']} ({misfit['in_file']}, the model has {misfit['in_model']})"
            for misfit in report["misfits"]
        ]
        listed = _listed(misfits, report["misfits_count"])
        problems.append(
            f"{listed} of another shape or type; drop them by spec.names.drop, and allow them to be missing"
        )
    if problems:
        return InvalidArgument(
            f"header.files: the weights do not fit the model: {'; '.join(problems)}",
            reason="WEIGHTS_DO_NOT_FIT",
            metadata={name: str(report[f"{name}_count"]) for name in ("missing", "unexpected", "misfits")},
            fields=[("header.files", problem) for problem in problems],
        )
    if report["non_finite_count"] and not allow_non_finite:
        tensors = [f"{one['source']} ({one['count']:,})" for one in report["non_finite"]]
        listed = _listed(tensors, report["non_finite_count"], verb=False)
        text = f"NaN or infinities in {listed}; set spec.allow_non_finite"
        return InvalidArgument(
            f"header.files: {text} if they are meant",
            reason="NON_FINITE_WEIGHTS",
            metadata={"tensors": str(report["non_finite_count"])},
            fields=[("header.files", text)],
        )
    return None


def _listed(shown: Sequence[str], count: int, *, verb: bool = True) -> str:
    more = f" and {count - MAX_SHOWN} more" if count > MAX_SHOWN else ""
    return ", ".join(shown[:MAX_SHOWN]) + more + ((" are" if count > 1 else " is") if verb else "")
