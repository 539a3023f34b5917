"""How many different values a column has, and which are frequent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from data_service.domain.statistics.hashing import Hashes

EXACT_DISTINCT = 4096
MAX_FREQUENT = 1000
# Of the different texts together: a column of long texts would make a report of megabytes.
MAX_FREQUENT_BYTES = 256 * 1024


class DistinctCount:
    """The least `EXACT_DISTINCT + 1` hashes of the values: exact while there are no more.

    Beyond, the k-th least hash tells how dense they lie; the standard error is 1 / sqrt(k - 2), 1.6 %.
    Source: Bar-Yossef and others, Counting distinct elements in a data stream, 2002.
    """

    def __init__(self) -> None:
        self._least: Hashes = np.empty(0, np.uint64)

    def add(self, hashes: Hashes) -> None:
        if len(self._least) > EXACT_DISTINCT:
            hashes = hashes[hashes < self._least[-1]]
        if len(hashes):
            self._least = np.unique(np.concatenate([self._least, hashes]))[: EXACT_DISTINCT + 1]

    def merge(self, other: DistinctCount) -> None:
        self.add(other._least)

    @property
    def is_exact(self) -> bool:
        return len(self._least) <= EXACT_DISTINCT

    @property
    def count(self) -> int:
        if self.is_exact:
            return len(self._least)
        density = (int(self._least[-1]) + 1) / 2**64
        return round((len(self._least) - 1) / density)


class FrequentValues:
    """Exact counts while at most `MAX_FREQUENT` different values were seen; `None` from then on, for good.

    That does not depend on the order: a part with too many values makes the whole have too many.
    """

    def __init__(self) -> None:
        self.counts: dict[Any, int] | None = {}
        self._bytes = 0

    def add(self, values: Iterable[Any], counts: Iterable[int]) -> None:
        """Each value once, and how often it occurred."""
        mine = self.counts
        if mine is None:
            return
        for value, count in zip(values, counts, strict=True):
            if value in mine:
                mine[value] += count
                continue
            mine[value] = count
            self._bytes += len(value.encode()) if isinstance(value, str) else 0
            if len(mine) > MAX_FREQUENT or self._bytes > MAX_FREQUENT_BYTES:
                self.close()
                return

    def close(self) -> None:
        """There are too many."""
        self.counts = None

    def merge(self, other: FrequentValues) -> None:
        theirs: Mapping[Any, int] | None = other.counts
        if theirs is None:
            self.close()
        else:
            self.add(theirs.keys(), theirs.values())
