"""The order of rows: each once an epoch, whatever the seed, the lanes, the row groups and the number of workers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train_service.domain.order import (
    WINDOW_ROWS,
    EpochOrder,
    Ints,
    blocks_of,
    epoch_order,
    permutation,
    rank_positions,
    sorting,
    step_bounds,
    steps_per_epoch,
    window_rows,
)

SEEDS = st.integers(0, 2**64 - 1)
LANES = st.integers(1, 64)
ROW_GROUPS = st.lists(st.integers(1, 300), min_size=1, max_size=40)


def whole_epoch(row_groups: list[int], lanes: int, seed: int, epoch: int, window_rows: int = WINDOW_ROWS) -> Ints:
    order = epoch_order(blocks_of(row_groups, lanes), lanes, seed, epoch, window_rows)
    return order.rows(np.arange(sum(row_groups), dtype=np.int64))


@given(ROW_GROUPS, LANES, SEEDS, st.integers(0, 10_000), st.integers(1, 400))
def test_an_epoch_holds_every_row_exactly_once(
    row_groups: list[int], lanes: int, seed: int, epoch: int, window_rows: int
) -> None:
    rows = whole_epoch(row_groups, lanes, seed, epoch, window_rows)

    assert np.array_equal(np.sort(rows), np.arange(sum(row_groups)))


@given(ROW_GROUPS, LANES, SEEDS, st.data())
def test_any_positions_can_be_asked_for_without_walking_to_them(
    row_groups: list[int], lanes: int, seed: int, data: st.DataObject
) -> None:
    rows = sum(row_groups)
    asked = np.asarray(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=50)), np.int64)

    order = epoch_order(blocks_of(row_groups, lanes), lanes, seed, 3)

    assert np.array_equal(order.rows(asked), whole_epoch(row_groups, lanes, seed, 3)[asked])


@given(ROW_GROUPS, LANES)
def test_blocks_cover_the_split_in_order_and_never_cross_a_row_group(row_groups: list[int], lanes: int) -> None:
    blocks = blocks_of(row_groups, lanes)

    ends = blocks[:, 0] + blocks[:, 1]
    assert blocks[0, 0] == 0
    assert np.array_equal(blocks[1:, 0], ends[:-1])
    assert ends[-1] == sum(row_groups)
    assert set(itertools.accumulate(row_groups)) <= set(ends.tolist())


@given(st.integers(50, 300), LANES, SEEDS, st.integers(0, 100))
def test_two_epochs_and_two_seeds_are_ordered_differently(rows: int, lanes: int, seed: int, epoch: int) -> None:
    order = whole_epoch([rows], lanes, seed, epoch)

    assert not np.array_equal(order, whole_epoch([rows], lanes, seed, epoch + 1))
    assert not np.array_equal(order, whole_epoch([rows], lanes, (seed + 1) % 2**64, epoch))


@given(ROW_GROUPS, LANES, SEEDS)
def test_the_lanes_share_the_rows_equally(row_groups: list[int], lanes: int, seed: int) -> None:
    order = epoch_order(blocks_of(row_groups, lanes), lanes, seed, 0)

    sizes = [order.lane_rows(lane) for lane in range(lanes)]

    assert sum(sizes) == order.row_count
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(0, 2000), st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5))
def test_a_permutation_depends_on_nothing_but_its_key(count: int, key: list[int]) -> None:
    once, again = permutation(count, *key), permutation(count, *key)

    assert np.array_equal(once, again)
    assert np.array_equal(np.sort(once), np.arange(count))


@given(st.lists(st.integers(0, 5) | st.integers(0, 2**64 - 1), max_size=300))
def test_equal_draws_keep_their_places(drawn: list[int]) -> None:
    numbers = np.asarray(drawn, np.uint64)

    assert sorting(numbers).tolist() == np.argsort(numbers, kind="stable").tolist()


def test_the_order_is_the_one_that_earlier_releases_gave() -> None:
    # Runs that were begun must resume with the same order after an upgrade: these values are part of the format.
    assert permutation(8, 1, 2, 3).tolist() == [1, 2, 4, 6, 5, 0, 7, 3]
    assert whole_epoch([20, 20], 4, 7, 1)[:12].tolist() == [37, 18, 13, 16, 35, 39, 3, 15, 26, 29, 4, 9]


def test_a_step_takes_rows_from_every_lane_and_neighbours_are_torn_apart() -> None:
    rows = whole_epoch([256] * 100, 24, seed=5, epoch=0)

    groups = [set((rows[start : start + 240] // 256).tolist()) for start in range(0, 2400, 240)]

    assert min(len(seen) for seen in groups) >= 24
    assert float(np.mean(np.abs(np.diff(rows)) < 256)) < 0.05


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_a_rank_reads_little_more_than_its_share_of_the_row_groups(world_size: int) -> None:
    groups, rows_each, lanes = 480, 256, 24
    rows = groups * rows_each
    order = epoch_order(blocks_of([rows_each] * groups, lanes), lanes, 11, 0)

    for rank in range(world_size):
        mine = np.concatenate([order.rows(rank_positions(0, rows, lanes, rank, world_size))])
        assert len(np.unique(mine // rows_each)) / groups <= 1.2 / world_size


def test_each_window_of_a_rank_is_read_once_and_in_long_stretches() -> None:
    """A lane's windows follow one another, so no row group is needed again after the lane has left it."""
    rows_each, lanes = 256, 4
    order = epoch_order(blocks_of([rows_each] * 64, lanes), lanes, 3, 0)

    for lane in range(lanes):
        windows = [np.unique(order.window(lane, number) // rows_each) for number in range(order.windows(lane))]
        met = [int(group) for window in windows for group in window]
        # A group met in two windows is cut by their border: at most one for each border.
        assert len(met) - len(set(met)) <= order.windows(lane) - 1


@given(st.integers(1, 5000), st.integers(1, 600), LANES, st.integers(1, 8), SEEDS)
def test_the_rows_of_a_step_do_not_depend_on_the_number_of_workers(
    rows: int, global_batch: int, lanes: int, world_size: int, seed: int
) -> None:
    steps = steps_per_epoch(rows, global_batch)
    step = min(steps - 1, 2)
    begin, end = step_bounds(rows, steps, step)
    order = epoch_order(blocks_of([rows], lanes), lanes, seed, 0)

    together = [order.rows(rank_positions(begin, end, lanes, rank, world_size)) for rank in range(world_size)]

    assert sorted(np.concatenate(together).tolist()) == sorted(order.rows(np.arange(begin, end)).tolist())


class CountingInts(np.ndarray[Any, np.dtype[np.int64]]):
    """Counts the numbers that arithmetic on it, and on what is made from it, has made."""

    made = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        plain = [one.view(np.ndarray) if isinstance(one, CountingInts) else one for one in inputs]
        results = getattr(ufunc, method)(*plain, **options)
        for one in results if isinstance(results, tuple) else (results,):
            CountingInts.made += one.size
        counted = (one.view(CountingInts) for one in (results if isinstance(results, tuple) else (results,)))
        return tuple(counted) if isinstance(results, tuple) else next(counted)


@pytest.mark.parametrize("lanes", [2, 64])
def test_the_cost_of_asking_for_rows_grows_with_the_rows_and_not_with_the_windows_too(
    lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CountingInts, "made", 0)
    order = epoch_order(blocks_of([256] * 64, lanes), lanes, 3, 0, window_rows=16)
    asked = np.arange(order.row_count, dtype=np.int64)

    rows = order.rows(asked.view(CountingInts))

    assert np.array_equal(rows, order.rows(asked))
    assert CountingInts.made <= 10 * len(asked)


def test_of_a_window_only_the_rows_that_are_asked_for_are_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, worked_out = 8, []
    order = epoch_order(blocks_of([256] * 256, lanes), lanes, 3, 0)
    rows_at = EpochOrder._rows_at

    def counting(self: EpochOrder, sequence: Ints) -> Ints:
        worked_out.append(len(sequence))
        return rows_at(self, sequence)

    monkeypatch.setattr(EpochOrder, "_rows_at", counting)
    order.rows(np.arange(0, order.row_count, 1000, dtype=np.int64))

    assert sum(worked_out) == -(-order.row_count // 1000)


def test_neighbouring_seeds_give_unrelated_orders() -> None:
    rows = 4096
    first, second = (whole_epoch([rows], 24, seed, 0) for seed in (1, 2))

    # Of two random orders about one row stays where it was.
    assert int((first == second).sum()) < 10
    assert abs(float(np.corrcoef(first, second)[0, 1])) < 4 / math.sqrt(rows)


def test_large_rows_are_shuffled_within_windows_of_fewer() -> None:
    assert window_rows(784, 24) == WINDOW_ROWS
    large = 224 * 224 * 3
    assert 24 * large * window_rows(large, 24) <= 256 * 1024 * 1024 < 24 * large * (window_rows(large, 24) + 1)
    assert window_rows(2**40, 24) == 16
    assert window_rows(0, 24) == WINDOW_ROWS
