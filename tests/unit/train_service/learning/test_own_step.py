"""A training step of a user's own in Millrace's loop: resumed bit for bit, averaged over ranks, with any optimizers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.checkpoint import CheckpointRegistry
from shared.code_bundle_registry import load_code
from shared.dataset_version import load_version
from shared.errors import FailedPrecondition
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.own_models import code_of_this_process, own
from tests.support.own_steps import CLASSIFIER, GAN, MEASURED
from tests.unit.train_service.in_ranks import in_ranks
from tests.unit.train_service.learners import ALONE, CLASSES, INPUT, STEPS, WIDTH, batch, commit_table, vectors
from tests.unit.train_service.learners import SPEC as TABLE
from tests.unit.train_service.worker.test_loop import entries, events, lose_and_begin, new_job, run_of, saved
from train_service.domain.spec import (
    BFLOAT16,
    FLOAT16,
    FSDP,
    EarlyStopping,
    OptimizerSpec,
    OwnModelFacts,
    Placement,
    TrainingSpec,
    settled,
)
from train_service.learning.own_step import OwnStepLearner
from train_service.learning.ranks import Ranks
from train_service.loading.loader import LoaderFactory
from train_service.records.event_log import EventKind
from train_service.records.metrics_log import metrics_page

FACTS = OwnModelFacts(num_classes=CLASSES, is_step=True, has_optimizers=True)
SPEC = replace(TABLE, epochs=3, global_batch_size=70, checkpoint_every_steps=4)
NAME = "trainingJobs/whole"


@pytest.fixture(autouse=True)
def here(store: ObjectStore) -> Iterator[None]:
    commit_table(store)
    with code_of_this_process():
        yield


def classifier(store: ObjectStore, base: TrainingSpec = SPEC, **kwargs: Any) -> TrainingSpec:
    return settled(own(store, base, CLASSIFIER, "net:Classifier", kwargs=kwargs), FACTS, (WIDTH,))


def gan(store: ObjectStore, base: TrainingSpec = SPEC) -> TrainingSpec:
    facts = replace(FACTS, num_classes=0, is_manual=True)
    return settled(own(store, base, GAN, "net:GAN", num_classes=CLASSES), facts, (WIDTH,))


def learner(spec: TrainingSpec, ranks: Ranks = ALONE, *, prepared: bool = True) -> OwnStepLearner:
    made = OwnStepLearner(spec, ranks, INPUT, STEPS // 2, STEPS)
    if prepared:
        made.prepare()
    return made


def whole_and_resumed(store: ObjectStore, spec: TrainingSpec, at: int) -> None:
    new_job(store, NAME, spec)
    run_of(store, NAME, spec=spec).run()
    whole, name = entries(store, NAME), "trainingJobs/resumed"
    new_job(store, name, spec)
    CheckpointRegistry(store, name).commit(replace(whole[at], name=f"{name}/checkpoints/step-{at:08d}", attempt=1))
    lose_and_begin(store, name)
    run_of(store, name, attempt=2, spec=spec).run()
    again = entries(store, name)
    assert sorted(again) == [step for step in sorted(whole) if step >= at]
    assert all(saved(store, again[step]) == saved(store, whole[step]) for step in again)
    assert all(again[step].metrics == whole[step].metrics for step in again)


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("at", [10, 12])
def test_a_run_that_is_resumed_ends_with_bit_for_bit_the_same_state(store: ObjectStore, interval: str, at: int) -> None:
    """At the end of an epoch, and within one; with an average of the weights, and an attribute of the module's own."""
    whole_and_resumed(store, classifier(store, interval=interval), at)

    last = entries(store, NAME)[30]
    assert last.metrics["val_accuracy"] > 0.8
    assert last.metrics["val_epochs"] == 2  # of the three, two were over
    assert last.metrics["epochs_done"] == 3
    assert 0 < last.metrics["validation_loss"] < 1


def test_a_gan_steps_its_two_optimizers_and_is_resumed_bit_for_bit(store: ObjectStore) -> None:
    whole_and_resumed(store, gan(store), 12)

    points, _ = metrics_page(store, NAME, 0, 100, "")
    assert len(points) == 30
    assert all({"critic_loss", "generator_loss", "loss"} <= set(point.values) for point in points)
    assert points[-1].values["learning_rate"] == pytest.approx(0.01 * 0.99**29)
    assert not events(store, NAME, EventKind.VALIDATED)  # it has no validation_step


