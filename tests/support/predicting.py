"""Checkpoints of small models, and predictions with them as jobs."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save

from data_service.domain.transform_spec import CheckpointRef, PredictSpec
from data_service.transforms.checking import found_checkpoint
from data_service.transforms.predict_job import run_predict
from shared.checkpoint import CheckpointContent, CheckpointEntry, CheckpointRegistry, write_checkpoint
from shared.checkpoint.format import WEIGHTS, ProgramContent, ProgramFile, write_manifest
from shared.dataset_version.manifest import tensor_array
from shared.dataset_version.version import IMPORT_KIND
from shared.jobs import JobRecord, Jobs
from shared.jobs.attempt import run_attempt
from shared.jobs.transitions import begin_attempt
from shared.model_spec import CLASSIFICATION, ModelSpec, TargetScaling
from shared.models import build_model
from shared.storage import ObjectStore
from tests.support.transforming import SOURCE, create_job, run_here
from tests.support.versions import columns_of

JOB = "trainingJobs/marks"
CHECKPOINT = f"{JOB}/checkpoints/c1"
CLASS_NAMES = ("low", "middle", "high")
TABLE_SCHEMA = pa.schema([("id", pa.int64()), ("x", pa.float64()), ("mark", pa.string())])
# What a version that training used had gone through, and what training did then.
PREPARING: list[dict[str, Any]] = [
    {"column": "x", "standardize": {"mean": 3.0, "deviation": 2.0}},
    {"column": "mark", "oneHotEncode": {"categories": ["a", "b"]}},
]
TRAINING: list[dict[str, Any]] = [{"concat": {"columns": ["x", "mark"], "into": "features"}}]


def marks(rows: int, seed: int = 0) -> pa.Table:
    generator = np.random.default_rng(seed)
    letters = [("a", "b")[one] for one in generator.integers(0, 2, rows)]
    return pa.table([np.arange(rows), generator.normal(3, 2, rows), letters], schema=TABLE_SCHEMA)


def images(rows: int, seed: int = 0, side: int = 28) -> pa.Table:
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 256, (rows, side, side), np.uint8)
    return pa.table({"image": tensor_array(pixels), "label": generator.integers(0, 10, rows)})


def write(
    store: ObjectStore,
    *,
    name: str = CHECKPOINT,
    ingested: pa.Schema = TABLE_SCHEMA,
    transforms: Sequence[Mapping[str, Any]] = ({"steps": PREPARING}, {"steps": TRAINING}),
    input_column: str = "features",
    model: ModelSpec = ModelSpec(builder="mlp", in_channels=3, num_classes=3),  # noqa: B008 (it is immutable)
    class_names: Sequence[str] = CLASS_NAMES,
    weights: bytes | None = None,
    nan_counts: Mapping[str, int] | None = None,
    target_scaling: TargetScaling | None = None,
) -> CheckpointEntry:
    """Commit a checkpoint with seeded weights, or with these bytes for them."""
    job = name.partition("/checkpoints/")[0]
    registry = CheckpointRegistry(store, job)
    registry.fence(1)
    content = CheckpointContent(
        training_job=job,
        dataset_version="datasets/d/versions/trained-on",
        dataset_manifest_sha256="0" * 64,
        step=1,
        epoch=1,
        seed=7,
        metrics={"validation_accuracy": 0.9},
        model=model,
        ingested=columns_of(ingested),
        transforms=[dict(one) for one in transforms],
        input_column=input_column,
        class_names=class_names if model.task == CLASSIFICATION else (),
        nan_counts=nan_counts,
        target_scaling=target_scaling,
    )
    folder = f"{registry.data_folder}/{name.rpartition('/')[2]}-{uuid.uuid4().hex[:8]}"
    files = {WEIGHTS: seeded(model) if weights is None else weights}
    written = write_checkpoint(store, folder, content, files)
    return _committed(registry, name, folder, written, epoch=1, metrics=content.metrics)


def write_program(
    store: ObjectStore, bundle: str, files: Mapping[str, bytes], *, entry: str = "train:loop", name: str = CHECKPOINT
) -> CheckpointEntry:
    """Commit a checkpoint as a program of that bundle would report it."""
    job = name.partition("/checkpoints/")[0]
    registry = CheckpointRegistry(store, job)
    registry.fence(1)
    folder = f"{registry.data_folder}/{name.rpartition('/')[2]}-{uuid.uuid4().hex[:8]}"
    named = [
        ProgramFile(path=path, rank=0, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        for path, data in files.items()
    ]
    for one in named:
        store.put(f"{folder}/{one.object}", files[one.path])
    content = ProgramContent(
        training_job=job,
        code_bundle=bundle,
        entry=entry,
        report=1,
        epoch=0,
        seed=0,
        world_size=1,
        optimizer_steps=0,
        metrics={},
        files=named,
        dataset_version="datasets/d/versions/trained-on",
    )
    written = write_manifest(store, folder, content)
    return _committed(registry, name, folder, written, epoch=0, code_bundle=bundle)


def _committed(
    registry: CheckpointRegistry, name: str, folder: str, written: tuple[str, int], *, epoch: int, **others: Any
) -> CheckpointEntry:
    """The committed entry of a checkpoint whose manifest's digest and size in bytes are `written`."""
    digest, size_bytes = written
    entry = CheckpointEntry(
        name=name,
        folder=folder,
        manifest_sha256=digest,
        step=1,
        epoch=epoch,
        attempt=1,
        size_bytes=size_bytes,
        create_time=time.time(),
        **others,
    )
    registry.commit(entry)
    return entry


def seeded(model: ModelSpec) -> bytes:
    torch.manual_seed(7)
    return save(build_model(model).state_dict())


def create_prediction(store: ObjectStore, checkpoint: str = CHECKPOINT, source: str = SOURCE, **spec: Any) -> str:
    """The name of the version that the new job will make."""
    name = f"datasets/d/versions/v{uuid.uuid4().hex[:12]}"
    found = found_checkpoint(store, CheckpointRef(name=checkpoint))
    wanted = PredictSpec(source=source, checkpoint=found, **spec)
    create_job(Jobs(store, IMPORT_KIND), name, {"predict": wanted.as_record()})
    return name


def predict_here(store: ObjectStore, **spec: Any) -> JobRecord:
    """The job after its first attempt, which ran in this process."""
    name = create_prediction(store, **spec)
    jobs = Jobs(store, IMPORT_KIND)
    jobs.transition(name, lambda job: begin_attempt(job, time.time()), attempt=1)
    run_attempt(functools.partial(run_predict, run_parts=run_here), store, IMPORT_KIND, name, 1)
    return jobs.get(name, name)


def crashes(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A custom function that kills its worker over one row."""
    if 1234 in batch["id"].to_pylist():
        os.kill(os.getpid(), signal.SIGSEGV)
    return batch
