"""Source versions of any columns, and transforms of them as jobs."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from ray import cloudpickle

from data_service.domain.transform_spec import TransformSpec
from data_service.parallel import P, Pool, Results, Work
from data_service.transforms.job import run_transform
from data_service.version_attempt import columns_of
from shared.dataset_version import SplitWriter, VersionReader, load_version
from shared.dataset_version.manifest import DataFile, Manifest, Split, sha256_hex
from shared.dataset_version.pages import manifest_with
from shared.dataset_version.version import IMPORT_KIND
from shared.jobs import AttemptContext, JobRecord, Jobs
from shared.jobs.attempt import run_attempt
from shared.jobs.transitions import begin_attempt, succeed
from shared.storage import ObjectStore

SOURCE = "datasets/d/versions/source"
FICKLE_FOLDER = "FICKLE_FOLDER"


def commit_tables(store: ObjectStore, splits: Mapping[str, pa.Table], name: str = SOURCE, **names: list[str]) -> None:
    """A version whose splits have these rows; `names` are value names of columns."""
    folder = f"{name}/data/a00001-{uuid.uuid4().hex[:8]}"
    schema = next(iter(splits.values())).schema
    files: list[DataFile] = []
    described, first = [], 0
    with tempfile.TemporaryDirectory() as scratch:
        for split, table in splits.items():
            writer = SplitWriter(store, folder, Path(scratch), schema=schema, split=split, first_row_id=first)
            writer.write(table)
            files += writer.close()
            described.append(Split(name=split, first_row_id=first, row_count=table.num_rows))
            first += table.num_rows
    columns = columns_of(schema, names)
    manifest = Manifest(columns=columns, splits=described, files=[], ingested=columns)
    data = manifest_with(manifest, store, folder, files).to_json()
    store.put(f"{folder}/manifest.json", data)
    jobs = Jobs(store, IMPORT_KIND)
    create_job(jobs, name, {})
    result = {"manifest": f"{folder}/manifest.json", "manifest_sha256": sha256_hex(data)}
    jobs.transition(name, lambda job: begin_attempt(job, time.time()), attempt=1)
    jobs.transition(name, lambda job: succeed(job, result, time.time()), attempt=1)
    for live in jobs.live():
        jobs.forget(live)


def create_job(jobs: Jobs, name: str, spec: dict[str, Any]) -> JobRecord:
    now = time.time()
    return jobs.create(name, JobRecord(uid=uuid.uuid4().hex, name=name, spec=spec, create_time=now, update_time=now))


def create_transform(store: ObjectStore, steps: Sequence[dict[str, Any]] = (), **spec: Any) -> str:
    """The name of the version that the new job will make of `SOURCE`."""
    name = f"datasets/d/versions/v{uuid.uuid4().hex[:12]}"
    wanted = TransformSpec(source=SOURCE, transform={"steps": list(steps)}, **spec)
    create_job(Jobs(store, IMPORT_KIND), name, {"transform": wanted.as_record()})
    return name


def run_here(
    context: AttemptContext,
    folder: str,  # noqa: ARG001
    work: Work[P],
    parts: Sequence[P],
    *,
    foreign_code: bool,  # noqa: ARG001
    pool: Pool | None = None,
) -> Results[P]:
    """A `PartRunner` without Ray; parts come in an order that is not theirs, and everything travels by pickle. Of a
    pool each process has the work once, for all the parts that it is given."""
    stay = [pickle.loads(pickle.dumps(work)) for _ in range(pool.most or len(parts))] if pool else []
    for number, part in enumerate(reversed(parts)):
        context.raise_if_stopped()
        doing = stay[number % len(stay)] if stay else pickle.loads(pickle.dumps(work))
        sent = cloudpickle.loads(cloudpickle.dumps(part))  # type: ignore[no-untyped-call]
        yield part, pickle.loads(pickle.dumps(doing(sent)))


def transform_here(store: ObjectStore, steps: Sequence[dict[str, Any]] = (), **spec: Any) -> JobRecord:
    """The job after its first attempt, which ran in this process."""
    name = create_transform(store, steps, **spec)
    jobs = Jobs(store, IMPORT_KIND)
    jobs.transition(name, lambda job: begin_attempt(job, time.time()), attempt=1)
    run_attempt(functools.partial(run_transform, run_parts=run_here), store, IMPORT_KIND, name, 1)
    return jobs.get(name, name)


def rows_of(store: ObjectStore, name: str) -> dict[str, dict[str, list[Any]]]:
    """Of each split its columns with `_row_id`, as Python values."""
    reader = VersionReader(store, load_version(store, name))
    columns = reader.schema.names
    return {
        split.name: pa.concat_tables([reader.read(g, columns) for g in reader.row_groups(split.name)]).to_pydict()
        for split in reader.version.manifest.splits
    }


# Custom functions. A column `folder` names where a test and its workers leave signs for each other.


def doubles(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": [2 * n for n in batch["n"].to_pylist()]}, schema=batch.schema)


def fickle(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Add 1 to all numbers after it was called for the last time of a pass."""
    called = Path(os.environ[FICKLE_FOLDER]) / "called"
    again = called.exists()
    if 0 in batch["n"].to_pylist():
        called.touch()
    return pa.RecordBatch.from_arrays([pc.add(batch["n"], int(again))], schema=batch.schema)


def refuses(batch: pa.RecordBatch) -> pa.RecordBatch:
    if 1234 in batch["n"].to_pylist():
        raise ValueError("no such luck")
    return batch


def waits_for_go(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Tell its process, and wait for a file `go`."""
    if not len(batch):
        return batch
    folder = Path(batch["folder"][0].as_py())
    (folder / f"working-{os.getpid()}").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)
    return batch


def crashes(batch: pa.RecordBatch) -> pa.RecordBatch:
    if 1234 in batch["n"].to_pylist():
        os.kill(os.getpid(), signal.SIGSEGV)
    return batch


def hangs(batch: pa.RecordBatch) -> pa.RecordBatch:
    while 1234 in batch["n"].to_pylist():
        time.sleep(0.1)
    return batch
