"""Checks that everything of a training can be built.

A model, its loss, metrics and optimizer are built without memory, on torch's meta device.

The first call imports torch and torchvision, which takes seconds.

A separate process tries whether FSDP can shard a model. torch shards only within a process group, of which a process
has one by default, and a service that answers several calls must not have one.

Building and trying a model has a limit: `trial_limit`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shared.errors import InvalidArgument, ResourceExhausted, first_line, invalid_field
from shared.model_spec import ModelSpec
from shared.models import build_model, import_builder
from shared.transforms import TensorSpec
from shared.transforms.records import RowShape
from train_service.domain.spec import FLOAT16, FSDP, REGRESSION, TrainingSpec, default_best_metric

if TYPE_CHECKING:
    from torch import nn


# --- Model ---

ROWS = 2
SOME_STEPS = 100
# Optimizers that need a whole parameter: torch has no version of their step for shards.
NOT_OF_SHARDS = ("Adafactor",)


def check_model(spec: TrainingSpec, model_input: TensorSpec, total_steps: int = SOME_STEPS) -> None:
    """Check that the model and everything that trains it work.

    `total_steps` are those of the run. Raises `InvalidArgument` naming the field of `spec` that does not work, and
    `ResourceExhausted` if this machine cannot finish the check.
    """
    from train_service.learning.learner import build_training_step
    from train_service.learning.optimizers import check_optimizer

    check_names(spec)
    check_parallel(spec)
    model = check_outputs(spec, model_input)
    if spec.placement.parallel == FSDP:
        check_sharding(spec.model, model_input.shape)
    build_training_step(spec.training_step)
    check_loss(spec)
    check_optimizer(spec.optimizer, [tuple(parameter.shape) for parameter in model.parameters()], total_steps)


def check_outputs(spec: TrainingSpec, model_input: TensorSpec) -> nn.Module:
    """Return the model, on the meta device. Raises as `check_model` does."""
    import torch

    from train_service.jobs.trial_limit import TooLarge, TrialLimit

    import_builder(spec.model.builder, "spec.model.builder")
    limit = TrialLimit()
    try:
        with torch.device("meta"), limit:
            # If the limit stops a builder, the error is reported as one of the builder's arguments.
            model = build_model(spec.model, "spec.model")
            try:
                output = model(torch.zeros((ROWS, *model_input.shape)))
            except TooLarge as error:
                raise invalid_field("spec.model.kwargs", spec.model.kwargs, str(error)) from None
            except Exception as error:  # models refuse inputs with errors of many types
                remedy = f"the model does not take inputs of {model_input.shape}: {first_line(error)}"
                raise invalid_field("spec.model.builder", spec.model.builder, remedy) from None
    except InvalidArgument:
        if limit.out_of_time:
            text = "the model could not be tried in time, as this machine is busy; try again later"
            raise ResourceExhausted(text, reason="MODEL_NOT_TRIED") from None
        raise
    shape = tuple(output.shape) if isinstance(output, torch.Tensor) else None
    if shape != (ROWS, spec.model.num_classes):
        remedy = (
            f"in training it must give one tensor of (rows, {spec.model.num_classes}), not "
            f"{shape or type(output).__name__}; choose another"
        )
        raise invalid_field("spec.model.builder", spec.model.builder, remedy)
    return model


def check_loss(spec: TrainingSpec) -> None:
    """Raise `InvalidArgument` for an unusable loss.

    The loss is unknown, or does not suit the task's outputs and labels.
    """
    import torch

    from train_service.learning.losses import build_loss

    loss = build_loss(spec.loss)
    numbers = torch.zeros((ROWS, spec.model.num_classes))
    labels = numbers if spec.task == REGRESSION else torch.zeros(ROWS, dtype=torch.int64)
    try:
        loss.total(numbers, labels)
    except InvalidArgument as error:
        raise invalid_field("spec.loss.name", spec.loss.name, error.message) from None
    except Exception as error:  # losses refuse unsuitable labels with errors of many types
        path, value = ("spec.loss.kwargs", spec.loss.kwargs) if spec.loss.kwargs else ("spec.loss.name", spec.loss.name)
        remedy = f"{spec.loss.name} does not work for TASK_{spec.task}: {first_line(error)}"
        raise invalid_field(path, value, remedy) from None


def check_names(spec: TrainingSpec, own_metrics: Collection[str] = ()) -> None:
    """Check the names of metrics.

    All metrics must exist, and rules may use only metrics that will be measured. `own_metrics` are those of a user's
    own model.
    """
    import torch

    from train_service.learning.metrics import Metrics, measured

    Metrics(
        replace(spec, metrics=tuple(metric for metric in spec.metrics if metric not in own_metrics)),
        torch.device("cpu"),
    )
    will_be = ["validation_loss", *(f"validation_{name}" for name in measured(spec))]
    stopping = spec.early_stopping
    if stopping is not None and stopping.metric not in will_be:
        raise invalid_field("spec.early_stopping.metric", stopping.metric, f"use one of {', '.join(will_be)}")
    check_stopping(spec)
    _check_best(spec, will_be)


def check_stopping(spec: TrainingSpec) -> None:
    """Raise `InvalidArgument` for early stopping without a validation split."""
    if spec.early_stopping is not None and not spec.validation_split:
        remedy = "it goes by what validation measures, and the version has no split for it; set spec.validation_split"
        raise invalid_field("spec.early_stopping", spec.early_stopping.metric, remedy)


def _check_best(spec: TrainingSpec, will_be: list[str]) -> None:
    policy = spec.checkpoints
    if policy.best_metric not in will_be:
        raise invalid_field("spec.checkpoints.best_metric", policy.best_metric, f"use one of {', '.join(will_be)}")
    if spec.validation_split:
        return
    remedy = "it goes by what validation measures, and the version has no split for it; set spec.validation_split"
    # Every job's own specification has the default, and may be used again for another job.
    if policy.best_metric != default_best_metric(spec.task):
        raise invalid_field("spec.checkpoints.best_metric", policy.best_metric, remedy)
    if policy.keep_best > 1:
        raise invalid_field("spec.checkpoints.keep_best", policy.keep_best, remedy)


def check_parallel(spec: TrainingSpec) -> None:
    if spec.placement.parallel != FSDP:
        return
    if spec.optimizer.name in NOT_OF_SHARDS:
        remedy = "it does not work on the shards of FSDP; use another, or DDP"
        raise invalid_field("spec.optimizer.name", spec.optimizer.name, remedy)
    if spec.precision == FLOAT16:
        remedy = "its loss scaling does not work with FSDP; use PRECISION_BFLOAT16"
        raise invalid_field("spec.precision", spec.precision, remedy)
    if spec.compile:
        raise invalid_field("spec.compile", spec.compile, "a model of FSDP is not compiled; leave one of them out")
    if spec.acceleration.channels_last:
        remedy = "FSDP shards only what lies row by row; leave one of them out"
        raise invalid_field("spec.acceleration.channels_last", True, remedy)


# --- Sharding ---

# Time to import torch and to call the model twice on the meta device: seconds, but more on a busy machine. Other calls'
# models wait for the end of this check.
LIMIT_S = 120.0
_START = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {__name__} import answer; answer()"
_REMEDY = "use DDP, or change that module"


def check_sharding(model: ModelSpec, row_shape: Sequence[int]) -> None:
    """Check that FSDP can shard the model.

    The model must have been built and called before. `row_shape` is the shape of one row of the model's input.

    Raises `InvalidArgument` naming the module that cannot be sharded, and `ResourceExhausted` if the check does not end
    in time.
    """
    question = {"model": model.as_config(), "row_shape": list(row_shape)}
    try:
        answered = subprocess.run(
            [sys.executable, "-c", _START, json.dumps(sys.path)],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
            # A group of one process needs no network, and must not look up its host's address.
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
    except subprocess.TimeoutExpired:
        text = f"whether FSDP can shard the model could not be tried within {LIMIT_S:g} s; try again later, or use DDP"
        raise ResourceExhausted(text, reason="MODEL_NOT_TRIED") from None
    if answered.returncode:
        said = answered.stderr.strip().splitlines()[-1:] or [f"exit status {answered.returncode}"]
        raise invalid_field("spec.placement.parallel", FSDP, f"the model does not stand being sharded: {said[0]}")
    if problem := json.loads(answered.stdout.splitlines()[-1])["problem"]:
        raise invalid_field("spec.placement.parallel", FSDP, f"{problem}; {_REMEDY}")


def answer() -> None:
    """Answer the question on standard input.

    This is the child's entry point. The answer is the last line of standard output.
    """
    question: dict[str, Any] = json.load(sys.stdin)
    import torch
    import torch.distributed as dist

    from shared.models import build_model

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with torch.device("meta"):
        model = build_model(ModelSpec.from_config(question["model"]), "spec.model")
    print(json.dumps({"problem": sharding_problem(model, question["row_shape"])}))


def sharding_problem(model: nn.Module, row_shape: RowShape) -> str:
    """Return what keeps FSDP from sharding.

    The text is empty if nothing does. The model is on the meta device, and is sharded afterwards. Call this in a
    process of its own, with a process group of one process.
    """
    from train_service.learning.sharding import ShardingError, find_units, mixed_unit, shard

    units = find_units(model, row_shape)
    if mixed := mixed_unit(model, units):
        name, kinds = mixed
        return f"{name or 'the model'} has parameters of {' and '.join(kinds)}, and those of a unit must be alike"
    try:
        shard(model, "cpu", 1, units)
    except ShardingError as error:
        return str(error)
    return ""
