"""What statistics say of values of each kind."""

from __future__ import annotations

import math
import statistics as exact
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from google.protobuf.json_format import MessageToDict, ParseDict
from hypothesis import given
from hypothesis import strategies as st

from data_service.domain.statistics import ColumnStatistics, SplitStatistics, rfc3339
from data_service.domain.statistics.sketches import ExactMoments, Weighted, scaled
from millrace.data.v1 import quality_pb2
from shared.dataset_version.manifest import tensor_array

FINITE = st.floats(allow_nan=False, allow_infinity=False)


def of(values: Any, arrow_type: pa.DataType | None = None) -> ColumnStatistics:
    array = values if isinstance(values, pa.Array) else pa.array(values, arrow_type)
    found = SplitStatistics(pa.schema([pa.field("x", array.type)]))
    found.update(pa.table({"x": array}), 0)
    (one,) = found.result("train")
    return one


def test_integers() -> None:
    one = of([3, 1, None, 1, 2])
    assert (one.row_count, one.null_count, one.distinct_count, one.distinct_is_exact) == (5, 1, 3, True)
    assert one.numbers is not None
    assert (one.numbers.min, one.numbers.max, one.numbers.mean) == (1, 3, 1.75)
    assert one.numbers.deviation == exact.pstdev([3, 1, 1, 2])
    assert list(one.numbers.histogram) == [2, 1, 1]
    assert list(one.numbers.quantiles) == [1, 1, 1, 1, 2, 3, 3]
    assert one.values == [(1, 2), (2, 1), (3, 1)]


def test_booleans_count_as_0_and_1_and_stay_booleans_among_values() -> None:
    one = of([True, False, True, None])
    assert one.numbers is not None
    assert one.numbers.mean == 2 / 3
    assert one.values == [(True, 2), (False, 1)]
    assert list(one.numbers.histogram) == [1, 2]


def test_nan_is_no_value_and_minus_zero_is_zero() -> None:
    one = of([math.nan, -0.0, 0.0, None, math.nan])
    assert (one.nan_count, one.null_count, one.distinct_count) == (2, 1, 1)
    assert one.numbers is not None
    assert math.copysign(1, one.numbers.min) == 1
    assert one.values == [(0.0, 2)]


@pytest.mark.parametrize(
    ("values", "mean"), [([1.0, math.inf], math.inf), ([-math.inf, 1.0], -math.inf), ([math.inf, -math.inf], math.nan)]
)
def test_infinities_are_values_and_their_json_is_valid(values: list[float], mean: float) -> None:
    for one in (of(values), of(tensor_array(np.array([values])))):
        assert one.numbers is not None
        assert one.numbers.mean == pytest.approx(mean, nan_ok=True)
        assert math.isnan(one.numbers.deviation)
        assert list(one.numbers.histogram) == []
        parsed = ParseDict(one.to_json(), quality_pb2.ColumnStatistics())
        assert parsed.numbers.max == max(values)


def test_texts_and_bytes_have_lengths_in_bytes() -> None:
    text, data = of(["é", "abc", None, "abc"]), of([b"12345", b"1"])
    assert text.texts is not None
    assert data.texts is not None
    assert (text.texts.min_bytes, text.texts.max_bytes, text.texts.mean_bytes) == (2, 3, 8 / 3)
    assert text.values == [("abc", 2), ("é", 1)]
    assert (data.texts.max_bytes, data.distinct_count, list(data.values)) == (5, 2, [])


def test_dates_have_no_numbers() -> None:
    one = of([0, 366, None], pa.date32())
    assert one.numbers is None
    assert one.times is not None
    assert (one.times.min, one.times.max) == ("1970-01-01T00:00:00Z", "1971-01-02T00:00:00Z")
    assert sum(one.times.histogram) == 2


def test_times_of_day_have_their_values_alone() -> None:
    one = of([1_500, 0], pa.time32("ms"))
    assert (one.numbers, one.times, one.distinct_count) == (None, None, 2)
    assert [value for value, _ in one.values] == ["00:00:00", "00:00:01.500"]


@pytest.mark.parametrize("arrow_type", [pa.int64(), pa.float64(), pa.string(), pa.date32(), pa.binary(3), pa.bool_()])
def test_no_values_give_no_numbers(arrow_type: pa.DataType) -> None:
    for values in ([], [None, None]):
        one = of(values, arrow_type)
        assert (one.numbers, one.times, one.texts, one.distinct_count) == (None, None, None, 0)
        ParseDict(one.to_json(), quality_pb2.ColumnStatistics())
    empty = SplitStatistics(pa.schema([tensor_type(np.uint8), tensor_type(np.float32)]))
    assert [one.numbers for one in empty.result()] == [None, None]


