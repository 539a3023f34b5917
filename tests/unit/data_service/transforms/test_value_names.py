"""Numbers keep their names for as long as they mean the same."""

from __future__ import annotations

from typing import Any

import pytest

from data_service.transforms.job import value_names
from shared.transforms.pipeline import Pipeline

CLASSES = ["ants", "bees"]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], {"label": CLASSES}),
        ([{"rename": {"columns": {"label": "class"}}}], {"class": CLASSES}),
        ([{"drop": {"columns": ["label"]}}], {}),
        ([{"select": {"columns": ["label"]}}], {"label": CLASSES}),
        ([{"select": {"columns": ["other"]}}], {}),
        ([{"column": "label", "cast": {"arrowType": "int32"}}], {"label": CLASSES}),
        ([{"column": "label", "cast": {"arrowType": "string"}}], {}),
        ([{"column": "label", "fillNulls": {"value": {"integer": 0}}}], {"label": CLASSES}),
        ([{"filter": {"expression": "label > 0"}}], {"label": CLASSES}),
        ([{"column": "label", "bucketize": {"boundaries": [1]}}], {}),
        ([{"concat": {"columns": ["label"], "into": "all"}}], {}),
        ([{"concat": {"columns": ["label"], "into": "all", "keep": True}}], {"label": CLASSES}),
        ([{"custom": {"function": "m:f", "columns": ["label"]}}], {}),
        (
            [{"column": "word", "ordinalEncode": {"categories": ["a", "b"]}}],
            {"label": CLASSES, "word": ["a", "b"]},
        ),
    ],
)
def test_names_follow_the_steps(steps: list[dict[str, Any]], expected: dict[str, list[str]]) -> None:
    assert value_names({"label": CLASSES, "other": []}, Pipeline.from_config({"steps": steps})) == expected
