"""Casts: exact, or refused by the row."""

from __future__ import annotations

from datetime import time
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidArgument
from shared.transforms import Pipeline, RowError, ScalarType, Schema, TensorType
from tests.unit.shared.transforms.samples import pipeline


def cast(column: pa.Array, to: str) -> pa.Array:
    built = pipeline({"column": "x", "cast": {"arrowType": to}})
    announced = built.output({"x": ScalarType(column.type)})["x"]
    made = built({"x": column})["x"]
    assert announced == ScalarType(made.type)
    return made


@pytest.mark.parametrize(
    ("given_values", "given_type", "to", "made"),
    [
        (["1", None, "-7"], "string", "int64", [1, None, -7]),
        (["0.1", "nan", "-inf"], "string", "double", None),
        (["true", "false"], "string", "bool", [True, False]),
        ([1, 0, None], "int64", "bool", [True, False, None]),
        ([True, None], "bool", "uint8", [1, None]),
        ([1.0, -0.0, 3e9], "double", "int64", [1, 0, 3_000_000_000]),
        ([0.5, None, float("inf")], "double", "float", [0.5, None, float("inf")]),
        ([2**60, -(2**63)], "int64", "double", [2.0**60, -(2.0**63)]),
        ([1, 255], "int64", "uint8", [1, 255]),
        ([5, None], "int64", "string", ["5", None]),
        (["1.25"], "string", "decimal128(5, 2)", None),
        ([0.25], "double", "decimal128(5, 2)", None),
        ([999, None], "int64", "decimal128(5, 2)", None),
        ([86_400_000_000], "timestamp[us]", "date32[day]", None),
        ([1, None], "timestamp[s]", "timestamp[us]", None),
        (["2019-03-01T12:00:00"], "string", "timestamp[us]", None),
        (["2019-03-01"], "string", "date32[day]", None),
        (["12:00", None], "string", "time32[s]", [time(12), None]),
        (["23:59:59.5"], "string", "time32[ms]", [time(23, 59, 59, 500_000)]),
        (["00:00:00.000001", None], "string", "time64[us]", [time(0, 0, 0, 1), None]),
        (["12:30:00"], "string", "time64[ns]", [time(12, 30)]),
        ([b"abc"], "binary", "string", ["abc"]),
        ([1.5, None], "halffloat", "double", [1.5, None]),
    ],
)
def test_values_that_the_type_holds_are_cast(given_values: list[Any], given_type: str, to: str, made: Any) -> None:
    out = cast(pa.array(given_values, pa.type_for_alias(given_type)), to)

    assert str(out.type) == to
    if made is not None:
        assert out.to_pylist() == made


@pytest.mark.parametrize(
    ("given_values", "given_type", "to", "row"),
    [
        (["1", "two", "3"], "string", "int64", 1),
        (["300"], "string", "uint8", 0),
        (["1", "1e999"], "string", "double", 1),
        (["1.5"], "string", "int32", 0),
        ([1.0, 1.5], "double", "int64", 1),
        ([1.0, None, float("nan")], "double", "int64", 2),
        ([1e300], "double", "int64", 0),
        ([0.5, 0.1], "double", "float", 1),
        ([1e300], "double", "float", 0),
        ([2**53, 2**53 + 1], "int64", "double", 1),
        ([2**63 - 1], "int64", "double", 0),
        ([2**24 + 1], "int64", "float", 0),
        ([0, 256], "int64", "uint8", 1),
        ([-1], "int64", "uint64", 0),
        ([0, 1, 2], "int64", "bool", 2),
        ([0.25, 0.125], "double", "decimal128(5, 2)", 1),
        ([999, 1000], "int64", "decimal128(5, 2)", 1),
        ([86_400_000_000, 1], "timestamp[us]", "date32[day]", 1),
        ([1_000_000, 1], "timestamp[us]", "timestamp[s]", 1),
        (["2019-03-01", "1st of March"], "string", "date32[day]", 1),
        (["12:00", "12:00:00.5"], "string", "time32[s]", 1),
        ([b"abc", b"\xff"], "binary", "string", 1),
        ([1.0, 1.5], "halffloat", "int8", 1),
        ([1, 2**63 - 1], "int64", "timestamp[s]", 1),
        ([1, -(2**63)], "int64", "timestamp[s, tz=UTC]", 1),
        ([86_399, 2**31 - 1], "int32", "time32[s]", 1),
    ],
)
def test_a_value_that_the_type_cannot_hold_names_its_row(
    given_values: list[Any], given_type: str, to: str, row: int
) -> None:
    with pytest.raises(RowError, match="cannot hold exactly") as refused:
        cast(pa.array(given_values, pa.type_for_alias(given_type)), to)

    assert (refused.value.row, refused.value.path) == (row, "transform.steps[0]")


