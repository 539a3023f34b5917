"""A parameter that a step gives no gradient stays as it is, on every number of ranks; the others learn the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.train_service.in_ranks import in_ranks
from tests.unit.train_service.learners import ALONE
from tests.unit.train_service.partly_used import (
    LATER,
    SPECS,
    WHOLE,
    in_one_piece_and_in_two,
    install_two_heads,
    weights_at_first,
    what_is_learnt_of_a_part,
)
from train_service.domain.spec import TrainingSpec


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = install_two_heads(tmp_path_factory.mktemp("site"))
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("two_heads", None)


@pytest.fixture(scope="module")
def of_two(site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 of two real processes has learnt."""
    first: dict[str, Any] = in_ranks(
        2, what_is_learnt_of_a_part, tmp_path_factory.mktemp("ranks"), str(site), [*SPECS, *WHOLE]
    )[0]
    return first


@pytest.mark.parametrize("name", SPECS)
def test_a_parameter_without_gradient_stays_unchanged_on_two_ranks_as_on_one(
    name: str, site: Path, of_two: dict[str, Any]
) -> None:
    first = weights_at_first(SPECS[name])
    alone = what_is_learnt_of_a_part(ALONE, str(site), [name])[name]

    assert of_two[name].keys() == alone.keys() == first.keys()
    for key in alone:
        torch.testing.assert_close(of_two[name][key], alone[key], rtol=1e-4, atol=1e-5)
        for learnt in (of_two[name][key], alone[key]):
            assert torch.equal(learnt, first[key]) is key.startswith("spare")


@pytest.mark.parametrize("name", WHOLE)
def test_a_step_of_a_users_own_learns_all_that_it_uses_on_two_ranks_as_on_one(
    name: str, site: Path, of_two: dict[str, Any]
) -> None:
    first = weights_at_first(WHOLE[name])
    alone = what_is_learnt_of_a_part(ALONE, str(site), [name])[name]

    for key in alone:
        assert not torch.equal(of_two[name][key], first[key])
        assert not torch.equal(alone[key], first[key])


@pytest.mark.parametrize(
    ("world_size", "spec"), [(2, SPECS["shards of the model"]), (3, LATER)], ids=["never used, sharded", "joins later"]
)
def test_a_model_of_which_a_part_is_left_out_goes_on_bit_for_bit_where_it_was(
    world_size: int, spec: TrainingSpec, site: Path, tmp_path: Path
) -> None:
    whole, halves = in_ranks(world_size, in_one_piece_and_in_two, tmp_path, str(site), spec)[0]

    assert whole
    for key, one in whole.items():
        assert torch.equal(one, halves[key]), key
