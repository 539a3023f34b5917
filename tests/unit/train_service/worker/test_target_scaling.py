"""A regression's target that is scaled in training, and told in its own unit everywhere else."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import torch

from shared.checkpoint import CheckpointContent, load_checkpoint
from shared.checkpoint.format import FORMAT
from shared.errors import InvalidArgument
from shared.model_spec import NONE, STANDARD, ModelSpec, TargetScaling
from shared.models.loaded import LoadedModel
from shared.settings import StoreSettings
from shared.storage import ObjectStore
from tests.support.real_data import real_data
from tests.support.transforming import commit_tables
from tests.unit.train_service.in_ranks import in_ranks
from tests.unit.train_service.learners import NUMBERS, VERSION, WIDTH, batch, learner, vectors
from tests.unit.train_service.worker.test_loop import entries, events, lose_and_begin, new_job, run_of
from train_service.checkpoints.fine_tuning import check_scaling
from train_service.domain.spec import FSDP, CheckpointPolicy, OptimizerSpec, Placement, TrainingSpec
from train_service.domain.spec_rules import check
from train_service.learning.ranks import Ranks
from train_service.records.event_log import EventKind
from train_service.worker.loop import LoopConfig, Run

FAR, WIDE = 5000.0, 40.0
JOB = "trainingJobs/scaled"
SPEC = replace(
    NUMBERS,
    target_scaling=STANDARD,
    epochs=3,
    global_batch_size=100,
    checkpoint_every_steps=4,
    optimizer=OptimizerSpec(learning_rate=0.01),
    metrics=("mae", "rmse", "r2"),
    checkpoints=CheckpointPolicy(best_metric="validation_mae", maximize=False),
)


def far_numbers(rows: int, seed: int) -> np.ndarray[Any, Any]:
    made: np.ndarray[Any, Any] = vectors(rows, seed) @ np.arange(WIDTH) * WIDE + FAR
    return made.astype(np.float32)


def commit_far(store: ObjectStore, name: str = VERSION, label: Any = far_numbers) -> None:
    """700 rows `train` and 200 `validation` whose target lies far from 0."""

    def table(rows: int, seed: int) -> pa.Table:
        x = pa.FixedShapeTensorArray.from_numpy_ndarray(vectors(rows, seed).astype(np.float32))
        return pa.table({"x": x, "y": label(rows, seed)})

    commit_tables(store, {"train": table(700, 1), "validation": table(200, 2)}, name)


@pytest.fixture(autouse=True)
def far(store: ObjectStore) -> None:
    commit_far(store)


def content_of(store: ObjectStore, name: str = JOB, step: int | None = None) -> CheckpointContent:
    found = entries(store, name)
    entry = found[max(found) if step is None else step]
    return load_checkpoint(store, entry.folder, entry.manifest_sha256).content


def loaded(store: ObjectStore, name: str = JOB) -> LoadedModel:
    """The last checkpoint's model, as deployments and predictions over versions load it."""
    found = entries(store, name)
    entry = found[max(found)]
    checkpoint = load_checkpoint(store, entry.folder, entry.manifest_sha256)
    return LoadedModel(checkpoint)


def run(store: ObjectStore, spec: TrainingSpec = SPEC, name: str = JOB) -> None:
    new_job(store, name)
    run_of(store, name, spec=spec).run()


def test_a_checkpoint_keeps_what_was_learnt_of_the_training_split_and_answers_in_the_targets_unit(
    store: ObjectStore,
) -> None:
    run(store)

    content, labels = content_of(store), far_numbers(700, 1).astype(np.float64)
    assert content.target_scaling is not None
    assert content.target_scaling.mean == pytest.approx([labels.mean()], rel=1e-12)
    assert content.target_scaling.deviation == pytest.approx([labels.std()], rel=1e-12)
    (values,) = loaded(store)(vectors(200, 2).astype(np.float32))
    assert values.dtype == np.float32
    errors = np.abs(values[:, 0].astype(np.float64) - far_numbers(200, 2))
    # What validation measured is what the served model is off by, in the target's unit; the loss is of the scaled one.
    assert content.metrics["validation_mae"] == pytest.approx(errors.mean(), rel=1e-4)
    assert content.metrics["validation_rmse"] == pytest.approx(np.sqrt((errors**2).mean()), rel=1e-4)
    deviation = content.target_scaling.deviation[0]
    assert content.metrics["validation_loss"] == pytest.approx((errors**2).mean() / deviation**2, rel=1e-3)
    assert content.metrics["validation_mae"] < deviation / 2


