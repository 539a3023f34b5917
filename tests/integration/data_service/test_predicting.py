"""Predictions on a real Ray: the same bytes as without it, whatever happens to its workers, and prompt ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data_service.domain.import_spec import BadRows
from data_service.domain.transform_spec import Workers
from shared.dataset_version import load_version
from shared.jobs import JobRecord, Jobs, JobState
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.code_folders import LOOP, store_bundle
from tests.support.own_models import code_of_this_process
from tests.support.predicting import (
    PREPARING,
    TABLE_SCHEMA,
    TRAINING,
    create_prediction,
    marks,
    predict_here,
    write,
    write_program,
)
from tests.support.ray_head import RayHead
from tests.support.transforming import commit_tables
from tests.support.version_attempts import (
    TIMEOUT_S,
    Reconciler,
    await_worker,
    over,
    pid_of,
    title_of,
)
from tests.support.waiting import wait_until

ROWS, TEST_ROWS = 9000, 1000
SCHEMA = TABLE_SCHEMA.append(pa.field("folder", pa.string())).append(pa.field("noise", pa.binary()))
WAITING, CRASHING = "trainingJobs/waiting/checkpoints/c1", "trainingJobs/crashing/checkpoints/c1"
TWO = Workers(most=2)
# Each worker imports torch: where their number does not matter, one.
ONE = Workers(most=1)

pytestmark = pytest.mark.usefixtures("reconciler")


@pytest.fixture
def signs(store: ObjectStore, folder: Path) -> Iterator[Path]:  # noqa: ARG001
    """Where custom functions and tests leave signs for each other; empty."""
    yield folder
    for path in folder.iterdir():
        path.unlink()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signs")


@pytest.fixture(scope="module")
def store(settings: StoreSettings, folder: Path) -> ObjectStore:
    """With a source of some parts, and three checkpoints: of one the steps wait, of one they kill their worker."""
    store = open_store(settings)
    generator = np.random.default_rng(0)

    def rows(count: int, seed: int) -> pa.Table:
        noise = [generator.bytes(400) for _ in range(count)]
        table = marks(count, seed).append_column("folder", [[str(folder)] * count])
        return table.append_column("noise", pa.array(noise, pa.binary())).cast(SCHEMA)

    commit_tables(store, {"train": rows(ROWS, 1), "test": rows(TEST_ROWS, 2)})
    write(store)
    for name, function, columns in (
        (WAITING, "tests.support.transforming:waits_for_go", ["x", "folder"]),
        (CRASHING, "tests.support.predicting:crashes", ["x", "id"]),
    ):
        steps = [{"custom": {"function": function, "columns": columns}}, *PREPARING, *TRAINING]
        write(store, name=name, ingested=SCHEMA, transforms=[{"steps": steps}])
    return store


def digest(store: ObjectStore, job: JobRecord) -> str:
    assert job.state is JobState.SUCCEEDED, job.error
    return load_version(store, job.name).manifest_sha256


def test_a_cluster_makes_the_same_bytes_as_one_process_and_loads_the_model_once_a_worker(
    store: ObjectStore, jobs: Jobs, reconciler: Reconciler, signs: Path
) -> None:
    (signs / "go").touch()
    done = over(jobs, create_prediction(store, WAITING, workers=TWO))
    with reconciler.aside():
        alone = predict_here(store, checkpoint=WAITING, workers=TWO)
    assert digest(store, done) == digest(store, alone)
    assert len(load_version(store, done.name).manifest.files) > 4, "several parts"
    workers = {pid_of(sign) for sign in signs.glob("working-*")} - {os.getpid()}
    assert 1 <= len(workers) <= 2
    progress = jobs.progress(done.name)
    assert (progress["phase"], progress["rows_done"], progress["rows_total"]) == (
        "PREDICTING",
        ROWS + TEST_ROWS,
        ROWS + TEST_ROWS,
    )
    assert progress["rows_per_second"] > 0


# In `make test`: tests/unit/data_service/transforms/test_predict_job.py keeps bad rows aside, and the test above gets
# the same bytes from a cluster.
@pytest.mark.long
@pytest.mark.usefixtures("signs")
def test_left_out_rows_are_counted_before_anything_is_written(
    store: ObjectStore, jobs: Jobs, reconciler: Reconciler
) -> None:
    spec: dict[str, Any] = {"bad_rows": BadRows(action="quarantine"), "workers": ONE, "columns": ["id"]}
    done = over(jobs, create_prediction(store, **spec))
    with reconciler.aside():
        alone = predict_here(store, **spec)
    assert digest(store, done) == digest(store, alone)


@pytest.mark.chaos
def test_a_worker_killed_in_the_middle_of_its_part_costs_nothing_but_time(
    store: ObjectStore, jobs: Jobs, reconciler: Reconciler, signs: Path
) -> None:
    name = create_prediction(store, WAITING, workers=TWO)
    await_worker(jobs, name, signs)
    victim = next(signs.glob("working-*"))
    assert b"PoolWorker" in title_of(victim), title_of(victim)
    os.kill(pid_of(victim), signal.SIGKILL)
    wait_until(lambda: any(one != victim for one in signs.glob("working-*")), "another worker", TIMEOUT_S)
    (signs / "go").touch()
    done = over(jobs, name)
    assert (done.attempt, done.failures) == (1, 0), done.error
    with reconciler.aside():
        alone = predict_here(store, checkpoint=WAITING, workers=TWO)
    assert digest(store, done) == digest(store, alone)


@pytest.mark.chaos
def test_an_attempt_killed_in_the_middle_is_followed_by_one_that_makes_the_same(
    store: ObjectStore, jobs: Jobs, reconciler: Reconciler, signs: Path, data_ray: RayHead
) -> None:
    name = create_prediction(store, WAITING, workers=TWO)
    await_worker(jobs, name, signs)
    begun = list(signs.iterdir())
    for pid in data_ray.processes("ray::AttemptActor.run"):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: jobs.get(name, name).attempt == 2, "the second attempt", TIMEOUT_S)
    wait_until(lambda: not any(map(_at_work, begun)), "the workers of the first to end")
    (signs / "go").touch()
    done = over(jobs, name)
    assert (done.attempt, done.failures) == (2, 1), done.error
    with reconciler.aside():
        alone = predict_here(store, checkpoint=WAITING, workers=TWO)
    assert digest(store, done) == digest(store, alone)
    assert [attempt[:6] for attempt in store.folders(f"{name}/data")] == ["a00002"]


def test_a_cancelled_prediction_ends_its_workers_and_leaves_nothing(
    store: ObjectStore, jobs: Jobs, signs: Path
) -> None:
    name = create_prediction(store, WAITING, workers=ONE)
    await_worker(jobs, name, signs)
    jobs.cancel(name, name)
    assert over(jobs, name).state is JobState.CANCELLED
    wait_until(lambda: not any(map(_at_work, signs.glob("working-*"))), "the workers to end")
    assert list(store.list(f"{name}/data")) == []


@pytest.mark.long
@pytest.mark.usefixtures("signs")
def test_a_row_that_kills_its_worker_again_and_again_ends_it_with_the_rows_named(
    store: ObjectStore, jobs: Jobs
) -> None:
    failed = over(jobs, create_prediction(store, CRASHING, workers=TWO))
    assert (failed.state, failed.attempt) == (JobState.FAILED, 1)
    assert failed.error is not None
    assert failed.error["kind"] == "FailedPrecondition", failed.error
    assert "the worker died, and died again, on rows " in failed.error["message"]
    assert list(store.list(f"{failed.name}/data")) == []


# Each batch waits for the sign `go`, and leaves a sign of the process that it runs in.
PREDICTOR = """
import os
import pathlib
import time

