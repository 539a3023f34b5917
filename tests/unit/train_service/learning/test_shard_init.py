"""The first weights of a sharded model: the same as of a model that is built whole, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.train_service.sharded_models import MODELS
from train_service.learning import sharding
from train_service.learning.sharding import record


class ManyInitializers(nn.Module):
    def __init__(self, in_channels: int, _num_classes: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.narrow, self.wide = nn.Linear(in_channels, 8), nn.Linear(8, 8)
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.register_buffer("mean", torch.tensor([1.0, 2.0, 3.0]))
        self.positions = nn.Parameter(torch.randn(3, 5) * 0.02)
        self.scale = nn.Parameter(torch.full((4,), 1e-6))
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        nn.init.trunc_normal_(self.tokens.weight, std=0.5)
        nn.init.trunc_normal_(self.narrow.weight, 0.0, 3.0, -0.5, 0.5)
        nn.init.orthogonal_(self.wide.weight)
        with torch.no_grad():
            self.wide.weight[0] = 0
            self.narrow.bias.copy_(torch.linspace(0, 1, 8))


@pytest.mark.parametrize("builder", [*MODELS.values(), ManyInitializers])
def test_the_operations_draw_what_the_builder_draws(builder: Callable[[int, int], nn.Module]) -> None:
    torch.manual_seed(5)
    built = builder(6, 3)
    expected = {**dict(built.named_parameters()), **dict(built.named_buffers())}
    torch.manual_seed(5)
    recorded = record(lambda: builder(6, 3))
    found = {name: value.clone() for name, value in recorded.values()}
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


def test_one_tensor_is_there_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a builder that goes over all its layers a second time."""

    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(50, 50, bias=False) for _ in range(8)))
        for weight in model.parameters():
            nn.init.xavier_normal_(weight)
        return model

    most = 0
    run = sharding.Recorded._run

    def watched(self: Any, operation: Any, memory: dict[int, Any]) -> None:
        nonlocal most
        run(self, operation, memory)
        most = max(most, sum(storage.nbytes() for storage in memory.values()))

    recorded = record(build)
    monkeypatch.setattr(sharding.Recorded, "_run", watched)
    assert len(list(recorded.values())) == 8
    assert most <= 2 * 50 * 50 * 4


class PollsAtValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.is_high = bool(self.weight.sum() > 0)


class FromElsewhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(torch.ones(4).numpy()))


@pytest.mark.parametrize("builder", [PollsAtValues, FromElsewhere])
def test_a_builder_that_needs_values_cannot_be_recorded(builder: Callable[[], nn.Module]) -> None:
    with pytest.raises(Exception, match=r".+"):
        record(builder)


def test_nothing_is_drawn_while_a_builder_is_recorded() -> None:
    torch.manual_seed(5)
    first: Tensor = torch.randn(3)
    torch.manual_seed(5)
    record(lambda: ManyInitializers(6, 3))
    assert torch.equal(torch.randn(3), first)
