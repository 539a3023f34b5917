"""What every column's statistics have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from data_service.domain.statistics.hashing import Hashes
from data_service.domain.statistics.result import ColumnStatistics

MAX_REPORTED_VALUES = 100
# Of one text: a report is one message, and is kept with the version for ever.
MAX_REPORTED_BYTES = 200


class Column(ABC):
    """Takes in the values of one column; of two columns of one type, either can take in the other."""

    def __init__(self) -> None:
        self.row_count = 0
        self.null_count = 0

    def update(self, array: pa.Array, hashes: Hashes) -> None:
        """One chunk, and the hashes of its row ids."""
        self.row_count += len(array)
        if array.null_count:
            self.null_count += array.null_count
            hashes = hashes[np.asarray(array.is_valid())]
            array = array.drop_null()
        if len(array):
            self._update(array, hashes)

    def merge(self, other: Column) -> None:
        self.row_count += other.row_count
        self.null_count += other.null_count
        self._merge(other)

    def result(self, split: str, column: str) -> ColumnStatistics:
        return ColumnStatistics(
            split=split, column=column, row_count=self.row_count, null_count=self.null_count, **self._result()
        )

    def value_counts(self) -> Mapping[Any, int] | None:
        """Of all values that are neither null nor NaN, exactly; None where they are too many, or of another kind."""
        return None

    @abstractmethod
    def _update(self, array: pa.Array, hashes: Hashes) -> None:
        """Values without nulls, at least one."""

    @abstractmethod
    def _merge(self, other: Any) -> None: ...

    @abstractmethod
    def _result(self) -> dict[str, Any]:
        """The fields of `ColumnStatistics` beyond those that every column has."""


class Bounds:
    """The least and the greatest value; None while there is none."""

    def __init__(self) -> None:
        self.min: Any = None
        self.max: Any = None

    def add(self, least: Any, most: Any) -> None:
        self.min = least if self.min is None else min(self.min, least)
        self.max = most if self.max is None else max(self.max, most)

    def merge(self, other: Bounds) -> None:
        if other.min is not None:
            self.add(other.min, other.max)


def most_frequent(counts: Mapping[Any, int] | None) -> list[tuple[Any, int]]:
    """At most `MAX_REPORTED_VALUES`, the most frequent first, of equally frequent ones the least.

    None where one of them is a text of more than `MAX_REPORTED_BYTES`: cut it would be another value, and without it
    the list would not be of the most frequent.
    """
    ordered = sorted((counts or {}).items(), key=lambda item: (-item[1], item[0]))[:MAX_REPORTED_VALUES]
    is_long = any(isinstance(value, str) and len(value.encode()) > MAX_REPORTED_BYTES for value, _ in ordered)
    return [] if is_long else ordered
