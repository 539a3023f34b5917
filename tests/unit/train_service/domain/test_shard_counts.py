"""How often a program was given each row of a shard: block by block, so that memory does not grow with the rows."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train_service.domain import coverage_counts
from train_service.domain.coverage_counts import Span, count_given
from train_service.domain.order import blocks_of, epoch_order

SPANS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 130), st.integers(0, 130), st.integers(1, 7)).map(list), max_size=8
)


@given(rows=st.integers(1, 120), spans=SPANS, lanes=st.integers(1, 5))
def test_every_row_is_counted_as_by_hand(rows: int, spans: list[Span], lanes: int) -> None:
    order = epoch_order(blocks_of([rows], lanes), lanes, 5, 1, window_rows=4)
    of_position = order.rows(np.arange(rows, dtype=np.int64)).tolist()
    times = Counter(
        of_position[position]
        for epoch, start, stop, step in spans
        if epoch == 1
        for position in range(start, min(stop, rows), step)
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(coverage_counts, "BLOCK_ROWS", 16)
        counts = count_given(spans, order, 1000)

    assert counts.missing_row_ids == [1000 + row for row in range(rows) if times[row] == 0]
    assert counts.repeated_row_ids == [1000 + row for row in range(rows) if times[row] > 1]
    assert (counts.missing, counts.repeated) == (len(counts.missing_row_ids), len(counts.repeated_row_ids))
    assert counts.seen_once == rows - counts.missing - counts.repeated


def test_memory_is_that_of_a_block_however_many_rows_there_are() -> None:
    rows, ranks = 50_000_000, 4
    order = epoch_order(blocks_of([4096] * (rows // 4096) + [rows % 4096], 24), 24, 5, 0)
    spans = [[0, rank, rows - 1, ranks] for rank in range(ranks)]
    tracemalloc.start()
    try:
        counts = count_given(spans, order, 0)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (counts.seen_once, counts.missing, counts.repeated) == (rows - 1, 1, 0)
    assert peak_bytes < rows / 5