def averaged(ranks: Ranks) -> list[Tensor | None]:
    """Of parameters of which all, one and none have a gradient, in two dtypes."""
    shapes = [(3,), (2, 2), (5,), (2, 3), (4,)]
    kinds = [torch.float32, torch.float64, torch.float32, torch.float32, torch.float32]
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=kind)) for shape, kind in zip(shapes, kinds, strict=True)]
    for number, one in enumerate(parameters[:4]):
        if number != 2 or ranks.rank == 1:
            one.grad = torch.full_like(one, float(ranks.rank + number))
    ranks.average_gradients(parameters)
    buffers = [torch.full((2,), float(ranks.rank)), torch.tensor(ranks.rank)]
    ranks.share_tensors(buffers)
    means = [None if one.grad is None else one.grad.flatten()[-1].clone() for one in parameters]
    return [*means, *(one.clone() for one in buffers)]


def test_a_gradient_is_the_mean_over_ranks_where_some_rank_has_one(tmp_path: Path) -> None:
    results = in_ranks(3, averaged, tmp_path)

    assert results[0][4] is None
    assert [float(one) for one in results[0][:4]] == [1.0, 2.0, 1.0, 4.0]
    assert torch.equal(results[2][5], torch.zeros(2))
    assert int(results[2][6]) == 0
    for one in results[1:]:
        assert [None if value is None else value.tolist() for value in one] == [
            None if value is None else value.tolist() for value in results[0]
        ]


