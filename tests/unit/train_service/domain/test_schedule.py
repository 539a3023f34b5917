"""The learning rate is a pure function of the step."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train_service.domain.spec import CONSTANT, COSINE_WITH_WARMUP, learning_rate


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_a_constant_rate_stays_what_it_is(step: int, total: int) -> None:
    assert learning_rate(CONSTANT, 0.3, step, total) == 0.3


def test_the_rate_rises_for_a_tenth_of_the_run_then_falls_along_a_half_cosine() -> None:
    rates = [learning_rate(COSINE_WITH_WARMUP, 0.5, step, 100) for step in range(100)]

    assert rates[:10] == pytest.approx([0.05 * (step + 1) for step in range(10)])
    assert rates[10] == 0.5
    assert rates[55] == pytest.approx(0.25)
    assert all(before > after for before, after in itertools.pairwise(rates[10:]))
    assert 0 < rates[-1] < 0.001


@given(st.integers(1, 10_000), st.floats(1e-6, 10), st.data())
def test_the_rate_is_never_negative_nor_above_the_base(total: int, base: float, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, total - 1))

    assert 0 < learning_rate(COSINE_WITH_WARMUP, base, step, total) <= base * (1 + 1e-12) or total == 1


def test_a_run_of_one_step_learns() -> None:
    assert learning_rate(COSINE_WITH_WARMUP, 0.1, 0, 1) == 0.1
