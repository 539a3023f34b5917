"""The parameters of trials: all of the grid, inside their ranges, and always the same for a seed and a number."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.model_spec import ModelSpec
from train_service.domain.spec import TrainingSpec
from train_service.domain.sweep import (
    CHOICE,
    GRID,
    INTEGERS,
    LOG_UNIFORM,
    UNIFORM,
    Domain,
    number_of_trials,
    parameters_of,
    probes,
    problems,
    repetitions,
    with_values,
)

RATE, BATCH, NAME, DROPOUT = "optimizer.learning_rate", "global_batch_size", "optimizer.name", "model.kwargs.dropout"

GOOD = TrainingSpec(
    dataset_version="datasets/digits/versions/v1",
    model=ModelSpec(builder="torchvision.resnet18", in_channels=1, num_classes=10),
    epochs=2,
    global_batch_size=64,
)

values = st.lists(st.integers(1, 1000), min_size=1, max_size=6, unique=True).map(tuple)
bounds = st.tuples(st.floats(1e-9, 1e9), st.floats(1e-9, 1e9)).filter(lambda pair: pair[0] < pair[1])
seeds = st.integers(0, 2**64 - 1)


def ranged(kind: str, low: float, high: float) -> Domain:
    return Domain(kind=kind, low=low, high=high)


def listed(kind: str, *given_values: Any) -> Domain:
    return Domain(kind=kind, values=given_values)


@given(batches=values, rates=values, samples=st.integers(1, 4), seed=seeds)
def test_the_whole_grid_is_tried_in_each_sample(
    batches: tuple[int, ...], rates: tuple[int, ...], samples: int, seed: int
) -> None:
    space = {BATCH: Domain(kind=GRID, values=batches), RATE: Domain(kind=GRID, values=rates)}
    count = number_of_trials(space, samples)

    trials = [parameters_of(space, seed, number) for number in range(count)]

    size = len(batches) * len(rates)
    assert count == samples * size
    for sample in range(samples):
        some = trials[sample * size : (sample + 1) * size]
        assert [(one[BATCH], one[RATE]) for one in some] == list(itertools.product(batches, rates))


@given(pair=bounds, whole=st.tuples(st.integers(-50, 50), st.integers(0, 50)), choices=values, seed=seeds)
def test_a_drawn_value_lies_in_its_domain(
    pair: tuple[float, float], whole: tuple[int, int], choices: tuple[int, ...], seed: int
) -> None:
    low, high = whole[0], whole[0] + whole[1]
    space = {
        RATE: ranged(LOG_UNIFORM, *pair),
        DROPOUT: ranged(UNIFORM, *pair),
        "seed": ranged(INTEGERS, low, high),
        BATCH: Domain(kind=CHOICE, values=choices),
    }
    for number in range(20):
        drawn = parameters_of(space, seed, number)
        assert pair[0] <= drawn[RATE] <= pair[1]
        assert pair[0] <= drawn[DROPOUT] <= pair[1]
        assert isinstance(drawn["seed"], int)
        assert low <= drawn["seed"] <= high
        assert drawn[BATCH] in choices


def test_a_trial_is_a_function_of_seed_number_and_path_alone() -> None:
    # Written down once: a sweep that was begun by an older version of us goes on with the same trials.
    alone = {RATE: ranged(LOG_UNIFORM, 1e-4, 1e-1)}
    assert parameters_of(alone, 7, 3) == {RATE: pytest.approx(0.000531645336597454, rel=1e-12)}

    beside = {**alone, "seed": ranged(INTEGERS, 0, 9)}
    assert parameters_of(beside, 7, 3)[RATE] == parameters_of(alone, 7, 3)[RATE]
    assert parameters_of(alone, 7, 3) != parameters_of(alone, 7, 4)
    assert parameters_of(alone, 7, 3) != parameters_of(alone, 8, 3)


def test_draws_are_even_and_those_of_a_logarithm_are_even_in_it() -> None:
    space = {DROPOUT: ranged(UNIFORM, 0, 1), RATE: ranged(LOG_UNIFORM, 1e-4, 1), "seed": ranged(INTEGERS, 0, 3)}
    drawn = [parameters_of(space, 1, number) for number in range(4000)]
    for quarter in range(4):
        assert sum(int(one[DROPOUT] * 4) == quarter for one in drawn) == pytest.approx(1000, rel=0.1)
        assert sum(int(math.log10(one[RATE])) == -quarter for one in drawn) == pytest.approx(1000, rel=0.1)
        assert sum(one["seed"] == quarter for one in drawn) == pytest.approx(1000, rel=0.1)


def test_probes_have_each_listed_value_and_both_ends_of_each_range() -> None:
    space = {
        NAME: listed(GRID, "SGD", "AdamW", "Adam"),
        BATCH: listed(CHOICE, 32, 512, 64),
        RATE: ranged(LOG_UNIFORM, 1e-4, 1e-1),
    }
    tried = list(probes(space, 3))
    assert {one[NAME] for one in tried} == {"SGD", "AdamW", "Adam"}
    assert {32, 512} <= {one[BATCH] for one in tried}
    assert {1e-4, 1e-1} <= {one[RATE] for one in tried}
    assert tried[0] == parameters_of(space, 3, 0)


@pytest.mark.parametrize(
    ("path", "domain", "field"),
    [
        ("optimizer.lr", listed(GRID, 1), "parameters[optimizer.lr]"),
        ("dataset_version", listed(GRID, "x"), "parameters[dataset_version]"),
        ("model.kwargs.", listed(GRID, 1), "parameters[model.kwargs.]"),
        ("", listed(GRID, 1), "parameters[]"),
        (RATE, Domain(kind=""), f"parameters[{RATE}]"),
        (RATE, listed(GRID), f"parameters[{RATE}].grid.values"),
        (RATE, listed(CHOICE), f"parameters[{RATE}].choice.values"),
        (RATE, listed(GRID, *range(1, 1002)), f"parameters[{RATE}].grid.values"),
        (RATE, listed(GRID, 0.1, "fast"), f"parameters[{RATE}].grid.values[1]"),
        (RATE, listed(GRID, True), f"parameters[{RATE}].grid.values[0]"),
        (RATE, listed(GRID, math.nan), f"parameters[{RATE}].grid.values[0]"),
        (BATCH, listed(GRID, 32.5), f"parameters[{BATCH}].grid.values[0]"),
        (NAME, listed(CHOICE, "SGD", 1), f"parameters[{NAME}].choice.values[1]"),
        (DROPOUT, listed(CHOICE, None), f"parameters[{DROPOUT}].choice.values[0]"),
        ("precision", listed(GRID, "FLOAT64"), "parameters[precision].grid.values[0]"),
        (RATE, ranged(UNIFORM, 0.2, 0.1), f"parameters[{RATE}].uniform"),
        (RATE, ranged(UNIFORM, 0.1, 0.1), f"parameters[{RATE}].uniform"),
        (RATE, ranged(UNIFORM, math.nan, 1), f"parameters[{RATE}].uniform"),
        (RATE, ranged(UNIFORM, 0, math.inf), f"parameters[{RATE}].uniform"),
        (RATE, ranged(LOG_UNIFORM, 0.0, 1), f"parameters[{RATE}].log_uniform.low"),
        (RATE, ranged(LOG_UNIFORM, -1, 1), f"parameters[{RATE}].log_uniform.low"),
        (BATCH, ranged(UNIFORM, 1, 2.5), f"parameters[{BATCH}].uniform.high"),
        (NAME, ranged(INTEGERS, 1, 2), f"parameters[{NAME}].integers.low"),
        ("seed", ranged(INTEGERS, 3, 2), "parameters[seed].integers"),
        ("seed", ranged(INTEGERS, 0, 2**60), "parameters[seed].integers"),
    ],
)
def test_a_domain_that_cannot_be_meant_is_refused_by_name(path: str, domain: Domain, field: str) -> None:
    assert field in [one for one, _, _ in problems({path: domain})]


def test_a_value_that_a_grid_has_twice_is_found_and_one_that_a_choice_has_twice_is_meant() -> None:
    space = {DROPOUT: listed(GRID, 1, True, 0.5, 1), NAME: listed(GRID, "SGD", "SGD"), RATE: listed(CHOICE, 0.1, 0.1)}
    found = [(where, value) for where, value, _ in repetitions(space)]
    assert found == [(f"parameters[{DROPOUT}].grid.values[3]", 1), (f"parameters[{NAME}].grid.values[1]", "SGD")]
    assert problems(space) == []


def test_a_sweep_of_nothing_and_one_of_too_much_are_refused() -> None:
    assert [one for one, _, _ in problems({})] == ["parameters"]
    many = {f"model.kwargs.a{number}": listed(GRID, 1) for number in range(33)}
    assert [one for one, _, _ in problems(many)] == ["parameters"]


def test_integers_of_one_number_are_fine() -> None:
    assert problems({"seed": ranged(INTEGERS, 5, 5)}) == []
    assert parameters_of({"seed": ranged(INTEGERS, 5, 5)}, 1, 2) == {"seed": 5}


@pytest.mark.parametrize(
    ("path", "where"),
    [
        (RATE, ("optimizer", "learning_rate")),
        (BATCH, ("global_batch_size",)),
        (DROPOUT, ("model", "kwargs", "dropout")),
        ("model.kwargs.a.b", ("model", "kwargs", "a.b")),
        ("optimizer.scheduler_kwargs.gamma", ("optimizer", "scheduler_kwargs", "gamma")),
        ("loss.label_smoothing", ("loss", "label_smoothing")),
    ],
)
def test_a_path_sets_its_field_and_nothing_else(path: str, where: tuple[str, ...]) -> None:
    given, untouched = GOOD.as_config(), GOOD.as_config()

    config = with_values(given, {path: "it"})

    assert given == untouched
    *parents, last = where
    inner, other = config, untouched
    for parent in parents:
        inner, other = inner[parent], other[parent]
    assert inner.pop(last) == "it"
    other.pop(last, None)
    assert config == untouched
