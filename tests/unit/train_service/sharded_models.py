"""Models of many shapes, installed by entry points, and what two ranks learn with their shards; real processes import
it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared.model_spec import ModelSpec
from tests.unit.train_service.learners import ALONE, CLASSES, SPEC, WIDTH, batch, resumed, trained
from train_service.domain.spec import FSDP, OptimizerSpec, Placement
from train_service.learning.ranks import Ranks

STEPS = 4
TOKENS = 16
SIDE = 56


class Blocks(nn.Module):
    """A ModuleList, as most transformers have one."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(in_channels, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.inputs(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden).relu()
        outputs: Tensor = self.head(hidden)
        return outputs


class TiedTokens(nn.Module):
    """Embedding and output share their weights."""

    def __init__(self, _in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(TOKENS, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU()))
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, TOKENS, bias=False)])
        self.layers[1].weight = self.body[0].weight
        self.num_classes = num_classes

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = (inputs * 3 + TOKENS / 2).clamp(0, TOKENS - 1).long()
        hidden = self.layers[0](self.body(tokens).mean(1))
        outputs: Tensor = self.layers[1](hidden)[:, : self.num_classes]
        return outputs


class Borrowed(nn.Module):
    """It uses a block's weights without calling the block."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(in_channels, 8), nn.Linear(8, num_classes)])

    def forward(self, inputs: Tensor) -> Tensor:
        last: Any = self.blocks[1]
        return nn.functional.linear(self.blocks[0](inputs).relu(), last.weight, last.bias)


class SharedBlock(nn.Module):
    """Two groups of blocks have one of them in common."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        shared = nn.Linear(8, 8)
        self.groups = nn.ModuleList(
            [Group(nn.Linear(in_channels, 8), shared), Group(shared, nn.Linear(8, num_classes))]
        )

    def forward(self, inputs: Tensor) -> Tensor:
        for group in self.groups:
            inputs = group(inputs)
        return inputs


class Group(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.second(self.first(inputs).relu())
        return outputs


class Scalar(nn.Module):
    """torch does not shard a parameter without dimensions."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scaled(in_channels, 8), Scaled(8, num_classes)])

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


class Scaled(nn.Module):
    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(width, outputs), nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.linear(inputs) * self.scale
        return outputs


def nested(in_channels: int, num_classes: int) -> nn.Module:
    inner = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)))
    return nn.Sequential(nn.Linear(in_channels, 8), inner, nn.Sequential(nn.ReLU(), nn.Linear(8, num_classes)))


class SmallMaxVit(nn.Module):
    """torchvision's, whose blocks are in a ModuleList, on small images made of the row's numbers."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        from torchvision.models.maxvit import MaxVit

        super().__init__()
        self.vit = MaxVit((SIDE, SIDE), 8, 7, [8, 16], [1, 1], 8, 0.0, num_classes=num_classes)
        self.in_channels = in_channels

    def forward(self, inputs: Tensor) -> Tensor:
        images = inputs.repeat(1, SIDE * SIDE // self.in_channels + 1)[:, : SIDE * SIDE].reshape(-1, 1, SIDE, SIDE)
        outputs: Tensor = self.vit(images.expand(-1, 3, -1, -1))
        return outputs


MODELS = {
    "blocks": Blocks,
    "nested": nested,
    "tied-tokens": TiedTokens,
    "borrowed": Borrowed,
    "shared-block": SharedBlock,
    "small-maxvit": SmallMaxVit,
    "scalar": Scalar,
}


def install_models(site: Path) -> Path:
    """By entry points in a folder that must be on the path of whoever names a model."""
    info = site / "sharded_models-1.dist-info"
    info.mkdir(parents=True)
    points = [f"{name} = {__name__}:{builder.__name__}" for name, builder in MODELS.items()]
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sharded-models\nVersion: 1\n")
    (info / "entry_points.txt").write_text("\n".join(["[millrace.models]", *points]) + "\n")
    return site


def model_spec(builder: str) -> ModelSpec:
    return ModelSpec(builder=builder, in_channels=WIDTH, num_classes=CLASSES)


def what_shards_learn(ranks: Ranks, sites: list[str], builder: str) -> dict[str, Any]:
    """Weights of the same run, whole on each rank and sharded, in one piece and resumed on other numbers of ranks, and
    what both models answer in validation."""
    sys.path[:0] = [site for site in sites if site not in sys.path]
    whole = replace(SPEC, model=model_spec(builder), optimizer=OptimizerSpec(name="SGD", learning_rate=0.05))
    whole = replace(whole, optimizer=replace(whole.optimizer, kwargs={"momentum": 0.9}))
    sharded = replace(whole, placement=Placement(parallel=FSDP))
    reported: dict[str, Any] = {}
    for name, spec in (("whole", whole), ("sharded", sharded)):
        learner = trained(spec, range(STEPS), ranks)
        reported[name] = {key: one.clone() for key, one in learner.weights().items()}
        learner.model.eval()
        with torch.no_grad():
            reported[f"{name} answers"] = learner.model(torch.from_numpy(batch(ranks).inputs))
    reported["resumed"] = resumed(sharded, ranks, steps=STEPS)
    reported["from one"] = resumed(sharded, ranks, saved_on=ALONE, steps=STEPS)
    reported["to one"] = resumed(sharded, ALONE, saved_on=ranks, steps=STEPS)
    return reported
