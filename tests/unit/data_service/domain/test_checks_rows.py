"""Checks of rows: which rows pass, in one pass over a stream and in parallel parts alike."""

from __future__ import annotations

import datetime as dt
import pickle
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.domain.checks import Check, Condition, NotNull, OneOf, Pattern, Range, Unique
from data_service.domain.checks_rows import CheckCounts, KeepFirst, RowChecks, RowVerdict, UniqueKeys
from shared.dataset_version.manifest import tensor_array
from shared.errors import FailedPrecondition

NAN, INF = float("nan"), float("inf")


def bad_rows(condition: Condition, values: Any, arrow_type: pa.DataType | None = None) -> list[int]:
    array = values if isinstance(values, pa.Array) else pa.array(values, arrow_type)
    table = pa.table({"x": array})
    rows = RowChecks([Check("x", condition, quarantines=True)], table.schema)
    return [row for row, _ in KeepFirst(rows).apply(table, 0).quarantined()]


def test_nulls_pass_everything_but_not_null() -> None:
    assert bad_rows(NotNull(), [1, None, 2]) == [1]
    assert bad_rows(Range(5, None), [None, 6]) == []
    assert bad_rows(OneOf((1,)), [None, 1]) == []
    assert bad_rows(Pattern("a"), [None, "a"]) == []
    assert bad_rows(Unique(), [None, 1, None]) == []


def test_nan_is_not_null_and_in_no_range() -> None:
    assert bad_rows(NotNull(), [NAN, None]) == [1]
    assert bad_rows(Range(None, 5), [NAN, -INF, INF, 5.0, None]) == [0, 2]


def test_range_is_inclusive_and_exact_for_large_integers() -> None:
    assert bad_rows(Range(1, 3), [0, 1, 3, 4]) == [0, 3]
    assert bad_rows(Range(0.5, 2.5), [0, 1, 2, 3]) == [0, 3]
    assert bad_rows(Range(None, 2.0**53), [2**53, 2**53 + 1]) == [1]
    assert bad_rows(Range(None, 300), [255], pa.uint8()) == []
    assert bad_rows(Range(300, None), [255, None], pa.uint8()) == [0]
    assert bad_rows(Range(0.1, None), pa.array(["0.09", "0.10"]).cast(pa.decimal128(4, 2))) == [0]


def test_one_of_texts_integers_and_booleans() -> None:
    assert bad_rows(OneOf(("a", "b")), ["a", "c", "B"]) == [1, 2]
    assert bad_rows(OneOf((1, 1000)), [1, 2], pa.int8()) == [1]
    assert bad_rows(OneOf((True,)), [True, False]) == [1]


def test_the_whole_text_must_match() -> None:
    assert bad_rows(Pattern("a|bc"), ["a", "bc", "abc", "a\n", "xa", ""]) == [2, 3, 4, 5]
    assert bad_rows(Pattern("(?i)x.z"), ["XYZ", "x\nz"]) == [1]


@pytest.mark.parametrize(
    ("values", "arrow_type"),
    [
        ([1, 2, 1], pa.int64()),
        ([0.0, NAN, -0.0], pa.float64()),
        (["a", "", "a"], pa.string()),
        ([b"a", b"ab", b"a"], pa.binary()),
        (["1.10", "1.11", "1.10"], pa.decimal128(5, 2)),
        ([True, False, True], pa.bool_()),
        ([1, 2, 1], pa.timestamp("ns", "UTC")),
    ],
    ids=str,
)
def test_of_equal_values_the_first_row_stays(values: list[Any], arrow_type: pa.DataType) -> None:
    array = pa.array(values).cast(arrow_type) if pa.types.is_decimal(arrow_type) else pa.array(values, arrow_type)
    assert bad_rows(Unique(), array) == [2]
    assert bad_rows(Unique(), pa.concat_arrays([array, array])[1:]) == [2, 3, 4]


