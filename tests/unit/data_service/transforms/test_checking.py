"""A transform that does not fit its source is refused when it is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from data_service.domain.splits import ColumnSplit, HashSplit, RatioSplit, Share
from data_service.domain.transform_spec import TransformSpec
from data_service.transforms.checking import check_transform
from shared.dataset_version.manifest import Column, Manifest, Split
from shared.errors import InvalidArgument

IMAGE = "extension<arrow.fixed_shape_tensor[value_type=uint8, shape=[28,28]]>"
MANIFEST = Manifest(
    columns=[
        Column(name="image", arrow_type=IMAGE, shape=[28, 28]),
        Column(name="label", arrow_type="int64", shape=[]),
        Column(name="word", arrow_type="string", shape=[]),
        Column(name="jpeg", arrow_type="binary", shape=[]),
    ],
    splits=[Split(name="train", first_row_id=0, row_count=9), Split(name="test", first_row_id=9, row_count=1)],
    files=[],
)
SHARES = [Share(split="a", weight=1), Share(split="b", weight=1)]
SHORTEN = {"column": "label", "cast": {"arrowType": "int32"}}
NORMALIZE = {"column": "image", "normalize": {"mean": [0.5], "std": [0.5]}}


def spec(*steps: dict[str, Any], **fields: Any) -> TransformSpec:
    return TransformSpec(source="datasets/d/versions/v1", transform={"steps": list(steps)}, **fields)


@pytest.mark.parametrize(
    "good",
    [
        spec({"column": "image", "toFloat": {}}, NORMALIZE),
        spec({"column": "word", "oneHotEncode": {}}, {"concat": {"columns": ["word", "label"], "into": "x"}}),
        spec({"column": "jpeg", "decodeImage": {}}, {"column": "jpeg", "resize": {"height": 8, "width": 8}}),
        spec(splits=ColumnSplit(column="word"), fit_split="whatever"),
        spec(splits=HashSplit(key_columns=["word", "label"], shares=SHARES, seed=0)),
        spec({"drop": {"columns": ["word"]}}, fit_split="nowhere"),
    ],
)
def test_a_pipeline_that_fits_the_schema_passes(good: TransformSpec) -> None:
    check_transform(good, MANIFEST, custom_allowed=[])


@pytest.mark.parametrize(
    ("bad", "path"),
    [
        (spec(NORMALIZE), "transform.steps[0]"),
        (spec({"toFloat": {}}), "transform.steps[0].column"),
        (
            spec({"rename": {"columns": {"word": "x" * 1100}}}, {"rename": {"columns": {"x" * 1100: "x"}}}),
            "transform.steps[0]",
        ),
        (spec({"drop": {"columns": [str(one) for one in range(10_001)]}}), "transform.steps[0].drop.columns"),
        (spec({"column": "jpeg", "decodeImage": {}}), "transform"),
        (spec({"column": "image", "randomFlip": {"horizontalProbability": 0.5}}), "transform.steps[0]"),
        (spec({"custom": {"function": "os:system", "columns": ["word"]}}), "transform.steps[0].custom.function"),
        (spec({"column": "label", "standardize": {}}, fit_split="val"), "fit_split"),
        (
            spec({"column": "label", "standardize": {}}, splits=RatioSplit(shares=SHARES, seed=0)),
            "fit_split",
        ),
        (spec(splits=ColumnSplit(column="label")), "splits.column.column"),
        (spec(splits=HashSplit(key_columns=["image"], shares=SHARES, seed=0)), "splits.hash.key_columns[0]"),
        (spec({"column": "word", "fillNulls": {}}, splits=ColumnSplit(column="word")), "transform.steps[0].fill_nulls"),
        (spec({"drop": {"columns": ["word"]}}, checks=[{"column": "word", "notNull": {}}]), "checks[0].column"),
        (
            spec({"drop": {"columns": ["word"]}}, checks=[{"rowCount": {"split": "x", "min": 1}}]),
            "checks[0].row_count.split",
        ),
    ],
)
def test_a_step_that_does_not_fit_its_columns_is_refused_with_its_path(bad: TransformSpec, path: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_transform(bad, MANIFEST, custom_allowed=["tests.support.transforming:doubles"])
    assert caught.value.fields[0][0] == path


def test_a_custom_function_that_ends_its_process_does_not_end_the_service() -> None:
    function = "tests.unit.shared.transforms.custom_functions:leaving"
    bad = spec({"custom": {"function": function, "columns": ["word"]}})
    with pytest.raises(InvalidArgument, match="ended its process for 0 rows, with exit status 3") as caught:
        check_transform(bad, MANIFEST, custom_allowed=[function])
    assert caught.value.fields[0][0] == "transform.steps[0]"
