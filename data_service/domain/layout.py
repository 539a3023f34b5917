"""Assigns rows to splits, and row ids to rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data_service.domain.import_spec import HoldOut

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# The rows that are hashed at once.
CHUNK_ROWS = 1 << 20
# One byte a row.
REMEMBERED_ROWS = 1 << 26
# 65,536 counts: of a billion rows, some 15,000 share these bits.
_HIGH_BITS = 16

Hashes = npt.NDArray[np.uint64]
Choice = npt.NDArray[np.uint8]


class LayoutError(ValueError):
    """The splits cannot be divided as requested; the text says why.

    `hold_out` is the index of the one at fault, or None.
    """

    def __init__(self, message: str, hold_out: int | None = None) -> None:
        super().__init__(message)
        self.hold_out = hold_out


class EmptySplit(LayoutError):
    """The split has no rows."""

    def __init__(self, split: str) -> None:
        super().__init__(f"the split {split!r} has no rows")
        self.split = split


@dataclass(frozen=True)
class SplitRange:
    """The row ids of a split: `row_count` ids from `first_row_id`."""

    name: str
    first_row_id: int
    row_count: int


@dataclass(frozen=True)
class Routing:
    """The targets of an imported split's rows; targets[0] is the split itself.

    Target k from 1 on takes the rows whose hash in the stream of `seeds[k - 1]` is at most `limits[k - 1]`, unless an
    earlier target took them. `counts` has the rows of each target. Small and picklable, however many rows there are.
    """

    targets: list[str]
    counts: list[int]
    seeds: tuple[int, ...] = ()
    limits: tuple[int, ...] = ()

    def choice(self, first: int, count: int) -> Choice | None:
        """Returns the index of the target of each of `count` rows from row `first` of the split on: (count,).

        None if all rows stay.
        """
        if not self.seeds:
            return None
        choice = np.zeros(count, np.uint8)
        for target, (seed, limit) in enumerate(zip(self.seeds, self.limits, strict=True), start=1):
            taken = ordinal_hashes(seed, count, first) <= np.uint64(limit)
            choice[taken & (choice == 0)] = target
        return choice

    def counts_of(self, first: int, count: int) -> list[int]:
        """Returns how many of `count` rows from row `first` on each target has."""
        if not self.seeds:
            return [count]
        counts = np.zeros(len(self.targets), np.int64)
        for begin, rows in _chunks(first, count):
            choice = self.choice(begin, rows)
            assert choice is not None  # as there are seeds
            counts += np.bincount(choice, minlength=len(self.targets))
        return [int(rows) for rows in counts]


def held_out_count(row_count: int, fraction: float) -> int:
    """Returns the nearest whole number, halves up, at least 1."""
    return max(1, math.floor(row_count * fraction + 0.5))


def route(split: str, row_count: int, hold_outs: Sequence[HoldOut]) -> Routing:
    """Divides `hold_outs`, in order, from an imported split of `row_count` rows.

    Each fraction is of the split as it was imported. A hold-out takes the remaining rows with the smallest hash of (its
    seed, the row's ordinal), instead of a random generator whose stream a new release may change. Memory stays bounded:
    a hold-out is described by its largest hash. Raises `LayoutError` unless at least one row remains, `EmptySplit` if
    there was none.
    """
    own = [(index, out) for index, out in enumerate(hold_outs) if out.from_split == split]
    if not own:
        return Routing([split], [row_count])
    if not row_count:
        raise EmptySplit(split)
    routing = Routing([split], [row_count])
    free = _FreeRows(row_count)
    for index, hold_out in own:
        wanted, left = held_out_count(row_count, hold_out.fraction), routing.counts[0]
        if wanted >= left:
            raise LayoutError(
                f"the hold-out {hold_out.to_split!r} takes {wanted} rows of {split!r}, which has {left} left; at least "
                "one must stay",
                index,
            )
        # The hash is a bijection of the ordinal, so no two rows tie.
        limit = _smallest(free, routing, hold_out.seed, wanted)
        free.take(hold_out.seed, limit)
        routing = Routing(
            [*routing.targets, hold_out.to_split],
            [left - wanted, *routing.counts[1:], wanted],
            (*routing.seeds, hold_out.seed),
            (*routing.limits, limit),
        )
    return routing


class _FreeRows:
    """The rows of a split that no hold-out took yet.

    Remembers them for a split of at most `REMEMBERED_ROWS`; those of a larger one are computed again and again.
    """

    def __init__(self, row_count: int) -> None:
        self.row_count = row_count
        self._free = np.ones(row_count, np.bool_) if row_count <= REMEMBERED_ROWS else None

    def hashes(self, routing: Routing, seed: int) -> Iterator[Hashes]:
        """Yields the hashes of the free rows, some at a time; `routing` has the hold-outs so far."""
        for first, count in _chunks(0, self.row_count):
            hashes = ordinal_hashes(seed, count, first)
            if self._free is not None:
                yield hashes[self._free[first : first + count]]
            else:
                choice = routing.choice(first, count)
                yield hashes if choice is None else hashes[choice == 0]

    def take(self, seed: int, limit: int) -> None:
        """Takes the rows whose hash is at most `limit`."""
        if self._free is not None:
            for first, count in _chunks(0, self.row_count):
                self._free[first : first + count] &= ordinal_hashes(seed, count, first) > np.uint64(limit)


def _smallest(free: _FreeRows, routing: Routing, seed: int, wanted: int) -> int:
    """Returns the hash at place `wanted`, from 1 on, among the ascending hashes of the free rows.

    Counts the hashes by their high bits first, and then looks only at those that share the wanted one's.
    """
    by_high_bits = np.zeros(1 << _HIGH_BITS, np.int64)
    for hashes in free.hashes(routing, seed):
        by_high_bits += np.bincount(_high_bits(hashes), minlength=1 << _HIGH_BITS)
    ends = np.cumsum(by_high_bits)
    high = int(np.searchsorted(ends, wanted))
    place = wanted - 1 - int(ends[high] - by_high_bits[high])
    alike = [hashes[_high_bits(hashes) == high] for hashes in free.hashes(routing, seed)]
    return int(np.partition(np.concatenate(alike), place)[place])


def _high_bits(hashes: Hashes) -> npt.NDArray[np.int64]:
    return (hashes >> np.uint64(64 - _HIGH_BITS)).astype(np.int64)


def _chunks(first: int, count: int) -> Iterator[tuple[int, int]]:
    """Yields (first, count) of consecutive runs of at most `CHUNK_ROWS` rows."""
    for begin in range(first, first + count, CHUNK_ROWS):
        yield begin, min(CHUNK_ROWS, first + count - begin)


def lay_out(routings: Iterable[Routing], order: Sequence[str]) -> list[SplitRange]:
    """Assigns contiguous row ids: the imported splits in order, then the hold-outs in theirs.

    `order` names all of them. Raises `EmptySplit` for a split without rows.
    """
    counts: dict[str, int] = {}
    for routing in routings:
        counts.update(zip(routing.targets, routing.counts, strict=True))
    ranges = []
    first = 0
    for name in order:
        if not counts[name]:
            raise EmptySplit(name)
        ranges.append(SplitRange(name, first, counts[name]))
        first += counts[name]
    return ranges


def ordinal_hashes(seed: int, row_count: int, first: int = 0) -> Hashes:
    """Returns SplitMix64 (Steele, Lea and Flood 2014) of the ordinals from `first` on, in the stream of the seed.

    Overflow is intended.
    """
    begin = _mix(np.array([seed], np.uint64) + _GOLDEN)
    return _mix(begin + np.arange(first + 1, first + row_count + 1, dtype=np.uint64) * _GOLDEN)


def _mix(z: Hashes) -> Hashes:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = z ^ (z >> np.uint64(31))
    return mixed
