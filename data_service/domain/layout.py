"""Assigns rows to splits, and row ids to rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_service.domain.import_spec import HoldOut

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


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
    """The targets of an imported split's rows: row i belongs to `targets[choice[i]]`.

    targets[0] is the split itself. `counts` has the rows of each target; `choice` is None if all rows stay.
    """

    targets: list[str]
    counts: list[int]
    choice: np.ndarray[Any, np.dtype[np.uint8]] | None = None


def held_out_count(row_count: int, fraction: float) -> int:
    """Returns the nearest whole number, halves up, at least 1."""
    return max(1, math.floor(row_count * fraction + 0.5))


def route(split: str, row_count: int, hold_outs: Sequence[HoldOut]) -> Routing:
    """Divides `hold_outs`, in order, from an imported split of `row_count` rows.

    Each fraction is of the split as it was imported. A hold-out takes the remaining rows with the smallest hash of (its
    seed, the row's ordinal), instead of a random generator whose stream a new release may change. Raises `LayoutError`
    unless at least one row remains, `EmptySplit` if there was none.
    """
    own = [(index, out) for index, out in enumerate(hold_outs) if out.from_split == split]
    if not own:
        return Routing([split], [row_count])
    if not row_count:
        raise EmptySplit(split)
    choice = np.zeros(row_count, np.uint8)
    left = row_count
    for target, (index, hold_out) in enumerate(own, start=1):
        wanted = held_out_count(row_count, hold_out.fraction)
        if wanted >= left:
            raise LayoutError(
                f"the hold-out {hold_out.to_split!r} takes {wanted} rows of {split!r}, which has {left} left; at least "
                "one must stay",
                index,
            )
        hashes = ordinal_hashes(hold_out.seed, row_count)
        # The hash is a bijection of the ordinal, so no two rows tie; rows already taken come last.
        hashes[choice != 0] = np.iinfo(np.uint64).max
        choice[np.argpartition(hashes, wanted - 1)[:wanted]] = target
        left -= wanted
    counts = np.bincount(choice, minlength=1 + len(own)).tolist()
    return Routing([split, *(one.to_split for _, one in own)], counts, choice)


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


def ordinal_hashes(seed: int, row_count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Returns SplitMix64 (Steele, Lea and Flood 2014) of each ordinal, in the stream of the seed.

    Overflow is intended.
    """
    begin = _mix(np.array([seed], np.uint64) + _GOLDEN)
    return _mix(begin + np.arange(1, row_count + 1, dtype=np.uint64) * _GOLDEN)


def _mix(z: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray[Any, np.dtype[np.uint64]] = z ^ (z >> np.uint64(31))
    return mixed
