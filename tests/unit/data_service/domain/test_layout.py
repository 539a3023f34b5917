from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.domain import splits
from data_service.domain.import_spec import HoldOut
from data_service.domain.splits import _GOLDEN, LayoutError, _mix, held_out_count, lay_out, ordinal_hashes, route


def cut(rows: int, *hold_outs: HoldOut) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Which target each row of the split `train` goes to."""
    choice = route("train", rows, hold_outs).choice(0, rows)
    assert choice is not None
    return choice


def hold_out(to_split: str, fraction: float, seed: int = 0, from_split: str = "train") -> HoldOut:
    return HoldOut(from_split=from_split, to_split=to_split, fraction=fraction, seed=seed)


@given(rows=st.integers(1, 2000), fraction=st.floats(0.001, 0.4), seed=st.integers(0, 2**64 - 1))
def test_a_hold_out_has_the_nearest_whole_number_of_rows(rows: int, fraction: float, seed: int) -> None:
    wanted = held_out_count(rows, fraction)
    assert wanted >= 1
    assert wanted == 1 or abs(wanted - rows * fraction) <= 0.5
    if wanted < rows:
        choice = cut(rows, hold_out("validation", fraction, seed))
        assert int((choice == 1).sum()) == wanted


@given(rows=st.integers(20, 500), first=st.floats(0.01, 0.4), second=st.floats(0.01, 0.4), seed=st.integers(0, 9))
def test_hold_outs_of_one_split_are_disjoint_shares_of_what_was_imported(
    rows: int, first: float, second: float, seed: int
) -> None:
    choice = cut(rows, hold_out("a", first, seed), hold_out("b", second, seed))
    assert int((choice == 1).sum()) == held_out_count(rows, first)
    assert int((choice == 2).sum()) == held_out_count(rows, second)


def routed_at_once(rows: int, hold_outs: Sequence[HoldOut]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The routing of releases that kept an array of all rows; it must never change."""
    choice = np.zeros(rows, np.uint8)
    for target, one in enumerate(hold_outs, start=1):
        wanted = held_out_count(rows, one.fraction)
        hashes = ordinal_hashes(one.seed, rows)
        hashes[choice != 0] = np.iinfo(np.uint64).max
        choice[np.argpartition(hashes, wanted - 1)[:wanted]] = target
    return choice


@pytest.mark.parametrize("remembered_rows", [0, splits.REMEMBERED_ROWS], ids=["computed again", "remembered"])
@given(
    rows=st.integers(20, 700),
    fractions=st.lists(st.floats(0.001, 0.3), min_size=1, max_size=3),
    seed=st.integers(0, 2**64 - 1),
    chunk_rows=st.integers(60, 1000),
    part_rows=st.integers(1, 1000),
)
@settings(max_examples=20)
def test_parts_find_their_rows_of_a_hold_out_without_an_array_of_all_rows(
    remembered_rows: int, rows: int, fractions: list[float], seed: int, chunk_rows: int, part_rows: int
) -> None:
    hold_outs = [hold_out(f"h{index}", fraction, seed) for index, fraction in enumerate(fractions)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits, "CHUNK_ROWS", chunk_rows)
        patch.setattr(splits, "REMEMBERED_ROWS", remembered_rows)
        routing = route("train", rows, hold_outs)
        parts = [(first, min(part_rows, rows - first)) for first in range(0, rows, part_rows)]
        chosen = [routing.choice(first, count) for first, count in parts]
        counts = [routing.counts_of(first, count) for first, count in parts]
    expected = routed_at_once(rows, hold_outs)
    np.testing.assert_array_equal(np.concatenate([one for one in chosen if one is not None]), expected)
    assert routing.counts == np.bincount(expected, minlength=1 + len(hold_outs)).tolist()
    assert np.sum(counts, axis=0).tolist() == routing.counts


@given(counts=st.lists(st.integers(2, 300), min_size=1, max_size=4), fraction=st.floats(0.01, 0.45))
def test_row_ids_are_contiguous_and_every_row_has_one(counts: list[int], fraction: float) -> None:
    rows = {f"s{index}": count for index, count in enumerate(counts)}
    cuts = [hold_out(f"h{index}", fraction, index, split) for index, split in enumerate(rows)]
    routings = {split: route(split, count, cuts) for split, count in rows.items()}
    ranges = lay_out(routings.values(), [*rows, *(cut.to_split for cut in cuts)])
    next_row_id = 0
    for one in ranges:
        assert one.first_row_id == next_row_id
        assert one.row_count >= 1
        next_row_id += one.row_count
    assert next_row_id == sum(counts)
    assert [one.name for one in ranges[: len(rows)]] == list(rows)


def test_the_same_seed_holds_out_the_same_rows_and_another_seed_others() -> None:
    chosen = [cut(1000, hold_out("v", 0.1, seed)) for seed in (7, 7, 8)]
    np.testing.assert_array_equal(chosen[0], chosen[1])
    assert (chosen[0] != chosen[2]).any()


def test_the_hashes_are_splitmix64_and_stay_so() -> None:
    """The first outputs of SplitMix64 from the state 1234567, as its authors publish them; a changed hash would move
    rows between splits when an import is done again."""
    begin = np.uint64(1234567)
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    with np.errstate(over="ignore"):
        states = begin + np.arange(1, 4, dtype=np.uint64) * _GOLDEN
    assert _mix(states).tolist() == expected
    assert ordinal_hashes(7, 3).tolist() == ordinal_hashes(7, 5)[:3].tolist()
    assert ordinal_hashes(7, 3, 2).tolist() == ordinal_hashes(7, 5)[2:].tolist()


def test_a_hold_out_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(LayoutError, match="at least one must stay") as refused:
        route("train", 3, [hold_out("a", 0.5), hold_out("b", 0.5)])
    assert refused.value.hold_out == 1


def test_a_split_without_rows_is_refused() -> None:
    with pytest.raises(LayoutError, match="'train' has no rows"):
        lay_out([route("train", 0, [])], ["train"])


def test_no_hold_out_leaves_a_split_as_it_is() -> None:
    routing = route("test", 5, [hold_out("validation", 0.5, from_split="train")])
    assert (routing.targets, routing.counts, routing.choice(0, 5)) == (["test"], [5], None)
