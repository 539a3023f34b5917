"""Classifiers of torchvision, with the channels and classes that a specification asks for."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from shared.errors import first_line, invalid_field
from shared.model_spec import ModelSpec

if TYPE_CHECKING:
    from torch import nn

PREFIX = "torchvision."


@functools.cache
def known_builders() -> frozenset[str]:
    """Every builder of torchvision that a specification may name. Takes seconds the first time."""
    import torchvision

    return frozenset(PREFIX + name for name in torchvision.models.list_models(module=torchvision.models))


def build_torchvision(spec: ModelSpec, path: str) -> nn.Module:
    """Images float32 (B, C, H, W) in, logits float32 (B, num_classes) out.

    Raises `InvalidArgument` naming the field below `path` for an unknown builder, arguments that it does not take, or
    a model whose input channels cannot be adapted.
    """
    import torchvision

    if spec.builder not in known_builders():
        raise invalid_field(
            f"{path}.builder", spec.builder, "use torchvision. and a classification builder, e.g. torchvision.resnet18"
        )
    try:
        model: nn.Module = torchvision.models.get_model(
            spec.builder.removeprefix(PREFIX), weights=None, num_classes=spec.num_classes, **spec.kwargs
        )
    except Exception as error:  # each builder has its own way of refusing arguments
        raise invalid_field(f"{path}.kwargs", spec.kwargs, f"the builder refuses them: {first_line(error)}") from None
    return adapt_channels(model, spec, path)


def adapt_channels(model: nn.Module, spec: ModelSpec, path: str) -> nn.Module:
    """Replaces the first convolution by one of the same shape that takes `spec.in_channels`."""
    from torch import nn

    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            if module.in_channels != spec.in_channels:
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, _with_channels(module, spec.in_channels))
            return model
    raise invalid_field(f"{path}.builder", spec.builder, "use a model that begins with a 2-d convolution")


def _with_channels(conv: nn.Conv2d, in_channels: int) -> nn.Conv2d:
    from torch import nn

    return nn.Conv2d(
        in_channels,
        conv.out_channels,
        kernel_size=conv.kernel_size,  # type: ignore[arg-type]
        stride=conv.stride,  # type: ignore[arg-type]
        padding=conv.padding,  # type: ignore[arg-type]
        dilation=conv.dilation,  # type: ignore[arg-type]
        bias=conv.bias is not None,
    )
