"""An installed model of which a step leaves a part unused, and what ranks learn with it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from shared.model_spec import ModelSpec
from tests.unit.train_service.learners import ALONE, CLASSES, SPEC, WIDTH, learner, resumed, trained
from train_service.domain.spec import FSDP, OptimizerSpec, Placement, TrainingSpec
from train_service.learning.ranks import Ranks

# `two-heads` has a head that its `forward` leaves out unless it `mixes`; so does the step, whatever the model says.
CODE = """
import torch
from torch import nn

class TwoHeads(nn.Module):
    def __init__(self, in_channels, num_classes, mixes=False):
        super().__init__()
        self.body, self.main = nn.Linear(in_channels, 16), nn.Linear(16, num_classes)
        self.spare, self.mixes = nn.Linear(16, num_classes), mixes

    def forward(self, x, mixes=None):
        hidden = self.body(x).relu()
        mixes = self.mixes if mixes is None else mixes
        return self.main(hidden) + self.spare(hidden) if mixes else self.main(hidden)

class JoinsLater(nn.Module):
    def __init__(self, in_channels, num_classes):
        super().__init__()
        self.body, self.middle = nn.Linear(in_channels, 64), nn.Linear(64, 64)
        self.main, self.spare = nn.Linear(64, num_classes), nn.Linear(64, num_classes)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        hidden = self.middle(self.body(x).relu()).relu()
        outputs = self.main(hidden) + self.spare(hidden) if self.steps >= 3 else self.main(hidden)
        self.steps += 1 if self.training else 0
        return outputs

def main_head(model, inputs, labels, loss):
    outputs = model(inputs, mixes=False)
    return loss(outputs, labels), outputs

def both_heads(model, inputs, labels, loss):
    outputs = model(inputs, mixes=True)
    return loss(outputs, labels), outputs

def hardest_rows(model, inputs, labels, loss):
    outputs = model(inputs)
    return loss(outputs, labels).topk(3).values.sum(), outputs

def main_head_twice(model, inputs, labels, loss):
    outputs, again = model(inputs, mixes=False), model(inputs * 1.5, mixes=False)
    return loss(outputs, labels) + loss(again, labels), outputs
"""
POINTS = """
[millrace.models]
two-heads = two_heads:TwoHeads
joins-later = two_heads:JoinsLater
[millrace.training_steps]
main-head = two_heads:main_head
main-head-twice = two_heads:main_head_twice
both-heads = two_heads:both_heads
hardest-rows = two_heads:hardest_rows
"""
MODEL = ModelSpec(builder="two-heads", in_channels=WIDTH, num_classes=CLASSES)
# AdamW takes from each weight that has a gradient, be it zero: what has none must stay as it is.
BY_MODEL = replace(SPEC, model=MODEL)
BY_STEP = replace(SPEC, model=replace(MODEL, kwargs={"mixes": True}), training_step="main-head")
SPECS = {
    "the model": BY_MODEL,
    "the step": BY_STEP,
    "a step that calls it twice": replace(BY_STEP, training_step="main-head-twice"),
    "the step, in parts": replace(BY_STEP, accumulation_steps=3),
    "shards of the model": replace(BY_MODEL, placement=Placement(parallel=FSDP)),
}
# What a step uses all of, be it that `forward` alone does not, or that the step takes no two rows.
WHOLE = {
    "a head for training alone": replace(BY_MODEL, training_step="both-heads"),
    "a step of three rows or more": replace(BY_STEP, training_step="hardest-rows"),
}
# A part of it that joins after three steps. The order in which three ranks add gradients up shows in the last bits.
LATER = replace(
    SPEC,
    model=replace(MODEL, builder="joins-later"),
    optimizer=OptimizerSpec(name="SGD", learning_rate=0.05),
)
STEPS = 6


def install_two_heads(site: Path) -> Path:
    """The package's folder, which must be on the path of whoever names it."""
    info = site / "two_heads-1.dist-info"
    info.mkdir(parents=True)
    (site / "two_heads.py").write_text(CODE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: two-heads\nVersion: 1\n")
    (info / "entry_points.txt").write_text(POINTS)
    return site


def weights_at_first(spec: TrainingSpec) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in learner(spec, ALONE).weights().items()}


def what_is_learnt_of_a_part(ranks: Ranks, site: str, names: Iterable[str]) -> dict[str, Any]:
    """By the names of `SPECS` and `WHOLE`: the weights after `STEPS` steps."""
    if site not in sys.path:
        sys.path.insert(0, site)
    specs = {**SPECS, **WHOLE}
    return {
        name: {key: one.clone() for key, one in trained(specs[name], range(STEPS), ranks).weights().items()}
        for name in names
    }


def in_one_piece_and_in_two(ranks: Ranks, site: str, spec: TrainingSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights after ten steps; the second run goes on from what was saved after five."""
    if site not in sys.path:
        sys.path.insert(0, site)
    return trained(spec, range(10), ranks).weights(), resumed(spec, ranks, steps=10)
