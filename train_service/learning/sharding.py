"""A model sharded over ranks (FSDP): sharding it, and whole weights and optimizer state to and from it.

What torch needs for it takes longer to import than torch itself, so that happens only where a model is sharded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.errors import first_line
from shared.models import load_weights
from train_service.domain.spec import FSDP
from train_service.learning.sharding_units import find_units


def shard(model: nn.Module, device_type: str, world_size: int, units: Iterable[str] | None = None) -> nn.Module:
    """The model itself, its parameters and gradients sharded unit by unit; build its optimizer after that. `units` are
    those of `find_units`; without them, those that it finds without calling the model.

    Raises `ShardingError` naming the module that cannot be sharded.

    Activations and dropouts no longer act in place, which computes the same: what a sharded layer is given is a view of
    a function of torch's own, and torch refuses to change that.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
    mesh = init_device_mesh(device_type, (world_size,))
    for name in [*(find_units(model) if units is None else units), ""]:
        try:
            fully_shard(model.get_submodule(name), mesh=mesh)
        except (ValueError, NotImplementedError, AssertionError) as error:  # by torch, of a parameter that it names
            raise ShardingError(name, first_line(error)) from error
    return model


class ShardingError(ValueError):
    """torch cannot shard the module of that name; `""` is the model itself."""

    def __init__(self, module: str, problem: str) -> None:
        super().__init__(f"FSDP cannot shard {module or 'the model'}: {problem}")
        self.module = module
        self.problem = problem


def sharded(model: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def whole_weights(model: nn.Module, touched: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
    """Weights and buffers; not a copy unless the model is sharded. Of such a model every rank must call it, and rank 0
    alone gets them, in host memory. `touched` is called with each tensor that is gathered: all of a large model take
    their time."""
    if not sharded(model):
        return dict(model.state_dict())
    from torch.distributed.checkpoint import state_dict

    return _gathered(state_dict.get_model_state_dict(model), touched)


def put_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Whole weights on every rank, in any order."""
    if not sharded(model):
        return load_weights(model, weights)
    if weights.keys() != (there := model.state_dict().keys()):
        wrong = ", ".join(sorted(weights.keys() ^ there))
        raise RuntimeError(f"the weights are not those of the model: {wrong}")
    return put_some_weights(model, weights)


def put_some_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Whole weights on every rank, in any order, of some of the model's tensors; the others stay as they are."""
    if not sharded(model):
        own = model.state_dict()
        for name, tensor in weights.items():
            own[name].copy_(tensor)
        return
    from torch.distributed.checkpoint import state_dict

    # torch finds a tensor that the model has at several places by the first of their names alone.
    names = {id(tensor): name for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    first = set(names.values())
    once = {name: tensor for name, tensor in weights.items() if name in first}
    state_dict.set_model_state_dict(model, _in_one_order(once), options=_whole(strict=False))


def whole_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, parallel: str, touched: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """As `whole_weights`. With FSDP keyed by the names of parameters, on one rank as on many, so that a run may go on
    on another number of them."""
    if parallel != FSDP:
        return optimizer.state_dict()
    from torch.distributed.checkpoint import state_dict

    return _gathered(state_dict.get_optimizer_state_dict(model, optimizer), touched)


def put_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], parallel: str
) -> None:
    """What `whole_optimizer_state` gave, on every rank."""
    if parallel != FSDP:
        return optimizer.load_state_dict(state)
    if not state["state"]:
        # torch cannot put an empty state; the groups' values are all there is, in their order.
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        return None
    from torch.distributed.checkpoint import state_dict

    # Not strict: a parameter that no step gave a gradient has no state.
    state_dict.set_optimizer_state_dict(model, optimizer, state, options=_whole(strict=False))
    return None


@torch.no_grad()
def _gathered(state: Mapping[str, Any], touched: Callable[[], None]) -> dict[str, Any]:
    """`state` with whole tensors in host memory, on rank 0, and nothing on the others. torch's own options do the same,
    but leave nobody a moment to say that it gets on."""
    from torch.distributed.tensor import DTensor

    keeps = not dist.is_initialized() or dist.get_rank() == 0

    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: whole(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(whole, value))
        if not isinstance(value, Tensor):
            return value
        touched()
        gathered = value.full_tensor() if isinstance(value, DTensor) else value
        return gathered.cpu() if keeps else None

    everything: dict[str, Any] = whole(dict(state))
    return everything if keeps else {}


def _in_one_order(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Ranks shard one tensor after the other together, and each reads them from a file in an order of its own."""
    return dict(sorted(weights.items()))


def _whole(*, strict: bool = True) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True, strict=strict)
