"""Transforms on a real Ray: the same bytes as without it, whatever happens to its workers, and prompt ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data_service.domain.splits import HashSplit, Share
from shared.dataset_version import load_version
from shared.jobs import Jobs, JobState
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.ray_head import RayHead
from tests.support.stores import S3_IN_CHAOS
from tests.support.transforming import commit_tables, create_transform, transform_here
from tests.support.version_attempts import TIMEOUT_S, Reconciler, await_worker, over, pid_of, title_of
from tests.support.waiting import wait_until

ROWS = 60_000
# What a transform makes on S3 is in test_real_data.py, too.
ON_S3_IN_CHAOS = pytest.mark.parametrize("settings", S3_IN_CHAOS, indirect=True)
CUSTOM = "tests.support.transforming"

pytestmark = pytest.mark.usefixtures("reconciler")


@pytest.fixture(scope="module")
def signs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where custom functions and tests leave signs for each other."""
    return tmp_path_factory.mktemp("signs")


@pytest.fixture(scope="module")
def store(settings: StoreSettings, signs: Path) -> ObjectStore:
    """With a source of 60,000 rows, in several parts."""
    store = open_store(settings)
    n = np.arange(ROWS)
    text = pa.array([f"{i % 11} " + "." * 500 for i in n])
    table = pa.table({"n": n, "x": n / 7, "word": text, "folder": [str(signs)] * ROWS})
    commit_tables(store, {"train": table.slice(0, 50_000), "test": table.slice(50_000)})
    return store


def custom(function: str, *columns: str, **fields: Any) -> dict[str, Any]:
    return {"custom": {"function": f"{CUSTOM}:{function}", "columns": list(columns), **fields}}


@ON_S3_IN_CHAOS
def test_a_cluster_makes_the_same_bytes_as_one_process(store: ObjectStore, jobs: Jobs, reconciler: Reconciler) -> None:
    steps: list[dict[str, Any]] = [
        {"filter": {"expression": "n % 10 != 3"}},
        {"column": "x", "standardize": {}},
        {"column": "word", "ordinalEncode": {}},
        {"drop": {"columns": ["folder"]}},
        custom("doubles", "n"),
    ]
    spec: dict[str, Any] = {
        "splits": HashSplit(
            key_columns=["n"], shares=[Share(split="train", weight=4), Share(split="val", weight=1)], seed=1
        ),
        "checks": [{"column": "n", "action": "ACTION_QUARANTINE", "range": {"max": 119_000}}],
    }
    done = over(jobs, create_transform(store, steps, **spec))
    assert done.state is JobState.SUCCEEDED, done.error
    with reconciler.aside():
        here = transform_here(store, steps, **spec)
    assert load_version(store, done.name).manifest_sha256 == load_version(store, here.name).manifest_sha256
    progress = jobs.progress(done.name)
    assert (progress["phase"], progress["rows_done"], progress["rows_total"]) == ("WRITING", ROWS, ROWS)
    assert not [info.key for info in store.list(done.name) if "/begun/" in info.key]


@ON_S3_IN_CHAOS
def test_a_transform_outlives_a_worker_within_its_attempt_and_then_the_attempt_and_makes_the_same(
    store: ObjectStore, jobs: Jobs, reconciler: Reconciler, signs: Path, data_ray: RayHead
) -> None:
    steps = [custom("waits_for_go", "folder"), {"column": "x", "minMaxScale": {}}]
    name = create_transform(store, steps)
    await_worker(jobs, name, signs)
    killed = set(signs.glob("working-*"))
    for victim in killed:
        os.kill(pid_of(victim), signal.SIGKILL)
    wait_until(lambda: set(signs.glob("working-*")) - killed, "another worker", TIMEOUT_S)
    going_on = jobs.get(name, name)
    assert (going_on.state, going_on.attempt, going_on.failures) == (JobState.RUNNING, 1, 0), going_on.error

    begun = list(signs.iterdir())
    for pid in data_ray.processes("ray::AttemptActor.run"):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: jobs.get(name, name).attempt == 2, "the second attempt", TIMEOUT_S)
    wait_until(lambda: not any(map(_alive_on_task, begun)), "the tasks of the first to end")
    (signs / "go").touch()
    done = over(jobs, name)
    assert (done.state, done.attempt, done.failures) == (JobState.SUCCEEDED, 2, 1), done.error
    with reconciler.aside():
        undisturbed = transform_here(store, steps)
    assert load_version(store, name).manifest_sha256 == load_version(store, undisturbed.name).manifest_sha256
    assert [folder[:6] for folder in store.folders(f"{name}/data")] == ["a00002"]
    for path in signs.iterdir():
        path.unlink()


# In `make test`: test_ray_data_stream.py ends a cluster's tasks, and a cancelled prediction leaves nothing.
@pytest.mark.long
@ON_S3_IN_CHAOS
def test_a_cancelled_transform_ends_its_tasks_and_leaves_nothing(store: ObjectStore, jobs: Jobs, signs: Path) -> None:
    name = create_transform(store, [custom("waits_for_go", "folder")])
    await_worker(jobs, name, signs)
    jobs.cancel(name, name)
    assert over(jobs, name).state is JobState.CANCELLED
    wait_until(lambda: not any(map(_alive_on_task, signs.glob("working-*"))), "the tasks to end")
    assert list(store.list(f"{name}/data")) == []
    for path in signs.iterdir():
        path.unlink()


@ON_S3_IN_CHAOS
@pytest.mark.parametrize(
    ("step", "kind", "expected"),
    [
        # Errors that a worker lives to report; in `make test` tests/unit/data_service/transforms/test_job.py has both.
        pytest.param(
            {"column": "n", "cast": {"arrowType": "int8"}},
            "InvalidArgument",
            "transform.steps[0]: row ",
            id="bad row",
            marks=pytest.mark.long,
        ),
        pytest.param(
            custom("hangs", "n", timeoutS=1),
            "InvalidArgument",
            "transform.steps[0]",
            id="hangs",
            marks=pytest.mark.long,
        ),
        pytest.param(
            custom("crashes", "n"),
            "FailedPrecondition",
            "the worker died, and died again, on rows 0 to ",
            id="crashes",
        ),
    ],
)
def test_a_step_that_cannot_do_its_work_fails_the_transform_at_once(
    store: ObjectStore, jobs: Jobs, step: dict[str, Any], kind: str, expected: str
) -> None:
    failed = over(jobs, create_transform(store, [step]))
    assert (failed.state, failed.attempt) == (JobState.FAILED, 1)
    assert failed.error is not None
    assert failed.error["kind"] == kind, failed.error
    assert expected in failed.error["message"]
    assert list(store.list(f"{failed.name}/data")) == []


def _alive_on_task(sign: Path) -> bool:
    """Whether that worker still does what it said. One that Ray keeps for other work is idle."""
    return b"PartsTask" in title_of(sign)
