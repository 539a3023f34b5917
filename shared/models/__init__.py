"""Builds models of every kind, in the same way for training and serving.

These are torchvision's, the multi-layer perceptron, those of installed packages, and users' own. torch and torchvision
take seconds to import, so they are imported at the first call.

The multi-layer perceptron takes rows that are vectors, as from tables. Classifiers of torchvision get the channels and
classes that a specification asks for. A user's own code is called by its entry, in a process that has loaded it.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shared.code_bundle_registry import entry_failed, find_entry
from shared.errors import InvalidArgument, MillraceError, first_line, invalid_field
from shared.model_spec import ModelSpec
from shared.settings import MODELS, load_installed

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["build_model", "import_builder", "input_dimensions", "known_builders", "load_weights"]


# --- Building ---

# The prefix of models of the library `transformers`, see `shared.models.transformers_models`.
TRANSFORMERS = "transformers."


def build_model(spec: ModelSpec, path: str = "model") -> nn.Module:
    """Build a model with fresh weights: inputs float32 (B, C, H, W) to outputs (B, num_classes).

    For `mlp` and the models of `transformers` the inputs are (B, C).

    Raises `InvalidArgument`, naming the field below `path`, for an unknown builder, arguments that it does not take, or
    a model whose input channels cannot be adapted; `FailedPrecondition` for a user's own model in a process that has
    not loaded its code.
    """
    if spec.is_own:
        return build_own(spec, path)
    if spec.builder.startswith(PREFIX):
        return build_torchvision(spec, path)
    if spec.builder == MLP:
        return build_mlp(spec, path)
    if spec.builder.startswith(TRANSFORMERS):
        from shared.models.transformers_models import build_text_model

        return build_text_model(spec, path)
    return _build_installed(spec, path)


def import_builder(builder: str, field: str) -> None:
    """Import the packages that `build_model` will need, because imports may take long.

    Raises `InvalidArgument`, naming `field`, for an unknown builder, or one whose import fails.
    """
    if builder.startswith(PREFIX):
        known_builders()
    elif builder.startswith(TRANSFORMERS):
        from shared.models.transformers_models import import_library

        import_library(builder, field)
    elif builder != MLP:
        _installed(builder, field)


def input_dimensions(builder: str) -> int | None:
    """Return the dimensions of one input row; None if only the model itself knows."""
    if builder.startswith(PREFIX):
        return 3
    return 1 if builder == MLP or builder.startswith(TRANSFORMERS) else None


def load_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Load weights and buffers into a model built from the specification that they were trained with.

    Some models read the version that saved a state dict from its metadata. Weight files have no such metadata, so the
    present version is assumed.
    """
    state = model.state_dict()
    for name in [name for name in state if name not in weights]:
        del state[name]
    state.update(weights)
    model.load_state_dict(state)


def _build_installed(spec: ModelSpec, path: str) -> nn.Module:
    """Call the builder of an installed package: `builder(in_channels, num_classes, **kwargs)`."""
    from torch import nn

    builder = _installed(spec.builder, f"{path}.builder")
    try:
        model = builder(spec.in_channels, spec.num_classes, **spec.kwargs)
    except InvalidArgument:
        raise
    except Exception as error:  # each builder refuses arguments in its own way
        raise invalid_field(f"{path}.kwargs", spec.kwargs, f"the builder refuses them: {first_line(error)}") from None
    if not isinstance(model, nn.Module):
        remedy = f"it made a {type(model).__name__}; it must make a torch.nn.Module"
        raise invalid_field(f"{path}.builder", spec.builder, remedy)
    return model


def _installed(builder: str, field: str) -> Any:
    return load_installed(MODELS, builder, field, "a classifier of torchvision, e.g. torchvision.resnet18, mlp,")


# --- Multi-layer perceptron ---

MLP = "mlp"
MAX_WIDTH = 65_536
MAX_LAYERS = 64
DEFAULT_HIDDEN = (128, 64)
# Maps the name in kwargs to the class of torch.nn.
ACTIVATIONS = {
    "relu": "ReLU",
    "gelu": "GELU",
    "silu": "SiLU",
    "tanh": "Tanh",
    "elu": "ELU",
    "leaky_relu": "LeakyReLU",
    "sigmoid": "Sigmoid",
}


