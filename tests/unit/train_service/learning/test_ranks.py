"""What the ranks of an attempt compute together is what one process alone would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.train_service.in_ranks import in_ranks
from tests.unit.train_service.small_network import (
    full_batch_gradients,
    gradients_of_rank,
    what_ranks_agree_on,
)
from train_service.learning.ranks import Ranks

ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module", params=[2, 3])
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of two, and each of three, real processes says."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    return in_ranks(request.param, what_ranks_agree_on, folder)


def assert_exact(gradients: list[torch.Tensor]) -> None:
    expected = full_batch_gradients()
    assert len(gradients) == len(expected)
    for ours, mean in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, mean, rtol=1e-12, atol=1e-12)


def test_gradients_of_one_worker_are_the_mean_over_the_global_batch() -> None:
    assert_exact(gradients_of_rank(ALONE))


def test_gradients_of_several_workers_are_the_mean_over_the_global_batch(answers: list[Any]) -> None:
    for gradients, *_ in answers:
        assert_exact(gradients)


def test_after_sharing_buffers_every_rank_has_those_of_rank_0(answers: list[Any]) -> None:
    _, first, *_ = answers[0]
    assert int(first["1.num_batches_tracked"]) == 1
    for _, buffers, *_ in answers:
        assert buffers.keys() == first.keys()
        assert all(torch.equal(buffers[name], first[name]) for name in first)


def test_every_rank_gets_the_value_of_rank_0_and_the_same_sum(answers: list[Any]) -> None:
    world_size = len(answers)
    for _, _, shared, total in answers:
        assert shared == {"from": 0}
        assert total == [world_size * (world_size - 1) / 2, world_size]


def test_a_group_of_one_needs_no_process_group() -> None:
    model = torch.nn.BatchNorm1d(2)

    ALONE.share_buffers(model)
    assert ALONE.wrap(model) is model
    assert ALONE.share("value") == "value"
    assert ALONE.add([1.5, 2.0]).result() == [1.5, 2.0]
