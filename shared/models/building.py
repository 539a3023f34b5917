"""One function for every kind of builder: torchvision's, the MLP, those of installed packages, and users' own code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shared.errors import InvalidArgument, first_line, invalid_field
from shared.installed import MODELS, load_installed
from shared.model_spec import ModelSpec
from shared.models.mlp import MLP, build_mlp
from shared.models.own_model import build_own
from shared.models.torchvision_models import PREFIX, build_torchvision, known_builders

if TYPE_CHECKING:
    import torch
    from torch import nn


def build_model(spec: ModelSpec, path: str = "model") -> nn.Module:
    """A model with fresh weights: inputs float32 (B, C, H, W), or (B, C) for `mlp`, to outputs (B, num_classes).

    Raises `InvalidArgument` naming the field below `path` for an unknown builder, arguments that it does not take, or
    a model whose input channels cannot be adapted; `FailedPrecondition` for a user's own model in a process that has
    not loaded its code.
    """
    if spec.is_own:
        return build_own(spec, path)
    if spec.builder.startswith(PREFIX):
        return build_torchvision(spec, path)
    if spec.builder == MLP:
        return build_mlp(spec, path)
    return _build_installed(spec, path)


def import_builder(builder: str, field: str) -> None:
    """Imports what `build_model` will need: of a package that may take long, and is no work of the model's.

    Raises `InvalidArgument` naming `field` for an unknown builder of packages, or one whose import fails.
    """
    if builder.startswith(PREFIX):
        known_builders()
    elif builder != MLP:
        _installed(builder, field)


def input_dimensions(builder: str) -> int | None:
    """How many dimensions one row of the model's input has; None where only the model itself knows."""
    if builder.startswith(PREFIX):
        return 3
    return 1 if builder == MLP else None


def load_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Puts weights and buffers into a model that `build_model` made of the specification that they were trained with.

    Some models read from a state dict's metadata in which version of themselves it was saved; files of weights have no
    such thing, and here it is always the present one.
    """
    state = model.state_dict()
    for name in [name for name in state if name not in weights]:
        del state[name]
    state.update(weights)
    model.load_state_dict(state)


def _build_installed(spec: ModelSpec, path: str) -> nn.Module:
    """`millrace.models`: called as `builder(in_channels, num_classes, **kwargs)`, gives an `nn.Module`."""
    from torch import nn

    builder = _installed(spec.builder, f"{path}.builder")
    try:
        model = builder(spec.in_channels, spec.num_classes, **spec.kwargs)
    except InvalidArgument:
        raise
    except Exception as error:  # each builder has its own way of refusing arguments
        raise invalid_field(f"{path}.kwargs", spec.kwargs, f"the builder refuses them: {first_line(error)}") from None
    if not isinstance(model, nn.Module):
        remedy = f"it made a {type(model).__name__}; it must make a torch.nn.Module"
        raise invalid_field(f"{path}.builder", spec.builder, remedy)
    return model


def _installed(builder: str, field: str) -> Any:
    return load_installed(MODELS, builder, field, "a classifier of torchvision, e.g. torchvision.resnet18, mlp,")
