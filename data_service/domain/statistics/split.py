"""Statistics of all columns of one split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as kinds

from data_service.domain.statistics.column import Column
from data_service.domain.statistics.hashing import row_hashes
from data_service.domain.statistics.result import ColumnStatistics
from data_service.domain.statistics.scalars import FloatColumn, IntegerColumn
from data_service.domain.statistics.tensors import ByteTensorColumn, TensorColumn
from data_service.domain.statistics.texts import TextColumn


class SplitStatistics:
    """Takes in rows of the logical columns of `schema`; small and picklable, at most a few 100 KB a column.

    What it finds depends on the rows and their ids alone, to the last bit: neither on the order in which rows come nor
    on how they are divided among parts that are merged later.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.row_count = 0
        self._columns = {field.name: _column(field.type) for field in schema}

    def update(self, table: pa.Table, first_row_id: int | npt.NDArray[np.int64]) -> None:
        """Rows that follow each other from `first_row_id` on, or one id for each; no id may come twice.

        Columns of the table that the schema does not have are left out.
        """
        if isinstance(first_row_id, int | np.integer):
            row_ids = np.arange(first_row_id, first_row_id + table.num_rows, dtype=np.int64)
        else:
            row_ids = np.ascontiguousarray(first_row_id, np.int64)
        hashes = row_hashes(row_ids)
        self.row_count += table.num_rows
        for name, column in self._columns.items():
            start = 0
            for chunk in table.column(name).chunks:
                column.update(chunk, hashes[start : start + len(chunk)])
                start += len(chunk)

    def merge(self, other: SplitStatistics) -> None:
        """Takes in the rows of another part of the same split."""
        self.row_count += other.row_count
        for name, column in self._columns.items():
            column.merge(other._columns[name])

    def result(self, split: str = "") -> list[ColumnStatistics]:
        """In the order of the columns."""
        return [column.result(split, name) for name, column in self._columns.items()]

    def value_counts(self, column: str) -> Mapping[Any, int] | None:
        """All different values of a column and how often each occurs; None where there are more than 1,000."""
        return self._columns[column].value_counts()


def _column(arrow_type: pa.DataType) -> Column:
    if isinstance(arrow_type, pa.FixedShapeTensorType):
        value_type = arrow_type.value_type
        return ByteTensorColumn() if kinds.is_uint8(value_type) else TensorColumn(value_type)
    if kinds.is_floating(arrow_type) or kinds.is_decimal(arrow_type):
        return FloatColumn(arrow_type)
    if kinds.is_integer(arrow_type) or kinds.is_boolean(arrow_type) or kinds.is_temporal(arrow_type):
        return IntegerColumn(arrow_type)
    return TextColumn(arrow_type)
