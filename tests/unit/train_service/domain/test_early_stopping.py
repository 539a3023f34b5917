"""A run ends once it has not got better for a while; whoever asks, and however often."""

from __future__ import annotations

import math

import pytest

from train_service.domain.spec import EarlyStopping, should_stop


def rule(patience: int = 2, *, maximize: bool = True, min_delta: float = 0.0) -> EarlyStopping:
    return EarlyStopping(metric="m", maximize=maximize, patience=patience, min_delta=min_delta)


def history(*values: float) -> list[tuple[int, float]]:
    return list(enumerate(values))


@pytest.mark.parametrize(
    ("values", "stops"),
    [
        ((), False),
        ((0.5,), False),
        ((0.5, 0.4), False),
        ((0.5, 0.4, 0.4), True),
        ((0.5, 0.5, 0.5), True),
        ((0.5, 0.4, 0.6, 0.6), False),
        ((0.5, 0.4, 0.6, 0.6, 0.5), True),
        ((0.1, 0.2, 0.3, 0.4, 0.5), False),
        ((math.nan, 0.5, math.nan), False),
        ((math.nan, math.nan), True),
        ((0.5, math.inf, math.nan), True),
    ],
)
def test_early_stopping_ends_after_its_patience_without_a_better_value(values: tuple[float, ...], stops: bool) -> None:
    assert should_stop(rule(), history(*values)) is stops


def test_a_loss_is_better_the_lower_it_is() -> None:
    assert not should_stop(rule(maximize=False), history(0.5, 0.4, 0.3))
    assert should_stop(rule(maximize=False), history(0.3, 0.4, 0.5))


def test_an_improvement_below_min_delta_does_not_reset_patience() -> None:
    assert should_stop(rule(min_delta=0.125), history(0.5, 0.5625, 0.6))
    assert not should_stop(rule(min_delta=0.125), history(0.5, 0.5625, 0.625))


def test_without_a_rule_no_run_ends_early() -> None:
    assert not should_stop(None, history(0.5, 0.4, 0.3, 0.2))


def test_a_run_that_should_have_ended_ends_however_it_went_on() -> None:
    """As where it was killed between the decision and its end."""
    assert should_stop(rule(), history(0.5, 0.4, 0.4, 0.9))


def test_an_epoch_that_was_measured_twice_counts_once_and_order_does_not_matter() -> None:
    twice = [(2, 0.3), (0, 0.5), (1, 0.4), (0, 0.5), (2, 0.6)]

    assert not should_stop(rule(), twice)
    assert should_stop(rule(), [*twice, (2, 0.4)])
