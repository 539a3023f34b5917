"""How often each row of a split was consumed: counting, on plain values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from train_service.domain.order import Ints

# So many row ids are told of each kind.
MAX_LISTED = 1000


@dataclass(frozen=True, kw_only=True)
class Counts:
    """`missing` rows were never consumed, `repeated` twice or more; of each the lowest ids are listed."""

    row_count: int
    seen_once: int
    missing: int
    repeated: int
    missing_row_ids: list[int]
    repeated_row_ids: list[int]


def count_rows(parts: Iterable[Ints], first: int, row_count: int, max_listed: int = MAX_LISTED) -> Counts:
    """Counts the row ids of all `parts` for a split that owns the ids [first, first + row_count).

    Raises `ValueError` for an id that is not the split's.
    """
    times = np.zeros(row_count, np.int64)
    for row_ids in parts:
        if not row_ids.size:
            continue
        if row_ids.min() < first or row_ids.max() >= first + row_count:
            stranger = row_ids[(row_ids < first) | (row_ids >= first + row_count)][0]
            raise ValueError(f"row {stranger} is not among the rows {first} to {first + row_count - 1}")
        times += np.bincount(row_ids - first, minlength=row_count)
    missing, repeated = np.flatnonzero(times == 0), np.flatnonzero(times > 1)
    return Counts(
        row_count=row_count,
        seen_once=int((times == 1).sum()),
        missing=len(missing),
        repeated=len(repeated),
        missing_row_ids=(missing[:max_listed] + first).tolist(),
        repeated_row_ids=(repeated[:max_listed] + first).tolist(),
    )