def test_training_rows_are_measured_in_the_targets_unit_too() -> None:
    plain, scaled = learner(NUMBERS), learner(NUMBERS)
    scaled.target_scaling = TargetScaling(mean=(3.0,), deviation=(7.0,))
    rows = batch(spec=NUMBERS)
    outputs = plain.model(torch.from_numpy(rows.inputs)).detach()[:, 0].numpy()

    reported = scaled.describe(scaled.step(rows))

    assert reported["mae"] == pytest.approx(np.abs(outputs * 7 + 3 - rows.labels).mean(), rel=1e-4)
    assert reported["loss"] == pytest.approx((((rows.labels - 3) / 7 - outputs) ** 2).mean(), rel=1e-4)


@pytest.mark.parametrize("precision", ["FLOAT32", "BFLOAT16", "FLOAT16"])
def test_a_resumed_run_goes_on_with_its_scaling_bit_for_bit(store: ObjectStore, precision: str) -> None:
    spec = replace(SPEC, precision=precision)
    run(store, spec, "trainingJobs/whole")
    new_job(store, JOB)
    run_of(store, JOB, spec=replace(spec, epochs=1)).run()
    lose_and_begin(store, JOB)

    run_of(store, JOB, attempt=2, spec=spec).run()

    assert content_of(store).target_scaling == content_of(store, "trainingJobs/whole").target_scaling
    (ours,), (theirs,) = (loaded(store, name)(vectors(9, 5)) for name in (JOB, "trainingJobs/whole"))
    assert np.array_equal(ours, theirs)


def test_a_target_of_one_value_is_only_shifted(store: ObjectStore) -> None:
    commit_far(store, "datasets/constant/versions/v1", lambda rows, _: np.full(rows, 0.1, np.float32))
    run(store, replace(SPEC, dataset_version="datasets/constant/versions/v1", metrics=("mae",)))

    scaling = content_of(store).target_scaling
    assert scaling is not None
    assert scaling.mean == pytest.approx([np.float32(0.1)], rel=1e-12)
    assert scaling.deviation == (1.0,)


def test_labels_that_are_not_finite_count_for_nothing_where_they_are_allowed(store: ObjectStore) -> None:
    """As those of a step that masks them: each output is scaled by the labels that it has."""

    def pairs(rows: int, seed: int) -> Any:
        both = np.stack([far_numbers(rows, seed), far_numbers(rows, seed + 1)], 1)
        both[::7, 0], both[1::5, 1] = np.nan, np.inf
        return pa.FixedShapeTensorArray.from_numpy_ndarray(both)

    commit_far(store, "datasets/gaps/versions/v1", pairs)
    spec = replace(SPEC, dataset_version="datasets/gaps/versions/v1", model=replace(SPEC.model, num_classes=2))
    new_job(store, JOB)
    run = run_of(store, JOB, spec=replace(spec, allow_non_finite=True))

    run._scale_target()

    first, second = far_numbers(700, 1).astype(np.float64), far_numbers(700, 2).astype(np.float64)
    present = np.delete(first, np.s_[::7]), np.delete(second, np.s_[1::5])
    scaling = run._learner.target_scaling
    assert scaling is not None
    assert scaling.mean == pytest.approx([one.mean() for one in present], rel=1e-12)
    assert scaling.deviation == pytest.approx([one.std() for one in present], rel=1e-12)


def test_a_target_without_any_finite_label_is_left_as_it_is(store: ObjectStore) -> None:
    commit_far(store, "datasets/none/versions/v1", lambda rows, _: np.full(rows, np.nan, np.float32))
    new_job(store, JOB)
    run = run_of(store, JOB, spec=replace(SPEC, dataset_version="datasets/none/versions/v1", allow_non_finite=True))

    run._scale_target()

    assert run._learner.target_scaling == TargetScaling(mean=(0.0,), deviation=(1.0,))


