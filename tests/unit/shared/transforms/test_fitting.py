"""Fitting: exact, the same to the last bit for any order and cut of the training rows, and frozen by the config."""

from __future__ import annotations

import json
import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidArgument
from shared.transforms import Batch, Pipeline, RowError, ScalarType, TensorType
from shared.transforms.steps import fitted as filling
from shared.transforms.steps import fitted as value_counts_module
from shared.transforms.steps.fitted import ExactMoments
from tests.unit.shared.transforms.samples import bits, cut, fitted, people, pipeline, schema_of_batch

FINITE = st.floats(allow_nan=False, allow_infinity=False)
MODEST = st.floats(-1e150, 1e150)


@given(st.lists(FINITE, min_size=1, max_size=30))
def test_a_mean_is_the_float_next_to_the_exact_one(values: list[float]) -> None:
    moments = ExactMoments()
    moments.add(np.array(values))

    assert moments.mean == float(sum(map(Fraction, values)) / len(values))


@given(st.lists(MODEST, min_size=1, max_size=30))
def test_a_deviation_is_the_root_of_the_exact_variance(values: list[float]) -> None:
    moments = ExactMoments()
    moments.add(np.array(values))

    exact = [Fraction(value) for value in values]
    mean = sum(exact) / len(exact)
    variance = sum((value - mean) ** 2 for value in exact) / len(exact)
    # Within one place in 2**53 of the float: the square of the neighbours must enclose the variance.
    below, above = (math.nextafter(moments.deviation, end) for end in (0.0, math.inf))
    assert Fraction(below) ** 2 <= variance <= Fraction(above) ** 2
    assert (moments.deviation == 0) == (variance == 0) or variance < Fraction(1, 2**2100)


def test_values_that_differ_by_one_bit_beside_large_ones_still_deviate() -> None:
    moments = ExactMoments()
    moments.add(np.array([1e16, 1e16 + 2, 1e16]))

    assert moments.deviation == math.sqrt(8 / 9)


@given(st.lists(FINITE, min_size=1, max_size=40), st.randoms(use_true_random=False), st.integers(1, 5))
def test_order_and_cut_of_the_values_do_not_show(values: list[float], random: Any, parts: int) -> None:
    whole = ExactMoments()
    whole.add(np.array(values))
    shuffled = random.sample(values, len(values))

    merged = ExactMoments()
    for part in np.array_split(np.array(shuffled), parts):
        one = ExactMoments()
        one.add(part)
        merged.merge(one)

    assert merged.__dict__ == whole.__dict__


LEARNING = (
    {"column": "age", "fillNulls": {"statistic": "STATISTIC_MEAN"}},
    {"column": "visits", "fillNulls": {"statistic": "STATISTIC_MODE"}},
    {"column": "seen", "fillNulls": {"statistic": "STATISTIC_MEDIAN"}},
    {"column": "weight", "standardize": {}},
    {"column": "city", "oneHotEncode": {}},
    {"column": "digits", "ordinalEncode": {}},
    {"column": "member", "ordinalEncode": {}},
    {"column": "visits", "minMaxScale": {}},
    {"column": "age", "standardize": {}},
    {"filter": {"expression": "age < 1"}},
    {"concat": {"columns": ["age", "city", "visits"], "into": "features"}},
)
PEOPLE = people(200)


@given(
    seed=st.integers(0, 2**32 - 1),
    places=st.lists(st.integers(0, 200), max_size=4),
    wait=st.sampled_from([1, 40, 1 << 16]),
)
def test_learned_values_are_the_same_for_any_order_and_cut_of_the_rows(seed: int, places: list[int], wait: int) -> None:
    order = np.random.default_rng(seed).permutation(200)
    shuffled: Batch = {
        name: column.take(pa.array(order)) if isinstance(column, pa.Array) else column[order]
        for name, column in PEOPLE.items()
    }
    built = pipeline(*LEARNING)
    passes = 0
    while built.unfitted:
        fitters = []
        for part in cut(shuffled, places):
            fitter = built.fitter(schema_of_batch(PEOPLE))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(value_counts_module, "ROWS_TO_WAIT_FOR", wait)
                fitter.update(part)
            fitters.append(pickle.loads(pickle.dumps(fitter)))
        for other in fitters[1:]:
            fitters[0].merge(other)
        built = fitters[0].fitted()
        passes += 1

    expected = fitted(pipeline(*LEARNING), PEOPLE)
    assert built.config == expected.config
    assert bits(built(PEOPLE)) == bits(expected(PEOPLE))
    assert passes == 2


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64(), pa.int8(), pa.uint64()], ids=str)
@pytest.mark.parametrize(
    "step", [{"standardize": {}}, {"minMaxScale": {}}, {"fillNulls": {"statistic": "STATISTIC_MEDIAN"}}]
)
def test_every_type_of_number_teaches(kind: pa.DataType, step: dict[str, Any]) -> None:
    rows: Batch = {"x": pa.array([3, None, 1, 3], pa.float32()).cast(kind)}
    built = fitted(pipeline({"column": "x", **step}), rows)

    double: Batch = {"x": rows["x"].cast(pa.float64())}
    same = fitted(pipeline({"column": "x", **step}), double)(double)["x"].to_pylist()
    assert built(rows)["x"].to_pylist() == same


