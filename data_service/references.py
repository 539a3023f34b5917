"""What a job that makes a version refers to: versions, uploads and checkpoints that it reads, and the version that it
follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from data_service.domain.import_spec import ImportSpec
from data_service.domain.predict_spec import CheckpointRef, PredictSpec
from data_service.domain.transform_spec import TransformSpec
from data_service.domain.uris import UploadSource, parse_uri
from data_service.successors import following
from data_service.uploads.record import using as using_upload
from data_service.versions import ActiveVersion, Versions
from shared.checkpoint import users as checkpoint_users
from shared.dataset_version.users import using
from shared.dataset_version.version import IMPORT_KIND
from shared.errors import FailedPrecondition, invalid_field, invalid_fields
from shared.jobs import JobRecord, Jobs
from shared.storage import ObjectStore


def with_base(versions: Versions, parent: str, spec: ImportSpec) -> ImportSpec:
    """The spec with the digest of its base. Raises `InvalidArgument`, `NotFound` and `FailedPrecondition` unless the
    import may follow it."""
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
    """Marks what `job` reads as used, and claims its place behind its base, before the body makes it. Marks that are
    left over when the body is refused are taken away.

    Raises `NotFound` and `FailedPrecondition` where something of it is gone, and `Conflict` where another version
    follows the base.
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
    with checkpoint_users.using(store, "checkpoint", checkpoint.name, IMPORT_KIND, job.uid, job.name) as entry:
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
        (f"hold_outs[{index}].to_split", one.to_split, f"{name} has this split; choose another")
        for index, one in enumerate(spec.hold_outs)
        if one.to_split in splits
    ]
    if taken:
        raise invalid_fields(taken)
