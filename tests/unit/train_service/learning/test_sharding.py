"""What a model may be made of that is sharded."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.unit.train_service.in_ranks import in_ranks
from train_service.learning.ranks import Ranks
from train_service.learning.sharding import put_some_weights, put_weights, shard


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_layers_that_begin_in_place_are_sharded_and_compute_the_same() -> None:
    """As the classifiers of torchvision's MNASNet and EfficientNet do, with a dropout."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True)),
        nn.Linear(8, 8),
        nn.Sequential(nn.Dropout(0.2, inplace=True), nn.Linear(8, 3)),
    )
    plain = copy.deepcopy(model)
    results = []
    for one in (plain, shard(model, "cpu", 1)):
        torch.manual_seed(4)
        one.train()
        outputs = one(torch.ones(5, 6))
        outputs.square().sum().backward()
        gradients = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in one.parameters()]
        results.append([outputs.detach(), *gradients])

    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_ranks_may_have_read_the_weights_in_different_orders(tmp_path: Path) -> None:
    """As they do: safetensors gives tensors in an order that each process draws anew."""
    assert all(in_ranks(2, put_in_own_order, tmp_path))


def put_in_own_order(ranks: Ranks) -> bool:
    widths = [(8, 4), (4, 64), (64, 2), (2, 32)]
    model = nn.Sequential(*[nn.Linear(*width) for width in widths])
    names = list(model.state_dict())
    names = names[::-1] if ranks.rank else names
    weights = {name: torch.full_like(model.state_dict()[name], float(len(name))) for name in names}
    shard(model, "cpu", ranks.world_size)
    put_weights(model, weights)
    put_some_weights(model, weights)
    shards: Any = model.named_parameters()
    return all(torch.equal(shard.full_tensor(), weights[name]) for name, shard in shards)
