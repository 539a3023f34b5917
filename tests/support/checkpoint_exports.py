"""Committed checkpoints with real files, of a model and of a program, to be handed out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from shared.checkpoint import CheckpointEntry, CheckpointRegistry, write_checkpoint
from shared.checkpoint.format import ProgramContent, ProgramFile, write_manifest
from shared.storage import ObjectStore
from tests.support.checkpoint_samples import content
from tests.support.training_records import JOB

BUNDLE = "codeBundles/" + "a" * 64
# The second ends within its third piece.
MODEL_FILES = {"model.safetensors": bytes(range(256)) * 40, "optimizer.safetensors": b"momenta " * (9 << 17)}
PROGRAM_FILES = {"model.pt": b"weights" * 1000, "nested/état.json": b"{}", "empty": b""}


def commit_model(
    store: ObjectStore, step: int = 30, files: Mapping[str, bytes] = MODEL_FILES, **metrics: float
) -> CheckpointEntry:
    folder = f"{JOB}/checkpoints/data/step-{step}-a1"
    digest, size_bytes = write_checkpoint(store, folder, content(step=step), files)
    return _committed(store, f"step-{step:08d}", folder, digest, size_bytes, step, metrics)


def commit_program(store: ObjectStore, report: int = 3, files: Mapping[str, bytes] = PROGRAM_FILES) -> CheckpointEntry:
    folder = f"{JOB}/checkpoints/data/report-{report}-a1"
    named = []
    for rank, (path, data) in enumerate(sorted(files.items())):
        named.append(ProgramFile(path=path, rank=rank, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))
        store.put(f"{folder}/{named[-1].object}", data)
    reported = ProgramContent(
        training_job=JOB,
        code_bundle=BUNDLE,
        entry="train:loop",
        report=report,
        epoch=0,
        seed=0,
        world_size=len(files),
        optimizer_steps=0,
        metrics={},
        files=named,
    )
    digest, size_bytes = write_manifest(store, folder, reported)
    return _committed(store, f"report-{report:08d}", folder, digest, size_bytes, report, {}, code_bundle=BUNDLE)


def _committed(
    store: ObjectStore,
    name: str,
    folder: str,
    digest: str,
    size_bytes: int,
    step: int,
    metrics: Mapping[str, float],
    code_bundle: str = "",
) -> CheckpointEntry:
    entry = CheckpointEntry(
        name=f"{JOB}/checkpoints/{name}",
        folder=folder,
        manifest_sha256=digest,
        step=step,
        epoch=0,
        attempt=1,
        size_bytes=size_bytes,
        create_time=1.0,
        metrics=dict(metrics),
        code_bundle=code_bundle,
    )
    CheckpointRegistry(store, JOB).commit(entry)
    return entry