@pytest.mark.parametrize("given_type", [pa.timestamp("us"), pa.timestamp("s"), pa.date32()], ids=str)
def test_times_without_a_zone_are_not_asked_to_have_one_and_recorded_casts_still_do(given_type: pa.DataType) -> None:
    step = {"column": "x", "cast": {"arrowType": "timestamp[us, tz=Europe/Berlin]"}}
    schema: Schema = {"x": ScalarType(given_type)}
    with pytest.raises(InvalidArgument, match=r"has no time zone.*keep it as timestamp\[us\]") as refused:
        Pipeline.from_config({"steps": [step]}, asked=True).output(schema)
    assert refused.value.fields[0][0] == "transform.steps[0].cast.arrow_type"

    assert pipeline(step).output(schema)["x"] == ScalarType(pa.timestamp("us", "Europe/Berlin"))


def test_times_with_a_zone_may_have_another() -> None:
    step = {"column": "x", "cast": {"arrowType": "timestamp[us, tz=Europe/Berlin]"}}
    asked = Pipeline.from_config({"steps": [step]}, asked=True)
    for given_type in (pa.timestamp("s", "UTC"), pa.string(), pa.int64()):
        assert asked.output({"x": ScalarType(given_type)})["x"] == ScalarType(pa.timestamp("us", "Europe/Berlin"))


def test_a_text_without_an_offset_is_no_moment_and_the_error_says_what_is() -> None:
    with pytest.raises(RowError, match=r"needs its offset, such as 2024-07-01T12:00:00\+02:00"):
        cast(pa.array(["2024-07-01T12:00:00Z", "2024-07-01T12:00:00"]), "timestamp[us, tz=UTC]")


@given(
    values=st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=9),
    to=st.sampled_from(["int8", "uint16", "int32", "uint64", "float", "double", "halffloat"]),
)
def test_integers_are_cast_exactly_or_refused_at_the_first_that_cannot(values: list[int | None], to: str) -> None:
    dtype = np.dtype(pa.type_for_alias(to).to_pandas_dtype())

    def holds(value: int | None) -> bool:
        if value is None:
            return True
        if dtype.kind == "f":
            with np.errstate(over="ignore"):
                nearest = float(dtype.type(value))
            return np.isfinite(nearest) and int(nearest) == value
        return bool(np.iinfo(dtype).min <= value <= np.iinfo(dtype).max)

    bad = [row for row, value in enumerate(values) if not holds(value)]
    if bad:
        with pytest.raises(RowError) as refused:
            cast(pa.array(values, pa.int64()), to)
        assert refused.value.row == bad[0]
    else:
        assert cast(pa.array(values, pa.int64()), to).to_pylist() == values


@pytest.mark.parametrize(
    "spelling",
    [
        *("", "int", "complex", "list<item: int64>", "timestamp", "struct", "null", "duration[s]"),
        *("decimal128(5, -1)", "decimal128(5, 7)", "decimal128(39, 0)", "fixed_size_binary[0]"),
        *("timestamp[us, tz=A B]", "timestamp[us, tz=weird.zone]"),
    ],
)
def test_types_that_no_column_has_are_refused(spelling: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        pipeline({"column": "x", "cast": {"arrowType": spelling}})

    assert refused.value.fields[0][0] == "transform.steps[0].cast.arrow_type"


def test_tensors_and_types_with_no_cast_between_them_are_refused_before_any_row() -> None:
    built = pipeline({"column": "x", "cast": {"arrowType": "bool"}})

    for given_type in (TensorType("uint8", (2,)), ScalarType(pa.timestamp("s"))):
        with pytest.raises(InvalidArgument):
            built.output({"x": given_type})


@pytest.mark.parametrize("target", ["float", "double"])
def test_half_floats_are_cast_exactly(target: str) -> None:
    column = pa.array(np.array([1.5, np.nan, -0.0, 65504], np.float16))

    made = pipeline({"column": "x", "cast": {"arrowType": target}})({"x": column})["x"]

    assert isinstance(made, pa.Array)
    assert made.type == pa.type_for_alias(target)
    np.testing.assert_array_equal(made.to_numpy(), [1.5, np.nan, 0.0, 65504])
