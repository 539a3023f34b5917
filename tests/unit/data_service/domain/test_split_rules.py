"""Rows go to the split that their rule says, whatever the company in which they are looked at."""

from __future__ import annotations

import datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.domain.splits import (
    ColumnSplit,
    Divider,
    HashSplit,
    Period,
    RatioSplit,
    Share,
    TimeSplit,
    column_problems,
    divider,
    row_hashes,
    share_counts,
    split_order,
)
from shared.errors import InvalidArgument

NS = 1_000_000_000
# These must never change.
FROZEN_SPLITS = ["s0", "s0", "s0", "s0", "s0", "s0", "s0", "s0", "s0", "s1", "s0", "s0"]
FROZEN_CHOICE = [1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0]


def shares(*weights: float) -> list[Share]:
    return [Share(split=f"s{index}", weight=weight) for index, weight in enumerate(weights)]


def names(rule: Divider, rows: pa.Table, first_row_id: int = 0) -> list[str]:
    assigned = rule.assign(rows, np.arange(first_row_id, first_row_id + rows.num_rows))
    return [assigned.splits[choice] for choice in assigned.choice]


def ratio_counts(rule: RatioSplit, rows: int) -> list[int]:
    assigned = divider(rule, rows).assign(pa.table({}), np.arange(rows))
    return [int(one) for one in np.bincount(assigned.choice, minlength=len(rule.shares))]


# By hash


def test_a_key_has_the_split_that_it_always_had() -> None:
    rule = HashSplit(key_columns=["key"], shares=shares(2, 1, 1), seed=1)
    assert names(rule, pa.table({"key": [f"user-{i}" for i in range(12)]})) == FROZEN_SPLITS


@given(st.lists(st.integers(0, 20), min_size=1), st.lists(st.integers(0, 20)), st.integers(0, 2**64 - 1))
def test_adding_rows_never_moves_a_row(before: list[int], added: list[int], seed: int) -> None:
    rule = HashSplit(key_columns=["key"], shares=shares(2, 1), seed=seed)
    alone = names(rule, pa.table({"key": pa.array(before, pa.int64())}))
    assert names(rule, pa.table({"key": pa.array(added + before, pa.int64())}))[len(added) :] == alone


@given(st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, 2))))
def test_rows_with_equal_keys_stay_in_one_split(keys: list[tuple[str | None, int]]) -> None:
    rule = HashSplit(key_columns=["text", "number"], shares=shares(1, 1, 1), seed=3)
    table = pa.table(
        {"text": pa.array([k[0] for k in keys], pa.string()), "number": pa.array([k[1] for k in keys], pa.int64())}
    )
    seen = dict(zip(keys, names(rule, table), strict=True))
    assert [seen[key] for key in keys] == names(rule, table)


def test_shares_of_many_keys_come_near_their_weights() -> None:
    rule = HashSplit(key_columns=["key"], shares=shares(0.8, 0.1, 0.1), seed=0)
    assigned = rule.assign(pa.table({"key": np.arange(20_000)}), np.arange(20_000))
    assert np.bincount(assigned.choice) / 20_000 == pytest.approx([0.8, 0.1, 0.1], abs=0.01)


def test_another_seed_divides_otherwise() -> None:
    table = pa.table({"key": np.arange(100)})
    first, second = (names(HashSplit(key_columns=["key"], shares=shares(1, 1), seed=s), table) for s in (0, 1))
    assert first != second


def test_weights_count_relative_to_each_other_alone() -> None:
    table = pa.table({"key": np.arange(500)})
    small, large = (HashSplit(key_columns=["key"], shares=shares(*w), seed=0) for w in ((0.5, 0.25), (2e300, 1e300)))
    assert names(small, table) == names(large, table)


# By a column's values


def test_rows_go_to_the_split_that_their_column_names() -> None:
    assert names(ColumnSplit(column="fold"), pa.table({"fold": ["train", "test", "train"]})) == [
        "train",
        "test",
        "train",
    ]


@pytest.mark.parametrize(
    ("bad", "expected", "remedy"),
    [(None, "a null", "fill or filter"), ("Not A Split", "'Not A Split'", "use 1 to 63"), ("", "''", "use 1 to 63")],
)
def test_a_value_that_names_no_split_is_refused_with_its_row(bad: str | None, expected: str, remedy: str) -> None:
    with pytest.raises(InvalidArgument, match=f"row 41 has {expected} in column 'fold': {remedy}"):
        names(ColumnSplit(column="fold"), pa.table({"fold": pa.array(["train", bad], pa.string())}), first_row_id=40)


def test_splits_of_a_column_are_in_the_order_of_their_names_bytes() -> None:
    assert split_order(ColumnSplit(column="fold"), ["train", "test", "a"]) == ["a", "test", "train"]


