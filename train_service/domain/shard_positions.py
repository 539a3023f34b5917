"""Where a program is in a shard of its dataset version, and which positions of which epoch it was given.

A pass of W ranks over an epoch deals positions out like cards: the i-th row of rank r is position base + r + W*i, for
which `order.EpochOrder` has the row. `base` is 0 but for a pass that goes on in the middle of an epoch. So where a rank
is takes three numbers, [epoch, base, taken], and what it was given is a range, [epoch, start, stop, step].
N = rows of the split.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from train_service.domain.coverage import MAX_LISTED, OFTEN, Counts
from train_service.domain.order import EpochOrder, Ints

# [epoch, start, stop, step] of positions.
Span = list[int]
# Ranks that do not go in step leave a span each, and there are 64 at most.
LOOK_BACK = 128


@dataclass(frozen=True)
class Pass:
    """W ranks' way through the positions [base, N) of an epoch. Where `keeps_remainder`, the first ranks have a row
    more; else the (N - base) mod W positions at the end are left out, and all ranks have as many."""

    row_count: int
    base: int
    world_size: int
    keeps_remainder: bool = False

    def rows_of(self, rank: int) -> int:
        left = self.row_count - self.base
        return max(0, -(-(left - rank) // self.world_size)) if self.keeps_remainder else left // self.world_size

    def first_position(self, rank: int, taken: int) -> int:
        """The position of the row that comes after `taken` rows."""
        return self.base + rank + self.world_size * taken

    def positions(self, rank: int, begin: int, end: int) -> Ints:
        """Of the rank's rows [begin, end)."""
        return self.first_position(rank, 0) + self.world_size * np.arange(begin, end, dtype=np.int64)

    def rows_before(self, rank: int, position: int) -> int:
        """How many of the rank's rows have lower positions."""
        return max(0, -(-(position - self.base - rank) // self.world_size))


@dataclass(frozen=True)
class Place:
    """Where a rank is: `taken` rows were given to it of the pass from `base` on."""

    epoch: int = 0
    base: int = 0
    taken: int = 0


def extend(spans: list[Span], span: Span) -> None:
    """Appends `span`, or makes one of the newest longer where it goes on from there."""
    for last in spans[-LOOK_BACK:]:
        if last[0] == span[0] and last[3] == span[3] and last[2] == span[1]:
            last[2] = span[2]
            return
    spans.append(list(span))


def merge_reports(
    reports: Sequence[Sequence[Mapping[str, Any]]], world_size: int, before: Mapping[str, Any]
) -> dict[str, Any]:
    """The positions of all shards for a checkpoint. `reports` are those since the last one, oldest first; each has what
    `ProgramShards.take` gave on each rank. `before` is what this function made for the checkpoint before."""
    merged = {name: dict(one) for name, one in before.items()}
    for report in reports:
        for name in sorted({name for said in report for name in said}):
            parts = [said.get(name) for said in report]
            about = next(part for part in parts if part is not None)
            known = merged.get(name, {})
            spans = [list(span) for span in known.get("given", ())]
            for span in merge_spans([part["given"] if part else [] for part in parts], world_size):
                extend(spans, span)
            places = [
                part["place"] if part else _place_before(known, rank, world_size) for rank, part in enumerate(parts)
            ]
            merged[name] = {
                **about["shard"],
                "world_size": world_size,
                "places": places[:1] if all(place == places[0] for place in places) else places,
                "given": spans,
            }
    return merged


def _place_before(known: Mapping[str, Any], rank: int, world_size: int) -> list[int] | None:
    """Of a rank that has not asked for the shard in this attempt. None: at the beginning."""
    places: list[list[int] | None] = known.get("places") or [None]
    if len(places) == 1:
        return places[0]
    return places[rank] if known.get("world_size") == world_size else None


def merge_spans(by_rank: Sequence[Sequence[Span]], world_size: int) -> list[Span]:
    """What all ranks were given together: one span for every W that lie side by side, as where ranks go in step; the
    rest as they are, rank by rank."""
    if by_rank and len({len(spans) for spans in by_rank}) == 1 and len(by_rank) == world_size:
        joined = [_side_by_side(spans, world_size) for spans in zip(*by_rank, strict=True)]
        if all(joined):
            return [span for span in joined if span]
    return [list(span) for spans in by_rank for span in spans]


def _side_by_side(spans: Sequence[Span], world_size: int) -> Span | None:
    epoch, start, stop, _ = spans[0]
    wanted = [[epoch, start + rank, stop + rank, world_size] for rank in range(world_size)]
    return [epoch, start, stop, 1] if [list(span) for span in spans] == wanted else None


class UnevenRanks(ValueError):
    """The ranks were at different places, and cannot go on from them on another number of ranks."""


def place_to_resume(saved: Mapping[str, Any], rank: int, world_size: int, *, goes_on: bool) -> Place:
    """Where a rank begins after a checkpoint whose shard was `saved` by `merge_reports`. `goes_on`: with the rest of
    the epoch; else with the epoch's beginning, in the same order.

    Raises `UnevenRanks`.
    """
    places = [Place(*place) if place else Place() for place in saved["places"]]
    same_size = saved["world_size"] == world_size
    if not goes_on:
        own = places[rank] if same_size and len(places) > 1 else min(places, key=lambda place: place.epoch)
        return Place(own.epoch)
    if same_size:
        return places[rank] if len(places) > 1 else places[0]
    if len(places) > 1:
        raise UnevenRanks(
            f"its {saved['world_size']} workers had read different numbers of rows at the checkpoint, so {world_size} "
            "workers cannot go on from there"
        )
    return Place(places[0].epoch, places[0].base + saved["world_size"] * places[0].taken)


def last_epoch(saved: Mapping[str, Any]) -> int:
    """The last one of which a row was given; 0 before the first row."""
    return max((span[0] for span in saved["given"]), default=0)


def is_epoch_done(saved: Mapping[str, Any], epoch: int) -> bool:
    """Whether all ranks were behind `epoch`."""
    return all((place or [0])[0] > epoch for place in saved["places"])


def times_given(spans: Iterable[Span], epoch: int, row_count: int) -> NDArray[np.uint8]:
    """(N,): how often each position of `epoch` was given, 2 for twice or more."""
    times = np.zeros(row_count, np.uint8)
    for of, start, stop, step in spans:
        if of == epoch:
            mine = times[start : min(stop, row_count) : step]
            np.minimum(mine + 1, OFTEN, out=mine)
    return times


def count_given(spans: Iterable[Span], order: EpochOrder, first_row_id: int) -> Counts:
    """How often each row was given in the epoch of `order`. Takes a byte a row, and 8 for each missing or repeated
    one."""
    times = times_given(spans, order.epoch, order.row_count)
    missing, repeated = np.flatnonzero(times == 0), np.flatnonzero(times == OFTEN)
    return Counts(
        row_count=order.row_count,
        seen_once=order.row_count - len(missing) - len(repeated),
        missing=len(missing),
        repeated=len(repeated),
        missing_row_ids=_lowest_ids(order, missing, first_row_id),
        repeated_row_ids=_lowest_ids(order, repeated, first_row_id),
    )


def _lowest_ids(order: EpochOrder, positions: Ints, first_row_id: int) -> list[int]:
    lowest: Ints = np.empty(0, np.int64)
    # A window of all lanes at a time, so that each is worked out once.
    span = order.lanes * order.window_rows
    cuts = np.searchsorted(positions, np.arange(0, order.row_count + span, span)).tolist()
    for begin, end in itertools.pairwise(cuts):
        if end > begin:
            lowest = np.sort(np.concatenate([lowest, order.rows(positions[begin:end])]))[:MAX_LISTED]
    return [first_row_id + row for row in lowest.tolist()]
