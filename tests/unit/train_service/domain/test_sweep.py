"""What a sweep asks of its trials, and how it is told what a trial's checks refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from shared.errors import FailedPrecondition, InvalidArgument, invalid_field
from shared.model_spec import ModelSpec
from train_service.domain import spec_rules
from train_service.domain.spec import CheckpointPolicy, Program, TrainingSpec
from train_service.domain.sweep import (
    CHOICE,
    GRID,
    LOG_UNIFORM,
    Asha,
    Domain,
    SweepSpec,
    check,
    trial_id,
    with_trial_named,
)

RATE = "optimizer.learning_rate"
GOOD = TrainingSpec(
    dataset_version="datasets/digits/versions/v1",
    model=ModelSpec(builder="torchvision.resnet18", in_channels=1, num_classes=10),
    epochs=2,
    global_batch_size=64,
)


@pytest.fixture
def sweep() -> SweepSpec:
    rates = Domain(kind=LOG_UNIFORM, low=1e-4, high=1e-1)
    names = Domain(kind=GRID, values=("SGD", "AdamW"))
    return SweepSpec(base=GOOD, parameters={RATE: rates, "optimizer.name": names}, num_samples=3, asha=Asha())


def refused(sweep: SweepSpec) -> list[str]:
    with pytest.raises(InvalidArgument) as error:
        check(sweep)
    return [field for field, _ in error.value.fields]


def test_the_plain_form_of_a_sweep_survives_json(sweep: SweepSpec) -> None:
    assert SweepSpec.from_config(json.loads(json.dumps(sweep.as_config()))) == sweep


def test_a_trial_is_the_base_with_its_parameters(sweep: SweepSpec) -> None:
    check(sweep)
    trial = sweep.training_of({RATE: 0.5, "optimizer.name": "SGD"})
    expected = replace(sweep.base.optimizer, learning_rate=0.5, name="SGD")
    assert trial == replace(sweep.base, optimizer=expected)
    assert sweep.trial_count == 6


def test_the_rules_are_asked_no_more_often_for_more_values_that_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[TrainingSpec] = []

    def counted(spec: TrainingSpec) -> None:
        asked.append(spec)
        check_rules(spec)

    check_rules = spec_rules.check
    monkeypatch.setattr(spec_rules, "check", counted)
    counts = []
    for number in (2, 1000):
        names = Domain(kind=CHOICE, values=tuple(f"x{value}" for value in range(number)))
        parameters = {f"optimizer.kwargs.p{index}": names for index in range(32)}
        asked.clear()
        check(SweepSpec(base=GOOD, parameters=parameters, num_samples=2))
        counts.append(len(asked))

    assert counts[0] == counts[1]
    assert set(asked[0].optimizer.kwargs) == {f"p{index}" for index in range(32)}


def test_a_trial_copies_nothing_of_the_base_that_it_does_not_change() -> None:
    model = replace(GOOD.model, kwargs={"hidden": [1] * 1000})
    swept = SweepSpec(base=replace(GOOD, model=model), parameters={})
    rate, dropout = swept.training_of({RATE: 0.5}), swept.training_of({"model.kwargs.dropout": 0.1})

    assert rate.model.kwargs is swept.training_of({}).model.kwargs
    assert dropout.model.kwargs == {**model.kwargs, "dropout": 0.1}
    assert dropout.model.kwargs["hidden"] is rate.model.kwargs["hidden"]
    assert rate.model.kwargs == model.kwargs, "another trial's own is not in it"


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"num_samples": 0}, ["spec.num_samples"]),
        ({"num_samples": -1}, ["spec.num_samples"]),
        ({"num_samples": 501}, ["spec.num_samples"]),
        ({"max_concurrent_trials": 65}, ["spec.max_concurrent_trials"]),
        ({"max_concurrent_trials": -1}, ["spec.max_concurrent_trials"]),
        ({"asha": Asha(grace_period=-1)}, ["spec.asha.grace_period"]),
        ({"asha": Asha(reduction_factor=1.0)}, ["spec.asha.reduction_factor"]),
        ({"asha": Asha(reduction_factor=float("nan"))}, ["spec.asha.reduction_factor"]),
        ({"asha": Asha(grace_period=5, max_t=4)}, ["spec.asha.max_t"]),
        ({"parameters": {"epochs": Domain(kind=GRID, values=(1, 2))}}, ["spec.num_samples"]),
        ({"parameters": {}, "num_samples": 0}, ["spec.parameters", "spec.num_samples"]),
    ],
)
def test_an_invalid_sweep_is_refused_by_name(sweep: SweepSpec, change: dict[str, Any], fields: list[str]) -> None:
    assert refused(replace(sweep, **change)) == fields


def test_a_value_given_twice_is_refused_once_the_trials_are_few_enough_to_look_for_one(sweep: SweepSpec) -> None:
    grid = Domain(kind=GRID, values=(*range(1, 1000), 1))
    few = replace(sweep, parameters={"seed": grid}, num_samples=1)
    assert refused(few) == ["spec.parameters[seed].grid.values[999]"]
    assert refused(replace(few, num_samples=2)) == ["spec.num_samples"]


def test_a_trial_out_of_bounds_is_refused_by_the_parameter_that_made_it(sweep: SweepSpec) -> None:
    rates = Domain(kind=CHOICE, values=(0.1, -1))
    assert refused(replace(sweep, parameters={RATE: rates}, num_samples=20)) == [f"spec.parameters[{RATE}]"]


@pytest.mark.parametrize("low", [-1, 2**64 - 1])
def test_a_seed_that_the_contract_cannot_hold_is_refused(sweep: SweepSpec, low: int) -> None:
    seeds = Domain(kind=GRID, values=(low, low + 1))
    assert refused(replace(sweep, parameters={"seed": seeds}, num_samples=1)) == ["spec.parameters[seed]"]


def test_a_fault_of_the_base_is_refused_by_its_field(sweep: SweepSpec) -> None:
    assert refused(replace(sweep, base=replace(sweep.base, epochs=0))) == ["spec.base.epochs"]


def test_a_field_that_the_base_lacks_may_come_from_the_parameters(sweep: SweepSpec) -> None:
    base = replace(sweep.base, epochs=0)
    check(replace(sweep, base=base, parameters={"epochs": Domain(kind=GRID, values=(1, 2))}, num_samples=1))


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("spec.optimizer.learning_rate", f"spec.parameters[{RATE}]"),
        ("spec.checkpoints.best_metric", "spec.metric"),
        ("spec.model.builder", "spec.base.model.builder"),
        ("spec.model.kwargs", "spec.parameters[model.kwargs.dropout]"),
    ],
)
def test_a_trials_refusal_names_the_sweeps_field_in_words_and_details(
    sweep: SweepSpec, field: str, expected: str
) -> None:
    def refuse(_: TrainingSpec) -> None:
        raise invalid_field(field, 3, "use another")

    with pytest.raises(InvalidArgument) as error:
        with_trial_named(refuse, sweep, {RATE: 3, "model.kwargs.dropout": 0.5})
    assert [one for one, _ in error.value.fields] == [expected]
    assert error.value.message.startswith(f"{expected}: 3: use another (in the trial with {RATE}=3")
    assert error.value.metadata["field"] == expected


def test_every_field_of_a_refusal_is_named_as_the_sweep_has_it_whatever_its_path(sweep: SweepSpec) -> None:
    fields = ["spec.num_workers", "spec.model.kwargs"]

    def refuse(_: TrainingSpec) -> None:
        raise FailedPrecondition(f"{', '.join(fields)}: too much", reason="WHY", fields=[(one, "x") for one in fields])

    with pytest.raises(FailedPrecondition) as error:
        with_trial_named(refuse, sweep, {r"model.kwargs.a\1": 3})
    reported = ["spec.base.num_workers", r"spec.parameters[model.kwargs.a\1]"]
    assert [one for one, _ in error.value.fields] == reported
    assert error.value.message.startswith(f"{', '.join(reported)}: too much (in the trial with")
    assert error.value.specific_reason == "WHY"


def test_trials_sort_by_their_numbers() -> None:
    ids = [trial_id("s", number) for number in range(1000)]
    assert ids == sorted(ids)
    assert (ids[0], ids[-1]) == ("s-000", "s-999")


PROGRAM = replace(
    GOOD,
    dataset_version="",
    model=ModelSpec(builder="", in_channels=1, num_classes=1),
    epochs=0,
    global_batch_size=0,
    program=Program(
        code_bundle="codeBundles/x", entry="train:loop", config_json='{"epochs": 3, "model": {"kind": "mlp"}}'
    ),
    checkpoints=CheckpointPolicy(best_metric="eval_loss", maximize=False),
)
SEARCHED = {
    "program.config.lr": Domain(kind=LOG_UNIFORM, low=1e-5, high=1e-3),
    "program.config.model.width": Domain(kind=CHOICE, values=(8, 16)),
}


def test_a_trial_of_a_program_has_its_values_in_the_configuration() -> None:
    sweep = SweepSpec(base=PROGRAM, parameters=SEARCHED, num_samples=4, asha=Asha(max_t=3))
    check(sweep)
    trial = sweep.training_of({"program.config.lr": 0.5, "program.config.model.width": 8})
    assert trial.program is not None
    assert json.loads(trial.program.config_json) == {"epochs": 3, "lr": 0.5, "model": {"kind": "mlp", "width": 8}}
    assert replace(trial, program=PROGRAM.program) == PROGRAM


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"base": GOOD}, [f"spec.parameters[{path}]" for path in sorted(SEARCHED)]),
        ({"parameters": {**SEARCHED, RATE: Domain(kind=GRID, values=(1,))}}, [f"spec.parameters[{RATE}]"]),
        ({"asha": Asha()}, ["spec.asha.max_t"]),
        ({"base": replace(PROGRAM, checkpoints=CheckpointPolicy(best_metric="", maximize=True))}, ["spec.metric"]),
        ({"parameters": {"program.config.": Domain(kind=GRID, values=(1,))}}, ["spec.parameters[program.config.]"]),
    ],
)
def test_a_missing_field_of_a_sweep_of_a_program_is_named(changes: dict[str, Any], fields: list[str]) -> None:
    sweep = SweepSpec(base=PROGRAM, parameters=SEARCHED)
    assert refused(replace(sweep, **changes)) == fields
