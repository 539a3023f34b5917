"""What a job stands on stays: the dataset version and the checkpoint that it starts from while it is at work, the
bundle of a user's own code until the job is deleted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from shared.checkpoint import references as checkpoint_references
from shared.code_bundle import release_bundle, using_bundle
from shared.dataset_version import DatasetVersion
from shared.dataset_version.version import unmark, using
from shared.jobs import JobRecord
from shared.storage import ObjectStore
from train_service.checkpoints.fine_tuning import FIELD
from train_service.domain.spec import TrainingSpec


@contextlib.contextmanager
def using_inputs(store: ObjectStore, kind: str, job: JobRecord, spec: TrainingSpec) -> Iterator[DatasetVersion | None]:
    """Marks what `spec` reads, and gives its version, None of a program that names none, while the body makes `job`, of
    this kind; the marks stay unless the body is refused."""
    with contextlib.ExitStack() as stack:
        version = None
        if spec.dataset_version or spec.program is None:
            version = stack.enter_context(using(store, spec.dataset_version, kind, job.uid, job.name))
        if spec.program is not None:
            stack.enter_context(using_bundle(store, spec.program.code_bundle, kind, job.uid, job.name))
        if spec.model.is_own:
            bundle, field = spec.model.code_bundle, "spec.model.code_bundle"
            stack.enter_context(using_bundle(store, bundle, kind, job.uid, job.name, field=field))
        if spec.initial_checkpoint:
            mark = checkpoint_references.using(store, FIELD, spec.initial_checkpoint, kind, job.uid, job.name)
            stack.enter_context(mark)
        yield version


def release_inputs(store: ObjectStore, kind: str, uid: str, training: Mapping[str, Any]) -> None:
    """For a job that is being deleted: its marks count for nothing, but they would be read for ever. `training` is the
    plain form of what it read."""
    if version := training.get("dataset_version"):
        unmark(store, version, kind, uid)
    if program := training.get("program"):
        release_bundle(store, program["code_bundle"], kind, uid)
    if bundle := training.get("model", {}).get("code_bundle"):
        release_bundle(store, bundle, kind, uid)
    if initial := training.get("initial_checkpoint"):
        checkpoint_references.release(store, initial, kind, uid)
