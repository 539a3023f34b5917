"""A regression on the columns of a table, on real workers: it stops by itself, and another goes on from its best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millrace.train.v1 import resources_pb2 as res
from millrace.train.v1 import train_service_pb2 as pb
from tests.support.training import State, TrainStack, Watch
from tests.support.transforming import commit_tables

VERSION = "datasets/plane/versions/v1"
ROWS, VALIDATION_ROWS, BATCH, EPOCHS, WORKERS = 512, 128, 64, 200, 2


@dataclass(frozen=True)
class Trained:
    stack: TrainStack
    job: res.TrainingJob
    watch: Watch


def plane(rows: int, seed: int) -> pa.Table:
    """Two numbers, and what a linear model learns of them but for some noise."""
    generator = np.random.default_rng(seed)
    one, other = generator.normal(size=(2, rows))
    noise = generator.normal(0, 0.1, rows)
    return pa.table({"one": one, "other": other, "y": 2 * one - other + 1 + noise})


def spec_of(**changes: Any) -> res.TrainingSpec:
    spec = res.TrainingSpec(
        dataset_version=VERSION,
        input_column="x",
        label_column="y",
        task=res.TrainingSpec.TASK_REGRESSION,
        model=res.Model(builder="mlp", in_channels=2, num_classes=1),
        optimizer=res.Optimizer(name="AdamW", learning_rate=0.02, scheduler="ExponentialLR"),
        max_gradient_norm=5.0,
        metrics=["mae", "r2"],
        epochs=EPOCHS,
        global_batch_size=BATCH,
        num_workers=WORKERS,
        seed=3,
    )
    spec.optimizer.scheduler_kwargs["gamma"] = 0.99
    spec.model.kwargs["hidden"] = [16]
    concat = spec.transform.steps.add().concat
    concat.columns.extend(["one", "other"])
    concat.into = "x"
    spec.MergeFrom(res.TrainingSpec(**changes))
    return spec


@pytest.fixture(scope="module")
def trained(file_stack: TrainStack) -> Trained:
    commit_tables(file_stack.store, {"train": plane(ROWS, 1), "validation": plane(VALIDATION_ROWS, 2)}, VERSION)
    stopping = res.EarlyStopping(metric="validation_loss", patience=2)
    job = file_stack.client.create(spec_of(early_stopping=stopping))
    watch = file_stack.client.watch(job.name)
    watch.rest()
    return Trained(file_stack, file_stack.client.get(job.name), watch)


@pytest.mark.timeout(600)
def test_training_on_a_table_learns_stops_early_and_reads_each_row_once_an_epoch(trained: Trained) -> None:
    job, validated = trained.job, trained.watch.of("validated")
    assert job.state == State.STATE_SUCCEEDED, job
    assert len(validated) < EPOCHS
    best = min(validated, key=lambda one: one.loss)
    assert validated.index(best) == len(validated) - 3, "the best, and two that were no better"
    assert best.metrics["r2"] > 0.95
    coverage = trained.stack.client.rpc.GetCoverage(
        pb.GetCoverageRequest(name=job.name, epoch=len(validated) - 1), timeout=60
    )
    assert (coverage.seen_once, coverage.missing, coverage.repeated) == (ROWS, 0, 0)


def test_each_step_is_listed_once_with_the_rate_that_it_had(trained: Trained) -> None:
    client, name = trained.stack.client, trained.job.name
    points = client.rpc.ListMetrics(pb.ListMetricsRequest(name=name, page_size=10_000), timeout=60).points
    steps = [point for point in points if "loss" in point.values]
    assert [point.step for point in steps] == list(range(1, len(trained.watch.of("validated")) * ROWS // BATCH + 1))
    rates = [point.values["learning_rate"] for point in steps]
    assert rates == pytest.approx([0.02 * 0.99**step for step in range(len(steps))])


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("ingest", "split", "workers"),
    [
        # Without Ray Train: in test_runs.py a row ends a run of two workers.
        pytest.param(res.TrainingSpec.INGEST_THREADS, "validation", 0, id="threads"),
        # That both engines tell of a row alike is in test_cluster_loader.py.
        pytest.param(res.TrainingSpec.INGEST_RAY_DATA, "train", WORKERS, id="ray-data", marks=pytest.mark.chaos),
    ],
)
def test_a_row_that_is_not_finite_ends_the_run_at_once_and_is_named(
    file_stack: TrainStack, ingest: Any, split: str, workers: int
) -> None:
    name = f"datasets/plane/versions/nan-{split}"
    splits = {"train": plane(ROWS, 1), "validation": plane(VALIDATION_ROWS, 2)}
    values = splits[split]["other"].to_numpy().copy()
    values[7] = np.nan
    splits[split] = splits[split].set_column(1, "other", pa.array(values))
    commit_tables(file_stack.store, splits, name)
    job = file_stack.client.create(spec_of(dataset_version=name, ingest=ingest, epochs=2, num_workers=workers))
    file_stack.client.watch(job.name).rest()
    ended = file_stack.client.get(job.name)
    assert (ended.state, ended.attempt) == (State.STATE_FAILED, 1), ended
    row_id = 7 if split == "train" else ROWS + 7
    assert f"row {row_id} of split '{split}' of {name}: column 'other' is nan" in ended.error.message


@pytest.mark.timeout(600)
def test_another_job_goes_on_from_its_best_checkpoint(trained: Trained) -> None:
    client = trained.stack.client
    best = min(one.loss for one in trained.watch.of("validated"))
    (checkpoint,) = (
        one.name
        for one in client.checkpoints(trained.job.name)
        if one.metrics.get("validation_loss") == best and not one.name.endswith("/final")
    )
    # Without Ray Train, whose processes would take most of the time.
    slowly = res.Optimizer(learning_rate=1e-6)
    job = client.create(spec_of(initial_checkpoint=checkpoint, epochs=1, num_workers=0, optimizer=slowly))
    watch = client.watch(job.name)
    watch.rest()
    assert client.get(job.name).state == State.STATE_SUCCEEDED
    (after,) = watch.of("validated")
    assert after.loss == pytest.approx(best, rel=0.05)


# In `make test`: tests/unit/train_service/worker/test_target_scaling.py; test_cluster_loader.py has both engines.
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_scaled_target_whose_rows_ray_data_prepares_is_measured_in_its_own_unit(file_stack: TrainStack) -> None:
    def far(rows: int, seed: int) -> pa.Table:
        table = plane(rows, seed)
        scaled = pa.array(table["y"].to_numpy() * 40 + 5000)
        return table.set_column(2, "y", scaled)

    version = "datasets/far/versions/v1"
    commit_tables(file_stack.store, {"train": far(ROWS, 1), "validation": far(VALIDATION_ROWS, 2)}, version)
    spec = spec_of(
        dataset_version=version, epochs=6, target_scaling="TARGET_SCALING_STANDARD", ingest="INGEST_RAY_DATA"
    )

    job = file_stack.client.create(spec)
    watch = file_stack.client.watch(job.name)
    watch.rest()

    assert file_stack.client.get(job.name).state == State.STATE_SUCCEEDED
    # The noise alone is 40 / 10 in the target's unit. Unscaled, six epochs do not reach the mean of 5,000.
    assert 2 < watch.of("validated")[-1].metrics["mae"] < 20
    assert watch.of("validated")[-1].loss < 0.1
