"""Numbers scaled, counted against boundaries, filled, and put into one tensor."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidArgument
from shared.transforms import RowError, ScalarType, TensorType
from tests.unit.shared.transforms.samples import pipeline, schema_of_batch


def test_standardize_works_in_float64_and_gives_float32() -> None:
    values = np.random.default_rng(0).normal(1e6, 1, 100)
    built = pipeline({"column": "x", "standardize": {"mean": 1e6, "deviation": 0.3}})

    made = built({"x": pa.array(values)})["x"]

    assert made.to_numpy().tobytes() == ((values - 1e6) / 0.3).astype(np.float32).tobytes()


def test_values_outside_what_was_learnt_leave_the_range_unless_clipped() -> None:
    column = pa.array([-1, 0, 5, None, 20])

    for clip, expected in ((False, [-0.1, 0.0, 0.5, None, 2.0]), (True, [0.0, 0.0, 0.5, None, 1.0])):
        made = pipeline({"column": "x", "minMaxScale": {"min": 0, "max": 10, "clip": clip}})({"x": column})["x"]
        assert made.to_pylist() == [None if value is None else np.float32(value) for value in expected]


@given(
    values=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=8),
    boundaries=st.lists(
        st.one_of(st.floats(-1e20, 1e20), st.sampled_from([2.0**63, -(2.0**63), 2.0**53, -0.0])),
        min_size=1,
        max_size=6,
        unique_by=lambda one: one + 0.0,
    ),
)
def test_buckets_of_integers_are_exact_however_large(values: list[int], boundaries: list[float]) -> None:
    ordered = sorted(boundaries)
    built = pipeline({"column": "x", "bucketize": {"boundaries": ordered}})

    made = built({"x": pa.array(values, pa.int64())})["x"].to_pylist()

    assert made == [sum(Fraction(boundary) <= value for boundary in ordered) for value in values]


def test_buckets_of_floats_count_boundaries_at_or_below_and_refuse_nan() -> None:
    built = pipeline({"column": "x", "bucketize": {"boundaries": [0, 1.5]}})

    assert built({"x": pa.array([-0.1, 0.0, 1.5, None, math.inf])})["x"].to_pylist() == [0, 1, 2, None, 2]
    with pytest.raises(RowError, match="NaN") as refused:
        built({"x": pa.array([None, math.nan])})
    assert refused.value.row == 1


def test_concat_puts_the_values_one_after_the_other() -> None:
    rows = {
        "x": pa.array([1, 2]),
        "t": np.arange(8, dtype=np.uint8).reshape(2, 2, 2),
        "b": pa.array([True, False]),
        "rest": pa.array(["a", "b"]),
    }
    built = pipeline({"concat": {"columns": ["t", "x", "b"], "into": "x"}})

    assert list(built.output(schema_of_batch(rows))) == ["rest", "x"]
    assert built(rows)["x"].tolist() == [[0, 1, 2, 3, 1, 1], [4, 5, 6, 7, 2, 0]]
    kept = pipeline({"concat": {"columns": ["t", "x"], "into": "all", "keep": True}})(rows)
    assert list(kept) == ["x", "t", "b", "rest", "all"]


def test_concat_names_the_row_of_a_null() -> None:
    with pytest.raises(RowError, match="'x' is null") as refused:
        pipeline({"concat": {"columns": ["x"], "into": "all"}})({"x": pa.array([1.0, None])})

    assert refused.value.row == 1


@pytest.mark.parametrize(
    ("kind", "value", "filled"),
    [
        (pa.int64(), {"integer": 7}, 7),
        (pa.uint8(), {"number": 7.0}, 7),
        (pa.float64(), {"integer": 7}, 7.0),
        (pa.float32(), {"number": 0.1}, float(np.float32(0.1))),
        (pa.string(), {"text": ""}, ""),
        (pa.bool_(), {"boolean": False}, False),
        (pa.int64(), {"integer": 0}, 0),
    ],
)
def test_nulls_are_filled_with_the_value_given(kind: pa.DataType, value: dict[str, Any], filled: Any) -> None:
    built = pipeline({"column": "x", "fillNulls": {"value": value}})

    assert built.output({"x": ScalarType(kind)})["x"] == ScalarType(kind, nullable=False)
    assert built({"x": pa.array([None], kind)})["x"].to_pylist() == [filled]
    assert built.unfitted == []


NUMBER = ScalarType(pa.float64())
UNFIT: list[tuple[dict[str, Any], Any, str]] = [
    ({"column": "x", "fillNulls": {"value": {"text": "a"}}}, NUMBER, "fill_nulls.value"),
    ({"column": "x", "fillNulls": {"value": {"boolean": True}}}, NUMBER, "fill_nulls.value"),
    ({"column": "x", "fillNulls": {"value": {"number": 1.5}}}, ScalarType(pa.int64()), "fill_nulls.value"),
    ({"column": "x", "fillNulls": {"value": {"integer": 300}}}, ScalarType(pa.uint8()), "fill_nulls.value"),
    ({"column": "x", "fillNulls": {"value": {"number": 1e300}}}, ScalarType(pa.float32()), "fill_nulls.value"),
    ({"column": "x", "fillNulls": {"value": {"text": "soon"}}}, ScalarType(pa.date32()), "fill_nulls.value"),
    ({"column": "x", "fillNulls": {"value": {"integer": 1}}}, ScalarType(pa.string()), "fill_nulls.value"),
    ({"column": "x", "fillNulls": {"statistic": "STATISTIC_MEAN"}}, ScalarType(pa.int64()), "fill_nulls.statistic"),
    ({"column": "x", "fillNulls": {"statistic": "STATISTIC_MODE"}}, ScalarType(pa.binary()), "fill_nulls.statistic"),
    ({"column": "x", "fillNulls": {"value": {"integer": 1}}}, TensorType("uint8", (2,)), ""),
    ({"column": "x", "standardize": {}}, ScalarType(pa.string()), ""),
    ({"column": "x", "standardize": {}}, ScalarType(pa.bool_()), ""),
    ({"column": "x", "minMaxScale": {}}, TensorType("float32", (2,)), ""),
    ({"column": "x", "bucketize": {"boundaries": [1]}}, ScalarType(pa.string()), ""),
    ({"column": "y", "standardize": {}}, NUMBER, "column"),
    ({"concat": {"columns": ["x", "y"], "into": "z"}}, NUMBER, "concat.columns[1]"),
    ({"concat": {"columns": ["x"], "into": "z"}}, ScalarType(pa.string()), "concat.columns[0]"),
    ({"concat": {"columns": ["x"], "into": "z"}}, TensorType("uint8", (None, None, 3)), "concat.columns[0]"),
    ({"concat": {"columns": ["x"], "into": "x", "keep": True}}, NUMBER, "concat.into"),
    ({"concat": {"columns": ["x"], "into": "_row_id"}}, NUMBER, ""),
]


@pytest.mark.parametrize(("step", "column", "at"), UNFIT)
def test_a_column_that_a_step_does_not_fit_is_refused_before_any_row(
    step: dict[str, Any], column: Any, at: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        pipeline(step).output({"x": column})

    assert refused.value.fields[0][0] == ".".join(filter(None, ["transform.steps[0]", at]))


SENSELESS: list[tuple[dict[str, Any], str]] = [
    ({"column": "x", "fillNulls": {}}, "fill_nulls"),
    ({"column": "x", "fillNulls": {"value": {}}}, "fill_nulls.value"),
    ({"column": "x", "standardize": {"mean": 1}}, "standardize"),
    ({"column": "x", "standardize": {"mean": "NaN", "deviation": 1}}, "standardize.mean"),
    ({"column": "x", "standardize": {"mean": 0, "deviation": -1}}, "standardize.deviation"),
    ({"column": "x", "minMaxScale": {"max": 1}}, "min_max_scale"),
    ({"column": "x", "minMaxScale": {"min": 2, "max": 1}}, "min_max_scale.max"),
    ({"column": "x", "minMaxScale": {"min": -1e308, "max": 1e308}}, "min_max_scale.max"),
    ({"column": "x", "bucketize": {}}, "bucketize.boundaries"),
    ({"column": "x", "bucketize": {"boundaries": [1, 1]}}, "bucketize.boundaries[1]"),
    ({"column": "x", "bucketize": {"boundaries": ["Infinity"]}}, "bucketize.boundaries[0]"),
    ({"concat": {"columns": ["x"]}}, "concat.into"),
    ({"concat": {"into": "x"}}, "concat.columns"),
    ({"concat": {"columns": ["x", "x"], "into": "y"}}, "concat.columns[1]"),
    ({"column": "x", "concat": {"columns": ["x"], "into": "y"}}, "column"),
    ({"standardize": {}}, "column"),
]


@pytest.mark.parametrize(("step", "at"), SENSELESS)
def test_a_step_that_makes_no_sense_is_refused_by_its_field(step: dict[str, Any], at: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        pipeline(step)

    assert refused.value.fields[0][0] == f"transform.steps[0].{at}"