def test_each_number_of_a_target_has_its_own_scale(store: ObjectStore) -> None:
    def pairs(rows: int, seed: int) -> Any:
        both = np.stack([far_numbers(rows, seed), vectors(rows, seed)[:, 0] / 1000], 1)
        return pa.FixedShapeTensorArray.from_numpy_ndarray(both.astype(np.float32))

    commit_far(store, "datasets/pairs/versions/v1", pairs)
    model = replace(SPEC.model, num_classes=2)
    run(store, replace(SPEC, dataset_version="datasets/pairs/versions/v1", model=model, epochs=8))

    scaling = content_of(store).target_scaling
    assert scaling is not None
    assert scaling.deviation == pytest.approx(
        [far_numbers(700, 1).std(dtype=np.float64), (vectors(700, 1)[:, 0] / 1000).std()], rel=1e-4
    )
    (values,) = loaded(store)(vectors(200, 2))
    off = np.abs(values - np.stack([far_numbers(200, 2), vectors(200, 2)[:, 0] / 1000], 1)).mean(0)
    assert (off < np.asarray(scaling.deviation) / 2).all()


def test_shards_on_two_ranks_learn_what_one_process_does(
    store: ObjectStore, file_store: StoreSettings, tmp_path: Path
) -> None:
    plain = replace(SPEC, num_workers=2, optimizer=OptimizerSpec(name="SGD", learning_rate=0.05))
    run(store, replace(plain, num_workers=1), "trainingJobs/one")
    new_job(store, JOB)
    (tmp_path / "ranks").mkdir()

    in_ranks(2, shards, tmp_path / "ranks", file_store, replace(plain, placement=Placement(parallel=FSDP)))

    ours, theirs = content_of(store), content_of(store, "trainingJobs/one")
    assert ours.target_scaling is not None
    assert theirs.target_scaling is not None
    assert ours.target_scaling.mean == pytest.approx(theirs.target_scaling.mean, rel=1e-12)
    assert ours.target_scaling.deviation == pytest.approx(theirs.target_scaling.deviation, rel=1e-12)
    assert ours.metrics["validation_mae"] == pytest.approx(theirs.metrics["validation_mae"], rel=1e-3)


def shards(ranks: Ranks, settings: StoreSettings, spec: TrainingSpec) -> None:
    Run(LoopConfig(store=settings, job_name=JOB, attempt=1, spec=spec), ranks).run()


def test_a_run_that_starts_from_a_scaled_checkpoint_keeps_its_scaling(store: ObjectStore) -> None:
    run(store)
    first = entries(store, JOB)[max(entries(store, JOB))].name
    commit_far(store, "datasets/other/versions/v1", lambda rows, seed: far_numbers(rows, seed) * 2)
    tuned = replace(SPEC, dataset_version="datasets/other/versions/v1", initial_checkpoint=first)

    run(store, tuned, "trainingJobs/tuned")

    assert content_of(store, "trainingJobs/tuned").target_scaling == content_of(store).target_scaling


def test_a_scaled_run_that_starts_from_an_unscaled_checkpoint_learns_a_scaling_and_warns(store: ObjectStore) -> None:
    run(store, replace(SPEC, target_scaling=NONE))
    first = entries(store, JOB)[max(entries(store, JOB))].name

    run(store, replace(SPEC, initial_checkpoint=first), "trainingJobs/tuned")

    assert content_of(store, "trainingJobs/tuned").target_scaling is not None
    (warning,) = events(store, "trainingJobs/tuned", EventKind.WARNING)
    assert "learnt anew" in warning.payload["text"]


