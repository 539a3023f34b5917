"""Which positions a step owns, and which of them a rank computes."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train_service.domain.order import (
    count_micro_batches,
    default_lanes,
    loss_scale,
    max_rows_of_a_rank,
    min_rows_of_a_rank,
    rank_positions,
    shapes_of_steps,
    step_bounds,
    steps_per_epoch,
)

ROWS = st.integers(1, 20_000)
BATCHES = st.integers(1, 2_000)


@given(ROWS, BATCHES)
def test_the_steps_of_an_epoch_cover_every_position_once_and_differ_by_one_row_at_most(rows: int, batch: int) -> None:
    steps = steps_per_epoch(rows, batch)
    bounds = [step_bounds(rows, steps, step) for step in range(steps)]

    assert bounds[0][0] == 0
    assert bounds[-1][1] == rows
    assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
    sizes = {end - begin for begin, end in bounds}
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= batch


@given(st.integers(0, 10_000), st.integers(0, 500), st.integers(1, 100), st.integers(1, 9))
def test_the_ranks_slices_partition_a_step(begin: int, length: int, lanes: int, world_size: int) -> None:
    end = begin + length

    slices = [rank_positions(begin, end, lanes, rank, world_size) for rank in range(world_size)]

    assert np.array_equal(np.sort(np.concatenate(slices)), np.arange(begin, end))


@given(st.integers(0, 10_000), st.integers(0, 500), st.integers(1, 100), st.integers(1, 9))
def test_a_ranks_positions_are_those_of_its_lanes_in_their_order(
    begin: int, length: int, lanes: int, world_size: int
) -> None:
    for rank in range(world_size):
        mine = [one for one in range(begin, begin + length) if one % lanes % world_size == rank]

        assert rank_positions(begin, begin + length, lanes, rank, world_size).tolist() == mine


def test_a_rank_of_a_thousand_takes_memory_for_its_own_positions_alone() -> None:
    ranks, rows = 1000, 10_000_000
    tracemalloc.start()
    try:
        mine = rank_positions(0, rows, 2 * ranks, 7, ranks)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(mine) == rows // ranks
    assert peak_bytes < 10 * mine.nbytes


@given(st.integers(0, 10_000), st.integers(0, 500), st.integers(1, 100), st.integers(1, 9))
def test_a_rank_owns_whole_lanes(begin: int, length: int, lanes: int, world_size: int) -> None:
    owners: dict[int, int] = {}
    for rank in range(world_size):
        for lane in (rank_positions(begin, begin + length, lanes, rank, world_size) % lanes).tolist():
            assert owners.setdefault(lane, rank) == rank


@given(st.integers(1, 3_000), st.integers(1, 300), st.integers(1, 64), st.integers(1, 8))
def test_the_fewest_rows_of_a_rank_are_those_of_the_smallest_slice_there_is(
    rows: int, batch: int, lanes: int, world_size: int
) -> None:
    steps = steps_per_epoch(rows, batch)
    smallest = min(
        len(rank_positions(*step_bounds(rows, steps, step), lanes, rank, world_size))
        for step in range(steps)
        for rank in range(world_size)
    )

    assert min_rows_of_a_rank(shapes_of_steps(rows, steps, lanes), lanes, world_size) == smallest


@given(st.integers(1, 2_000), st.integers(1, 64), st.integers(1, 8))
def test_the_most_rows_of_a_rank_are_those_of_the_largest_slice_of_any_such_step(
    length: int, lanes: int, world_size: int
) -> None:
    largest = max(
        len(rank_positions(begin, begin + length, lanes, rank, world_size))
        for begin in range(lanes)
        for rank in range(world_size)
    )

    assert max_rows_of_a_rank(length, lanes, world_size) == largest


@pytest.mark.parametrize("workers", range(1, 65))
def test_without_a_number_of_lanes_the_most_workers_share_every_step_evenly(workers: int) -> None:
    lanes = default_lanes(workers)

    for rows in (40 * workers, 40 * workers + 7, 3 * workers):
        assert max_rows_of_a_rank(rows, lanes, workers) == math.ceil(rows / workers)


@pytest.mark.parametrize("max_workers", [5, 7, 12, 16, 24, 64])
def test_without_a_number_of_lanes_fewer_workers_wait_for_none_that_has_half_as_much_again(max_workers: int) -> None:
    lanes, rows = default_lanes(max_workers), 1_000 * max_workers

    for workers in range(1, max_workers):
        assert max_rows_of_a_rank(rows, lanes, workers) < 1.5 * rows / workers + 1


def test_the_lanes_of_small_fleets_are_those_that_they_always_were() -> None:
    assert {workers for workers in range(1, 25) if default_lanes(workers) == 24} == {1, 2, 3, 4, 6, 8, 12}


@given(st.integers(1, 2_000), st.integers(1, 64), st.integers(1, 8), st.integers(1, 8), st.integers(1, 4))
def test_no_part_of_a_step_is_larger_on_few_workers_than_it_may_be_on_all(
    length: int, lanes: int, world_size: int, max_workers: int, accumulation_steps: int
) -> None:
    def slices(ranks: int) -> list[int]:
        return [
            len(rank_positions(begin, begin + length, lanes, rank, ranks))
            for begin in range(lanes)
            for rank in range(ranks)
        ]

    parts = count_micro_batches(length, lanes, world_size, max_workers, accumulation_steps)

    ours, whole = slices(world_size), slices(max_workers)
    if world_size >= max_workers:
        assert parts == accumulation_steps
    elif min(ours) >= 2 * (parts + 1):  # else there are too few rows
        assert math.ceil(max(ours) / parts) <= math.ceil(max(whole) / accumulation_steps)
    if parts > accumulation_steps:
        assert min(ours) // parts >= 2


@pytest.mark.parametrize(("world_size", "parts"), [(8, 1), (7, 2), (5, 2), (4, 2), (3, 3), (2, 4), (1, 8)])
def test_as_many_workers_fewer_as_many_parts_more(world_size: int, parts: int) -> None:
    assert count_micro_batches(960, 24, world_size, 8, 1) == parts
    assert count_micro_batches(960, 24, world_size, 8, 2) == (
        2 if world_size == 8 else math.ceil(parts_of_lanes(world_size))
    )


def parts_of_lanes(world_size: int) -> float:
    """By the lanes of the rank that has most, of 24, in parts of one and a half."""
    return math.ceil(24 / world_size) / 1.5


@given(ROWS, BATCHES, st.integers(1, 64))
def test_the_shapes_of_steps_are_those_of_a_walk_through_the_epoch(rows: int, batch: int, lanes: int) -> None:
    steps = steps_per_epoch(rows, batch)
    bounds = (step_bounds(rows, steps, step) for step in range(steps))
    walked = {(end - begin, begin % lanes) for begin, end in bounds}

    found = [(length, lane) for length, begins in shapes_of_steps(rows, steps, lanes) for lane in begins.tolist()]

    assert sorted(found) == sorted(walked)


@pytest.mark.parametrize(("world_size", "rows"), [(1, 64), (2, 64), (3, 61)])
def test_the_loss_scale_turns_the_mean_over_ranks_of_summed_losses_into_the_mean_over_rows(
    world_size: int, rows: int
) -> None:
    losses = np.linspace(0.5, 3.0, rows)
    shares = np.array_split(losses, world_size)

    mean_over_ranks = np.mean([share.sum() * loss_scale(world_size, rows) for share in shares])

    assert mean_over_ranks == pytest.approx(losses.mean(), abs=1e-12)
