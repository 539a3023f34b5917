"""Puts a committed dataset version into a store, as an import would, for suites that run without the data service."""

from __future__ import annotations

import tempfile
import time
import uuid
from pathlib import Path

import numpy as np
import pyarrow as pa

from shared.dataset_version import SplitWriter
from shared.dataset_version.manifest import Column, Manifest, Split, sha256_hex, shape_of, tensor_array, tensor_field
from shared.dataset_version.pages import manifest_with
from shared.dataset_version.version import IMPORT_KIND
from shared.jobs import JobRecord, Jobs
from shared.jobs.transitions import begin_attempt, succeed
from shared.storage import ObjectStore
from train_service.loading.preprocessing import Array

SCHEMA = pa.schema([tensor_field("image", pa.uint8(), (28, 28)), pa.field("label", pa.int64())])


def columns_of(schema: pa.Schema) -> list[Column]:
    return [Column(name=field.name, arrow_type=str(field.type), shape=shape_of(field.type)) for field in schema]


def commit_version(
    store: ObjectStore, name: str, splits: dict[str, tuple[Array, Array]], schema: pa.Schema = SCHEMA
) -> None:
    """`splits` maps a name to images uint8 (rows, 28, 28), or as `schema` has them, and labels int64 (rows,)."""
    folder = f"{name}/data/a00001-{uuid.uuid4().hex[:8]}"
    files, described, first = [], [], 0
    with tempfile.TemporaryDirectory() as scratch:
        for split, (images, labels) in splits.items():
            writer = SplitWriter(store, folder, Path(scratch), schema=schema, split=split, first_row_id=first)
            writer.write(pa.Table.from_arrays([tensor_array(images), pa.array(labels, pa.int64())], schema=schema))
            files += writer.close()
            described.append(Split(name=split, first_row_id=first, row_count=len(labels)))
            first += len(labels)
    columns = columns_of(schema)
    unpaged = Manifest(columns=columns, splits=described, files=[], ingested=columns)
    manifest = manifest_with(unpaged, store, folder, files).to_json()
    store.put(f"{folder}/manifest.json", manifest)
    jobs = Jobs(store, IMPORT_KIND)
    now = time.time()
    job = JobRecord(uid=uuid.uuid4().hex, name=name, spec={}, create_time=now, update_time=now)
    jobs.create(name, job)
    result = {"manifest": f"{folder}/manifest.json", "manifest_sha256": sha256_hex(manifest)}
    jobs.transition(name, lambda job: begin_attempt(job, time.time()), attempt=1)
    jobs.transition(name, lambda job: succeed(job, result, time.time()), attempt=1)
    for live in jobs.live():
        jobs.forget(live)


def striped_digits(rows: int, seed: int = 0) -> tuple[Array, Array]:
    """Noisy images uint8 (rows, 28, 28) whose label 0..9 is the place of a bright stripe: learnt within an epoch."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 10, rows)
    images = generator.integers(0, 60, (rows, 28, 28))
    for row, label in enumerate(labels):
        images[row, :, 2 * label + 4 : 2 * label + 6] += 180
    return images.astype(np.uint8), labels.astype(np.int64)
