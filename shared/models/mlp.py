"""The multi-layer perceptron, for rows that are vectors: tables."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from shared.errors import invalid_field
from shared.model_spec import ModelSpec

if TYPE_CHECKING:
    from torch import nn

MLP = "mlp"
MAX_WIDTH = 65_536
MAX_LAYERS = 64
DEFAULT_HIDDEN = (128, 64)
# By the name in kwargs, the class of torch.nn.
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
    """`in_channels` numbers in, `num_classes` out; kwargs `hidden` (widths), `dropout` (0 to below 1), `activation`.

    Raises `InvalidArgument` naming the argument below `path`.
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