def tensor_type(dtype: Any) -> pa.Field:
    return pa.field(str(dtype), tensor_array(np.zeros((1, 2), dtype)).type)


def test_distinct_is_exact_to_4096_and_about_right_beyond() -> None:
    assert (of(range(4096)).distinct_count, of(range(4096)).distinct_is_exact) == (4096, True)
    many = of(range(200_000))
    assert not many.distinct_is_exact
    assert many.distinct_count == pytest.approx(200_000, rel=0.05)
    texts = of([f"name {index}" for index in range(50_000)])
    assert texts.distinct_count == pytest.approx(50_000, rel=0.05)


def test_frequent_values_end_at_1000_different_ones() -> None:
    assert len(of([*range(1000), 7]).values) == 100
    assert of([*range(1000), 7]).values[0] == (7, 2)
    assert list(of(range(1001)).values) == []
    assert list(of(["x" * 300 + str(index) for index in range(999)]).values) == []  # more text than a report holds


def test_a_deviation_far_from_zero_is_exact() -> None:
    values = [1e15 + offset for offset in (0.0, 1.0, 2.0)]
    one = of(values)
    assert one.numbers is not None
    assert one.numbers.deviation == exact.pstdev(values)


@given(st.lists(FINITE, min_size=1, max_size=30))
def test_mean_and_deviation_are_the_nearest_floats(values: list[float]) -> None:
    moments = ExactMoments()
    moments.add_floats(np.array(values))
    fractions = [Fraction(value) for value in values]
    mean = sum(fractions) / len(values)
    assert moments.mean == float(mean)
    variance = sum((value - mean) ** 2 for value in fractions) / len(values)
    lower, upper = (math.nextafter(moments.deviation, end) for end in (0, math.inf))
    assert Fraction(lower) ** 2 <= variance <= Fraction(upper) ** 2


@given(st.lists(st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(1, 10)), min_size=1, max_size=10))
def test_integers_of_any_size_are_summed_exactly(pairs: list[tuple[int, int]]) -> None:
    moments = ExactMoments()
    for value, count in pairs:
        dtype = np.uint64 if value >= 2**63 else np.int64
        moments.add_integers(np.array([value], dtype), np.array([count]))
    total = sum(value * count for value, count in pairs)
    assert moments.mean == float(Fraction(total, sum(count for _, count in pairs)))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(0, 10**12))
def test_scaled_bars_add_up(counts: list[int], total: int) -> None:
    assert sum(scaled(counts, total)) == (total if sum(counts) else 0)


def test_bars_of_a_range_wider_than_a_float_can_subtract() -> None:
    assert Weighted(np.array([-1.7e308, 1.7e308])).histogram(-1.7e308, 1.7e308, 2, is_integer=False)[::19] == [1, 1]


@pytest.mark.parametrize("first", [2**64 - 100, 2**63 - 50, -(2**63), 0])
def test_bars_of_integers_that_floats_cannot_distinguish(first: int) -> None:
    dtype = np.uint64 if first >= 2**63 - 50 else np.int64
    values = np.array(range(first, first + 100), dtype)
    assert Weighted(values).histogram(first, first + 99, 100, is_integer=True) == [5] * 20


@pytest.mark.parametrize(
    ("days", "text"),
    [
        (0, "1970-01-01"),
        (-719_162, "0001-01-01"),
        (2_932_896, "9999-12-31"),
        (-(2**31), "0001-01-01"),
        (59, "1970-03-01"),
    ],
)
def test_dates_are_cut_to_what_a_timestamp_holds(days: int, text: str) -> None:
    assert rfc3339(days, pa.date32())[:10] == text


def test_the_protos_json_is_read_back() -> None:
    one = of([1.5, 2.5, math.nan, None])
    message = ParseDict(one.to_json(), quality_pb2.ColumnStatistics())
    for keep_names in (True, False):
        record = MessageToDict(message, preserving_proto_field_name=keep_names)
        assert ColumnStatistics.from_json(record) == one


@pytest.mark.parametrize("weight", [1, 3])
def test_a_quantile_is_the_least_value_that_so_many_percent_reach(weight: int) -> None:
    values = np.random.default_rng(0).permutation(1000)
    weights = np.full(1000, weight)
    assert Weighted(values, weights).quantiles() == [percent * 10 - 1 for percent in (1, 5, 25, 50, 75, 95, 99)]
