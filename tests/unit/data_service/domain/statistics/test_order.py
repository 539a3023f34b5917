"""Statistics depend on the rows and their ids alone: neither on their order nor on how they are divided."""

from __future__ import annotations

import datetime
import decimal
import math
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data_service.domain.statistics as domain_statistics
from data_service.domain.statistics import SplitStatistics, sketches
from shared.dataset_version.manifest import tensor_array

FLOATS = st.floats(width=64) | st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7e308])
KINDS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int8(), st.integers(-128, 127)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), FLOATS),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text(st.characters(codec="utf-8"), max_size=4)),
    (pa.binary(), st.binary(max_size=4)),
    (pa.binary(2), st.binary(min_size=2, max_size=2)),
    (pa.decimal128(20, 3), st.decimals(-(10**12), 10**12, places=3)),
    (pa.date32(), st.dates()),
    (pa.time64("us"), st.times()),
    (pa.timestamp("us"), st.datetimes()),
    (pa.timestamp("ns", "Europe/Berlin"), st.integers(-(2**63) + 1, 2**63 - 1)),
]


@st.composite
def columns(draw: st.DrawFn, length: int) -> pa.Table:
    arrays = []
    for arrow_type, values_of in KINDS:
        drawn = draw(st.lists(st.none() | values_of, min_size=length, max_size=length))
        arrays.append(pa.array(drawn, arrow_type))
    numbers = draw(st.lists(FLOATS, min_size=3 * length, max_size=3 * length))
    with np.errstate(over="ignore"):
        arrays.append(tensor_array(np.array(numbers, np.float32).reshape(length, 3)))
        arrays.append(tensor_array(np.array(numbers, np.float64).reshape(length, 1, 3)))
    small = draw(st.lists(st.integers(0, 255), min_size=5 * length, max_size=5 * length))
    arrays.append(tensor_array(np.array(small, np.uint8).reshape(length, 5)))
    arrays.append(tensor_array(np.array(small, np.int16).reshape(length, 5)))
    return pa.table(arrays, names=[f"c{index}" for index in range(len(arrays))])


def found(statistics: SplitStatistics) -> str:
    return repr([one.to_json() for one in statistics.result("train")])


@settings(max_examples=60)
@given(st.data())
def test_any_order_and_any_division_of_rows_give_the_same_to_the_bit(data: st.DataObject) -> None:
    length = data.draw(st.integers(0, 12))
    table = data.draw(columns(length))
    # Small limits, so that a dozen rows pass them.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sketches, "SAMPLE", data.draw(st.sampled_from([4, 4096])))
        patch.setattr(sketches, "EXACT_DISTINCT", data.draw(st.sampled_from([3, 4096])))
        patch.setattr(sketches, "MAX_FREQUENT", data.draw(st.sampled_from([2, 1000])))
        whole = SplitStatistics(table.schema)
        whole.update(table, 100)
        order = data.draw(st.permutations(range(length)))
        cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=4)))
        parts = []
        for start, end in zip([0, *cuts], [*cuts, length], strict=True):
            part, rows = SplitStatistics(table.schema), np.array(order[start:end], np.int64)
            part.update(table.take(pa.array(rows)), rows + 100)
            parts.append(pickle.loads(pickle.dumps(part)))
        merged = SplitStatistics(table.schema)
        for part in data.draw(st.permutations(parts)):
            merged.merge(part)
        assert found(merged) == found(whole)
        assert merged.row_count == length


@pytest.mark.parametrize("shape", [(28, 28), (1, 28, 28), (3, 5), (2,), (9000,)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64, np.float16, np.int32])
def test_tensors_are_summed_the_same_in_blocks_of_any_size(shape: tuple[int, ...], dtype: Any) -> None:
    rng = np.random.default_rng(1)
    rows = (rng.random((150, *shape)) * 200).astype(dtype)
    table = pa.table({"x": tensor_array(rows)})
    whole, merged = SplitStatistics(table.schema), SplitStatistics(table.schema)
    whole.update(table, 0)
    for start, end in ((90, 150), (0, 1), (1, 7), (7, 90)):
        merged.update(table.slice(start, end - start), start)
    assert found(merged) == found(whole)
    numbers = whole.result()[0].numbers
    assert numbers is not None
    exact = rows.astype(np.float64)
    assert numbers.mean == pytest.approx(exact.mean(), rel=1e-13)
    assert numbers.deviation == pytest.approx(exact.std(), rel=1e-10)
    assert (numbers.min, numbers.max) == (float(exact.min()), float(exact.max()))
    assert numbers.quantiles[3] == pytest.approx(np.median(exact), rel=0.1)
    assert sum(numbers.histogram) == exact.size


