"""Statistics of strings and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from data_service.domain.statistics.bytes_of import byte_slices
from data_service.domain.statistics.column import Bounds, Column, most_frequent
from data_service.domain.statistics.hashing import Hashes, hash_bytes
from data_service.domain.statistics.result import TextStatistics
from data_service.domain.statistics.values import MAX_FREQUENT, DistinctCount, FrequentValues


class TextColumn(Column):
    """Strings and bytes. Bytes have no frequent values: a report is no place for them."""

    def __init__(self, arrow_type: pa.DataType) -> None:
        super().__init__()
        self._is_text = kinds.is_string(arrow_type) or kinds.is_large_string(arrow_type)
        self._total_bytes = 0
        self._lengths = Bounds()
        self._distinct = DistinctCount()
        self._frequent = FrequentValues()
        if not self._is_text:
            self._frequent.close()

    def value_counts(self) -> Mapping[Any, int] | None:
        return self._frequent.counts

    def _update(self, array: pa.Array, hashes: Hashes) -> None:  # noqa: ARG002
        lengths = _lengths(array)
        self._total_bytes += int(lengths.sum())
        self._lengths.add(int(lengths.min()), int(lengths.max()))
        if not self._is_text:  # mostly large and seldom equal: not worth a copy in a hash table
            self._distinct.add(hash_bytes(byte_slices(array)))
        elif self._frequent.counts is None:
            self._distinct.add(hash_bytes(byte_slices(pc.unique(array))))
        else:
            self._count(pc.value_counts(array))

    def _count(self, counted: pa.StructArray) -> None:
        different = counted.field("values")
        self._distinct.add(hash_bytes(byte_slices(different)))
        if len(different) > MAX_FREQUENT:
            self._frequent.close()
        else:
            self._frequent.add(different.to_pylist(), counted.field("counts").to_pylist())

    def _merge(self, other: TextColumn) -> None:
        self._total_bytes += other._total_bytes
        self._lengths.merge(other._lengths)
        self._distinct.merge(other._distinct)
        self._frequent.merge(other._frequent)

    def _result(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "distinct_count": self._distinct.count,
            "distinct_is_exact": self._distinct.is_exact,
            "values": most_frequent(self._frequent.counts),
        }
        there = self.row_count - self.null_count
        if there:
            least, most = self._lengths.min, self._lengths.max
            mean = self._total_bytes / there
            found["texts"] = TextStatistics(min_bytes=least, max_bytes=most, mean_bytes=mean)
        return found


def _lengths(array: pa.Array) -> np.ndarray[Any, Any]:
    if kinds.is_fixed_size_binary(array.type):
        return np.full(len(array), array.type.byte_width, np.int64)
    lengths: np.ndarray[Any, Any] = pc.binary_length(array).to_numpy().astype(np.int64)
    return lengths
