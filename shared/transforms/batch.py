"""Batches of rows, column by column, as the steps pass them on.

B = rows of the batch, H = height, W = width, C = channels.

Random numbers that are a pure function of (seed, epoch, row id, place of the step): nothing to carry along.

SplitMix64 (Steele, Lea and Flood 2014) used as a hash: each part is mixed into the state in its turn, so streams of
neighbouring rows, epochs and steps have nothing to do with each other. Overflow of uint64 is meant.
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
    """B uint8 images, each (H, W) or (H, W, C), of sizes that may differ from row to row.

    `shape` is that of one row, with None for what differs: it tells the channels of no images, too.
    """

    images: tuple[Array, ...]
    shape: tuple[int | None, ...]

    def __len__(self) -> int:
        return len(self.images)


# Scalars are a pa.Array, tensors an array (B, *shape), images of unequal sizes RaggedImages. (pyarrow publishes no
# types: a union with it would make mypy ask for casts at every use, and check nothing.)
Column: TypeAlias = Any
# In the order of the columns; all have B rows.
Batch = dict[str, Column]


def row_count(batch: Batch) -> int:
    """B; 0 for a batch without columns."""
    return len(next(iter(batch.values()))) if batch else 0


def batch_of(table: pa.Table | pa.RecordBatch) -> Batch:
    """A batch of a version's logical columns; tensors come as (B, *shape), without a copy where they are in one chunk.

    Raises `InvalidArgument` for a tensor column with nulls.
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
    """The logical columns of `schema`, with the batch's values, each in one chunk.

    Raises `ValueError` for a column that is missing or not of the type that `schema` says.
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
    """The rows where `kept`, of shape (B), is true."""
    return {name: _take(column, kept) for name, column in batch.items()}


def joined(parts: Iterable[Batch]) -> Batch:
    """The rows of all parts, which have the same columns, one part after the other."""
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
    """Numbers as float64 (B), 0 where null, and where they are valid (B)."""
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
    """Which rows a batch of training has; `row_ids` has shape (B). The seed counts modulo 2**64."""

    seed: int
    epoch: int
    row_ids: NDArray[np.int64]

    def take(self, kept: NDArray[np.bool_]) -> RowKeys:
        return RowKeys(self.seed, self.epoch, self.row_ids[kept])

    def at(self, place: int) -> StepKeys:
        return StepKeys(self, place)


@dataclass(frozen=True, eq=False)
class StepKeys:
    """The rows of a batch as the step at `place` of the pipeline draws for them."""

    rows: RowKeys
    place: int

    def uniform(self, count: int) -> NDArray[np.float64]:
        """(B, count) numbers drawn evenly from [0, 1), each a multiple of 2**-53."""
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