import numpy as np


class Predictor:
    inputs = {"x": ("FP64", []), "folder": ("BYTES", [])}
    outputs = {"twice": ("FP32", [])}

    def __init__(self, checkpoint_dir):
        self.factor = float((pathlib.Path(checkpoint_dir) / "factor").read_text())

    def predict(self, inputs):
        folder = pathlib.Path(inputs["folder"][0].decode())
        (folder / f"working-{os.getpid()}").touch()
        while not (folder / "go").exists():
            time.sleep(0.05)
        return {"twice": inputs["x"] * self.factor}
"""
PROGRAM = "trainingJobs/program/checkpoints/c1"


@pytest.mark.chaos
def test_a_programs_predictor_runs_in_workers_alone_and_a_killed_one_costs_nothing(
    store: ObjectStore, jobs: Jobs, reconciler: Reconciler, signs: Path
) -> None:
    bundle = store_bundle(store, {"train.py": LOOP, "serve.py": PREDICTOR}).name
    write_program(store, bundle, {"factor": b"2.0"}, name=PROGRAM)
    spec: dict[str, Any] = {"predictor": "serve:Predictor", "columns": ["id"], "workers": ONE}
    name = create_prediction(store, PROGRAM, **spec)
    await_worker(jobs, name, signs)
    (victim,) = signs.glob("working-*")
    assert b"PoolWorker" in title_of(victim), title_of(victim)
    os.kill(pid_of(victim), signal.SIGKILL)
    wait_until(lambda: any(one != victim for one in signs.glob("working-*")), "another worker", TIMEOUT_S)
    (signs / "go").touch()
    done = over(jobs, name)
    assert (done.attempt, done.failures) == (1, 0), done.error
    workers = {pid_of(sign) for sign in signs.glob("working-*")}
    assert os.getpid() not in workers
    with reconciler.aside(), code_of_this_process():
        alone = predict_here(store, checkpoint=PROGRAM, **spec)
    assert digest(store, done) == digest(store, alone)


@pytest.mark.parametrize(
    ("workers", "missing"),
    [
        (Workers(cpus=64), "a node with 64 CPU for a worker"),
        (Workers(gpus=1.0), "a node with 1 CPU and 1 GPU for a worker"),
    ],
)
@pytest.mark.usefixtures("signs")
def test_without_room_for_one_worker_it_waits_and_says_for_what(
    store: ObjectStore, jobs: Jobs, workers: Workers, missing: str
) -> None:
    name = create_prediction(store, workers=workers)
    wait_until(lambda: jobs.waiting_for(name) == missing, "it to say so")
    assert jobs.get(name, name).state is JobState.PENDING
    jobs.cancel(name, name)
    assert over(jobs, name).state is JobState.CANCELLED


def _at_work(sign: Path) -> bool:
    return b"PoolWorker" in title_of(sign)
