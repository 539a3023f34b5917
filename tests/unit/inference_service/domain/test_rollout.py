"""Which plans of a rollout are refused."""

from __future__ import annotations

from typing import Any

import pytest

from inference_service.domain.deployment import latest_policy, named_policy
from inference_service.domain.rollout import DEFAULT_STEPS, RolloutLimits, RolloutStep, check_plan
from shared.errors import InvalidArgument


def test_no_steps_mean_four_of_a_minute() -> None:
    plan = check_plan(checkpoint="trainingJobs/j", steps=[], limits=RolloutLimits())
    assert [step.percent for step in plan.steps] == [5, 25, 50, 100]
    assert {step.interval_s for step in plan.steps} == {60.0}
    assert plan.steps == DEFAULT_STEPS


@pytest.mark.parametrize(
    ("steps", "field"),
    [
        ([RolloutStep(-1, 1.0), RolloutStep(100, 1.0)], "spec.steps[0].percent"),
        ([RolloutStep(0, 1.0), RolloutStep(0, 1.0), RolloutStep(100, 1.0)], "spec.steps[1].percent"),
        ([RolloutStep(101, 1.0)], "spec.steps[0].percent"),
        ([RolloutStep(50, 1.0), RolloutStep(50, 1.0), RolloutStep(100, 1.0)], "spec.steps[1].percent"),
        ([RolloutStep(50, 1.0), RolloutStep(20, 1.0), RolloutStep(100, 1.0)], "spec.steps[1].percent"),
        ([RolloutStep(50, 1.0)], "spec.steps[0].percent"),
        ([RolloutStep(100, -1.0)], "spec.steps[0].interval"),
        ([RolloutStep(100, 86_401.0)], "spec.steps[0].interval"),
        ([RolloutStep(100, float("nan"))], "spec.steps[0].interval"),
        ([RolloutStep(1 + number, 1.0) for number in range(21)], "spec.steps"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused_by_its_place(steps: list[RolloutStep], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_plan(checkpoint="trainingJobs/j", steps=steps, limits=RolloutLimits())
    assert [one for one, _ in refused.value.fields] == [field]


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"max_error_share": 1.1}, "max_error_share"),
        ({"max_error_share": float("nan")}, "max_error_share"),
        ({"max_p99_s": -1.0}, "max_p99_latency"),
        ({"max_p99_ratio": -1.0}, "max_p99_ratio"),
        ({"min_requests": -1}, "min_requests"),
        ({"window_s": 0.5}, "window"),
        ({"window_s": 601.0}, "window"),
    ],
)
def test_a_limit_out_of_range_is_refused_by_its_field(limits: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_plan(checkpoint="trainingJobs/j", steps=[], limits=RolloutLimits(**limits))
    assert [one for one, _ in refused.value.fields] == [f"spec.limits.{field}"]


@pytest.mark.parametrize("number", ["", "0x1", "-1", "01", "²", "9" * 10, "latest"])
def test_a_policy_names_versions_by_their_numbers(number: str) -> None:
    with pytest.raises(InvalidArgument):
        named_policy("spec.version_policy", [number])


def test_a_policy_keeps_one_version_unless_it_says_otherwise() -> None:
    assert latest_policy("spec.version_policy", 0).keeps(["9", "10"]) == ["10"]
    with pytest.raises(InvalidArgument, match="count"):
        latest_policy("spec.version_policy", 101)
