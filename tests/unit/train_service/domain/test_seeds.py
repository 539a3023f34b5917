"""What layers draw depends on where the run is, not on what ran before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from train_service.domain.order import noise_seed

SEEDS = st.integers(0, 2**64 - 1)


@given(SEEDS, st.integers(0, 10**9), st.integers(0, 63))
def test_a_noise_seed_is_a_pure_function_that_torch_accepts(seed: int, step: int, rank: int) -> None:
    value = noise_seed(seed, step, rank)

    assert value == noise_seed(seed, step, rank)
    assert 0 <= value < 2**63


def test_each_step_and_each_rank_has_noise_of_its_own() -> None:
    seeds = {noise_seed(7, step, rank) for step in range(500) for rank in range(8)}

    assert len(seeds) == 4000


def test_the_noise_is_the_one_that_earlier_releases_drew() -> None:
    assert noise_seed(7, 11, 1) == 3094505940441736032