def test_a_run_without_scaling_refuses_to_start_from_a_scaled_checkpoint(store: ObjectStore) -> None:
    run(store)
    entry = entries(store, JOB)[max(entries(store, JOB))]
    plain = replace(SPEC, target_scaling=NONE, initial_checkpoint=entry.name)

    with pytest.raises(InvalidArgument) as refused:
        check_scaling(store, entry, plain)

    assert refused.value.fields[0][0] == "spec.target_scaling"
    assert "TARGET_SCALING_STANDARD" in refused.value.message
    # The last layer starts anew.
    check_scaling(store, entry, replace(plain, model=replace(plain.model, num_classes=2)))
    check_scaling(store, entry, replace(plain, target_scaling=STANDARD))


@pytest.mark.parametrize(
    "change", [{"task": "CLASSIFICATION", "model": replace(SPEC.model, num_classes=3)}, {"target_scaling": "MOST"}]
)
def test_a_target_that_cannot_be_scaled_is_refused_by_its_field(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check(replace(SPEC, **change))

    assert "spec.target_scaling" in [field for field, _ in refused.value.fields]


def test_an_older_release_refuses_a_checkpoint_of_a_scaled_target_instead_of_answering_in_the_wrong_unit(
    store: ObjectStore,
) -> None:
    run(store)

    assert content_of(store).as_manifest()["format"] != FORMAT


def test_checkpoints_and_jobs_without_the_field_are_read_as_unscaled(store: ObjectStore) -> None:
    run(store, replace(SPEC, target_scaling=NONE))
    config = SPEC.as_config()
    del config["target_scaling"]

    assert content_of(store).target_scaling is None
    assert "target_scaling" not in content_of(store).as_manifest()
    assert content_of(store).as_manifest()["format"] == FORMAT
    assert TrainingSpec.from_config(config).target_scaling == NONE


def test_two_epochs_on_a_scaled_target_beat_six_without(store: ObjectStore) -> None:
    """Of taxis' fares, the median of three seeds."""
    commit_taxis(store)
    plain = [mean_error(store, target_scaling=NONE, epochs=6, seed=seed) for seed in range(3)]
    scaled = [mean_error(store, target_scaling=STANDARD, epochs=2, seed=seed) for seed in range(3)]

    print(f"validation_mae in dollars: scaled, two epochs {scaled}; unscaled, six epochs {plain}")
    assert statistics.median(scaled) < statistics.median(plain)


TAXIS = "datasets/taxis/versions/v1"


def commit_taxis(store: ObjectStore) -> None:
    """The total that a ride costs, of its distance, passengers, tolls, hour and way of paying."""
    table = pa.csv.read_csv(real_data() / "tabular" / "taxis.csv")
    table = table.filter(pa.compute.is_valid(table["payment"]))
    hours = pa.compute.hour(table["pickup"]).to_numpy()
    columns = [table[name].to_numpy().astype(np.float64) for name in ("distance", "passengers", "tolls")]
    columns += [np.sin(hours / 24 * 2 * np.pi), np.cos(hours / 24 * 2 * np.pi)]
    columns.append((table["payment"].to_numpy(zero_copy_only=False) == "cash").astype(np.float64))
    x = np.stack([(one - one.mean()) / one.std() for one in columns], 1).astype(np.float32)
    y = table["total"].to_numpy().astype(np.float32)
    order = np.random.default_rng(0).permutation(len(y))

    def part(places: np.ndarray[Any, Any]) -> pa.Table:
        return pa.table({"x": pa.FixedShapeTensorArray.from_numpy_ndarray(x[places]), "y": y[places]})

    commit_tables(store, {"train": part(order[1000:]), "validation": part(order[:1000])}, TAXIS)


def mean_error(store: ObjectStore, *, target_scaling: str, epochs: int, seed: int) -> float:
    """`validation_mae` after the last epoch, in dollars."""
    name = f"trainingJobs/{target_scaling.lower()}-{seed}"
    spec = replace(
        SPEC,
        dataset_version=TAXIS,
        model=ModelSpec(builder="mlp", in_channels=6, num_classes=1),
        optimizer=OptimizerSpec(name="AdamW", learning_rate=0.001),
        target_scaling=target_scaling,
        global_batch_size=128,
        checkpoint_every_steps=0,
        epochs=epochs,
        seed=seed,
    )
    run(store, spec, name)
    return content_of(store, name).metrics["validation_mae"]
