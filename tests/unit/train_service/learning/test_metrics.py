"""Metrics are sums: cut the rows anywhere, add up, and read what scikit-learn says of all of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as theirs

from shared.errors import InvalidArgument
from shared.models.transformers_models import NO_TOKEN
from shared.transforms import TensorSpec
from tests.support.peak_memory import MEBIBYTE, growth_here
from tests.unit.train_service.learners import NUMBERS, SPEC
from train_service.domain.spec import NEXT_TOKEN, LossSpec, TrainingSpec
from train_service.jobs.model_check import check_model
from train_service.learning import metrics as ours
from train_service.learning.losses import build_loss
from train_service.learning.metrics import Metrics, known_metrics

CPU = torch.device("cpu")
ROWS, CLASSES = 400, 7
OF_CLASSES = replace(SPEC, model=replace(SPEC.model, num_classes=CLASSES), metrics=tuple(known_metrics(SPEC.task)))
OF_NUMBERS = replace(NUMBERS, metrics=tuple(known_metrics(NUMBERS.task)))


def reported(spec: TrainingSpec, outputs: Any, labels: Any, cuts: list[int]) -> dict[str, float]:
    metrics = Metrics(spec, CPU)
    parts = zip(np.split(outputs, cuts), np.split(labels, cuts), strict=True)
    sums = [metrics.sums(torch.from_numpy(one), torch.from_numpy(other)) for one, other in parts]
    assert {(one.dtype, one.shape) for one in sums} == {(torch.float64, (metrics.width,))}
    return metrics.values(torch.stack(sums).sum(0).tolist())


@pytest.mark.parametrize("cuts", [[], [1, 100, 399]], ids=["whole", "in-parts"])
@pytest.mark.parametrize("certainty", [1.0, 12.0], ids=["doubtful", "certain"])
def test_metrics_of_classes_are_those_of_scikit_learn(cuts: list[int], certainty: float) -> None:
    random = np.random.default_rng(3)
    labels = random.integers(0, CLASSES, ROWS)
    outputs = random.standard_normal((ROWS, CLASSES)).astype(np.float32)
    outputs[np.arange(ROWS), labels] += 1
    outputs *= np.float32(certainty)
    chosen = outputs.argmax(1)
    probabilities = torch.from_numpy(outputs).double().softmax(1).numpy()

    values = reported(OF_CLASSES, outputs, labels, cuts)

    # At fixed thresholds, so not to the last digit.
    curve = theirs.roc_auc_score(labels, probabilities, multi_class="ovr")
    assert values.pop("auroc") == pytest.approx(curve, abs=2e-3)
    assert values == pytest.approx(
        {
            "accuracy": theirs.accuracy_score(labels, chosen),
            "top5_accuracy": theirs.top_k_accuracy_score(labels, outputs, k=5),
            "precision": theirs.precision_score(labels, chosen, average="macro"),
            "recall": theirs.recall_score(labels, chosen, average="macro"),
            "f1": theirs.f1_score(labels, chosen, average="macro"),
        },
        abs=1e-9,
    )


@pytest.mark.parametrize("cuts", [[], [1, 100, 399]], ids=["whole", "in-parts"])
@pytest.mark.parametrize("width", [1, 3])
def test_metrics_of_numbers_are_those_of_scikit_learn(cuts: list[int], width: int) -> None:
    random = np.random.default_rng(4)
    labels = random.standard_normal((ROWS, width)).astype(np.float32)
    outputs = labels + random.standard_normal((ROWS, width)).astype(np.float32) / 3
    spec = replace(OF_NUMBERS, model=replace(NUMBERS.model, num_classes=width))

    squares = theirs.mean_squared_error(labels, outputs)
    assert reported(spec, outputs, labels, cuts) == pytest.approx(
        {
            "mae": theirs.mean_absolute_error(labels, outputs),
            "mse": squares,
            "rmse": squares**0.5,
            "r2": theirs.r2_score(labels, outputs),
        },
        rel=1e-5,
    )


@pytest.mark.parametrize("spec", [OF_CLASSES, OF_NUMBERS], ids=["classes", "numbers"])
def test_of_no_rows_no_metric_fails(spec: TrainingSpec) -> None:
    metrics = Metrics(spec, CPU)

    values = metrics.values([0.0] * metrics.width)

    assert set(values) == set(spec.metrics)
    assert all(math.isnan(value) or value == 0 for value in values.values())


def test_metrics_too_wide_for_a_step_are_left_to_validation() -> None:
    spec = replace(SPEC, metrics=("auroc", "f1"))

    assert set(Metrics(spec, CPU, max_sums=100).values([0.0] * 14)) == {"accuracy", "f1"}


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (replace(SPEC, metrics=("accuracy", "no_such")), "no_such"),
        (replace(SPEC, metrics=("mae",)), "mae"),
        (replace(SPEC, metrics=("",)), ""),
        (replace(NUMBERS, metrics=("f1",)), "f1"),
        (replace(SPEC, metrics=("top5_accuracy",)), "top5_accuracy"),
    ],
)
def test_metrics_that_are_unknown_or_mean_nothing_are_refused(spec: TrainingSpec, name: str) -> None:
    with pytest.raises(InvalidArgument, match=repr(name)) as refused:
        Metrics(spec, CPU)

    assert [path for path, _ in refused.value.fields] == ["spec.metrics"]


def of_outputs(number: int, spec: TrainingSpec = SPEC, *metrics: str) -> TrainingSpec:
    return replace(spec, model=replace(spec.model, num_classes=number), metrics=metrics)


@pytest.mark.parametrize("outputs", [6, 31])
@pytest.mark.parametrize("spec", [SPEC, NUMBERS], ids=["classes", "numbers"])
def test_the_width_that_a_metric_is_judged_by_is_the_one_that_it_has(spec: TrainingSpec, outputs: int) -> None:
    for name in known_metrics(spec.task):
        metrics = Metrics(of_outputs(outputs, spec, name), CPU)
        labels = torch.zeros(9, dtype=torch.int64) if spec is SPEC else torch.zeros(9, outputs)

        assert metrics.sums(torch.rand(9, outputs), labels).shape == (metrics.width,), name


def test_metrics_that_would_take_gigabytes_are_refused_without_being_built() -> None:
    check_model(of_outputs(10, SPEC, "auroc", "f1"), TensorSpec("x", "float32", (6,)))  # imports what it needs

    with growth_here() as grown, pytest.raises(InvalidArgument, match="leave auroc out") as refused:
        check_model(of_outputs(1_000_000, SPEC, "auroc"), TensorSpec("x", "float32", (6,)))

    assert [path for path, _ in refused.value.fields] == ["spec.metrics"]
    assert grown() < 100 * MEBIBYTE


def test_metrics_are_refused_by_what_they_have_together() -> None:
    Metrics(of_outputs(600_000, SPEC, "f1", "recall"), CPU)

    with pytest.raises(InvalidArgument, match="7,200,002 numbers"):
        Metrics(of_outputs(600_000, SPEC, "f1", "recall", "precision"), CPU)


def test_a_metric_too_wide_for_a_step_is_not_built_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Any:
        raise AssertionError("built")

    monkeypatch.setitem(ours._OF_CLASSES, "auroc", replace(ours._OF_CLASSES["auroc"], build=refuse))

    assert Metrics(of_outputs(1_000, SPEC, "auroc", "f1"), CPU, max_sums=100_000).width == 2 + 4_000


def test_many_classes_are_counted_without_a_table_of_them_by_each_other() -> None:
    metrics = Metrics(of_outputs(20_000, SPEC, "f1"), CPU)
    outputs, labels = torch.rand(50, 20_000), torch.arange(50)

    with growth_here() as grown:
        metrics.sums(outputs, labels)

    assert grown() < 100 * MEBIBYTE


def test_a_surprise_that_is_no_number_counts_in_loss_and_metric() -> None:
    surprises_BL = torch.tensor([[NO_TOKEN, 1.0, math.nan, NO_TOKEN], [NO_TOKEN, 2.0, 4.0, NO_TOKEN]])
    labels = torch.zeros(2)

    each = build_loss(LossSpec(name=NEXT_TOKEN)).each(surprises_BL, labels)
    perplexity = ours._Perplexity()

    assert each.isnan().tolist() == [True, False]
    assert each[1] == 3
    assert math.isnan(perplexity.value(perplexity.sums(surprises_BL, labels)))
    assert perplexity.value(perplexity.sums(surprises_BL[1:], labels[1:])) == pytest.approx(math.exp(3))
