"""What a run keeps: never fewer than what was asked for, and nothing besides."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from shared.checkpoint import Ranking
from train_service.checkpoints.retention import Saved, outlived

LOSS = Ranking("validation_loss", maximize=False)

values = st.one_of(st.none(), st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(-3, 3).map(float))
saved = st.builds(
    lambda step, value, final, damaged: Saved(
        name=f"c{step}",
        step=step,
        metrics={} if value is None else {"validation_loss": value},
        final=final,
        damaged=damaged,
    ),
    step=st.integers(1, 40),
    value=values,
    final=st.booleans(),
    damaged=st.booleans(),
)
runs = st.lists(saved, max_size=15, unique_by=lambda one: one.step)


def loss(step: int, value: float) -> Saved:
    return Saved(name=f"c{step}", step=step, metrics={"validation_loss": value})


def kept(checkpoints: list[Saved], keep_newest: int, keep_best: int, ranking: Ranking = LOSS, *used: str) -> list[str]:
    going = outlived(checkpoints, keep_newest, keep_best, ranking, used)
    return [one.name for one in checkpoints if one.name not in going]


def test_the_newest_and_the_best_stay() -> None:
    run = [loss(1, 0.1), loss(2, 0.5), loss(3, 0.2), loss(4, 0.9), loss(5, 0.8)]

    assert kept(run, 1, 1) == ["c1", "c5"]
    assert kept(run, 2, 2) == ["c1", "c3", "c4", "c5"]
    assert kept(run, 1, 1, Ranking("validation_loss", maximize=True)) == ["c4", "c5"]


def test_of_equals_the_later_is_the_best() -> None:
    assert kept([loss(1, 0.1), loss(2, 0.1), loss(3, 0.5)], 1, 1) == ["c2", "c3"]


def test_a_diverged_checkpoint_is_never_the_best() -> None:
    assert kept([loss(1, math.nan), loss(2, -math.inf), loss(3, 7.0), loss(4, math.nan)], 1, 1) == ["c3", "c4"]


def test_one_in_use_and_the_final_one_stay_whatever_their_place() -> None:
    final = Saved(name="c2", step=2, final=True)

    assert kept([loss(1, 0.9), final, loss(3, 0.5), loss(4, 0.1)], 1, 1, LOSS, "c1") == ["c1", "c2", "c4"]


def test_a_damaged_one_counts_for_nothing_even_if_it_is_the_furthest_on() -> None:
    damaged = Saved(name="c9", step=9, metrics={"validation_loss": 0.0}, damaged=True)

    assert kept([loss(4, 0.5), damaged, loss(5, 0.6)], 1, 1) == ["c4", "c5"]
    assert kept([damaged], 1, 1) == ["c9"]


@given(runs, st.integers(0, 5), st.integers(1, 5), st.sets(st.integers(1, 40).map(lambda step: f"c{step}")))
def test_the_retained_checkpoints_are_the_required_ones_alone(
    run: list[Saved], newest: int, best: int, used: set[str]
) -> None:
    going = outlived(run, newest, best, LOSS, used)

    good = sorted((one for one in run if not one.damaged), key=lambda one: one.step)
    measured = [one for one in good if math.isfinite(one.metrics.get("validation_loss", math.nan))]
    by_rank = sorted(measured, key=lambda one: (one.metrics["validation_loss"], -one.step))
    must = {one.name for one in (*good[-newest:], *by_rank[:best], *(one for one in good if one.final))}
    if newest == 0 or not good:
        assert going == []
    else:
        assert set(going) == {one.name for one in run} - must - used
        assert good[-1].name not in going
    assert going == sorted(going, key=lambda name: int(name[1:]))


@given(runs, st.integers(1, 5), st.integers(1, 5))
def test_a_retained_checkpoint_is_retained_again(run: list[Saved], newest: int, best: int) -> None:
    going = outlived(run, newest, best, LOSS)

    assert outlived([one for one in run if one.name not in going], newest, best, LOSS) == []