def test_equal_images_are_found() -> None:
    images = np.zeros((4, 2, 2), np.float32)
    images[1, 0, 0], images[3] = 1, -0.0
    assert bad_rows(Unique(), tensor_array(images)) == [2, 3]
    assert bad_rows(Unique(), tensor_array(images.astype(np.uint8))) == [2, 3]


def test_a_row_is_counted_for_the_first_check_that_it_does_not_pass() -> None:
    table = pa.table({"x": [5, -1, 900], "y": [None, None, "z"]})
    checks = [Check("x", Range(0, 9), quarantines=True), Check("y", NotNull(), quarantines=True)]
    counts = CheckCounts(checks)
    verdict = RowChecks(checks, table.schema).apply(table, 0)
    counts.add(verdict)
    counts.refuse()
    assert list(verdict.quarantined()) == [(0, "y is null"), (1, "x is not from 0 to 9"), (2, "x is not from 0 to 9")]
    results = counts.results()
    assert [(results[index].violations, results[index].quarantined) for index in (0, 1)] == [(2, 2), (2, 1)]
    assert counts.quarantined == 3


def test_a_row_left_out_for_another_reason_makes_no_repeat() -> None:
    checks = [Check("id", Unique(), quarantines=True), Check("x", NotNull(), quarantines=True)]
    table = pa.table({"id": [7, 7, 7], "x": [None, 1, 2]})
    verdict = KeepFirst(RowChecks(checks, table.schema)).apply(table, 0)
    assert verdict.keep.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("values", "expected_text"),
    [
        (pa.array([dt.datetime(2019, 3, 17, 12, 10, 5)] * 2), "(2019-03-17 12:10:05);"),
        (pa.array([dt.date(2019, 3, 17)] * 2), "(2019-03-17);"),
        (pa.array([Decimal("1.50")] * 2), "(1.50);"),
        (pa.array(["a"] * 2), "('a');"),
        (pa.array([None, None], pa.int64()), "x is null;"),
    ],
    ids=lambda one: str(getattr(one, "type", "")),
)
def test_the_error_shows_the_value_as_people_write_it(values: pa.Array, expected_text: str) -> None:
    checks = [Check("x", NotNull()), Check("x", Unique())]
    table, counts = pa.table({"x": values}), CheckCounts(checks)
    keep = KeepFirst(RowChecks(checks, table.schema))
    counts.add(keep.apply(table, 0))
    with pytest.raises(FailedPrecondition) as caught:
        counts.refuse()
    assert expected_text in caught.value.message


def test_the_error_names_check_column_value_and_the_first_row() -> None:
    checks = [Check("y", NotNull(), quarantines=True), Check("x", Range(0, 120))]
    counts = CheckCounts(checks)
    for start, values in ((10, [1, 500]), (0, [3, 4, 130, 140])):  # parts in any order
        table = pa.table({"x": values, "y": ["a"] * len(values)})
        part = CheckCounts(checks)
        part.add(RowChecks(checks, table.schema).apply(table, start))
        counts.merge(pickle.loads(pickle.dumps(part)))
    with pytest.raises(FailedPrecondition, match=r"checks\[1\]: in row 2, x is not from 0 to 120 \(130\)") as caught:
        counts.refuse()
    assert caught.value.specific_reason == "QUALITY_CHECK_FAILED"
    assert caught.value.metadata == {"check_index": "1", "kind": "range", "column": "x", "row": "2"}


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (pa.array([2**60] * 2, pa.timestamp("us")), "1152921504606846976"),
        (pa.array([5_000_000] * 2, pa.date32()), "15659-07-15"),
        (pa.array([5] * 2, pa.timestamp("us", "Nowhere/Land")), "tz=Nowhere/Land"),
    ],
    ids=["timestamp", "date", "time zone"],
)
def test_the_error_shows_values_that_python_does_not_have(values: pa.Array, shown: str) -> None:
    checks = [Check("x", Unique())]
    table = pa.table({"x": values})
    counts = CheckCounts(checks)
    counts.add(KeepFirst(RowChecks(checks, table.schema)).apply(table, 0))
    with pytest.raises(FailedPrecondition, match=r"checks\[0\]: in row 1, .*" + shown):
        counts.refuse()