# By time


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_a_period_takes_what_is_before_its_end_and_no_earlier_one_took(unit: str) -> None:
    rule = TimeSplit(
        column="at",
        periods=[
            Period(split="old", before_ns=10 * NS),
            Period(split="new", before_ns=20 * NS),
            Period(split="rest", before_ns=None),
        ],
    )
    at = pa.array([-5, 9, 10, 19, 20], pa.timestamp("s")).cast(pa.timestamp(unit))
    assert names(rule, pa.table({"at": at})) == ["old", "old", "new", "new", "rest"]
    in_zone = pa.table({"at": at.cast(pa.timestamp(unit, "Europe/Berlin"))})
    assert names(rule, in_zone) == ["old", "old", "new", "new", "rest"]


def test_an_end_between_two_units_splits_between_them() -> None:
    rule = TimeSplit(column="at", periods=[Period(split="a", before_ns=NS + 1), Period(split="b", before_ns=None)])
    assert names(rule, pa.table({"at": pa.array([1, 2], pa.timestamp("s"))})) == ["a", "b"]


def test_a_date_is_its_midnight_in_utc() -> None:
    noon = 86_400 * NS // 2
    rule = TimeSplit(column="on", periods=[Period(split="a", before_ns=noon), Period(split="b", before_ns=None)])
    assert names(rule, pa.table({"on": [datetime.date(1970, 1, 1), datetime.date(1970, 1, 2)]})) == ["a", "b"]


def test_an_end_beyond_what_the_column_can_hold_takes_all() -> None:
    year_9999 = 253_402_300_799 * NS
    rule = TimeSplit(column="at", periods=[Period(split="a", before_ns=year_9999), Period(split="b", before_ns=None)])
    assert names(rule, pa.table({"at": pa.array([0, 2**63 - 1], pa.timestamp("ns"))})) == ["a", "a"]


def test_a_row_without_a_time_is_refused_by_its_id() -> None:
    rule = TimeSplit(column="at", periods=[Period(split="a", before_ns=1), Period(split="b", before_ns=None)])
    with pytest.raises(InvalidArgument, match="row 8 has a null in column 'at'"):
        names(rule, pa.table({"at": pa.array([0, None], pa.timestamp("s"))}), first_row_id=7)


# At random


@given(
    st.lists(st.floats(0.001, 1000), min_size=2, max_size=6),
    st.integers(1, 3000),
    st.integers(0, 2**64 - 1),
)
def test_each_share_has_the_nearest_whole_number_of_rows(weights: list[float], rows: int, seed: int) -> None:
    rule = RatioSplit(shares=shares(*weights), seed=seed)
    counts = ratio_counts(rule, rows)
    assert counts == share_counts(rule.shares, rows)
    assert sum(counts) == rows
    assert all(abs(count - rows * w / sum(weights)) < 1 for count, w in zip(counts, weights, strict=True))


def test_rows_left_by_rounding_go_to_the_splits_that_lost_most() -> None:
    assert share_counts(shares(0.6, 0.25, 0.15), 10) == [6, 3, 1]
    assert share_counts(shares(1, 1, 1), 100) == [34, 33, 33]


def test_a_row_has_the_random_split_that_it_always_had() -> None:
    assigned = divider(RatioSplit(shares=shares(2, 1), seed=9), 12).assign(pa.table({}), np.arange(12))
    assert assigned.choice.tolist() == FROZEN_CHOICE


def test_a_part_of_the_rows_is_divided_as_within_the_whole() -> None:
    rule = divider(RatioSplit(shares=shares(3, 2, 1), seed=4), 1000)
    whole = rule.assign(pa.table({}), np.arange(1000)).choice
    assert rule.assign(pa.table({}), np.arange(300, 400)).choice.tolist() == whole[300:400].tolist()


def test_row_hashes_are_those_of_the_published_generator() -> None:
    # SplitMix64's first output for the seed 0 is 0xE220A8397B1DCDAF; ours begins at the mixed seed.
    begin = int(np.uint64(0xE220A8397B1DCDAF))
    z = (begin + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    assert row_hashes(0, np.array([0])).tolist() == [z ^ (z >> 31)]


# Columns


def test_columns_that_a_rule_cannot_use_are_named() -> None:
    schema = pa.schema([("n", pa.int64()), ("image", pa.fixed_shape_tensor(pa.uint8(), [2]))])
    of_hash = HashSplit(key_columns=["n", "image", "gone"], shares=shares(1, 1), seed=0)
    assert [problem[0] for problem in column_problems(of_hash, schema)] == [
        "splits.hash.key_columns[1]",
        "splits.hash.key_columns[2]",
    ]
    assert [problem[0] for problem in column_problems(ColumnSplit(column="n"), schema)] == ["splits.column.column"]
    assert [problem[0] for problem in column_problems(TimeSplit(column="n", periods=[]), schema)] == [
        "splits.time.column"
    ]
    assert list(column_problems(RatioSplit(shares=shares(1, 1), seed=0), schema)) == []