def on_ranks(ranks: Ranks, settings: StoreSettings, specs: dict[str, TrainingSpec]) -> dict[str, Any]:
    load_code(open_store(settings), next(iter(specs.values())).model.code_bundle)
    results: dict[str, Any] = {}
    for name, spec in specs.items():
        made = learner(spec, ranks)
        for step in range(STEPS):
            sums = ranks.add(made.step(batch(ranks, step))).result()
        # Of a sharded model every rank gathers.
        results[name] = {key: one.clone() for key, one in made.weights().items()}
        results[f"{name}, described"] = made.describe(sums)
        half = learner(spec, ranks)
        for step in range(STEPS // 2):
            half.step(batch(ranks, step))
        weights, state = ranks.share((half.weights(), half.state()))
        results[f"{name}, half"] = copy.deepcopy((weights, state))  # an optimizer goes on in what it is given
        rest = learner(spec, ranks, prepared=False)
        rest.load(weights, state)
        rest.prepare()
        for step in range(STEPS // 2, STEPS):
            rest.step(batch(ranks, step))
        results[f"{name}, resumed"] = {key: one.clone() for key, one in rest.weights().items()}
    return results


def test_two_ranks_learn_as_one_and_are_resumed_bit_for_bit(store: ObjectStore, tmp_path: Path) -> None:
    """By the rows of the whole step, however unequal the ranks' shares; in parts, and sharded."""
    plain = classifier(store, noise=0.0, norm=False)
    specs = {
        "plain": plain,
        "parts": replace(plain, accumulation_steps=3, max_gradient_norm=0.05),
        "sharded": replace(plain, placement=Placement(parallel=FSDP)),
        "named": replace(plain, optimizer=OptimizerSpec(name="SGD", learning_rate=0.1, scheduler="ExponentialLR",
                                                        scheduler_kwargs={"gamma": 0.9})),
    }  # fmt: skip
    folder = tmp_path / "ranks"
    folder.mkdir()

    results, _ = in_ranks(2, on_ranks, folder, store.settings, specs)
    alone = on_ranks(ALONE, store.settings, specs)

    for name in specs:
        assert results[f"{name}, described"] == pytest.approx(alone[f"{name}, described"], rel=1e-3, abs=1e-4)
        for key, tensor in results[name].items():
            assert torch.equal(results[f"{name}, resumed"][key], tensor), (name, key)
            torch.testing.assert_close(alone[name][key], tensor, rtol=1e-3, atol=1e-4)
    assert set(results["plain, described"]) == {"loss", "train_accuracy"}
    # What two workers saved goes on on one.
    for name in ("plain", "sharded"):
        rest = learner(specs[name], prepared=False)
        rest.load(*results[f"{name}, half"])
        rest.prepare()
        for step in range(STEPS // 2, STEPS):
            rest.step(batch(step=step))
        for key, tensor in rest.weights().items():
            torch.testing.assert_close(tensor, results[name][key], rtol=1e-3, atol=1e-4)


def test_two_ranks_of_a_gan_stay_alike_and_are_resumed_bit_for_bit(store: ObjectStore, tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()

    results, other = in_ranks(2, on_ranks, folder, store.settings, {"gan": gan(store)})

    assert other["gan"] == {}
    assert all(torch.equal(results["gan, resumed"][key], tensor) for key, tensor in results["gan"].items())
    assert results["gan, described"]["critic_loss"] == results["gan, described"]["loss"] > 0


def test_a_manual_backward_takes_the_arguments_of_a_backward(store: ObjectStore) -> None:
    """Two losses of one graph, whose gradients come together."""
    source = GAN.replace("self.manual_backward(critic_loss)", "for one in (critic_loss, critic_loss):\n"
                         "            self.manual_backward(one, retain_graph=True)")  # fmt: skip
    facts = replace(FACTS, num_classes=0, is_manual=True)
    spec = settled(own(store, SPEC, source, "net:GAN", num_classes=CLASSES), facts, (WIDTH,))
    load_code(store, spec.model.code_bundle)
    made = learner(spec)

    assert made.describe(made.step(batch()))["critic_loss"] > 0


def measured_on(ranks: Ranks, settings: StoreSettings, spec: TrainingSpec) -> tuple[dict[str, float], int]:
    store = open_store(settings)
    load_code(store, spec.model.code_bundle)
    batches = LoaderFactory(store, load_version(store, spec.dataset_version), spec)
    made = learner(spec, ranks)
    for step in range(4):
        made.step(batch(ranks, step))
    return made.evaluate(batches.cache("validation"), batches.preprocessing)


def test_metrics_that_are_logged_themselves_are_read_over_all_rows_of_all_ranks(
    store: ObjectStore, tmp_path: Path
) -> None:
    kwargs = {"noise": 0.0, "norm": False}
    spec = settled(own(store, TABLE, MEASURED, "net:Measured", kwargs=kwargs), FACTS, (WIDTH,))

    folder = tmp_path / "ranks"
    folder.mkdir()
    results, other = in_ranks(2, measured_on, folder, store.settings, spec)
    alone = measured_on(ALONE, store.settings, spec)

    assert results == other
    assert results[1] == alone[1] == 523
    assert results[0] == pytest.approx(alone[0], abs=1e-4)
    assert 0.5 < results[0]["auroc"] < 1


def test_in_bfloat16_it_learns_and_weights_stay_in_float32(store: ObjectStore) -> None:
    spec = classifier(store, replace(SPEC, precision=BFLOAT16), noise=0.0)
    load_code(store, spec.model.code_bundle)
    made = learner(spec)

    losses = [made.describe(made.step(batch(step=step)))["loss"] for step in range(8)]

    assert losses[-1] < losses[0]
    assert all(one.dtype is torch.float32 for one in made.model.parameters())


def test_float16_scales_losses_and_its_scaler_is_saved(store: ObjectStore) -> None:
    spec = classifier(store, replace(SPEC, precision=FLOAT16), noise=0.0)
    load_code(store, spec.model.code_bundle)
    made = learner(spec)
    for step in range(4):
        made.step(batch(step=step))

    state = made.state()
    assert state["scaler"]["scale"] > 0
    assert state["updates"] == 4 - made.skipped_steps


def test_early_stopping_on_a_metric_that_validation_does_not_log_fails_the_run(store: ObjectStore) -> None:
    stopping = EarlyStopping(metric="val_f1", maximize=True, patience=1)
    spec = classifier(store, replace(SPEC, early_stopping=stopping))
    new_job(store, NAME, spec)

    with pytest.raises(FailedPrecondition, match="val_accuracy, val_epochs, validation_loss, and not 'val_f1'"):
        run_of(store, NAME, spec=spec).run()


def test_a_loss_that_is_not_finite_ends_the_run_with_the_rows(store: ObjectStore) -> None:
    spec = classifier(store, noise=0.0)
    load_code(store, spec.model.code_bundle)
    made = learner(spec)
    rows = batch()
    inputs = vectors().astype(np.float32)
    inputs[3] = np.nan

    with pytest.raises(FailedPrecondition, match="the loss of step 0") as raised:
        made.step(replace(rows, inputs=inputs))

    assert raised.value.specific_reason == "NON_FINITE_LOSS"
