"""What a package adds to Millrace: each of these is named by an entry point of `pyproject.toml`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[Tensor, Tensor], Tensor]


class TwoBranches(nn.Module):
    """Vectors (rows, in_channels) in, (rows, num_classes) out."""

    def __init__(self, in_channels: int, num_classes: int, *, width: int = 8) -> None:
        super().__init__()
        self.deep = nn.Sequential(nn.Linear(in_channels, width), nn.ReLU(), nn.Linear(width, num_classes))
        self.wide = nn.Linear(in_channels, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.add(self.deep(inputs), self.wide(inputs))


def no_model(_in_channels: int, _num_classes: int) -> str:
    return "not a module"


def focal(gamma: float = 2.0) -> Loss:
    """One number per row."""

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(outputs, labels, reduction="none")
        return (1 - (-each).exp()) ** gamma * each

    return loss


def mean_squares() -> Loss:
    """One number for all rows: their mean."""
    return nn.MSELoss()


def crooked() -> Loss:
    """Neither one number per row nor one for all."""
    return lambda outputs, _: outputs


def mixup(model: nn.Module, inputs: Tensor, labels: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """Rows mixed with others of the batch."""
    share = torch.rand(len(inputs), 1, device=inputs.device, dtype=inputs.dtype)
    other = torch.randperm(len(inputs), device=inputs.device)
    outputs = model(share * inputs + (1 - share) * inputs[other])
    weight = share[:, 0]
    return weight * loss(outputs, labels) + (1 - weight) * loss(outputs, labels[other]), outputs


def plain(model: nn.Module, inputs: Tensor, labels: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """What Millrace does without a step of one's own; told as a mean."""
    outputs = model(inputs)
    return loss(outputs, labels).mean(), outputs


class Transformer(nn.Module):
    """An encoder over the numbers of a row, each a token: (rows, in_channels) in, (rows, num_classes) out."""

    def __init__(self, in_channels: int, num_classes: int, *, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, width)
        self.positions = nn.Parameter(torch.zeros(in_channels, width))
        layer = nn.TransformerEncoderLayer(width, nhead=2, dim_feedforward=2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = self.embedding(inputs[:, :, None]) + self.positions
        outputs: Tensor = self.head(self.encoder(tokens).mean(1))
        return outputs
