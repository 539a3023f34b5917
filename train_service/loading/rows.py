"""Rows of a version on their way into a batch: as stored, with labels and ids, column by column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shared.dataset_version import DatasetVersion
from shared.dataset_version.columns import row_bytes
from shared.transforms import Batch, arrow_schema, schema_of_columns
from train_service.domain.order import Ints

Array = NDArray[Any]
# Tensors by column that are there to be written over: a large one that is made anew costs more than its copying.
RowBuffers = dict[str, Array]


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

    @classmethod
    def joined(cls, parts: Sequence[Rows], into: RowBuffers | None = None) -> Rows:
        """The rows of all parts, which have the same columns, one part after the other; with `into`, their tensors in
        its."""
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
        """Copies of the rows at these places, in that order."""
        return Rows(
            {name: values.take(places, axis=0) for name, values in self.tensors.items()},
            None if self.scalars is None else self.scalars.take(pa.array(places)),
            self.labels.take(places, axis=0),
            self.row_ids.take(places),
        )

    def slice(self, begin: int, end: int) -> Rows:
        """These rows, without a copy."""
        return Rows(
            {name: values[begin:end] for name, values in self.tensors.items()},
            None if self.scalars is None else self.scalars.slice(begin, end - begin),
            self.labels[begin:end],
            self.row_ids[begin:end],
        )

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


def _concatenated(tensors: Sequence[Array], name: str, buffers: RowBuffers) -> Array:
    rows = sum(map(len, tensors))
    if name not in buffers or len(buffers[name]) < rows:
        buffers[name] = np.empty((rows, *tensors[0].shape[1:]), tensors[0].dtype)
    return np.concatenate(tensors, out=buffers[name][:rows])


def bytes_of_row(version: DatasetVersion, split: str, columns: Sequence[str]) -> int:
    """About what these columns of a row take in memory, by the manifest alone: where their types do not say, by the
    bytes of the files."""
    types = schema_of_columns(version.columns)
    files = [file for file in version.manifest.files if file.split == split]
    stored = sum(file.size_bytes for file in files) // max(1, sum(file.row_count for file in files))
    sizes = [row_bytes(arrow_schema({name: types[name]})) for name in columns]
    return sum(size or 0 for size in sizes) + (stored if None in sizes else 0)
