"""Optimizers and schedulers of torch, by the names of their classes."""

from __future__ import annotations

import inspect
import io
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from shared.errors import first_line, invalid_field
from train_service.domain.spec import OptimizerSpec

FIELD = "spec.optimizer"
# Arguments that give a scheduler the length of the run, unless its kwargs set it.
STEPS_OF_THE_RUN = ("total_steps", "T_max")
STEPS_TRIED = 2_000
# As a share of the learning rate: rounding may take a scheduler this far below zero, as LinearLR at its end.
ROUNDING = 1e-9
# Optimizers whose fused kernel, on CPUs and GPUs, computes the same as the class, and the arguments that choose another
# implementation. Without the kernel torch handles parameter by parameter on a CPU, several calls each. SGD is left out:
# its kernel takes no sparse gradients, and its momentum has to begin for all parameters together.
FUSED = ("Adam", "AdamW")
HOW = frozenset({"fused", "foreach", "capturable", "differentiable"})


def build_optimizer(spec: OptimizerSpec, model: nn.Module, *, fused: bool = True) -> torch.optim.Optimizer:
    """Build the optimizer, with torch's fused kernel if possible.

    The fused kernel is used if the class and the model allow it, unless `fused` is False or the kwargs choose an
    implementation. Raises the errors of the class; `check_optimizer` names their field.
    """
    kwargs = dict(spec.kwargs)
    if fused and spec.name in FUSED and not HOW.intersection(kwargs) and _is_plain(model):
        kwargs["fused"] = True
    made = _optimizer_class(spec.name)(model.parameters(), lr=spec.learning_rate, **kwargs)
    made.register_load_state_dict_post_hook(_lay_out_state)
    return made


def build_scheduler(spec: OptimizerSpec, optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler | None:
    """Build the scheduler, to be stepped after each step of the optimizer.

    Return None if the run's own schedule sets the learning rate.
    """
    if not spec.scheduler:
        return None
    kind = _scheduler_class(spec.scheduler)
    kwargs = dict(spec.scheduler_kwargs)
    takes = inspect.signature(kind).parameters
    for name in STEPS_OF_THE_RUN:
        if name in takes and name not in kwargs and "epochs" not in kwargs:
            kwargs[name] = total_steps
    return kind(optimizer, **kwargs)


def check_optimizer(spec: OptimizerSpec, shapes: Iterable[tuple[int, ...]], total_steps: int) -> None:
    """Build the optimizer and the scheduler and step them, on small parameters.

    The parameters have two numbers per dimension; `shapes` are the shapes of the model's parameters.

    Raises `InvalidArgument` that names the field of `spec.optimizer` that does not work.
    """
    _optimizer_class(spec.name)  # raises with its own field
    dimensions = sorted({len(shape) for shape in shapes})
    refusal = _refusal(lambda: _try_optimizer(spec, spec.kwargs, dimensions))
    if refusal:
        if spec.kwargs and not _refusal(lambda: _try_optimizer(spec, {}, dimensions)):
            raise invalid_field(f"{FIELD}.kwargs", spec.kwargs, f"{spec.name} refuses them: {refusal}")
        if spec.kwargs and not _needs_closure(spec, dimensions):
            raise invalid_field(f"{FIELD}.kwargs", spec.kwargs, f"{spec.name} does not work with them: {refusal}")
        raise invalid_field(f"{FIELD}.name", spec.name, f"it does not work for this model: {refusal}; use another")
    if spec.scheduler:
        _check_scheduler(spec, dimensions, total_steps)


def _check_scheduler(spec: OptimizerSpec, dimensions: list[int], total_steps: int) -> None:
    _scheduler_class(spec.scheduler)  # raises with its own field
    reported = _refusal(lambda: _try_scheduler(spec, dimensions, total_steps))
    if reported:
        path, value = (
            (f"{FIELD}.scheduler_kwargs", spec.scheduler_kwargs)
            if spec.scheduler_kwargs
            else (f"{FIELD}.scheduler", spec.scheduler)
        )
        raise invalid_field(path, value, f"{spec.scheduler} does not work with {spec.name} and these: {reported}")


def _try_optimizer(spec: OptimizerSpec, kwargs: dict[str, Any], dimensions: list[int]) -> torch.optim.Optimizer:
    optimizer = build_optimizer(replace(spec, kwargs=kwargs), _model(dimensions))
    optimizer.step()
    return optimizer


def _try_scheduler(spec: OptimizerSpec, dimensions: list[int], total_steps: int) -> None:
    optimizer = _try_optimizer(spec, spec.kwargs, dimensions)
    scheduler = build_scheduler(spec, optimizer, total_steps)
    assert scheduler is not None
    last = getattr(scheduler, "total_steps", total_steps)
    if last < total_steps:
        raise ValueError(f"it ends after {last} steps, and the run has {total_steps}; leave total_steps out")
    for step in range(min(total_steps, STEPS_TRIED)):
        rate = float(optimizer.param_groups[0]["lr"])
        if not -ROUNDING * spec.learning_rate <= rate < math.inf:
            raise ValueError(f"the learning rate of step {step} would be {rate:g}; it must be finite and not negative")
        scheduler.step()
    # A checkpoint stores the state, and loading it must not run code.
    saved = io.BytesIO()
    torch.save(scheduler.state_dict(), saved)
    torch.load(io.BytesIO(saved.getvalue()), weights_only=True)


def _is_plain(model: nn.Module) -> bool:
    """Return whether fused kernels take the model's parameters: real numbers, contiguous in memory.

    The kernels walk through a parameter, its gradient and its state side by side, so all three need the same layout.
    Autograd and `_lay_out_state` ensure that.
    """
    return all(parameter.is_floating_point() and _has_no_gaps(parameter) for parameter in model.parameters())


def _has_no_gaps(tensor: torch.Tensor) -> bool:
    channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return channels_last or tensor.is_contiguous()


@torch.no_grad()
def _lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """Give the loaded state the memory layout of its parameters. A checkpoint stores it row by row."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            is_alike = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if is_alike and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _needs_closure(spec: OptimizerSpec, dimensions: list[int]) -> bool:
    try:
        _try_optimizer(spec, {}, dimensions)
    except Exception as error:
        return "closure" in str(error)
    return False


def _model(dimensions: list[int]) -> nn.Module:
    """Return a module with one parameter, and its gradient, per number of dimensions."""
    parameters = nn.ParameterList(torch.ones((2,) * count) for count in dimensions or [1])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


def _refusal(attempt: Callable[[], object]) -> str:
    """Return the first line of torch's error. Empty if the attempt works."""
    try:
        with _quiet():
            attempt()
    except Exception as error:  # torch may raise anything on a client's arguments
        return first_line(error)
    return ""


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _optimizer_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    kind = None if name.startswith("_") else getattr(torch.optim, name, None)
    base = torch.optim.Optimizer
    if not isinstance(kind, type) or not issubclass(kind, base) or kind is base:
        raise invalid_field(f"{FIELD}.name", name, "use a class of torch.optim, e.g. SGD, Adam, AdamW")
    return kind


def _scheduler_class(name: str) -> Callable[..., LRScheduler]:
    kind = None if name.startswith("_") else getattr(torch.optim.lr_scheduler, name, None)
    if not isinstance(kind, type) or not issubclass(kind, LRScheduler) or kind is LRScheduler:
        remedy = "use a class of torch.optim.lr_scheduler, e.g. StepLR, OneCycleLR, CosineAnnealingLR"
        raise invalid_field(f"{FIELD}.scheduler", name, remedy)
    return kind