def test_a_step_waits_until_what_it_depends_on_is_learnt_and_no_longer() -> None:
    built = pipeline(
        {"column": "age", "fillNulls": {"statistic": "STATISTIC_MEAN"}},
        {"column": "age", "standardize": {}},
        {"rename": {"columns": {"visits": "calls"}}},
        {"column": "calls", "minMaxScale": {}},
        {"filter": {"expression": "age > 0"}},
        {"column": "city", "ordinalEncode": {}},
    )
    given_schema = schema_of_batch(PEOPLE)
    assert built.unfitted == [0, 1, 3, 5]
    fitted = []
    while built.unfitted:
        fitter = built.fitter(given_schema)
        fitted.append(fitter.fitting_steps)
        fitter.update(PEOPLE)
        built = fitter.fitted()

    # The filter reads an age that is standardized: the rows that teach `city` are known only then.
    assert fitted == [[0, 3], [1], [5]]


def test_learning_sees_the_rows_and_values_that_the_step_gets() -> None:
    rows: Batch = {"x": pa.array([1.0, 5.0, 100.0, None]), "y": pa.array(["1", "2", "3", "4"])}
    built = fitted(
        pipeline(
            {"filter": {"expression": "x is None or x < 50"}},
            {"column": "y", "cast": {"arrowType": "int64"}},
            {"column": "y", "minMaxScale": {}},
            {"column": "x", "standardize": {}},
        ),
        rows,
    )

    assert built.config["steps"][2]["minMaxScale"] == {"min": 1.0, "max": 4.0}
    assert built.config["steps"][3]["standardize"] == {"mean": 3.0, "deviation": 2.0}


@pytest.mark.parametrize(
    ("values", "statistic", "value"),
    [
        ([3.0, 1.0, None, 2.0, 10.0], "MEAN", {"number": 4.0}),
        ([3.0, 1.0, None, 2.0, 10.0], "MEDIAN", {"number": 2.0}),
        ([4, 1, 4, None, 2], "MEDIAN", {"integer": "2"}),
        ([5, 1, 5, 1, 9], "MODE", {"integer": "1"}),
        (["b", "a", "b", "a", "c"], "MODE", {"text": "a"}),
        (["é", "z", "b"], "MEDIAN", {"text": "z"}),  # of bytes: é comes after z
        ([True, True, None, False, False, True], "MODE", {"boolean": True}),
        ([-0.0, 0.0], "MODE", {"number": 0.0}),
    ],
)
def test_statistics_are_those_of_the_contract(values: list[Any], statistic: str, value: dict[str, Any]) -> None:
    rows: Batch = {"x": pa.array(values)}

    built = fitted(pipeline({"column": "x", "fillNulls": {"statistic": f"STATISTIC_{statistic}"}}), rows)

    assert json.loads(json.dumps(built.config))["steps"][0]["fillNulls"]["value"] == value
    assert built(rows)["x"].null_count == 0
    assert built.output(schema_of_batch(rows))["x"] == ScalarType(rows["x"].type, nullable=False)


@pytest.mark.parametrize(
    "kind", [pa.timestamp("us"), pa.timestamp("ns", "Europe/Berlin"), pa.date32(), pa.decimal128(22, 3)]
)
def test_dates_times_and_decimals_are_frozen_as_text_and_read_back(kind: pa.DataType) -> None:
    column = pa.array([7, 3, 3, None], pa.int32() if kind == pa.date32() else pa.int64()).cast(kind)
    built = fitted(pipeline({"column": "x", "fillNulls": {"statistic": "STATISTIC_MODE"}}), {"x": column})

    made = Pipeline.from_config(json.loads(json.dumps(built.config)))({"x": column})["x"]

    assert made[3].as_py() == column[1].as_py()
    assert made.type == kind


