"""Sets of indices that loaders gave: as text, joined over ranks and reports, counted, and checked."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidArgument
from train_service.domain.coverage_counts import MAX_ROWS, check_drawn, count_drawn, decode, encode, merge_drawn

ROWS = 21
INDICES = st.lists(st.integers(0, ROWS - 1), max_size=2 * ROWS)


def record(indices: list[int], *, number: int = 0, done: int = 0, rows: int = ROWS) -> dict[str, Any]:
    """What a rank says that was given these indices since its last report."""
    times = np.bincount(indices, minlength=rows) if indices else np.zeros(rows, np.int64)
    return {"row_count": rows, "done": done, "passes": {str(number): [encode(times > 0), encode(times > 1)]}}


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_a_set_comes_back_from_its_text(flags: list[bool]) -> None:
    assert decode(encode(np.array(flags)), len(flags)).tolist() == flags


@given(st.lists(st.lists(INDICES, min_size=1, max_size=3), min_size=1, max_size=4))
def test_each_index_is_counted_over_all_ranks_and_reports(reports: list[list[list[int]]]) -> None:
    merged: dict[str, Any] = {}
    for ranks in reports:
        merged = merge_drawn(merged, [{"loader-0": record(indices)} for indices in ranks])
    times = np.bincount([one for ranks in reports for rank in ranks for one in rank] or [0], minlength=ROWS)
    if not any(indices for ranks in reports for indices in ranks):
        times[:] = 0
    counts = count_drawn(merged["loader-0"], 0)
    assert counts.missing_row_ids == np.flatnonzero(times == 0).tolist()
    assert counts.repeated_row_ids == np.flatnonzero(times > 1).tolist()
    assert counts.seen_once + counts.missing + counts.repeated == ROWS


def test_a_pass_that_gave_each_index_once_takes_a_few_bytes() -> None:
    rows = 1_000_000
    half = record(list(range(0, rows, 2)), rows=rows)
    other = record(list(range(1, rows, 2)), rows=rows, done=1)
    merged = merge_drawn({}, [{"loader-0": half}, {"loader-0": other}])
    assert merged["loader-0"] == {"row_count": rows, "done": 0, "passes": {"0": ["*", ""]}}
    assert count_drawn(merged["loader-0"], 0).seen_once == rows
    assert count_drawn(merged["loader-0"], 1).missing == rows


def test_ranks_with_datasets_of_different_sizes_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"21, 20 rows behind loader-0"):
        merge_drawn({}, [{"loader-0": record([1])}, {"loader-0": record([1], rows=20)}])


BOMB = base64.b64encode(zlib.compress(bytes(50_000_000))).decode()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([], "at most 16 loaders"),
        ({"other": record([1])}, "must be loader-0 to loader-15"),
        ({"loader-0": record([1]) | {"row_count": MAX_ROWS + 1}}, "row_count"),
        ({"loader-0": record([1], rows=20)}, "the same in each report"),
        ({"loader-0": record([1]) | {"done": -1}}, "loader-0.done"),
        ({"loader-0": record([1]) | {"passes": {"-1": ["", ""]}}}, "numbers of passes from 0"),
        ({"loader-0": record([1]) | {"passes": {"0": [""]}}}, "each with two sets"),
        ({"loader-0": record([1]) | {"passes": {"0": ["x!", ""]}}}, "no compressed bitmap"),
        ({"loader-0": record([1]) | {"passes": {"0": [BOMB, ""]}}}, "has not the 3 bytes"),
        ({"loader-0": record([1]) | {"passes": {"0": [encode(np.array([False] * 23 + [True])), ""]}}}, "beyond 20"),
    ],
)
def test_a_report_that_no_rank_can_make_is_refused(said: Any, expected: str) -> None:
    with pytest.raises(InvalidArgument, match="rank 3") as refused:
        check_drawn(3, said, {"loader-0": record([0])})
    assert expected in refused.value.message
