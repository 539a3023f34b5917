"""Nulls of dates, times and timestamps: filled by a value or by one that is learnt, which survives as text."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidArgument
from shared.transforms import Pipeline, ScalarType
from shared.value_texts import value_of_text, value_text
from tests.unit.shared.transforms.samples import fitted, pipeline

TIMES = [pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")]
NOON_S = 43_200
YEAR_20000_S = 568_971_820_800
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def filled(column: pa.Array, **fill: Any) -> pa.Array:
    """By the step as it comes back from a manifest."""
    built = pipeline({"column": "x", "fillNulls": fill})
    assert built.output({"x": ScalarType(column.type)})["x"] == ScalarType(column.type, nullable=False)
    kept = Pipeline.from_config(json.loads(json.dumps(fitted(built, {"x": column}).config)))
    made = kept({"x": column})["x"]
    assert isinstance(made, pa.Array)
    return made


@pytest.mark.parametrize("kind", TIMES, ids=str)
def test_times_of_day_are_filled(kind: pa.DataType) -> None:
    noon = NOON_S * PER_SECOND[kind.unit]
    given_times = pa.array([noon, None, noon, 1], kind)

    wanted = pa.array([noon, noon, noon, 1], kind)
    assert filled(given_times, value={"text": "12:00:00"}).equals(wanted)
    assert filled(given_times, value={"text": "12:00"}).equals(wanted)
    for statistic in ("STATISTIC_MODE", "STATISTIC_MEDIAN"):
        assert filled(given_times, statistic=statistic).equals(wanted)


@pytest.mark.parametrize("text", ["12:00:00.5", "25:00:00", "12:00:00Z", "noon", ""])
def test_a_text_that_is_no_time_of_the_type_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"time32\[s\] cannot hold"):
        filled(pa.array([None], pa.time32("s")), value={"text": text})


@pytest.mark.parametrize(
    "values",
    [
        pa.array([5_000_000, None], pa.date32()),
        pa.array([-5_000_000, None], pa.date32()),
        pa.array([2**31 - 1, None], pa.date32()),
        pa.array([YEAR_20000_S, None], pa.timestamp("s")),
        pa.array([YEAR_20000_S * 1000 + 1, None], pa.timestamp("ms", "Europe/Berlin")),
        pa.array([2**63 - 1, None], pa.timestamp("us")),
        pa.array([5, None], pa.timestamp("us", "Mars/Base")),
        pa.array([-1, None], pa.timestamp("ns", "+02:00")),
    ],
    ids=lambda values: f"{values.type} {values[0].value}",
)
def test_dates_that_no_calendar_of_python_has_are_learnt(values: pa.Array) -> None:
    assert filled(values, statistic="STATISTIC_MODE").equals(values.take(pa.array([0, 0])))


def test_a_date_beyond_the_year_9999_can_be_given() -> None:
    made = filled(pa.array([None], pa.date32()), value={"text": "15659-07-15"})
    assert made.equals(pa.array([5_000_000], pa.date32()))
    with pytest.raises(InvalidArgument, match=r"date32\[day\] cannot hold"):
        filled(pa.array([None], pa.date32()), value={"text": "15659-02-30"})
    with pytest.raises(InvalidArgument, match=r"date32\[day\] cannot hold"):
        filled(pa.array([None], pa.date32()), value={"text": "99999999-01-01"})


def test_a_time_beyond_its_day_is_no_value_to_learn() -> None:
    beyond = pa.array([90_000, None], pa.int32()).view(pa.time32("s"))
    with pytest.raises(InvalidArgument, match="25:00:00"):
        filled(beyond, statistic="STATISTIC_MODE")


@given(
    number=st.integers(-(2**63), 2**63 - 1),
    kind=st.sampled_from(
        [pa.date32(), *(pa.timestamp(unit, zone) for unit in PER_SECOND for zone in (None, "UTC", "Europe/Berlin"))]
    ),
)
def test_every_date_and_timestamp_survives_as_text(number: int, kind: pa.DataType) -> None:
    if pa.types.is_date(kind):
        stored = number // 2**32
    else:
        # Files hold no seconds beyond milliseconds, and Arrow reads not the first second of nanoseconds.
        stored = number // 1000 if kind.unit == "s" else max(number, -(2**63) + 10**9)
    assert value_of_text(value_text(stored, kind), kind).value == stored


@pytest.mark.parametrize("kind", TIMES, ids=str)
@given(data=st.data())
def test_every_time_of_day_survives_as_text(kind: pa.DataType, data: st.DataObject) -> None:
    stored = data.draw(st.integers(0, 86_400 * PER_SECOND[kind.unit] - 1))
    assert value_of_text(value_text(stored, kind), kind).value == stored
