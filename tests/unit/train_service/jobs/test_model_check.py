"""Models and optimizers that cannot work are refused before a job is made of them, by the field that is wrong."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shared.errors import InvalidArgument, ResourceExhausted
from shared.model_spec import ModelSpec
from shared.transforms import TensorSpec
from tests.support.cpu_time import cpu_at_most
from tests.support.peak_memory import MEBIBYTE, growth_here
from train_service.domain.spec import (
    REGRESSION,
    CheckpointPolicy,
    EarlyStopping,
    LossSpec,
    OptimizerSpec,
    Placement,
    TrainingSpec,
)
from train_service.jobs import model_check, trial_limit
from train_service.jobs.model_check import check_model

IMAGE = TensorSpec("image", "float32", (1, 28, 28))
SPEC = TrainingSpec(
    dataset_version="datasets/d/versions/v",
    model=ModelSpec(builder="torchvision.shufflenet_v2_x0_5", in_channels=1, num_classes=10),
    epochs=1,
    global_batch_size=64,
)


def with_model(builder: str, **kwargs: Any) -> TrainingSpec:
    model = ModelSpec(builder=f"torchvision.{builder}", in_channels=1, num_classes=10, kwargs=kwargs)
    return replace(SPEC, model=model)


def with_optimizer(name: str, **kwargs: Any) -> TrainingSpec:
    return replace(SPEC, optimizer=OptimizerSpec(name=name, kwargs=kwargs))


def with_scheduler(name: str, **kwargs: Any) -> TrainingSpec:
    return replace(SPEC, optimizer=OptimizerSpec(name="SGD", scheduler=name, scheduler_kwargs=kwargs))


def stopping(metric: str) -> TrainingSpec:
    rule = EarlyStopping(metric=metric, maximize=True, patience=1)
    return replace(SPEC, validation_split="validation", early_stopping=rule)


def weighed(*weight: object) -> TrainingSpec:
    return replace(SPEC, loss=LossSpec(name="cross_entropy", kwargs={"weight": list(weight)}))


def best(metric: str, validation_split: str = "validation", keep_best: int = 1) -> TrainingSpec:
    policy = CheckpointPolicy(best_metric=metric, maximize=True, keep_newest=1, keep_best=keep_best)
    return replace(SPEC, validation_split=validation_split, checkpoints=policy)


NUMBERS = replace(
    SPEC,
    task=REGRESSION,
    loss=LossSpec(name="mse"),
    metrics=("mae", "r2"),
    validation_split="validation",
    checkpoints=CheckpointPolicy(best_metric="validation_mae", maximize=False),
)


@pytest.fixture(autouse=True)
def generous_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """How busy the machine is says nothing of a model."""
    monkeypatch.setattr(model_check, "LIMIT_S", 500.0)
    monkeypatch.setattr(trial_limit, "WALL_LIMIT_S", 500.0)


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        with_model("resnet18", zero_init_residual=True),
        with_model("squeezenet1_1", dropout=0.1),
        with_optimizer("SGD", momentum=0.9, nesterov=True),
        with_optimizer("Adam", betas=[0.9, 0.99], weight_decay=0.01, amsgrad=True),
        with_optimizer("AdamW", foreach=False),
        *map(with_optimizer, ("Adafactor", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")),
        with_scheduler("StepLR", step_size=3),
        with_scheduler("OneCycleLR", max_lr=0.1),
        with_scheduler("OneCycleLR", max_lr=0.1, epochs=10, steps_per_epoch=10),
        with_scheduler("CosineAnnealingLR"),
        with_scheduler("CosineAnnealingWarmRestarts", T_0=5),
        with_scheduler("PolynomialLR", total_iters=50, power=2),
        with_scheduler("MultiStepLR", milestones=[3, 5]),
        with_scheduler("StepLR", step_size=2, gamma=0),
        with_scheduler("OneCycleLR", max_lr=0.1, anneal_strategy="linear", three_phase=True),
        with_scheduler("CyclicLR", base_lr=0, max_lr=0.1, step_size_up=7, cycle_momentum=False),
        # Ends 2e-18 below zero, by rounding.
        with_scheduler("LinearLR", start_factor=0.3, end_factor=0, total_iters=8),
        replace(SPEC, loss=LossSpec(name="cross_entropy", kwargs={"weight": [0.5] * 10}, label_smoothing=0.1)),
        replace(SPEC, metrics=("f1", "auroc", "top5_accuracy")),
        stopping("validation_loss"),
        stopping("validation_accuracy"),
        weighed(0, *[0.5] * 9),
        best("validation_loss"),
        best("validation_accuracy", keep_best=3),
        # What a job without a validation split tells of itself, and so may be asked for again.
        best("validation_accuracy", validation_split=""),
        NUMBERS,
        replace(
            NUMBERS, validation_split="", checkpoints=CheckpointPolicy(best_metric="validation_loss", maximize=False)
        ),
        replace(with_optimizer("Adam"), placement=Placement(parallel="FSDP")),
    ],
    ids=lambda spec: f"{spec.model.builder}-{spec.optimizer.name}-{spec.optimizer.scheduler}-{spec.task}",
)
def test_a_model_that_works_is_taken(spec: TrainingSpec) -> None:
    check_model(spec, IMAGE)


@pytest.mark.parametrize(
    ("path", "spec"),
    [
        ("model.builder", with_model("no_such_model")),
        ("model.builder", with_model("alexnet")),
        ("model.builder", with_model("googlenet")),
        ("model.builder", with_model("vit_b_16")),
        ("model.builder", with_model("inception_v3")),
        ("model.kwargs", with_model("resnet18", no_such_argument=1)),
        ("model.kwargs", with_model("resnet18", weights="DEFAULT")),
        ("model.kwargs", with_model("resnet18", norm_layer="BatchNorm2d")),
        ("model.kwargs", with_model("resnet50", groups=0)),
        ("model.kwargs", with_model("resnet50", width_per_group=-64)),
        ("optimizer.name", with_optimizer("")),
        ("optimizer.name", with_optimizer("adam")),
        ("optimizer.name", with_optimizer("Optimizer")),
        ("optimizer.name", with_optimizer("lr_scheduler")),
        ("optimizer.name", with_optimizer("__class__")),
        ("optimizer.name", with_optimizer("LBFGS")),
        ("optimizer.name", with_optimizer("LBFGS", max_iter=3)),
        ("optimizer.name", with_optimizer("SparseAdam")),
        ("optimizer.name", with_optimizer("Muon")),
        ("optimizer.scheduler", with_scheduler("steplr")),
        ("optimizer.scheduler", with_scheduler("LRScheduler")),
        ("optimizer.scheduler", with_scheduler("ReduceLROnPlateau")),
        ("optimizer.scheduler", with_scheduler("LambdaLR")),
        ("optimizer.scheduler", with_scheduler("StepLR")),
        ("optimizer.scheduler_kwargs", with_scheduler("StepLR", step_size=0)),
        ("optimizer.scheduler_kwargs", with_scheduler("StepLR", step_size=3, no_such=1)),
        ("optimizer.scheduler_kwargs", with_scheduler("OneCycleLR", max_lr=0.1, total_steps=99)),
        ("optimizer.scheduler_kwargs", with_scheduler("StepLR", step_size=2, gamma=-1)),
        ("optimizer.scheduler_kwargs", with_scheduler("OneCycleLR", max_lr=-1)),
        ("optimizer.scheduler_kwargs", with_scheduler("CyclicLR", base_lr=-1, max_lr=1, cycle_momentum=False)),
        ("optimizer.scheduler_kwargs", with_scheduler("CosineAnnealingLR", eta_min=-1)),
        ("optimizer.scheduler_kwargs", with_scheduler("ExponentialLR", gamma=1e10)),
        ("loss.name", replace(SPEC, loss=LossSpec(name="hinge"))),
        ("loss.name", replace(SPEC, loss=LossSpec(name="mse"))),
        ("loss.kwargs", replace(SPEC, loss=LossSpec(name="cross_entropy", kwargs={"no_such": 1}))),
        ("loss.kwargs", replace(SPEC, loss=LossSpec(name="cross_entropy", kwargs={"weight": [1.0, 2.0]}))),
        ("loss.kwargs", weighed(-1, *[1] * 9)),
        ("loss.kwargs", weighed(*[0] * 10)),
        ("loss.kwargs", weighed(float("inf"), *[1] * 9)),
        ("loss.kwargs", weighed(1e300, *[1] * 9)),
        ("loss.kwargs", weighed("heavy", *[1] * 9)),
        ("loss.kwargs", replace(NUMBERS, loss=LossSpec(name="huber", kwargs={"delta": -1}))),
        ("training_step", replace(SPEC, training_step="no_such")),
        ("metrics", replace(SPEC, metrics=("accuracy", "speed"))),
        ("metrics", replace(NUMBERS, metrics=("accuracy",))),
        ("early_stopping.metric", stopping("accuracy")),
        ("early_stopping.metric", stopping("validation_f1")),
        ("early_stopping", replace(stopping("validation_loss"), validation_split="")),
        ("checkpoints.best_metric", best("loss")),
        ("checkpoints.best_metric", best("validation_mae")),
        ("checkpoints.best_metric", best("validation_loss", validation_split="")),
        ("checkpoints.keep_best", best("validation_accuracy", validation_split="", keep_best=3)),
        ("optimizer.name", replace(with_optimizer("Adafactor"), placement=Placement(parallel="FSDP"))),
        ("precision", replace(SPEC, precision="FLOAT16", placement=Placement(parallel="FSDP"))),
        ("compile", replace(SPEC, compile=True, placement=Placement(parallel="FSDP"))),
        ("optimizer.kwargs", with_optimizer("SGD", nesterov=True)),
        ("optimizer.kwargs", with_optimizer("SGD", params=[])),
        ("optimizer.kwargs", with_optimizer("Adam", betas=[0.9])),
        ("optimizer.kwargs", with_optimizer("Adam", betas=[0.9, 2])),
        ("optimizer.kwargs", with_optimizer("Adam", eps="small")),
        ("optimizer.kwargs", with_optimizer("AdamW", fused=True, foreach=True)),
        ("optimizer.kwargs", with_optimizer("AdamW", capturable=True)),
        ("optimizer.kwargs", with_optimizer("AdamW", **{"x" * 5000: 1})),
    ],
)
def test_check_model_names_the_field_that_cannot_be_built(path: str, spec: TrainingSpec) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_model(spec, IMAGE)

    assert [field for field, _ in refused.value.fields] == [f"spec.{path}"]
    assert len(refused.value.message) < 1000


def test_the_largest_model_of_torchvision_is_within_the_limit() -> None:
    of_photos = TensorSpec("image", "float32", (3, 64, 64))
    spec = with_model("efficientnet_v2_l")
    check_model(replace(spec, model=replace(spec.model, in_channels=3)), of_photos)


@pytest.mark.timed
@pytest.mark.parametrize("setting", [[[1, 16, 3200, 1]], [[1, 16, 10_000_000, 1]], [[1, 16, 1, 1]] * 5000])
def test_arguments_that_make_endless_layers_are_refused_within_seconds(setting: list[list[int]]) -> None:
    with (
        cpu_at_most(10, time.process_time),
        growth_here() as grown,
        pytest.raises(InvalidArgument, match="too large") as refused,
    ):
        check_model(with_model("mobilenet_v2", inverted_residual_setting=setting), IMAGE)

    assert [field for field, _ in refused.value.fields] == ["spec.model.kwargs"]
    assert len(refused.value.message) < 1000
    assert grown() < 500 * MEBIBYTE


def test_a_model_that_is_endless_only_in_its_calls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            while True:
                given = given + 1

    monkeypatch.setattr(model_check, "build_model", lambda *_: Endless())
    monkeypatch.setattr(trial_limit, "MAX_CALLS", 1_000)

    with pytest.raises(InvalidArgument, match="too large") as refused:
        check_model(with_model("resnet18", width_per_group=64), IMAGE)

    assert [field for field, _ in refused.value.fields] == ["spec.model.kwargs"]


class Slow(nn.Module):
    """Its calls wait for something, and take no time of the processor's."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            time.sleep(0.1)
            given = given + 1
        return given.flatten(1)[:, :10]


@pytest.mark.timed
def test_time_in_which_the_machine_does_something_else_is_not_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_check, "build_model", lambda *_: Slow())
    model_check.check_outputs(SPEC, IMAGE)  # torch itself imports what it needs for a first trial
    monkeypatch.setattr(trial_limit, "TRIAL_LIMIT_S", 0.2)

    model_check.check_outputs(SPEC, IMAGE)


def test_a_check_that_the_machine_does_not_get_done_says_nothing_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_check, "build_model", lambda *_: Slow())
    monkeypatch.setattr(trial_limit, "WALL_LIMIT_S", 0.2)

    with pytest.raises(ResourceExhausted, match="again"):
        check_model(SPEC, IMAGE)
