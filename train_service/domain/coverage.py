"""Counts of how often each row was consumed. The functions work on plain values."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from train_service.domain.order import Ints

# The most row ids that are listed of each kind.
MAX_LISTED = 1000
# Rows scanned at a time. It is a multiple of eight, so that their bits fill whole bytes.
BLOCK_ROWS = 1 << 18


@dataclass(frozen=True, kw_only=True)
class CoverageCounts:
    """Counts of the rows of a split.

    Each row counts once. `skipped` rows were only in steps that changed no weight. `missing` rows were never read.
    `repeated` rows were consumed twice or more. The lowest ids of each kind are listed.
    """

    row_count: int
    seen_once: int
    missing: int
    repeated: int
    missing_row_ids: list[int]
    repeated_row_ids: list[int]
    skipped: int = 0
    skipped_row_ids: list[int] = field(default_factory=list)


def count_rows(
    parts: Iterable[Ints],
    first: int,
    row_count: int,
    max_listed: int = MAX_LISTED,
    skipped_parts: Iterable[Ints] = (),
) -> CoverageCounts:
    """Count the row ids of a split.

    `parts` hold consumed ids. The split owns the ids [first, first + row_count). Memory: three bits a row, plus one
    part at a time. `skipped_parts` hold the rows of skipped steps; they are read after `parts`. Raises `ValueError` for
    an id that does not belong to the split.
    """
    seen, repeated, skipped = RowBits(row_count), RowBits(row_count), RowBits(row_count)
    for row_ids in parts:
        _check_rows(row_ids, first, row_count)
        rows, times = np.unique(row_ids - first, return_counts=True)
        repeated.add(rows[(times > 1) | seen.has(rows)])
        seen.add(rows)
    for row_ids in skipped_parts:
        _check_rows(row_ids, first, row_count)
        rows = np.unique(row_ids - first)
        skipped.add(rows[~seen.has(rows)])
    tally = Tally(max_listed)
    for begin in range(0, row_count, BLOCK_ROWS):
        seen_here, skipped_here = seen.block(begin), skipped.block(begin)
        tally.add("missing", begin, ~(seen_here | skipped_here))
        tally.add("repeated", begin, repeated.block(begin))
        tally.add("skipped", begin, skipped_here)
    count, listed = tally.count, tally.listed
    return CoverageCounts(
        row_count=row_count,
        seen_once=row_count - count["missing"] - count["repeated"] - count["skipped"],
        missing=count["missing"],
        repeated=count["repeated"],
        missing_row_ids=[first + row for row in listed["missing"]],
        repeated_row_ids=[first + row for row in listed["repeated"]],
        skipped=count["skipped"],
        skipped_row_ids=[first + row for row in listed["skipped"]],
    )


class RowBits:
    """A set of the rows [0, N). Each row takes one bit: row r is bit r mod 8, the lowest first, of byte r div 8."""

    def __init__(self, row_count: int) -> None:
        self._row_count = row_count
        self._bytes = np.zeros(-(-row_count // 8), np.uint8)

    def add(self, rows: Ints) -> None:
        """Add `rows`, which are sorted and unique."""
        if not len(rows):
            return
        places = rows >> 3
        bits = np.left_shift(1, rows & 7).astype(np.uint8)
        begins = np.flatnonzero(np.diff(places, prepend=-1))
        self._bytes[places[begins]] |= np.bitwise_or.reduceat(bits, begins)

    def has(self, rows: Ints) -> NDArray[np.bool_]:
        """Return for each row whether the set has it."""
        found: NDArray[np.bool_] = (self._bytes[rows >> 3] >> (rows & 7)) & 1 == 1
        return found

    def block(self, begin: int) -> NDArray[np.bool_]:
        """Return the membership of a block of rows.

        The block has `BLOCK_ROWS` rows from `begin`, a multiple of eight.
        """
        rows = min(BLOCK_ROWS, self._row_count - begin)
        packed = self._bytes[begin // 8 : (begin + BLOCK_ROWS) // 8]
        return np.unpackbits(packed, count=rows, bitorder="little").astype(bool)


class Tally:
    """The number of rows of each kind.

    The lowest `max_listed` rows of each kind are listed, too. Rows are collected block by block.
    """

    def __init__(self, max_listed: int) -> None:
        self._max_listed = max_listed
        self.count: Counter[str] = Counter()
        self.listed: defaultdict[str, list[int]] = defaultdict(list)

    def add(self, kind: str, begin: int, here: NDArray[np.bool_]) -> None:
        """Count a block that begins at row `begin`. Blocks must come in order."""
        listed = self.listed[kind]
        rows = np.flatnonzero(here)
        self.count[kind] += len(rows)
        listed += (begin + rows[: self._max_listed - len(listed)]).tolist()


def _check_rows(row_ids: Ints, first: int, row_count: int) -> None:
    if row_ids.size and (row_ids.min() < first or row_ids.max() >= first + row_count):
        stranger = row_ids[(row_ids < first) | (row_ids >= first + row_count)][0]
        raise ValueError(f"row {stranger} is not among the rows {first} to {first + row_count - 1}")