@pytest.mark.parametrize(
    ("column", "step", "row"),
    [
        ([1.0, math.nan], {"standardize": {}}, 1),
        ([1.0, None, math.inf], {"minMaxScale": {}}, 2),
        ([-math.inf], {"fillNulls": {"statistic": "STATISTIC_MEAN"}}, 0),
        ([1.0, math.nan], {"fillNulls": {"statistic": "STATISTIC_MODE"}}, 1),
    ],
)
def test_a_row_that_teaches_nothing_is_named(column: list[float], step: dict[str, Any], row: int) -> None:
    rows: Batch = {"x": pa.array(column)}

    with pytest.raises(RowError) as refused:
        pipeline({"column": "x", **step}).fitter(schema_of_batch(rows)).update(rows)

    assert (refused.value.path, refused.value.row) == ("transform.steps[0]", row)


@pytest.mark.parametrize(
    "step",
    [
        {"standardize": {}},
        {"minMaxScale": {}},
        {"fillNulls": {"statistic": "STATISTIC_MEAN"}},
        {"fillNulls": {"statistic": "STATISTIC_MODE"}},
    ],
)
def test_a_column_of_nulls_teaches_nothing(step: dict[str, Any]) -> None:
    rows: Batch = {"x": pa.array([None, None], pa.float64())}

    with pytest.raises(InvalidArgument, match="has no value in the training rows") as refused:
        fitted(pipeline({"column": "x", **step}), rows)

    assert refused.value.fields[0][0] == "transform.steps[0]"


@pytest.mark.parametrize("step", ["standardize", "minMaxScale"])
def test_a_column_of_one_value_becomes_zero(step: str) -> None:
    rows: Batch = {"x": pa.array([0.1, None, 0.1, 0.1])}

    made = fitted(pipeline({"column": "x", step: {}}), rows)({"x": pa.array([0.1, None, 7.0])})["x"]

    assert made.type == pa.float32()
    assert made.to_pylist() == [0.0, None, 0.0]


@pytest.mark.parametrize(("op", "limit"), [("ordinalEncode", 100_000), ("oneHotEncode", 10_000)])
@pytest.mark.parametrize("parts", [1, 3])
def test_more_categories_than_the_limit_are_refused_by_step_and_limit(op: str, limit: int, parts: int) -> None:
    many: Batch = {"x": pa.array(range(limit + 1))}
    built = pipeline({"column": "x", op: {}})

    assert len(fitted(built, {"x": many["x"][:limit]}).config["steps"][0][op]["categories"]) == limit
    fitter = built.fitter(schema_of_batch(many))

    def fit() -> None:
        for part in cut(many, [limit * place // parts for place in range(1, parts)]):
            fitter.update(part)
        fitter.fitted()

    with pytest.raises(InvalidArgument, match=f"at most {limit:,} distinct values") as refused:
        fit()
    assert refused.value.fields[0][0] == "transform.steps[0]"


def test_more_distinct_values_than_a_median_keeps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "MAX_DISTINCT", 10)
    step = {"column": "x", "fillNulls": {"statistic": "STATISTIC_MEDIAN"}}

    with pytest.raises(InvalidArgument, match="fill_nulls with a median learns from at most 10 distinct values"):
        fitted(pipeline(step), {"x": pa.array(range(11))})


def test_a_pipeline_that_has_not_learnt_yet_is_not_applied() -> None:
    with pytest.raises(InvalidArgument, match="fit the pipeline first") as refused:
        pipeline({"column": "x", "standardize": {}})({"x": pa.array([1.0])})

    assert refused.value.fields[0][0] == "transform.steps[0]"


def test_the_length_of_categories_that_are_not_known_yet_is_free() -> None:
    built = pipeline({"column": "city", "oneHotEncode": {}}, {"concat": {"columns": ["city", "vector"], "into": "all"}})

    assert built.output(schema_of_batch(PEOPLE))["all"] == TensorType("float32", (None,))
    assert fitted(built, PEOPLE).output(schema_of_batch(PEOPLE))["all"] == TensorType("float32", (7,))


def test_fitters_of_different_passes_are_not_merged() -> None:
    first = pipeline({"column": "age", "standardize": {}}).fitter(schema_of_batch(PEOPLE))
    second = pipeline({"column": "age", "fillNulls": {"value": {"number": 1}}}).fitter(schema_of_batch(PEOPLE))

    with pytest.raises(ValueError, match="cannot be merged"):
        first.merge(second)
