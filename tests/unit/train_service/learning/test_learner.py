"""A step is the same however it is cut, wherever it runs and whenever it is taken up again."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shared.errors import FailedPrecondition
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.unit.train_service.in_ranks import in_ranks
from tests.unit.train_service.learners import (
    ALONE,
    CLIPPED,
    NUMBERS,
    ROWS,
    SPEC,
    STEPS,
    batch,
    classes,
    commit_table,
    expected_gradients,
    gradients,
    learner,
    norm,
    trained,
    validation,
    vectors,
    what_ranks_learn,
)
from train_service.domain.spec import BFLOAT16, FLOAT16, EarlyStopping, LossSpec, OptimizerSpec, TrainingSpec
from train_service.learning import learner as evaluation
from train_service.learning.learner import seed_generators
from train_service.learning.ranks import Ranks
from train_service.loading.preprocessing import Array, Rows


@pytest.fixture(scope="module", params=[2, 3])
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two, and each of three, real processes learns."""
    folder: Path = tmp_path_factory.mktemp("learning")
    store = table_store(folder / "store")
    (folder / "ranks").mkdir()
    return in_ranks(request.param, what_ranks_learn, folder / "ranks", store.settings)


def table_store(folder: Path) -> ObjectStore:
    store = open_store(StoreSettings(url=folder.as_uri()))
    commit_table(store)
    return store


