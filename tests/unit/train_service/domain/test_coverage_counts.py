"""Counting how often each row was consumed."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train_service.domain.coverage_counts import BLOCK_ROWS, count_rows


@given(
    first=st.integers(0, 2**40),
    rows=st.integers(1, 60),
    parts=st.lists(st.lists(st.integers(0, 59), max_size=80), max_size=6),
    most=st.integers(0, 10),
)
def test_every_row_is_counted_as_by_hand(first: int, rows: int, parts: list[list[int]], most: int) -> None:
    consumed = [[first + one % rows for one in part] for part in parts]
    times = Counter(one for part in consumed for one in part)

    counts = count_rows((np.asarray(part, np.int64) for part in consumed), first, rows, most)

    missing = [one for one in range(first, first + rows) if times[one] == 0]
    repeated = sorted(one for one, seen in times.items() if seen > 1)
    assert counts.row_count == rows == counts.seen_once + counts.missing + counts.repeated
    assert (counts.missing, counts.repeated) == (len(missing), len(repeated))
    assert counts.missing_row_ids == missing[:most]
    assert counts.repeated_row_ids == repeated[:most]


def test_rows_of_skipped_steps_are_counted_by_themselves_unless_another_step_consumed_them() -> None:
    ids = [np.asarray(part, np.int64) for part in ([10, 11, 12, 12], [12, 13, 14])]

    counts = count_rows([ids[0]], 10, 8, skipped_parts=[ids[1]])

    assert (counts.seen_once, counts.repeated, counts.missing, counts.skipped) == (2, 1, 3, 2)
    assert (counts.skipped_row_ids, counts.missing_row_ids) == ([13, 14], [15, 16, 17])


@pytest.mark.parametrize("stranger", [9, 20])
def test_a_row_of_another_split_is_refused_by_its_id(stranger: int) -> None:
    with pytest.raises(ValueError, match=f"row {stranger} is not among the rows 10 to 19"):
        count_rows([np.asarray([10, stranger], np.int64)], 10, 10)


def test_ids_are_listed_up_to_a_thousand() -> None:
    counts = count_rows([], 0, 5000)
    assert counts.missing == 5000
    assert counts.missing_row_ids == list(range(1000))


def test_counting_takes_three_bits_a_row_however_many_parts_there_are() -> None:
    rows = 80_000_000
    parts = (np.arange(first, rows, 1000, dtype=np.int64) for first in range(20))
    tracemalloc.start()
    try:
        counts = count_rows(parts, 0, rows)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (counts.seen_once, counts.repeated) == (20 * rows // 1000, 0)
    assert peak_bytes < rows / 2


@pytest.mark.parametrize("rows", [1, 7, 8, 9, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 2 * BLOCK_ROWS + 13])
def test_every_state_is_counted_at_the_borders_of_bytes_and_blocks(rows: int) -> None:
    ids = np.arange(rows)
    of_kind = {kind: ids[ids % 5 == place] for place, kind in enumerate(("once", "twice", "skipped", "both"))}

    counts = count_rows(
        [of_kind["once"], of_kind["twice"], of_kind["both"], of_kind["twice"]],
        0,
        rows,
        max_listed=3,
        skipped_parts=[of_kind["skipped"], of_kind["both"], of_kind["skipped"]],
    )

    missing = ids[ids % 5 == 4]
    assert (counts.missing, counts.missing_row_ids) == (len(missing), missing[:3].tolist())
    assert (counts.repeated, counts.repeated_row_ids) == (len(of_kind["twice"]), of_kind["twice"][:3].tolist())
    assert (counts.skipped, counts.skipped_row_ids) == (len(of_kind["skipped"]), of_kind["skipped"][:3].tolist())
    assert counts.seen_once == len(of_kind["once"]) + len(of_kind["both"])


def test_a_row_that_was_consumed_very_often_is_one_that_was_repeated() -> None:
    parts = [np.full(300, 7, np.int64)] * 2
    assert count_rows(parts, 0, 10).repeated_row_ids == [7]


@pytest.mark.parametrize("gap", [1, 100], ids=["counted", "sorted"])
def test_rows_that_lie_close_together_and_far_apart_are_counted_alike(gap: int) -> None:
    rows = np.random.default_rng(0).permutation(1000) * gap
    counts = count_rows([rows[:600] + 7, rows[500:] + 7, rows[:3] + 7], 7, 1000 * gap)
    assert (counts.seen_once, counts.repeated, counts.missing) == (897, 103, 1000 * (gap - 1))
    assert counts.repeated_row_ids == sorted((rows[[0, 1, 2, *range(500, 600)]] + 7).tolist())