def test_more_rows_than_the_sample_holds_are_sampled_by_their_ids_alone() -> None:
    rng = np.random.default_rng(2)
    table = pa.table({"x": rng.normal(size=20_000), "t": tensor_array(rng.random((20_000, 4)).astype(np.float32))})
    whole, merged = SplitStatistics(table.schema), SplitStatistics(table.schema)
    whole.update(table, 0)
    for start in (15_000, 5_000, 0, 10_000):
        merged.update(table.slice(start, 5_000), start)
    assert found(merged) == found(whole)
    normal, uniform = whole.result()
    assert normal.numbers is not None
    assert uniform.numbers is not None
    assert normal.numbers.quantiles[3] == pytest.approx(0, abs=0.05)
    assert normal.numbers.quantiles[5] == pytest.approx(1.645, abs=0.15)
    assert uniform.numbers.quantiles[2] == pytest.approx(0.25, abs=0.03)
    assert max(uniform.numbers.histogram) < 1.5 * min(uniform.numbers.histogram)


def test_tables_without_rows_are_not_kept() -> None:
    table = pa.table({"x": [1.0, 2.0]})
    statistics = SplitStatistics(table.schema)
    for _ in range(3):
        statistics.update(table.slice(0, 0), 0)
    assert statistics._waiting == []
    statistics.update(table, 0)
    assert statistics.row_count == 2
    assert statistics.result()[0].row_count == 2


@pytest.mark.parametrize("rows", [1, 2])
def test_waiting_rows_are_added_once_there_are_enough(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(domain_statistics, "_BATCH_ROWS", 4)
    table = pa.table({"x": [0.5] * rows})
    statistics = SplitStatistics(table.schema)
    waiting = []
    for first in range(0, 6 * rows, rows):
        statistics.update(table, first)
        waiting.append(len(statistics._waiting))
    most = 4 // rows
    assert waiting == [number % most for number in range(1, 7)]


def test_tables_of_a_split_may_differ_in_nullability() -> None:
    columns = [pa.array([1, 2, 3]), tensor_array(np.arange(6.0).reshape(3, 2))]
    table = pa.table(columns, names=["x", "t"])
    required = pa.schema([field.with_nullable(False) for field in table.schema])
    whole, mixed = SplitStatistics(table.schema), SplitStatistics(table.schema)
    whole.update(table, 0)
    mixed.update(table.slice(0, 1), 0)
    mixed.update(pa.table(columns, schema=required).slice(1), 1)
    assert found(mixed) == found(whole)


def test_pickled_statistics_of_30000_rows_are_below_800_kb() -> None:
    count = 30_000
    rng = np.random.default_rng(3)
    table = pa.table(
        {
            "image": tensor_array(rng.random((count, 10)).astype(np.float32)),
            "number": rng.normal(size=count),
            "text": [f"text {index} {'x' * 100}" for index in range(count)],
            "file": [b"x" * 1000 + str(index).encode() for index in range(count)],
        }
    )
    statistics = SplitStatistics(table.schema)
    statistics.update(table, 0)
    assert len(pickle.dumps(statistics)) < 4 * 200_000


def test_the_same_moment_in_every_unit_reads_the_same() -> None:
    moment = datetime.datetime(2024, 2, 29, 12, 30, 1)
    for unit in ("s", "ms", "us", "ns"):
        table = pa.table({"t": pa.array([moment], pa.timestamp(unit))})
        statistics = SplitStatistics(table.schema)
        statistics.update(table, 0)
        (one,) = statistics.result()
        assert one.times is not None
        assert one.times.min == "2024-02-29T12:30:01Z"
        assert one.values == [("2024-02-29T12:30:01", 1)]


def test_decimals_are_distinguished_beyond_the_precision_of_floats() -> None:
    close = [decimal.Decimal("12345678901234567.001"), decimal.Decimal("12345678901234567.002")]
    table = pa.table({"d": pa.array(close, pa.decimal128(20, 3))})
    statistics = SplitStatistics(table.schema)
    statistics.update(table, 0)
    (one,) = statistics.result()
    assert one.distinct_count == 2
    assert [value for value, _ in one.values] == [str(value) for value in close]