def build_mlp(spec: ModelSpec, path: str) -> nn.Module:
    """Build an MLP: `in_channels` numbers in, `num_classes` out.

    kwargs are `hidden` (widths), `dropout` (0 to below 1) and `activation`. Raises `InvalidArgument`, naming the
    argument below `path`.
    """
    from torch import nn

    hidden, dropout, activation = _arguments(spec.kwargs, f"{path}.kwargs")
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    width = spec.in_channels
    for number, next_width in enumerate(hidden):
        layers[f"linear{number}"] = nn.Linear(width, next_width)
        layers[f"activation{number}"] = getattr(nn, ACTIVATIONS[activation])()
        if dropout:
            layers[f"dropout{number}"] = nn.Dropout(dropout)
        width = next_width
    layers["output"] = nn.Linear(width, spec.num_classes)
    return nn.Sequential(layers)


def _arguments(kwargs: dict[str, Any], path: str) -> tuple[list[int], float, str]:
    unknown = sorted(kwargs.keys() - {"hidden", "dropout", "activation"})
    if unknown:
        raise invalid_field(path, unknown[0], "mlp takes hidden, dropout and activation")
    hidden = kwargs.get("hidden", list(DEFAULT_HIDDEN))
    if not isinstance(hidden, list | tuple) or len(hidden) > MAX_LAYERS or not all(map(_is_width, hidden)):
        raise invalid_field(f"{path}.hidden", hidden, f"use up to {MAX_LAYERS} widths of 1 to {MAX_WIDTH:,}")
    dropout = kwargs.get("dropout", 0)
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise invalid_field(f"{path}.dropout", dropout, "use 0 to below 1")
    activation = kwargs.get("activation", "relu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise invalid_field(f"{path}.activation", activation, f"use one of {', '.join(ACTIVATIONS)}")
    return list(hidden), float(dropout), activation


def _is_width(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_WIDTH


# --- A user's own model ---


def build_own(spec: ModelSpec, path: str) -> nn.Module:
    """Build a user's own model with fresh weights.

    `spec.entry` names a function of `spec.kwargs` or of no argument, or a class that takes them as keyword arguments.
    Raises `InvalidArgument`, naming `path`.entry, if it makes no `nn.Module`; `FailedPrecondition` with the line of the
    user's code if that raises, or if this process has not loaded the code.
    """
    from torch import nn

    made = called(find_entry(spec.code_bundle, spec.entry), spec)
    if not isinstance(made, nn.Module):
        remedy = f"it made a {type(made).__name__}; it must make a torch.nn.Module"
        raise invalid_field(f"{path}.entry", spec.entry, remedy)
    return made


def called(found: Any, spec: ModelSpec) -> Any:
    """Call the entry with `spec.kwargs`. Raises `FailedPrecondition` for any error of its own."""
    try:
        if isinstance(found, type):
            return found(**spec.kwargs)
        return found(dict(spec.kwargs)) if inspect.signature(found).parameters else found()
    except MillraceError:
        raise
    except Exception as error:  # a user's code can raise anything
        raise entry_failed(spec.code_bundle, spec.entry, error) from error


def own_method(module: object, name: str) -> Any:
    """Return the bound method that a user's class defines, or None.

    Attributes of the instance alone, such as layers, do not count, nor do methods of Lightning's base class.
    """
    found = inspect.getattr_static(type(module), name, None)
    defined_in = str(getattr(found, "__module__", ""))
    if found is None or defined_in.partition(".")[0] in ("torch", "lightning", "pytorch_lightning"):
        return None
    method = getattr(module, name)
    return method if callable(method) else None


# --- Torchvision ---

PREFIX = "torchvision."


@functools.cache
def known_builders() -> frozenset[str]:
    """Return torchvision's builders that a specification may name. The first call takes seconds."""
    import torchvision

    return frozenset(PREFIX + name for name in torchvision.models.list_models(module=torchvision.models))


def build_torchvision(spec: ModelSpec, path: str) -> nn.Module:
    """Build a torchvision model: images float32 (B, C, H, W) in, logits float32 (B, num_classes) out.

    Raises `InvalidArgument`, naming the field below `path`, for an unknown builder, arguments that it does not take, or
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
    except Exception as error:  # each builder refuses arguments in its own way
        raise invalid_field(f"{path}.kwargs", spec.kwargs, f"the builder refuses them: {first_line(error)}") from None
    return adapt_channels(model, spec, path)


def adapt_channels(model: nn.Module, spec: ModelSpec, path: str) -> nn.Module:
    """Replace the first convolution by one of the same shape that takes `spec.in_channels`."""
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
