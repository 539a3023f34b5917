"""Rows of a dataset version before they are prepared: columns as stored, with labels and ids.

Row groups are cached in memory: read once, ahead of time if requested, checked, and kept while there is room. A label
that the loss cannot take is refused, with its row, before anything is learnt from it.
"""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shared.dataset_version import ROW_ID, DatasetVersion, RowGroup, VersionReader
from shared.dataset_version.manifest import row_bytes
from shared.errors import DataLoss, InvalidArgument
from shared.transforms import Batch, arrow_schema, batch_of, schema_of_columns
from train_service.domain.order import Ints
from train_service.domain.spec import CLASSIFICATION
from train_service.store_retry import retry_on_outage, store_call

# --- Row cache ---

# Threads that read ahead, at most one per processor. Each requests several ranges of a remote store at once.
READERS = min(4, os.cpu_count() or 1)
# Limit on memory of row groups being read ahead. Further groups are read when they are requested.
AHEAD_BYTES = 256 * 1024 * 1024


class RowCache:
    """Cache of the rows of one split, read by position. The least recently used row groups leave first.

    Not thread-safe: each loader has its own. It uses its own threads to read ahead.
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
        *,
        allow_non_finite: bool = False,
    ) -> None:
        """Prepare the cache.

        `columns` are those that the job's transform reads; `num_classes` is K for regression; `capacity` in bytes.
        Without a `label_column` rows have no labels: (rows, 0).
        """
        self._reader = reader
        self._groups = retry_on_outage(lambda: reader.row_groups(split), "the row groups")
        self._columns = list(columns)
        self._label_column = label_column
        self._num_classes = num_classes
        self._task = task
        self._allow_non_finite = allow_non_finite
        self._capacity = capacity
        self._held: OrderedDict[int, Rows] = OrderedDict()
        self._in_flight_bytes = 0
        # Row groups being read: the future of their share, and their index in it.
        self._coming: dict[int, tuple[Future[list[Rows]], int]] = {}
        self._readers: ThreadPoolExecutor | None = None
        self._ends = self._groups.ends
        # The rows of each row group: (G,).
        self.row_groups = self._groups.row_counts
        self.row_count = self._groups.row_count
        self.row_bytes = bytes_of_row(reader.version, split, columns)
        self.bytes_read = 0
        # Called whenever rows are requested, as a sign of progress.
        self.touched: Callable[[], None] = lambda: None

    def read_ahead(self, positions: Ints) -> None:
        """Start reading the row groups of `positions` that are not cached, as many as fit.

        Each thread reads one contiguous share, because adjacent groups are cheap to read together.
        """
        numbers = self._capacity_for(number for number in self._needed(positions) if number not in self._held)
        if not numbers:
            return
        if self._readers is None:
            self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="row groups")
        for share in np.array_split(numbers, min(READERS, len(numbers))):
            reading = self._readers.submit(self._read, [self._groups[number] for number in share])
            self._coming.update({number: (reading, place) for place, number in enumerate(share.tolist())})

    def rows(self, positions: Ints, into: RowBuffers | None = None) -> Rows:
        """Return the rows at `positions` (from 0 at the split's beginning), in that order.

        If rows must be copied, their tensors use the memory of `into` until it is used again.

        Raises `DataLoss` if the stored row ids do not match their positions in the version, and `InvalidArgument` that
        names the row of a label that is missing, outside 0..num_classes-1 or, for regression, not finite.
        """
        groups = self._group_of(positions)
        # Runs of consecutive rows within one row group; each is copied at once.
        begins = np.flatnonzero((np.diff(positions, prepend=-2) != 1) | (np.diff(groups, prepend=-1) != 0))
        parts = []
        for begin, end in itertools.pairwise([*begins.tolist(), len(positions)]):
            self.touched()
            number = int(groups[begin])
            first = int(positions[begin] - self._ends[number] + self.row_groups[number])
            parts.append(self._group(number).slice(first, first + end - begin))
        # Even no rows have columns: take them from a cached row group if there is one.
        return Rows.joined(parts or [self._group(next(iter(self._held), 0)).slice(0, 0)], into)

    def _needed(self, positions: Ints) -> list[int]:
        """Return the row groups of these positions, sorted. Many positions share a group."""
        groups = self._group_of(positions)
        return sorted(set(groups[np.flatnonzero(np.diff(groups, prepend=-1))].tolist()))

    def _capacity_for(self, numbers: Iterable[int]) -> list[int]:
        """Return the groups that are not being read, up to the first that would exceed `AHEAD_BYTES`."""
        rows, chosen = sum(int(self.row_groups[number]) for number in self._coming), []
        for number in numbers:
            if number in self._coming:
                continue
            rows += int(self.row_groups[number])
            if rows * self.row_bytes > AHEAD_BYTES:
                break
            chosen.append(number)
        return chosen

    def _group_of(self, positions: Ints) -> Ints:
        found: Ints = np.searchsorted(self._ends, positions, side="right")
        return found

    def _group(self, number: int) -> Rows:
        held = self._held.get(number)
        if held is not None:
            self._held.move_to_end(number)
            return held
        if number in self._coming:
            reading, place = self._coming[number]
            try:
                with store_call():
                    read = reading.result()[place]
                del self._coming[number]
            except BaseException:  # the groups of the failed read are read again on request
                self._coming = {other: one for other, one in self._coming.items() if one[0] is not reading}
                raise
        else:
            (read,) = self._read([self._groups[number]])
        self._held[number] = read
        self._in_flight_bytes += read.size_bytes
        self.bytes_read += read.size_bytes
        while self._in_flight_bytes > self._capacity and len(self._held) > 1:
            self._in_flight_bytes -= self._held.popitem(last=False)[1].size_bytes
        return read

    def _read(self, groups: Sequence[RowGroup]) -> list[Rows]:
        """Read row groups, in any thread. Adjacent groups of one file are read together."""
        by_file = itertools.groupby(groups, lambda group: group.file_index)
        return [rows for _, of_file in by_file for rows in self._read_of_file(list(of_file))]

    def _read_of_file(self, groups: Sequence[RowGroup]) -> list[Rows]:
        labelled = [self._label_column] if self._label_column else []
        names = list(dict.fromkeys([*self._columns, *labelled, ROW_ID]))
        table = retry_on_outage(lambda: self._reader.read_many(groups, names), "row groups")
        row_ids: Ints = table.column(ROW_ID).to_numpy()
        ends = np.cumsum([group.row_count for group in groups]).tolist()
        for group, end in zip(groups, ends, strict=True):
            planned = np.arange(group.first_row_id, group.first_row_id + group.row_count)
            if not np.array_equal(row_ids[end - group.row_count : end], planned):
                raise DataLoss(
                    f"the rows stored at {group.first_row_id} and after carry other row ids", reason="WRONG_ROW_IDS"
                )
        labels = self._labels(table, row_ids)
        columns = batch_of(table.select(self._columns))
        tensors = {name: values for name, values in columns.items() if isinstance(values, np.ndarray)}
        scalars = {name: values for name, values in columns.items() if isinstance(values, pa.Array)}
        rows = Rows(tensors, pa.RecordBatch.from_pydict(scalars) if scalars else None, labels, row_ids)
        return [rows.slice(end - group.row_count, end) for group, end in zip(groups, ends, strict=True)]

    def _labels(self, table: pa.Table, row_ids: Ints) -> Array:
        if not self._label_column:
            return np.empty((len(row_ids), 0), np.int64)
        return labels_of(
            table,
            self._label_column,
            row_ids,
            self._num_classes,
            self._task,
            allow_non_finite=self._allow_non_finite,
        )


# --- Labels ---


def labels_of(
    table: pa.Table, column: str, row_ids: Ints, num_classes: int, task: str, *, allow_non_finite: bool = False
) -> NDArray[Any]:
    """Return classes, int64 (rows,), or for regression numbers, float32 (rows,) or (rows, K) of a tensor column.

    Raises `InvalidArgument` that names the first row whose label is missing, no class or, unless the job allows such,
    not finite.
    """
    _refuse_nulls(table, column, row_ids)
    if task == CLASSIFICATION:
        return _classes(table.column(column).to_numpy(), column, row_ids, num_classes)
    read = batch_of(table.select([column]))[column]
    values = read if isinstance(read, np.ndarray) else read.to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):  # values beyond float32 are reported as not finite
        numbers = values.astype(np.float32)
    if allow_non_finite:
        return numbers
    finite = np.isfinite(numbers).reshape(len(numbers), -1).all(1)
    if not finite.all():
        row = int(np.flatnonzero(~finite)[0])
        raise InvalidArgument(
            f"row {int(row_ids[row])} has the label {values[row]} in column {column!r}; labels must be finite float32 "
            "numbers, so filter or mend such rows in TransformVersion, or set spec.allow_non_finite",
            reason="NON_FINITE_LABEL",
            metadata={"row_id": str(int(row_ids[row]))},
            fields=[("spec.label_column", f"row {int(row_ids[row])}: {values[row]}")],
        )
    return numbers


def _classes(labels: NDArray[Any], column: str, row_ids: Ints, num_classes: int) -> NDArray[Any]:
    if labels.size and not (labels.min() >= 0 and labels.max() < num_classes):
        row = int(np.flatnonzero((labels < 0) | (labels >= num_classes))[0])
        raise InvalidArgument(
            f"row {int(row_ids[row])} has the label {int(labels[row])} in column {column!r}; "
            f"spec.model.num_classes is {num_classes}, so labels must be 0 to {num_classes - 1}",
            reason="LABEL_OUT_OF_RANGE",
            fields=[("spec.model.num_classes", f"a label is {int(labels[row])}")],
        )
    return labels.astype(np.int64)


def _refuse_nulls(table: pa.Table, column: str, row_ids: Ints) -> None:
    values = table.column(column)
    if values.null_count:
        row = int(row_ids[int(np.flatnonzero(values.is_null().to_numpy())[0])])
        raise InvalidArgument(
            f"column {column!r} has nulls, the first in row {row}; fill or drop them before training",
            reason="NULL_VALUES",
            metadata={"row_id": str(row)},
            fields=[("spec.label_column", f"row {row} has no label")],
        )


# --- Rows ---

Array = NDArray[Any]
# Reusable tensors by column. For a large tensor the allocation costs more than the copy.
RowBuffers = dict[str, Array]


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows in some order: columns as stored, `labels`, and `row_ids` int64 (rows,).

    Labels are classes, int64 (rows,), or for regression numbers, float32 (rows,) or (rows, K). `tensors` are (rows,
    *shape) each. `scalars` holds all other columns, so that one call of Arrow copies them all; None if there are none.
    """

    tensors: dict[str, Array]
    scalars: pa.RecordBatch | None
    labels: Array
    row_ids: Ints

    @classmethod
    def joined(cls, parts: Sequence[Rows], into: RowBuffers | None = None) -> Rows:
        """Concatenate parts with equal columns. The tensors use the memory of `into`, if given."""
        if len(parts) == 1:
            return parts[0]
        scalars = [part.scalars for part in parts if part.scalars is not None]
        buffers = {} if into is None else into
        return cls(
            {name: _concatenated([part.tensors[name] for part in parts], name, buffers) for name in parts[0].tensors},
            pa.concat_batches(scalars) if scalars else None,
            np.concatenate([part.labels for part in parts]),
            np.concatenate([part.row_ids for part in parts]),
        )

    def take(self, places: Ints) -> Rows:
        """Return copies of the rows at these indices, in that order."""
        return Rows(
            {name: values.take(places, axis=0) for name, values in self.tensors.items()},
            None if self.scalars is None else self.scalars.take(pa.array(places)),
            self.labels.take(places, axis=0),
            self.row_ids.take(places),
        )

    def slice(self, begin: int, end: int) -> Rows:
        """Return rows [begin, end) without a copy."""
        return Rows(
            {name: values[begin:end] for name, values in self.tensors.items()},
            None if self.scalars is None else self.scalars.slice(begin, end - begin),
            self.labels[begin:end],
            self.row_ids[begin:end],
        )

    def batch(self) -> Batch:
        """Return the columns as a pipeline takes them."""
        if self.scalars is None:
            return dict(self.tensors)
        return {**dict(zip(self.scalars.schema.names, self.scalars.columns, strict=True)), **self.tensors}

    @property
    def size_bytes(self) -> int:
        tensors = sum(values.nbytes for values in self.tensors.values())
        scalars = 0 if self.scalars is None else self.scalars.nbytes
        return tensors + scalars + self.labels.nbytes + self.row_ids.nbytes


def _concatenated(tensors: Sequence[Array], name: str, buffers: RowBuffers) -> Array:
    rows = sum(map(len, tensors))
    if name not in buffers or len(buffers[name]) < rows:
        buffers[name] = np.empty((rows, *tensors[0].shape[1:]), tensors[0].dtype)
    return np.concatenate(tensors, out=buffers[name][:rows])


def bytes_of_row(version: DatasetVersion, split: str, columns: Sequence[str]) -> int:
    """Estimate the memory of one row's columns, in bytes, from the manifest alone.

    A column whose type has no fixed size counts with the bytes of the files.
    """
    types = schema_of_columns(version.columns)
    rows = sum(one.row_count for one in version.manifest.splits if one.name == split)
    stored = version.manifest.bytes_of_split(split) // max(1, rows)
    sizes = [row_bytes(arrow_schema({name: types[name]})) for name in columns]
    return sum(size or 0 for size in sizes) + (stored if None in sizes else 0)
