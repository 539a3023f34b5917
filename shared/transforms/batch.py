"""Batches of rows, column by column, as the steps pass them on; and random numbers for augmentations.

B = rows of the batch, H = height, W = width, C = channels.

Random numbers are a pure function of (seed, epoch, row id, index of the step), so no generator state is kept.
SplitMix64 (Steele, Lea and Flood 2014) is used as a hash: each part is mixed into the state in turn, so the streams of
neighbouring rows, epochs and steps are independent. Overflow of uint64 is intended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shared.dataset_version.columns import is_tensor, refuse_nulls, tensor_array

# --- Batch ---

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class RaggedImages:
    """B uint8 images, each (H, W) or (H, W, C), whose sizes may differ from row to row.

    `shape` is that of one row, with None for lengths that differ. It keeps the number of channels even for B = 0.
    """

    images: tuple[Array, ...]
    shape: tuple[int | None, ...]

    def __len__(self) -> int:
        return len(self.images)


# Scalars are a pa.Array, tensors an array (B, *shape), images of unequal sizes RaggedImages. (pyarrow publishes no
# types, so with a union mypy would ask for casts at every use, and check nothing.)
Column: TypeAlias = Any
# In the order of the columns. All columns have B rows.
Batch = dict[str, Column]


def row_count(batch: Batch) -> int:
    """Return B; 0 for a batch without columns."""
    return len(next(iter(batch.values()))) if batch else 0


def batch_of(table: pa.Table | pa.RecordBatch) -> Batch:
    """Make a batch of a version's logical columns.

    Tensors become (B, *shape), without a copy if they are in one chunk. Raises `InvalidArgument` for a tensor column
    with nulls.
    """
    batch: Batch = {}
    for field, column in zip(table.schema, table.columns, strict=True):
        array = _one_chunk(column)
        if is_tensor(field.type):
            refuse_nulls(field.name, pa.chunked_array([array]))
            array = array.storage.flatten().to_numpy().reshape(len(array), *field.type.shape)
        batch[field.name] = array
    return batch


def table_of(batch: Batch, schema: pa.Schema) -> pa.Table:
    """Return the batch's values as the logical columns of `schema`, each in one chunk.

    Raises `ValueError` for a column that is missing or not of the type in `schema`.
    """
    columns = []
    for field in schema:
        if field.name not in batch:
            raise ValueError(f"the batch has no column {field.name!r}, only {', '.join(batch) or 'none'}")
        column = batch[field.name]
        if isinstance(column, RaggedImages):
            raise ValueError(f"column {field.name!r} has images of unequal sizes; resize or crop them first")
        array = tensor_array(column) if isinstance(column, np.ndarray) else column
        if array.type != field.type:
            raise ValueError(f"column {field.name!r} is {array.type}, not {field.type}")
        columns.append(array)
    return pa.Table.from_arrays(columns, schema=schema)


def take_rows(batch: Batch, kept: NDArray[np.bool_]) -> Batch:
    """Return the rows where `kept`, of shape (B), is true."""
    return {name: _take(column, kept) for name, column in batch.items()}


def joined(parts: Iterable[Batch]) -> Batch:
    """Concatenate the rows of all parts, which have the same columns."""
    batches = list(parts)
    out: Batch = {}
    for name in batches[0]:
        columns = [batch[name] for batch in batches]
        if isinstance(columns[0], RaggedImages):
            out[name] = RaggedImages(tuple(image for column in columns for image in column.images), columns[0].shape)
        elif isinstance(columns[0], np.ndarray):
            out[name] = np.concatenate(columns)
        else:
            out[name] = pa.concat_arrays(columns)
    return out


def float64_of(scalars: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return numbers as float64 (B), with 0 for nulls, and whether they are valid (B)."""
    valid = scalars.is_valid().to_numpy(zero_copy_only=False)
    filled = scalars.fill_null(0) if scalars.null_count else scalars
    return filled.to_numpy(zero_copy_only=False).astype(np.float64), valid


def _take(column: Column, kept: NDArray[np.bool_]) -> Column:
    if isinstance(column, RaggedImages):
        return RaggedImages(tuple(column.images[index] for index in np.flatnonzero(kept)), column.shape)
    if isinstance(column, np.ndarray):
        return column[kept]
    return column.filter(pa.array(kept))


def _one_chunk(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    if column.num_chunks == 0:
        return pa.array([], column.type)
    combined = column.combine_chunks()
    return combined.chunk(0) if isinstance(combined, pa.ChunkedArray) else combined


# --- Random numbers ---

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LARGEST = 2**64 - 1


@dataclass(frozen=True, eq=False)
class RowKeys:
    """The rows of a training batch. `row_ids` has shape (B). The seed counts modulo 2**64."""

    seed: int
    epoch: int
    row_ids: NDArray[np.int64]

    def take(self, kept: NDArray[np.bool_]) -> RowKeys:
        return RowKeys(self.seed, self.epoch, self.row_ids[kept])

    def at(self, place: int) -> StepKeys:
        return StepKeys(self, place)


@dataclass(frozen=True, eq=False)
class StepKeys:
    """The random streams of the step at index `place` of the pipeline, for the batch's rows."""

    rows: RowKeys
    place: int

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Return (B, count) uniform numbers in [0, 1), each a multiple of 2**-53."""
        state = np.zeros(1, np.uint64)
        for part in (self.rows.seed, self.rows.epoch, self.place):
            state = _mix((state ^ np.array([part & _LARGEST], np.uint64)) + _GOLDEN)
        of_row = _mix((state ^ self.rows.row_ids.astype(np.uint64)) + _GOLDEN)
        draws = _mix(of_row[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)
        return (draws >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
