"""Whole weights and optimizer state, to and from a model that is here in one piece or sharded over ranks (FSDP)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule

from shared.models import load_weights

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_FROM_WHOLE = StateDictOptions(full_state_dict=True)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers; not a copy unless the model is sharded. Of such a model every rank must call it, and rank 0
    alone gets them, in host memory."""
    if isinstance(model, FSDPModule):
        whole: dict[str, Any] = get_model_state_dict(model, options=_WHOLE)
        return whole
    return dict(model.state_dict())


def put_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Whole weights on every rank."""
    if isinstance(model, FSDPModule):
        set_model_state_dict(model, dict(weights), options=_FROM_WHOLE)
    else:
        load_weights(model, weights)


def whole_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As `whole_weights`; not a copy unless the model is sharded."""
    if isinstance(model, FSDPModule):
        return dict(get_optimizer_state_dict(model, optimizer, options=_WHOLE))
    return optimizer.state_dict()


def put_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    if isinstance(model, FSDPModule):
        set_optimizer_state_dict(model, optimizer, state, options=_FROM_WHOLE)
    else:
        optimizer.load_state_dict(state)