def test_a_row_that_is_left_out_fails_nothing_more() -> None:
    checks = [Check("x", NotNull(), quarantines=True), Check("y", NotNull())]
    table = pa.table({"x": [None], "y": pa.array([None], pa.int8())})
    counts = CheckCounts(checks)
    counts.add(RowChecks(checks, table.schema).apply(table, 0))
    counts.refuse()


def test_no_checks_keep_all_rows() -> None:
    table = pa.table({"x": [1, None]})
    rows = RowChecks([], table.schema)
    assert rows.are_none
    counts = CheckCounts([])
    counts.add(rows.apply(table, 0))
    counts.refuse()
    assert rows.apply(table, 0).keep.all()


@given(st.data())
def test_streams_and_parallel_parts_keep_the_same_rows(data: st.DataObject) -> None:
    length = data.draw(st.integers(0, 40))
    small = st.none() | st.integers(0, 6)
    table = pa.table(
        {
            name: pa.array(data.draw(st.lists(small, min_size=length, max_size=length)), pa.int64())
            for name in ("a", "b", "c")
        }
    )
    table = table.set_column(1, "b", table["b"].cast(pa.string()))
    checks = [
        Check("a", Unique(), quarantines=True),
        Check("c", Range(1, None), quarantines=True),
        Check("b", Unique(), quarantines=True),
    ]
    rows = RowChecks(checks, table.schema)
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=4)))
    parts = [(start, table.slice(start, end - start)) for start, end in zip([0, *cuts], [*cuts, length], strict=True)]

    seen = KeepFirst(rows)
    streamed = [seen.apply(part, start) for start, part in parts]

    merged = UniqueKeys({})  # what a part without rows gives
    for start, part in data.draw(st.permutations(parts)):
        merged.merge(pickle.loads(pickle.dumps(rows.keys(part, start))))
    repeats = merged.repeats()
    parallel = [rows.apply(part, start, repeats) for start, part in parts]

    assert kept(streamed) == kept(parallel) == expected(table)
    assert [one.violations.tolist() for one in streamed] == [one.violations.tolist() for one in parallel]


def kept(verdicts: list[RowVerdict]) -> list[bool]:
    return [bool(keep) for verdict in verdicts for keep in verdict.keep]


def expected(table: pa.Table) -> list[bool]:
    """The same by hand: first what each row is by itself, then one unique column after the other."""
    rows = table.to_pylist()
    keep = [row["c"] is None or row["c"] >= 1 for row in rows]
    for column in ("a", "b"):
        seen: set[Any] = set()
        for index, row in enumerate(rows):
            if keep[index] and row[column] is not None:
                keep[index] = row[column] not in seen
                seen.add(row[column])
    return keep


@pytest.mark.parametrize(
    "array", [tensor_array(np.zeros((3, 2), np.uint8)), pa.array(["a"] * 3)], ids=["tensor", "text"]
)
def test_unique_columns_in_many_chunks_next_to_rows_left_out(array: pa.Array) -> None:
    column = pa.chunked_array([array.slice(0, 1), array.slice(1, 0), array.slice(1, 2)])
    table = pa.table({"x": column, "y": [None, 1, 1]})
    checks = [Check("x", Unique(), quarantines=True), Check("y", NotNull(), quarantines=True)]
    rows = RowChecks(checks, table.schema)
    assert KeepFirst(rows).apply(table, 0).first_failed.tolist() == [1, -1, 0]
    assert rows.keys(table, 0).repeats().ordinals[0].tolist() == [2]
    for empty in (table.slice(0, 0), table.schema.empty_table()):
        assert KeepFirst(rows).apply(empty, 0).keep.tolist() == []
