"""Row groups in memory: read once, checked, and kept while there is room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shared.dataset_version import ROW_ID, RowGroup, VersionReader
from shared.errors import DataLoss
from shared.transforms import Batch, batch_of
from train_service.domain.order import Ints
from train_service.domain.spec import CLASSIFICATION
from train_service.labels import labels_of
from train_service.patience import patient

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows in some order: the columns as stored, `labels`, `row_ids` int64 (rows,). Labels are classes, int64 (rows,),
    or for regression numbers, float32 (rows,) or (rows, K).

    `tensors` are (rows, *shape) each. `scalars` has all others, so that one call of Arrow's moves them all; None where
    there are none.
    """

    tensors: dict[str, Array]
    scalars: pa.RecordBatch | None
    labels: Array
    row_ids: Ints

    def batch(self) -> Batch:
        """The columns, as a pipeline takes them."""
        if self.scalars is None:
            return dict(self.tensors)
        return {**dict(zip(self.scalars.schema.names, self.scalars.columns, strict=True)), **self.tensors}

    @property
    def size_bytes(self) -> int:
        tensors = sum(values.nbytes for values in self.tensors.values())
        scalars = 0 if self.scalars is None else self.scalars.nbytes
        return tensors + scalars + self.labels.nbytes + self.row_ids.nbytes


def gather(parts: list[tuple[Rows, Ints]], places: list[Ints]) -> Rows:
    """Picks rows and puts them together: row `parts[k][1][i]` of `parts[k][0]` goes to place `places[k][i]`; the places
    are 0 to the number of rows."""
    sources, indices = [rows for rows, _ in parts], [chosen for _, chosen in parts]

    def picked(values: list[Array]) -> Array:
        together = np.empty((sum(map(len, places)), *values[0].shape[1:]), values[0].dtype)
        for one, chosen, mine in zip(values, indices, places, strict=True):
            together[mine] = one[chosen]
        return together

    return Rows(
        {name: picked([rows.tensors[name] for rows in sources]) for name in sources[0].tensors},
        _picked_scalars(parts, places),
        picked([rows.labels for rows in sources]),
        picked([rows.row_ids for rows in sources]),
    )


def _picked_scalars(parts: list[tuple[Rows, Ints]], places: list[Ints]) -> pa.RecordBatch | None:
    if parts[0][0].scalars is None:
        return None
    taken = [rows.scalars.take(pa.array(indices)) for rows, indices in parts if rows.scalars is not None]
    back = np.argsort(np.concatenate(places), kind="stable")
    return pa.concat_batches(taken).take(pa.array(back))


class RowCache:
    """Reads rows of one split by their position in it. Least recently used row groups leave first.

    Not thread-safe: each loader has its own.
    """

    def __init__(
        self,
        reader: VersionReader,
        split: str,
        columns: Sequence[str],
        label_column: str,
        num_classes: int,
        capacity: int,
        task: str = CLASSIFICATION,
    ) -> None:
        """`columns` are those that the job's transform reads; `num_classes` is K for regression; `capacity` in
        bytes."""
        self._reader = reader
        self._groups = patient(lambda: reader.row_groups(split), "the row groups")
        self._columns = list(columns)
        self._label_column = label_column
        self._num_classes = num_classes
        self._task = task
        self._capacity = capacity
        self._held: OrderedDict[int, Rows] = OrderedDict()
        counts = [group.row_count for group in self._groups]
        self._ends = np.cumsum(np.asarray(counts, np.int64))
        self.row_groups = counts
        self.bytes_read = 0
        # Called whenever rows are asked for, as a sign that whoever does so gets on.
        self.touched: Callable[[], None] = lambda: None

    def rows(self, positions: Ints) -> Rows:
        """The rows at `positions` (from 0 at the split's beginning), in that order.

        Raises `DataLoss` when the stored bytes carry other row ids than their place in the version says, and
        `InvalidArgument` naming the row for a label that is missing, outside 0..num_classes-1 or, for regression, not
        finite.
        """
        self.touched()
        group_of = np.searchsorted(self._ends, positions, side="right")
        parts, places = [], []
        for number in np.unique(group_of).tolist():
            mine = np.flatnonzero(group_of == number)
            first = self._ends[number] - self._groups[number].row_count
            parts.append((self._group(number), positions[mine] - first))
            places.append(mine)
        return gather(parts, places)

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
        names = list(dict.fromkeys([*self._columns, self._label_column, ROW_ID]))
        table = patient(lambda: self._reader.read(group, names), "a row group")
        row_ids: Ints = table.column(ROW_ID).to_numpy()
        if not np.array_equal(row_ids, np.arange(group.first_row_id, group.first_row_id + group.row_count)):
            raise DataLoss(
                f"the rows stored at {group.first_row_id} and after carry other row ids", reason="WRONG_ROW_IDS"
            )
        labels = labels_of(table, self._label_column, row_ids, self._num_classes, self._task)
        columns = batch_of(table.select(self._columns))
        tensors = {name: values for name, values in columns.items() if isinstance(values, np.ndarray)}
        scalars = {name: values for name, values in columns.items() if isinstance(values, pa.Array)}
        return Rows(tensors, pa.RecordBatch.from_pydict(scalars) if scalars else None, labels, row_ids)
