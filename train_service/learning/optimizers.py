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
# What a scheduler may need to know of the run, where its kwargs do not say so.
STEPS_OF_THE_RUN = ("total_steps", "T_max")
STEPS_TRIED = 2_000
# Of the learning rate: so far below zero a scheduler may get by rounding, as LinearLR does where it ends.
ROUNDING = 1e-9
# Those whose fused kernel, on CPUs as on GPUs, computes what the class does otherwise, and the arguments that choose
# another way. Else torch takes parameter by parameter on a CPU, several calls each. SGD's is not among them: it takes
# no sparse gradients, and its momentum has to begin for all parameters together.
FUSED = ("Adam", "AdamW")
HOW = frozenset({"fused", "foreach", "capturable", "differentiable"})


def build_optimizer(spec: OptimizerSpec, model: nn.Module, *, fused: bool = True) -> torch.optim.Optimizer:
    """By torch's fused kernel where there is one for the class and the model, unless `fused` is False or the kwargs say
    how it computes. Raises what the class does; `check_optimizer` tells it by its field."""
    kwargs = dict(spec.kwargs)
    if fused and spec.name in FUSED and not HOW.intersection(kwargs) and _is_plain(model):
        kwargs["fused"] = True
    made = _optimizer_class(spec.name)(model.parameters(), lr=spec.learning_rate, **kwargs)
    made.register_load_state_dict_post_hook(_lay_out_state)
    return made


def build_scheduler(spec: OptimizerSpec, optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler | None:
    """None where the run's own schedule sets the rate. It is to be stepped after each step of the optimizer."""
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
    """Builds both and steps them, on two numbers a dimension; `shapes` are those of the model's parameters.

    Raises `InvalidArgument` naming the field of `spec.optimizer` that does not work.
    """
    _optimizer_class(spec.name)  # by its own field
    dimensions = sorted({len(shape) for shape in shapes})
    told = _refusal(lambda: _try_optimizer(spec, spec.kwargs, dimensions))
    if told:
        if spec.kwargs and not _refusal(lambda: _try_optimizer(spec, {}, dimensions)):
            raise invalid_field(f"{FIELD}.kwargs", spec.kwargs, f"{spec.name} refuses them: {told}")
        if spec.kwargs and not _needs_closure(spec, dimensions):
            raise invalid_field(f"{FIELD}.kwargs", spec.kwargs, f"{spec.name} does not work with them: {told}")
        raise invalid_field(f"{FIELD}.name", spec.name, f"it does not work for this model: {told}; use another")
    if spec.scheduler:
        _check_scheduler(spec, dimensions, total_steps)


def _check_scheduler(spec: OptimizerSpec, dimensions: list[int], total_steps: int) -> None:
    _scheduler_class(spec.scheduler)  # by its own field
    told = _refusal(lambda: _try_scheduler(spec, dimensions, total_steps))
    if told:
        path, value = (
            (f"{FIELD}.scheduler_kwargs", spec.scheduler_kwargs)
            if spec.scheduler_kwargs
            else (f"{FIELD}.scheduler", spec.scheduler)
        )
        raise invalid_field(path, value, f"{spec.scheduler} does not work with {spec.name} and these: {told}")


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
    # A checkpoint keeps the state, and nothing in it may run code when it is read.
    saved = io.BytesIO()
    torch.save(scheduler.state_dict(), saved)
    torch.load(io.BytesIO(saved.getvalue()), weights_only=True)


def _is_plain(model: nn.Module) -> bool:
    """Whether its parameters are what fused kernels take: real numbers without gaps in memory. The kernels go through a
    parameter, its gradient and its state side by side, which all lie alike: autograd and `_lay_out_state` see to that.
    """
    return all(one.is_floating_point() and _has_no_gaps(one) for one in model.parameters())


def _has_no_gaps(tensor: torch.Tensor) -> bool:
    channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return channels_last or tensor.is_contiguous()


@torch.no_grad()
def _lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """A checkpoint gives the state back row by row; that of a parameter which lies otherwise is to lie as it does."""
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
    """A parameter of each number of dimensions, with a gradient."""
    parameters = nn.ParameterList(torch.ones((2,) * count) for count in dimensions or [1])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


def _refusal(attempt: Callable[[], object]) -> str:
    """What torch says against it; empty where nothing."""
    try:
        with _quiet():
            attempt()
    except Exception as error:  # whatever torch makes of a client's arguments
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
