"""How two versions differ on the same rows, and when that is too much."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inference_service.domain.rollout import Compared, Comparison, Difference, RolloutLimits, check_plan, falls_short
from inference_service.domain.signature import TensorSpec
from shared.errors import InvalidArgument

OUTPUTS = (TensorSpec("logits", "FP32", (-1, 2)), TensorSpec("label", "INT64", (-1,)))
VALUES = (TensorSpec("values", "FP32", (-1, 2)),)


def test_labels_are_counted_and_the_greatest_difference_of_numbers_is_kept_over_all_parts() -> None:
    difference = Difference()
    logits = np.zeros((2, 2), np.float32)
    difference.add(OUTPUTS, [logits, np.array([1, 2])], [logits + 0.5, np.array([1, 3])])
    difference.add(OUTPUTS, [logits, np.array([9, 9])], [logits - 0.25, np.array([9, 9])])
    assert difference.result() == Compared(rows=4, agreement=0.75, difference=0.5)


def test_without_labels_there_is_no_agreement_and_what_is_no_number_differs_from_everything() -> None:
    difference = Difference()
    difference.add(VALUES, [np.zeros((1, 2), np.float32)], [np.array([[0.0, np.nan]], np.float32)])
    assert difference.result() == Compared(rows=1, agreement=None, difference=float("inf"))


def test_a_row_that_one_version_refuses_differs_and_one_that_both_do_is_no_part() -> None:
    difference = Difference()
    difference.add_refused(OUTPUTS, by_both=True)
    assert difference.result() == Compared(rows=0, agreement=None, difference=0.0, refused=1)
    difference.add_refused(OUTPUTS, by_both=False)
    assert difference.result() == Compared(1, 0.0, float("inf"), refused=1, refused_by_one=1)
    unlabelled = Difference()
    unlabelled.add_refused(VALUES, by_both=False)
    assert unlabelled.result().agreement is None


@pytest.mark.parametrize(
    ("limits", "seen", "said"),
    [
        ({"min_agreement": 0.9}, Compared(10, 0.9, 9.0), ""),
        ({"min_agreement": 0.9}, Compared(10, 0.8, 0.0), "80.00% of 10 held rows"),
        ({"min_agreement": 0.9}, Compared(10, None, 0.0), "use max_difference"),
        ({"max_difference": 0.5}, Compared(10, 0.0, 0.5), ""),
        ({"max_difference": 0.5}, Compared(10, 1.0, 0.75), "by up to 0.75, at most 0.5"),
        ({"max_difference": 0.5}, Compared(10, None, float("inf")), "by up to inf"),
        ({"max_difference": 0.5}, Compared(10, 0.9, float("inf"), 3, 1), "allowed; 1 of them only one of the versions"),
        ({"min_agreement": 0.9}, Compared(10, 0.8, float("inf"), 3, 2), "must; 2 of them only one of the versions"),
        ({"min_agreement": 0.8}, Compared(10, 0.8, float("inf"), 3, 2), ""),
    ],
)
def test_a_comparison_falls_short_below_the_agreement_or_above_the_difference(
    limits: dict[str, Any], seen: Compared, said: str
) -> None:
    reported = falls_short(Comparison(dataset_version="", split="test", **limits), seen)
    assert said in reported
    assert bool(reported) == bool(said)


def test_versions_that_may_differ_in_their_tensors_are_not_compared() -> None:
    wanted = Comparison(dataset_version="datasets/d/versions/v", split="test", min_agreement=0.9)
    with pytest.raises(InvalidArgument, match="allow_new_signature"):
        check_plan(
            checkpoint="trainingJobs/j", steps=[], limits=RolloutLimits(), comparison=wanted, allow_new_signature=True
        )


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"min_agreement": None}, ""),
        ({"split": "Test"}, ".split"),
        ({"split": ""}, ".split"),
        ({"max_rows": -1}, ".max_rows"),
        ({"max_rows": 10_001}, ".max_rows"),
        ({"min_agreement": 1.5}, ".min_agreement"),
        ({"max_difference": -1.0}, ".max_difference"),
        ({"max_difference": float("nan")}, ".max_difference"),
    ],
)
def test_a_comparison_that_makes_no_sense_is_refused_by_its_field(fields: dict[str, Any], field: str) -> None:
    given: dict[str, Any] = {
        "dataset_version": "datasets/d/versions/v",
        "split": "test",
        "min_agreement": 0.9,
        **fields,
    }
    with pytest.raises(InvalidArgument) as refused:
        check_plan(
            checkpoint="trainingJobs/j",
            steps=[],
            limits=RolloutLimits(),
            comparison=Comparison(**given),
        )
    assert [one for one, _ in refused.value.fields] == [f"spec.comparison{field}"]
