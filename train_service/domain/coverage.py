"""How often each row of a split was consumed: counting, on plain values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from train_service.domain.order import Ints

# So many row ids are told of each kind.
MAX_LISTED = 1000
# Nobody asks how often beyond once: a row takes one byte, whatever the run did.
OFTEN = 2
# Of a row that was never consumed, but for a step that was skipped.
SKIPPED = 3
# So many rows are looked through at a time.
BLOCK_ROWS = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Each row counts once. `skipped` rows were in a step that changed no weight and in no other, `missing` ones were
    never read, `repeated` ones consumed twice or more; of each the lowest ids are listed."""

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
) -> Counts:
    """Counts the row ids of all `parts` for a split that owns the ids [first, first + row_count). Takes a byte a row,
    and what one part at a time takes. `skipped_parts` are those of skipped steps, looked at after `parts`.

    Raises `ValueError` for an id that is not the split's.
    """
    times = np.zeros(row_count, np.uint8)
    for row_ids in parts:
        _check_rows(row_ids, first, row_count)
        rows, seen = np.unique(row_ids - first, return_counts=True)
        times[rows] = np.minimum(times[rows] + seen, OFTEN)
    for row_ids in skipped_parts:
        _check_rows(row_ids, first, row_count)
        rows = row_ids - first
        times[rows[times[rows] == 0]] = SKIPPED
    skipped, skipped_rows = _those_seen(times, SKIPPED, max_listed)
    missing, missing_rows = _those_seen(times, 0, max_listed)
    repeated, repeated_rows = _those_seen(times, OFTEN, max_listed)
    return Counts(
        row_count=row_count,
        seen_once=row_count - missing - repeated - skipped,
        missing=missing,
        repeated=repeated,
        missing_row_ids=[first + row for row in missing_rows],
        repeated_row_ids=[first + row for row in repeated_rows],
        skipped=skipped,
        skipped_row_ids=[first + row for row in skipped_rows],
    )


def _check_rows(row_ids: Ints, first: int, row_count: int) -> None:
    if row_ids.size and (row_ids.min() < first or row_ids.max() >= first + row_count):
        stranger = row_ids[(row_ids < first) | (row_ids >= first + row_count)][0]
        raise ValueError(f"row {stranger} is not among the rows {first} to {first + row_count - 1}")


def _those_seen(times: NDArray[np.uint8], often: int, max_listed: int) -> tuple[int, list[int]]:
    """How many rows were seen so often, and the first of them."""
    count, listed = 0, list[int]()
    for begin in range(0, len(times), BLOCK_ROWS):
        rows = begin + np.flatnonzero(times[begin : begin + BLOCK_ROWS] == often)
        count += len(rows)
        listed += rows[: max_listed - len(listed)].tolist()
    return count, listed
