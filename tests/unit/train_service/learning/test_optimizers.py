"""Optimizers compute as fast as torch can, and the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from train_service.checkpoints.tensor_files import NEST, TensorFile, put_together, take_apart
from train_service.domain.spec import OptimizerSpec
from train_service.learning.optimizers import build_optimizer


def a_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 10) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    return [one.detach().clone() for one in model.parameters()]


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return any(group.get("fused") for group in optimizer.param_groups)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("Adam", {"weight_decay": 0.01}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {"betas": [0.8, 0.99], "maximize": True}),
    ],
)
def test_a_fused_kernel_learns_what_the_loop_over_parameters_learns(name: str, kwargs: dict[str, Any]) -> None:
    fused_model, plain_model = a_model(), a_model()
    fused = build_optimizer(OptimizerSpec(name=name, learning_rate=0.01, kwargs=kwargs), fused_model)
    plain = getattr(torch.optim, name)(plain_model.parameters(), lr=0.01, foreach=False, fused=False, **kwargs)
    assert is_fused(fused)
    for given, expected in zip(stepped(fused_model, fused), stepped(plain_model, plain), strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("SGD", {"momentum": 0.9}),
        ("Adam", {"foreach": True}),
        ("AdamW", {"fused": False}),
        ("Adam", {"differentiable": True}),
        ("RMSprop", {}),
    ],
)
def test_who_says_how_it_computes_and_classes_without_a_fused_kernel_are_left_as_they_are(
    name: str, kwargs: dict[str, Any]
) -> None:
    assert not is_fused(build_optimizer(OptimizerSpec(name=name, learning_rate=0.01, kwargs=kwargs), a_model()))


def test_sparse_gradients_are_learnt_from() -> None:
    model = nn.Embedding(10, 4, sparse=True)
    before = model.weight.detach().clone()
    optimizer = build_optimizer(OptimizerSpec(name="SGD", learning_rate=0.1), model)
    model(torch.tensor([2, 7])).sum().backward()
    optimizer.step()
    changed = (model.weight != before).any(1).nonzero().flatten().tolist()
    assert changed == [2, 7]


def test_a_parameter_whose_first_gradient_comes_later_gets_its_momentum_then() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer = build_optimizer(OptimizerSpec(name="SGD", learning_rate=0.1, kwargs={"momentum": 0.9}), model)
    for used in ([1], [0, 1], [0, 1]):
        optimizer.zero_grad()
        sum(model[one](torch.ones(1, 2)).sum() for one in used).backward()
        optimizer.step()
    assert len(optimizer.state) == 4


def test_parameters_that_do_not_lie_row_by_row_learn_the_same_after_a_checkpoint() -> None:
    def convolution() -> nn.Module:
        torch.manual_seed(4)
        made: nn.Module = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        return made

    def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            model(torch.randn(4, 2, 8, 8, generator=generator)).square().mean().backward()
            optimizer.step()

    spec = OptimizerSpec(name="AdamW", learning_rate=0.05)
    whole, half, rest = convolution(), convolution(), convolution()
    learn(whole, build_optimizer(spec, whole), range(6))
    first, second = build_optimizer(spec, half), build_optimizer(spec, rest)
    learn(half, first, range(3))
    rest.load_state_dict(half.state_dict())
    tensors, form = take_apart(first.state_dict())
    second.load_state_dict(put_together(bytes(TensorFile().fill(tensors, {NEST: form}))))
    learn(rest, second, range(3, 6))
    for given, expected in zip(rest.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(given, expected, rtol=0, atol=0)


def test_a_run_that_began_with_another_kernel_goes_on_with_it_bit_for_bit() -> None:
    whole = a_model()
    expected = stepped(whole, torch.optim.AdamW(whole.parameters(), lr=0.01), steps=3)
    saved = torch.optim.AdamW(a_model().parameters(), lr=0.01).state_dict()
    resumed = a_model()
    optimizer = build_optimizer(OptimizerSpec(name="AdamW", learning_rate=0.01), resumed)
    optimizer.load_state_dict(saved)
    for given, wanted in zip(stepped(resumed, optimizer, steps=3), expected, strict=True):
        torch.testing.assert_close(given, wanted, rtol=0, atol=0)
