"""How often each value occurs: exact, and the same for any order and cut of the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shared.transforms.problems import StepError

# New values are counted together once so many rows wait: each counting is a pass over all that is known.
ROWS_TO_WAIT_FOR = 1 << 16


class ValueCounts:
    """Keeps every distinct value, up to `limit`; `name` is the step's, for the error beyond it."""

    def __init__(self, arrow_type: pa.DataType, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        # Arrow cannot count float16.
        self._type = pa.float32() if arrow_type == pa.float16() else arrow_type
        self._known = pa.table({"value": pa.array([], self._type), "count": pa.array([], pa.int64())})
        self._waiting: list[pa.Table] = []
        self._rows_waiting = 0

    def add(self, values: pa.Array) -> None:
        """Counts values, none of them null. Raises `StepError` beyond the limit."""
        values = values.cast(self._type)
        if pa.types.is_floating(values.type):
            values = pc.add(values, pa.scalar(0.0, values.type))  # -0.0 is the same value as 0.0
        counted = values.value_counts()
        self._wait(pa.table({"value": counted.field("values"), "count": counted.field("counts")}))

    def merge(self, other: ValueCounts) -> None:
        """Raises `StepError` beyond the limit."""
        for table in (other._known, *other._waiting):
            self._wait(table)

    def ordered(self) -> tuple[pa.Array, NDArray[np.int64]]:
        """The distinct values in ascending order (of numbers, or of bytes in UTF-8), and the count of each."""
        self._count_waiting()
        self._check()
        values = self._known["value"].combine_chunks()
        order = pc.sort_indices(values)
        return values.take(order), self._known["count"].to_numpy()[order.to_numpy()]

    def __getstate__(self) -> dict[str, Any]:
        self._count_waiting()
        return self.__dict__

    def _wait(self, table: pa.Table) -> None:
        self._waiting.append(table)
        self._rows_waiting += len(table)
        if self._rows_waiting > max(ROWS_TO_WAIT_FOR, len(self._known)):
            self._count_waiting()
            self._check()

    def _count_waiting(self) -> None:
        if self._waiting:
            together = pa.concat_tables([self._known, *self._waiting])
            counted = together.group_by("value", use_threads=False).aggregate([("count", "sum")])
            self._known = pa.table({"value": counted["value"], "count": counted["count_sum"]}).combine_chunks()
            self._waiting, self._rows_waiting = [], 0

    def _check(self) -> None:
        if len(self._known) > self._limit:
            raise StepError(
                f"{self._name} learns from at most {self._limit:,} distinct values, and the training rows have more"
            )
