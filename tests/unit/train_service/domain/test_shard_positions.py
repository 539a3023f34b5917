"""What a program's ranks were given is kept in few spans, and each of its positions exactly as often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from train_service.domain.coverage_counts import Pass, Place, merge_reports, place_to_resume


def positions_of(spans: Sequence[Sequence[int]]) -> Counter[tuple[int, int]]:
    return Counter((epoch, position) for epoch, *of in spans for position in range(*of))


class Reports:
    """What W ranks are given of a split of N rows, from report to report."""

    def __init__(self, row_count: int, world_size: int, before: dict[str, Any] | None = None) -> None:
        self.row_count = row_count
        self.world_size = world_size
        self.merged = before or {}
        self.expected = positions_of(self.spans)
        self.begin_pass(0)

    def begin_pass(self, epoch: int, base: int = 0) -> None:
        self.epoch = epoch
        self.way = Pass(self.row_count, base, self.world_size, keeps_remainder=True)
        self.taken = [0] * self.world_size

    def report(self, rows: Sequence[int]) -> None:
        """Each rank gets this many rows more, where it has any."""
        said = []
        for rank, wanted in enumerate(rows):
            begin = self.taken[rank]
            end = self.taken[rank] = min(begin + wanted, self.way.rows_of(rank))
            first, last = self.way.first_position(rank, begin), self.way.first_position(rank, end)
            spans = [[self.epoch, first, last, self.world_size]] if end > begin else []
            self.expected.update(positions_of(spans))
            place = [self.epoch, self.way.base, end]
            said.append({"train": {"shard": {"row_count": self.row_count}, "place": place, "given": spans}})
        self.merged = merge_reports([said], self.world_size, self.merged)

    @property
    def spans(self) -> list[list[int]]:
        return list(self.merged.get("train", {}).get("given", []))


RANK_ROWS = some.lists(some.integers(0, 5), min_size=4, max_size=4)


@given(
    some.integers(1, 4),
    some.integers(1, 40),
    some.lists(some.tuples(some.sampled_from(["report", "report", "report", "next", "again"]), RANK_ROWS)),
)
def test_spans_hold_each_position_as_often_as_it_was_given(
    world_size: int, row_count: int, steps: list[tuple[str, list[int]]]
) -> None:
    """Also where ranks go out of step, leave a pass early, and read an epoch again from its beginning."""
    reports = Reports(row_count, world_size)
    for what, rows in steps:
        if what == "report":
            reports.report(rows[:world_size])
        else:
            reports.begin_pass(reports.epoch + (what == "next"))
    assert positions_of(reports.spans) == reports.expected


@given(some.integers(1, 4), some.lists(RANK_ROWS), some.integers(1, 4), some.lists(RANK_ROWS))
def test_spans_hold_after_a_change_of_size_too(
    world_size: int, first: list[list[int]], size_after: int, then: list[list[int]]
) -> None:
    before = Reports(40, world_size)
    for rows in first:
        before.report(rows[:world_size])
    after = Reports(40, size_after, before.merged)
    after.begin_pass(0, base=world_size * min(before.taken))
    for rows in then:
        after.report(rows[:size_after])
    assert positions_of(after.spans) == after.expected


@pytest.mark.parametrize("row_count", [700, 701, 703])
def test_an_epoch_takes_one_span_however_its_ranks_go(row_count: int) -> None:
    """They take turns at being ahead, and some have a row more at the end."""
    reports = Reports(row_count, 4)
    for epoch in range(20):
        reports.begin_pass(epoch)
        number = 0
        while min(reports.taken) < row_count // 4 or sum(reports.taken) < row_count:
            number += 1
            reports.report([(rank + number) % 4 for rank in range(4)])
            assert len(reports.spans) <= epoch + 4
    assert reports.spans == [[epoch, 0, row_count, 1] for epoch in range(20)]


def test_a_pass_that_is_left_early_keeps_a_span_for_each_rank_that_was_ahead() -> None:
    reports = Reports(100, 4)
    reports.report([5, 7, 5, 9])
    assert reports.spans == [[0, 0, 20, 1], [0, 21, 29, 4], [0, 23, 39, 4]]
    reports.begin_pass(1)
    reports.report([25, 25, 25, 25])
    assert reports.spans[3:] == [[1, 0, 100, 1]]


def saved(world_size: int, *places: list[int] | None) -> dict[str, Any]:
    return {"world_size": world_size, "places": list(places)}


def test_all_ranks_replay_the_earliest_epoch_of_those_that_read_the_shard() -> None:
    for rank in range(3):
        assert place_to_resume(saved(3, [2, 0, 0], [1, 0, 5], None), rank, 3, goes_on=False) == Place(1)
        assert place_to_resume(saved(3, None, [4, 0, 0], None), rank, 3, goes_on=False) == Place(4)


def test_a_run_goes_on_at_the_places_of_its_ranks_where_there_are_as_many() -> None:
    places = saved(3, [2, 0, 0], [1, 0, 5], None)
    found = [place_to_resume(places, rank, 3, goes_on=True) for rank in range(3)]
    assert found == [Place(2), Place(1, 0, 5), Place(1)]