def assert_exact(given: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(given) == len(expected) > 0
    for ours, theirs in zip(given, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert one.keys() == other.keys()
    assert one
    assert all(torch.equal(one[name], other[name]) for name in one)


def saved_and_read(state: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint keeps it: nothing in it may run code."""
    saved = io.BytesIO()
    torch.save(state, saved)
    read: dict[str, Any] = torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
    return read


def test_gradients_are_the_mean_over_the_global_batch_on_one_two_and_three_ranks(several: list[dict[str, Any]]) -> None:
    expected = expected_gradients()

    assert_exact(gradients(SPEC, ALONE), expected)
    for reported in several:
        assert_exact(reported["gradients"], expected)


def test_a_step_in_parts_has_the_gradients_of_one_in_one_part(several: list[dict[str, Any]]) -> None:
    expected = expected_gradients()

    assert_exact(gradients(replace(SPEC, accumulation_steps=7), ALONE), expected)
    for reported in several:
        assert_exact(reported["accumulated"], expected)


def test_gradients_are_the_same_on_fewer_workers_than_there_should_be(several: list[dict[str, Any]]) -> None:
    expected = expected_gradients()

    assert_exact(gradients(replace(SPEC, num_workers=8), ALONE), expected)
    for reported in several:
        assert_exact(reported["shrunk"], expected)


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_no_more_rows_are_computed_at_once_on_one_worker_than_on_all(accumulation_steps: int) -> None:
    made = learner(replace(SPEC, num_workers=8, accumulation_steps=accumulation_steps))
    rows: list[int] = []
    made.model.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))

    made.step(batch())

    whole = max(len(batch(Ranks(rank, 8, torch.device("cpu"))).row_ids) for rank in range(8))
    assert sum(rows) == ROWS
    assert max(rows) <= math.ceil(whole / accumulation_steps)


def test_gradients_are_clipped_to_their_norm_over_all_ranks(several: list[dict[str, Any]]) -> None:
    full = expected_gradients()
    assert norm(full) > 2 * CLIPPED

    for clipped in (gradients(replace(SPEC, max_gradient_norm=CLIPPED), ALONE), *(one["clipped"] for one in several)):
        assert norm(clipped) == pytest.approx(CLIPPED, rel=1e-4)
        assert_exact(clipped, [one * (norm(clipped) / norm(full)) for one in full])


def test_shards_learn_what_the_whole_learns_and_come_back_bit_for_bit(several: list[dict[str, Any]]) -> None:
    first = several[0]
    alone = trained(replace(SPEC, accumulation_steps=3, max_gradient_norm=CLIPPED), range(STEPS)).weights()
    assert first["sharded"].keys() == first["whole"].keys() == alone.keys()
    for name in alone:
        torch.testing.assert_close(first["sharded"][name], first["whole"][name], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(first["whole"][name], alone[name], rtol=1e-4, atol=1e-5)
    assert_same(first["resumed"], first["sharded"])
    # Also with an optimizer that keeps nothing, and on another number of ranks.
    assert_same(first["plain resumed"], first["plain"])
    for name in alone:
        for resumed in ("from one", "to one"):
            torch.testing.assert_close(first[resumed][name], alone[name], rtol=1e-4, atol=1e-5)
    # Each rank really holds a part alone, and rank 0 alone the whole.
    rows = [reported["layers"]["linear0.weight"][0] for reported in several]
    assert sum(rows) == 16
    assert max(rows) < 16
    assert all(not reported["sharded"] for reported in several[1:])


def test_ranks_measure_together_what_one_measures_alone(several: list[dict[str, Any]], tmp_path: Path) -> None:
    one = learner()
    described = one.describe(one.step(batch()))
    whole = trained(replace(SPEC, accumulation_steps=3, max_gradient_norm=CLIPPED), range(STEPS))
    values, rows = whole.evaluate(*validation(SPEC, table_store(tmp_path)))

    assert rows == 523
    for reported in several:
        assert reported["described"] == pytest.approx(described, rel=1e-5)
        assert reported["measured"][1] == rows
        assert reported["measured"][0] == pytest.approx(values, rel=1e-3)


def test_a_step_returns_sums_that_describe_it() -> None:
    model = learner(replace(SPEC, metrics=("top5_accuracy",), model=replace(SPEC.model, num_classes=7)))
    given = batch()
    outputs = model.model(torch.from_numpy(given.inputs))

    sums = model.step(given)

    labels = torch.from_numpy(given.labels)
    assert sums[:3] == pytest.approx(
        [F.cross_entropy(outputs, labels, reduction="sum").item(), ROWS, (outputs.argmax(1) == labels).sum().item()]
    )
    assert model.describe(sums)["loss"] == pytest.approx(F.cross_entropy(outputs, labels).item())
    assert set(model.describe(sums)) == {"loss", "accuracy", "top5_accuracy"}


@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerSpec(learning_rate=0.01, schedule="COSINE_WITH_WARMUP"),
        OptimizerSpec(name="SGD", learning_rate=0.05, kwargs={"momentum": 0.9}, scheduler="OneCycleLR",
                      scheduler_kwargs={"max_lr": 0.1}),
        OptimizerSpec(name="RAdam", learning_rate=0.01, scheduler="StepLR", scheduler_kwargs={"step_size": 3}),
        OptimizerSpec(name="Adagrad", learning_rate=0.01, scheduler="CosineAnnealingLR"),
        OptimizerSpec(name="NAdam", learning_rate=0.01, scheduler="MultiStepLR",
                      scheduler_kwargs={"milestones": [2, 4, 7]}),
        OptimizerSpec(name="SGD", learning_rate=0.01, scheduler="CyclicLR",
                      scheduler_kwargs={"base_lr": 0.001, "max_lr": 0.1, "step_size_up": 3, "cycle_momentum": False}),
    ],
    ids=lambda spec: f"{spec.name}-{spec.scheduler or spec.schedule}",
)  # fmt: skip
@pytest.mark.parametrize("precision", ["FLOAT32", FLOAT16])
def test_a_run_resumed_from_its_state_goes_on_bit_for_bit(optimizer: OptimizerSpec, precision: str) -> None:
    spec = replace(SPEC, optimizer=optimizer, precision=precision)
    spec = replace(spec, model=replace(SPEC.model, kwargs={"hidden": [16], "dropout": 0.3}))
    whole, half = learner(spec), trained(spec, range(4))
    expected = []
    for step in range(STEPS):
        whole.step(batch(step=step))
        expected.append(whole.learning_rate)

    rest = learner(spec, prepared=False)
    rest.load(half.weights(), saved_and_read(half.state()))
    rest.prepare()
    rates = []
    for step in range(4, STEPS):
        rest.step(batch(step=step))
        rates.append(rest.learning_rate)

    assert_same(rest.weights(), whole.weights())
    assert rates == expected[4:]
    assert len(set(rates)) > 1
    assert ("scaler" in rest.state()) == (precision == FLOAT16)


@pytest.mark.parametrize("schedule", [{"scheduler": "StepLR", "scheduler_kwargs": {"step_size": 1, "gamma": 0.5}},
                                      {"schedule": "COSINE_WITH_WARMUP"}], ids=["torch's", "ours"])  # fmt: skip
def test_the_rate_that_is_reported_of_a_step_is_the_one_it_took(schedule: dict[str, Any]) -> None:
    made = learner(replace(SPEC, optimizer=OptimizerSpec(name="SGD", learning_rate=0.5, **schedule)))
    parameter = made.model.get_parameter("linear1.bias")
    reported = []
    for step in range(4):
        before = parameter.detach().clone()
        made.step(batch(step=step))
        assert parameter.grad is not None
        torch.testing.assert_close(before - parameter.detach(), made.learning_rate * parameter.grad)
        reported.append(made.learning_rate)
    assert len(set(reported)) > 2


@pytest.mark.parametrize("precision", [BFLOAT16, FLOAT16])
def test_in_half_precision_it_learns_with_whole_weights(precision: str) -> None:
    spec = replace(SPEC, precision=precision, max_gradient_norm=1.0, accumulation_steps=2)
    spec = replace(spec, optimizer=replace(spec.optimizer, learning_rate=0.05))
    half = learner(spec)
    seen: list[torch.dtype] = []
    half.model.get_submodule("linear1").register_forward_hook(lambda _m, _i, made: seen.append(made.dtype))

    losses = [half.describe(half.step(batch()))["loss"] for _ in range(20)]

    assert set(seen) == {torch.bfloat16 if precision == BFLOAT16 else torch.float16}
    assert losses[-1] < losses[0] * 0.7
    assert {one.dtype for one in half.weights().values()} == {torch.float32}


@pytest.mark.parametrize(
    "loss", [LossSpec(name="mse"), LossSpec(name="l1"), LossSpec(name="huber", kwargs={"delta": 2})]
)
def test_numbers_are_learnt_with_each_loss(loss: LossSpec) -> None:
    spec = replace(NUMBERS, loss=loss, optimizer=OptimizerSpec(learning_rate=0.03))
    model = learner(spec)

    reported = [model.describe(model.step(batch(spec=spec))) for _ in range(60)]

    assert set(reported[0]) == {"loss", "mae", "r2"}
    assert reported[-1]["r2"] > 0.9 > reported[0]["r2"]
    assert reported[-1]["loss"] < reported[0]["loss"] / 4
    if loss.name == "l1":
        assert reported[0]["loss"] == pytest.approx(reported[0]["mae"], rel=1e-6)


def test_several_numbers_a_row_are_learnt_as_their_mean() -> None:
    spec = replace(NUMBERS, model=replace(NUMBERS.model, num_classes=2))
    model = learner(spec)
    given = batch(spec=spec)
    given = replace(given, labels=np.stack([given.labels, -given.labels], 1))
    outputs = model.model(torch.from_numpy(given.inputs))

    sums = model.step(given)

    assert model.describe(sums)["loss"] == pytest.approx(
        F.mse_loss(outputs, torch.from_numpy(given.labels)).item(), rel=1e-6
    )


def test_labels_are_smoothed() -> None:
    model = learner(replace(SPEC, loss=LossSpec(name="cross_entropy", label_smoothing=0.2)))
    given = batch()
    outputs = model.model(torch.from_numpy(given.inputs))

    smoothed = F.cross_entropy(outputs, torch.from_numpy(given.labels), label_smoothing=0.2).item()
    assert model.describe(model.step(given))["loss"] == pytest.approx(smoothed, rel=1e-6)


def test_class_weights_multiply_the_losses_of_rows_whose_mean_counts_each_as_one() -> None:
    weight = [0.5, 1.0, 4.0]
    model = learner(replace(SPEC, loss=LossSpec(name="cross_entropy", kwargs={"weight": weight})))
    given = batch()
    outputs, labels = model.model(torch.from_numpy(given.inputs)), torch.from_numpy(given.labels)

    weighed = F.cross_entropy(outputs, labels, weight=torch.tensor(weight), reduction="none").mean().item()
    assert weighed != pytest.approx(F.cross_entropy(outputs, labels, weight=torch.tensor(weight)).item(), rel=1e-2)
    assert model.describe(model.step(given))["loss"] == pytest.approx(weighed, rel=1e-6)


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, accumulation_steps=3)], ids=["whole", "in-parts"])
def test_a_loss_that_is_not_finite_stops_the_step_and_names_the_rows(spec: TrainingSpec) -> None:
    model = learner(spec)
    before = model.weights()
    given = replace(batch(step=7), epoch=2)
    given.inputs[[3, 50]] = np.nan

    with pytest.raises(FailedPrecondition, match=r"step 7 \(epoch 2\) is nan on rank 0, with the rows") as stopped:
        model.step(given)

    assert stopped.value.specific_reason == "NON_FINITE_LOSS"
    assert stopped.value.metadata | {"row_ids": ""} == {"step": "7", "epoch": "2", "rank": "0", "row_ids": ""}
    rows = ["1003"] if spec.accumulation_steps > 1 else ["1003", "1050"]
    assert stopped.value.metadata["row_ids"].split(", ") == rows
    assert_same(model.weights(), before)


def test_of_a_diverged_model_at_most_twenty_rows_are_named() -> None:
    model = learner()
    with torch.no_grad():
        next(model.model.parameters()).fill_(math.inf)

    with pytest.raises(FailedPrecondition) as stopped:
        model.step(batch())

    assert len(stopped.value.metadata["row_ids"].split(", ")) == 20


def test_weights_that_are_not_finite_are_never_given_to_a_checkpoint() -> None:
    model = learner()
    with torch.no_grad():
        model.model.get_parameter("linear1.bias")[2] = math.nan

    with pytest.raises(FailedPrecondition, match=r"linear1\.bias") as refused:
        model.weights()

    assert refused.value.specific_reason == "NON_FINITE_WEIGHTS"
    # A job's specification is fixed: only a new job has another rate.
    assert "new job" in refused.value.message
    assert "initial_checkpoint" in refused.value.message


def test_large_weights_are_no_fault() -> None:
    model = learner()
    with torch.no_grad():
        next(model.model.parameters()).fill_(3e38)

    assert model.weights()


def test_a_run_stops_early_by_what_its_epochs_measured() -> None:
    stopping = EarlyStopping(metric="validation_loss", maximize=False, patience=2)

    assert not learner().should_stop([(0, 1.0), (1, 1.0), (2, 1.0)])
    assert learner(replace(SPEC, early_stopping=stopping)).should_stop([(0, 1.0), (1, 1.0), (2, 1.0)])


def test_a_compiled_model_learns_what_it_learns_otherwise() -> None:
    from torch._inductor import config as inductor

    # Compiles here: with more threads torch starts processes to compile in, each of which imports torch first.
    with inductor.patch(compile_threads=1):
        compiled = trained(replace(SPEC, compile=True), range(3))

    for name, tensor in trained(SPEC, range(3)).weights().items():
        torch.testing.assert_close(compiled.weights()[name], tensor, rtol=1e-4, atol=1e-5)


def test_validation_measures_the_whole_split(tmp_path: Path) -> None:
    model = trained(SPEC, range(3))

    values, rows = model.evaluate(*validation(SPEC, table_store(tmp_path)))

    with torch.no_grad():
        outputs = model.model(torch.from_numpy(vectors(523, 2).astype(np.float32)))
    labels = torch.from_numpy(classes(523, 2))
    assert rows == 523
    assert values == pytest.approx(
        {
            "validation_loss": F.cross_entropy(outputs, labels).item(),
            "validation_accuracy": (outputs.argmax(1) == labels).float().mean().item(),
        },
        rel=1e-5,
    )


def test_after_a_validation_a_step_trains_again(tmp_path: Path) -> None:
    made = learner(replace(SPEC, model=replace(SPEC.model, kwargs={"hidden": [16], "dropout": 0.5})))
    made.evaluate(*validation(SPEC, table_store(tmp_path)))
    assert not made.model.training
    made.step(batch())
    assert all(module.training for module in made.model.modules())


def test_the_noise_of_a_step_is_that_of_torchs_own_seeding() -> None:
    seed_generators(7, torch.device("cpu"))
    drawn = torch.rand(4)
    torch.manual_seed(7)
    assert drawn.equal(torch.rand(4))


def test_momentum_begins_with_the_first_step_that_does_not_overflow() -> None:
    momentum = OptimizerSpec(name="SGD", learning_rate=0.05, kwargs={"momentum": 0.9})
    made = learner(replace(SPEC, precision=FLOAT16, optimizer=momentum))
    made.load_state({**made.state(), "scaler": {**made.state()["scaler"], "scale": 2.0**60}})
    before = {name: one.clone() for name, one in made.weights().items()}
    made.step(batch())
    assert_same(made.weights(), before)
    kept = made.state()["optimizer"]["state"].values()
    assert all(one.get("momentum_buffer") is None for one in kept)


def test_a_run_in_half_precision_that_began_with_another_kernel_goes_on() -> None:
    spec = replace(SPEC, precision=FLOAT16)
    state = trained(spec, range(4)).state()
    state["optimizer"]["param_groups"][0]["fused"] = None
    rest = learner(spec, prepared=False)
    rest.load(trained(spec, range(4)).weights(), saved_and_read(state))
    rest.prepare()
    rest.step(batch(step=4))
    assert_same(rest.weights(), trained(spec, range(5)).weights())


def test_a_validation_gives_a_sign_of_life_after_each_row_that_takes_long_to_prepare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = learner(SPEC)
    cache, preprocessing = validation(SPEC, table_store(tmp_path))
    quick = made.evaluate(cache, preprocessing)
    row_s, now, signs = 10.0, [0.0], [0.0]
    monkeypatch.setattr(evaluation, "time", SimpleNamespace(monotonic=lambda: now[0]))
    cache.note_progress = lambda: signs.append(now[0])

    prepared = preprocessing.for_device

    def slow(rows: Rows) -> Array:
        now[0] += row_s * len(rows.row_ids)
        return prepared(rows)

    monkeypatch.setattr(preprocessing, "for_device", slow)
    slowly = made.evaluate(cache, preprocessing)

    assert now[0] >= row_s * slowly[1]
    assert max(after - before for before, after in itertools.pairwise(signs)) == row_s
    assert slowly == quick
