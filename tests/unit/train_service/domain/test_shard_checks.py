"""What ranks report of their shards passes where it can be, and is refused by rank and value where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from shared.errors import InvalidArgument
from train_service.domain.coverage_counts import Pass, check_shards, merge_reports

N, W = 23, 3
IDENTITY = {"format": "millrace.shard/1", "split": "train", "row_count": N, "seed": 3}
IDENTITIES = {"train": IDENTITY, "validation": {**IDENTITY, "split": "validation"}}


def check(rank: int, said: object, before: dict[str, Any] | None = None, *, keeps: bool = False) -> None:
    check_shards(rank, said, IDENTITIES, W, before or {}, keeps_remainder=keeps)


def shard(place: object, *given: object, **identity: object) -> dict[str, Any]:
    return {"train": {"shard": {**IDENTITY, **identity}, "place": place, "given": list(given)}}


@given(
    some.booleans(), some.lists(some.tuples(some.sampled_from(["read", "read", "next", "load"]), some.integers(0, 9)))
)
def test_reports_of_a_correct_rank_are_never_refused(keeps: bool, steps: list[tuple[str, int]]) -> None:
    """It reads some rows and reports after each step, also at the end of a pass, or from another place on."""
    merged: dict[str, Any] = {}
    places = [[0, 0, 0] for _ in range(W)]
    for what, amount in steps:
        said = []
        for rank, place in enumerate(places):
            way = Pass(N, place[1], W, keeps)
            spans = []
            if what == "read":
                begin = place[2]
                place[2] = end = min(begin + amount + rank % 2, way.rows_of(rank))
                if end > begin:
                    spans = [[place[0], way.first_position(rank, begin), way.first_position(rank, end), W]]
            else:
                place[:] = [place[0] + 1, 0, 0] if what == "next" else [place[0], min(amount, N), 0]
            said.append(shard(list(place), *spans))
            check(rank, said[-1], merged, keeps=keeps)
        merged = merge_reports([said], W, merged)


NUMBERS = some.integers(-3, 40) | some.booleans() | some.none() | some.floats() | some.just(10**30)
PLACES = some.lists(NUMBERS, max_size=5) | NUMBERS | some.text(max_size=3)
SPANS = some.lists(some.lists(NUMBERS, min_size=3, max_size=5) | NUMBERS, max_size=6)


@given(some.lists(some.tuples(PLACES, SPANS), min_size=W, max_size=W))
def test_accepted_reports_are_merged_into_positions_of_the_split(reports: list[tuple[Any, list[Any]]]) -> None:
    """Whatever ranks make up: the attempt merges what passes, in no endless loop, and every position is a row's."""
    said = [shard(place, *spans) for place, spans in reports]
    try:
        for rank, one in enumerate(said):
            check(rank, one)
    except InvalidArgument:
        return
    merged = merge_reports([said], W, {})["train"]
    for epoch, start, stop, step in merged["given"]:
        assert epoch >= 0
        assert all(0 <= position < N for position in range(start, stop, step))
    assert all(place is None or (0 <= place[1] <= N and 0 <= place[2] <= N) for place in merged["places"])


@given(
    some.recursive(
        NUMBERS | some.text(max_size=4), lambda inner: some.lists(inner) | some.dictionaries(some.text(), inner)
    )
)
def test_any_other_value_is_refused_and_raises_nothing_else(said: Any) -> None:
    if said != {}:
        with pytest.raises(InvalidArgument, match="rank 1 reports a wrong position of its data"):
            check(1, said)
    with pytest.raises(InvalidArgument, match="rank 1 reports a wrong position of its data"):
        check(1, {"train": {"shard": said, "place": [0, 0, 0], "given": []}})


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"test": shard([0, 0, 0])["train"]}, "split = 'test' must be one of train, validation"),
        (shard([0, 0, 0], seed=4), r"shards\['train'\].shard.seed = 4 must be 3, that of this job"),
        (shard([0, 0, 0], row_count=True), r"row_count = True must be 23"),
        (shard([0, 0, 0], more=1), r"shards\['train'\].shard = 'more' is no part of a shard's identity"),
        (shard([0, 0, 0], [0, 1, 4, 1]), r"given\[0\] = \[0, 1, 4, 1\] must have the step 3"),
        (shard([0, 0, 0], [0, 1, 5, 3]), "must be positions from 0 to below 23, whole steps apart"),
        (shard([0, 0, 0], [0, 4, 4, 3]), "must be positions from 0 to below 23, whole steps apart"),
        (shard([0, 0, 0], [0, 22, 28, 3]), "must be positions from 0 to below 23, whole steps apart"),
        (shard([0, 0, 0], [-1, 1, 4, 3]), "must have an epoch from 0"),
        (shard([0, 0, 8]), r"place = \[0, 0, 8\] must have taken 0 to 7 rows, those of the rank in this pass"),
        (shard([0, 24, 0]), "a base from 0 to the 23 rows of the split"),
        (shard([0, 0]), "must be 3 whole numbers: epoch, base, taken"),
        (shard([0, 0, 2], [0, 1, 4, 3]), r"place = \[0, 0, 2\] is at position 7, where none of the given rows ends"),
        (shard([0, 0, 2]), r"place = \[0, 0, 2\] must be None, as at the last report: no row was given since"),
    ],
)
def test_a_wrong_value_is_named(said: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        check(1, said)


def test_a_rank_that_was_given_nothing_stays_where_it_was() -> None:
    before = merge_reports([[shard([0, 0, 2], [0, rank, rank + 6, 3]) for rank in range(W)]], W, {})
    check(1, shard([0, 0, 2]), before)
    with pytest.raises(InvalidArgument, match=r"place = \[0, 0, 3\] must be \[0, 0, 2\]"):
        check(1, shard([0, 0, 3]), before)


def test_ranges_that_could_be_joined_for_ever_are_refused() -> None:
    for rank, span in enumerate(([0, 0, 4, 3], [0, 1, 3, 3])):
        with pytest.raises(InvalidArgument, match="whole steps apart"):
            check(rank, shard([0, 0, 1], span))
