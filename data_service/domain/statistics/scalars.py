"""Statistics of integers, booleans, floats, decimals, dates, times and timestamps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from data_service.domain.statistics.column import Bounds, Column, most_frequent
from data_service.domain.statistics.distribution import Weighted
from data_service.domain.statistics.hashing import Hashes, float_words, hash_words, integers_of, mix, words_of
from data_service.domain.statistics.moments import ExactMoments
from data_service.domain.statistics.result import NumberStatistics, TimeStatistics
from data_service.domain.statistics.sampling import Sample
from data_service.domain.statistics.times import rfc3339
from data_service.domain.statistics.values import MAX_FREQUENT, DistinctCount, FrequentValues
from shared.value_texts import value_text


class _ScalarColumn(Column):
    """Has a sample of the values as numbers, the number of different ones, and the frequent ones."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        super().__init__()
        self.moments = ExactMoments()
        self.bounds = Bounds()
        self.sample = Sample(dtype)
        self.distinct = DistinctCount()
        self.frequent = FrequentValues()

    def _merge(self, other: Any) -> None:
        self.moments.merge(other.moments)
        self.bounds.merge(other.bounds)
        self.sample.merge(other.sample)
        self.distinct.merge(other.distinct)
        self.frequent.merge(other.frequent)

    def _result(self) -> dict[str, Any]:
        return {
            "distinct_count": self.distinct.count,
            "distinct_is_exact": self.distinct.is_exact,
            "values": most_frequent(self.value_counts()),
        }

    @abstractmethod
    def _weighted(self) -> Weighted:
        """All values where their counts are known, else the sample."""

    def _numbers(self, *, is_integer: bool) -> dict[str, Any]:
        if not self.moments.count:
            return {}
        weighted, least, most = self._weighted(), self.bounds.min, self.bounds.max
        numbers = NumberStatistics(
            min=float(least),
            max=float(most),
            mean=self.moments.mean,
            deviation=self.moments.deviation,
            quantiles=[float(value) for value in weighted.quantiles()],
            histogram=weighted.histogram(least, most, self.moments.count, is_integer=is_integer),
        )
        return {"numbers": numbers}


class IntegerColumn(_ScalarColumn):
    """Integers; booleans as 0 and 1; dates, times and timestamps in their own unit."""

    def __init__(self, arrow_type: pa.DataType) -> None:
        super().__init__(np.uint64 if kinds.is_uint64(arrow_type) else np.int64)
        self._type = arrow_type

    def value_counts(self) -> Mapping[Any, int] | None:
        counts = self.frequent.counts
        if counts is None or kinds.is_integer(self._type):
            return counts
        if kinds.is_boolean(self._type):
            return {bool(value): count for value, count in counts.items()}
        return {value_text(value, self._type): count for value, count in counts.items()}

    def _update(self, array: pa.Array, hashes: Hashes) -> None:
        values = words_of(array).astype(np.int64) if kinds.is_boolean(array.type) else integers_of(array)
        self.sample.add(hashes, values)
        different, counts = values, None
        if self.frequent.counts is not None:
            different, counts = self._count(values)
        self.bounds.add(int(different.min()), int(different.max()))
        self.moments.add_integers(different, counts)
        self.distinct.add(mix(different))

    def _count(self, values: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        counted = pc.value_counts(pa.array(values))
        different, counts = counted.field("values").to_numpy(), counted.field("counts").to_numpy()
        if len(different) > MAX_FREQUENT:
            self.frequent.close()
        else:
            self.frequent.add(different.tolist(), counts.tolist())
        return different, counts

    def _weighted(self) -> Weighted:
        if self.frequent.counts is None:
            return Weighted(self.sample.values)
        values, counts = self.frequent.counts.keys(), self.frequent.counts.values()
        return Weighted(np.array(list(values), self.sample.values.dtype), np.array(list(counts), np.int64))

    def _result(self) -> dict[str, Any]:
        common = super()._result()
        if kinds.is_date(self._type) or kinds.is_timestamp(self._type):
            return {**common, **self._times()}
        return common if kinds.is_time(self._type) else {**common, **self._numbers(is_integer=True)}

    def _times(self) -> dict[str, Any]:
        if not self.moments.count:
            return {}
        least, most = self.bounds.min, self.bounds.max
        bars = self._weighted().histogram(least, most, self.moments.count, is_integer=False)
        return {"times": TimeStatistics(min=rfc3339(least, self._type), max=rfc3339(most, self._type), histogram=bars)}


class FloatColumn(_ScalarColumn):
    """Floats of any width and decimals; decimals are told apart exactly, and summed as the nearest float64."""

    def __init__(self, arrow_type: pa.DataType) -> None:
        super().__init__(np.float64)
        self._is_decimal = kinds.is_decimal(arrow_type)
        self._nan_count = 0

    def value_counts(self) -> Mapping[Any, int] | None:
        counts = self.frequent.counts
        if counts is None or not self._is_decimal:
            return counts
        return {str(value): count for value, count in counts.items()}

    def _update(self, array: pa.Array, hashes: Hashes) -> None:
        if self._is_decimal:
            values = array.cast(pa.float64()).to_numpy()
            words, countable = words_of(array), array
        else:
            values = array.to_numpy(zero_copy_only=False).astype(np.float64) + 0.0  # -0.0 is 0.0
            there = ~np.isnan(values)
            if not there.all():
                self._nan_count += int((~there).sum())
                values, hashes = values[there], hashes[there]
            if not len(values):
                return
            words, countable = float_words(values), pa.array(values)
        self.bounds.add(float(values.min()), float(values.max()))
        self.moments.add_floats(values)
        self.sample.add(hashes, values)
        self.distinct.add(hash_words(words))
        if self.frequent.counts is not None:
            self._count(countable)

    def _count(self, values: pa.Array) -> None:
        counted = pc.value_counts(values)
        if len(counted) > MAX_FREQUENT:
            self.frequent.close()
        else:
            self.frequent.add(counted.field("values").to_pylist(), counted.field("counts").to_pylist())

    def _merge(self, other: Any) -> None:
        super()._merge(other)
        self._nan_count += other._nan_count

    def _weighted(self) -> Weighted:
        if self.frequent.counts is None:
            return Weighted(self.sample.values)
        values = np.array([float(value) for value in self.frequent.counts], np.float64)
        return Weighted(values, np.array(list(self.frequent.counts.values()), np.int64))

    def _result(self) -> dict[str, Any]:
        return {**super()._result(), "nan_count": self._nan_count, **self._numbers(is_integer=False)}
