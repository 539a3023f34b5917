"""Categories: their order, what fitting did not see, and nulls."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from shared.errors import InvalidArgument
from shared.transforms import RowError, ScalarType, TensorType
from tests.unit.shared.transforms.samples import fitted, pipeline


@pytest.mark.parametrize(
    ("seen", "categories"),
    [
        (["b", "é", "a", None, "Z", "b"], ["Z", "a", "b", "é"]),
        ([10, -3, 9, 10, None], ["-3", "9", "10"]),
        ([True, None, False], ["false", "true"]),
        (["", " "], ["", " "]),
    ],
)
def test_categories_are_learnt_in_order(seen: list[Any], categories: list[str]) -> None:
    built = fitted(pipeline({"column": "x", "ordinalEncode": {}}), {"x": pa.array(seen)})

    assert built.config["steps"][0]["ordinalEncode"]["categories"] == categories
    places = built({"x": pa.array(seen)})["x"]
    assert places.type == pa.int64()
    order = [value for value in dict.fromkeys(seen) if value is not None]
    ranked = sorted(order, key=lambda value: value.encode() if isinstance(value, str) else value)
    assert places.to_pylist() == [None if value is None else ranked.index(value) for value in seen]


def test_one_hot_is_one_at_the_place_and_zeros_for_null() -> None:
    built = pipeline({"column": "x", "oneHotEncode": {"categories": ["a", "b", "c"]}})

    made = built({"x": pa.array(["c", None, "a"])})["x"]

    assert made.tolist() == [[0, 0, 1], [0, 0, 0], [1, 0, 0]]
    assert built.output({"x": ScalarType(pa.string())})["x"] == TensorType("float32", (3,))


@pytest.mark.parametrize("op", ["ordinalEncode", "oneHotEncode"])
@pytest.mark.parametrize("unknown", [{}, {"unknown": "UNKNOWN_VALUE_ERROR"}])
@pytest.mark.parametrize("repeats", [1, 100])  # few rows and many are looked up in different ways
def test_a_value_that_fitting_did_not_see_is_an_error_that_names_the_row(
    op: str, unknown: dict[str, str], repeats: int
) -> None:
    built = pipeline({"column": "x", op: {"categories": [f"c{place}" for place in range(90)], **unknown}})
    values = ["c1", None] * repeats + ["x"]

    with pytest.raises(RowError, match="'x' is 'x', which is none of the 90 categories") as refused:
        built({"x": pa.array(values)})

    assert refused.value.row == 2 * repeats


@pytest.mark.parametrize("repeats", [1, 100])
def test_a_value_that_fitting_did_not_see_may_be_encoded(repeats: int) -> None:
    categories = [str(place) for place in range(90)]
    column = pa.array([5, None, 1000] * repeats)

    ordinal = pipeline({"column": "x", "ordinalEncode": {"categories": categories, "unknown": "UNKNOWN_VALUE_ENCODE"}})
    one_hot = pipeline({"column": "x", "oneHotEncode": {"categories": categories, "unknown": "UNKNOWN_VALUE_ENCODE"}})

    assert ordinal({"x": column})["x"].to_pylist() == [5, None, -1] * repeats
    assert one_hot({"x": column})["x"].sum(axis=1).tolist() == [1, 0, 0] * repeats


@pytest.mark.parametrize(
    ("categories", "kind"),
    [
        (["a"], pa.int64()),
        (["300"], pa.uint8()),
        (["1", "01"], pa.int64()),
        (["1"], pa.float64()),
        (["a"], pa.date32()),
    ],
)
def test_categories_that_are_not_of_the_column_are_refused_before_any_row(
    categories: list[str], kind: pa.DataType
) -> None:
    built = pipeline({"column": "x", "oneHotEncode": {"categories": categories}})

    with pytest.raises(InvalidArgument) as refused:
        built.output({"x": ScalarType(kind)})

    assert refused.value.fields[0][0].startswith("transform.steps[0]")


@pytest.mark.parametrize(
    ("op", "message", "at"),
    [
        ("oneHotEncode", {"categories": ["a", "a"]}, "one_hot_encode.categories"),
        ("oneHotEncode", {"categories": [str(one) for one in range(10_001)]}, "one_hot_encode.categories"),
        ("ordinalEncode", {"categories": [str(one) for one in range(100_001)]}, "ordinal_encode.categories"),
        ("ordinalEncode", {"unknown": 9}, "ordinal_encode.unknown"),
    ],
)
def test_categories_that_make_no_sense_are_refused(op: str, message: dict[str, Any], at: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        pipeline({"column": "x", op: message})

    assert refused.value.fields[0][0] == f"transform.steps[0].{at}"
