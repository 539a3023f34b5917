"""Row groups as arrays: read once, checked, and kept while there is room."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shared.dataset_version import ROW_ID, RowGroup, VersionReader
from shared.errors import DataLoss, InvalidArgument
from train_service.domain.order import Ints

Array = NDArray[Any]


@dataclass(frozen=True)
class Rows:
    """Rows in some order: `inputs` (rows, …) as stored, `labels` int64 (rows,), `row_ids` int64 (rows,)."""

    inputs: Array
    labels: Ints
    row_ids: Ints

    def take(self, indices: Ints) -> Rows:
        return Rows(self.inputs[indices], self.labels[indices], self.row_ids[indices])

    @property
    def size_bytes(self) -> int:
        return self.inputs.nbytes + self.labels.nbytes + self.row_ids.nbytes


def interleave(parts: list[Rows], where: list[Ints]) -> Rows:
    """Puts parts together: row i of part k goes to place `where[k][i]`; the places are 0 to the number of rows."""
    back = np.argsort(np.concatenate(where), kind="stable")
    return Rows(
        np.concatenate([part.inputs for part in parts])[back],
        np.concatenate([part.labels for part in parts])[back],
        np.concatenate([part.row_ids for part in parts])[back],
    )


class RowCache:
    """Reads rows of one split by their position in it. Least recently used row groups leave first.

    Not thread-safe: each loader has its own.
    """

    def __init__(
        self, reader: VersionReader, split: str, input_column: str, label_column: str, num_classes: int, capacity: int
    ) -> None:
        """`capacity` in bytes."""
        self._reader = reader
        self._groups = reader.row_groups(split)
        self._columns = [input_column, label_column, ROW_ID]
        self._num_classes = num_classes
        self._capacity = capacity
        self._held: OrderedDict[int, Rows] = OrderedDict()
        counts = [group.row_count for group in self._groups]
        self._ends = np.cumsum(np.asarray(counts, np.int64))
        self.row_groups = counts
        self.bytes_read = 0

    def rows(self, positions: Ints) -> Rows:
        """The rows at `positions` (from 0 at the split's beginning), in that order.

        Raises `DataLoss` when the stored bytes carry other row ids than their place in the version says, and
        `InvalidArgument` for a label outside 0..num_classes-1.
        """
        group_of = np.searchsorted(self._ends, positions, side="right")
        parts, where = [], []
        for number in np.unique(group_of).tolist():
            mine = np.flatnonzero(group_of == number)
            first = self._ends[number] - self._groups[number].row_count
            parts.append(self._group(number).take(positions[mine] - first))
            where.append(mine)
        return interleave(parts, where)

    def _group(self, number: int) -> Rows:
        held = self._held.get(number)
        if held is None:
            held = self._read(self._groups[number])
            self._held[number] = held
            self.bytes_read += held.size_bytes
            while sum(rows.size_bytes for rows in self._held.values()) > self._capacity and len(self._held) > 1:
                self._held.popitem(last=False)
        else:
            self._held.move_to_end(number)
        return held

    def _read(self, group: RowGroup) -> Rows:
        table = self._reader.read(group, self._columns)
        for column in self._columns:
            if table.column(column).null_count:
                raise InvalidArgument(
                    f"column {column!r} has nulls; fill or drop them before training", reason="NULL_VALUES"
                )
        inputs, labels, row_ids = (as_array(table.column(index)) for index in range(3))
        expected = np.arange(group.first_row_id, group.first_row_id + group.row_count)
        if not np.array_equal(row_ids, expected):
            raise DataLoss(
                f"the rows stored at {group.first_row_id} and after carry other row ids", reason="WRONG_ROW_IDS"
            )
        if labels.size and not (labels.min() >= 0 and labels.max() < self._num_classes):
            row = int(np.flatnonzero((labels < 0) | (labels >= self._num_classes))[0])
            raise InvalidArgument(
                f"row {int(row_ids[row])} has the label {int(labels[row])} in column {self._columns[1]!r}; "
                f"spec.model.num_classes is {self._num_classes}, so labels must be 0 to {self._num_classes - 1}",
                reason="LABEL_OUT_OF_RANGE",
                fields=[("spec.model.num_classes", f"a label is {int(labels[row])}")],
            )
        return Rows(inputs, labels.astype(np.int64), row_ids)


def as_array(column: pa.ChunkedArray) -> Array:
    """A column without nulls as one numpy array; a tensor column keeps its shape behind the row axis."""
    chunk = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if isinstance(chunk, pa.FixedShapeTensorArray):
        tensors: Array = chunk.to_numpy_ndarray()
        return tensors
    values: Array = chunk.to_numpy(zero_copy_only=False)
    return values
