"""NaN in rows for a model: which NaN mean null, and which rows the model cannot answer.

pandas writes a NaN for a missing float, but a dataset version has null there. Serving and predictions over versions
both read NaN by this module, so that a row gets the same answer from either.

B = rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds
from numpy.typing import NDArray

from shared.checkpoint.format import CheckpointContent
from shared.transforms import Batch, Pipeline, ScalarType, Schema, TensorType
from shared.transforms.batch import ColumnType, Step
from shared.transforms.steps.columns import Drop, Rename, Select
from shared.transforms.steps.custom import Custom
from shared.transforms.steps.fitted import FillNulls, OneHotEncode

Array = NDArray[Any]
# Steps that define a value for null.
_TAKE_NULLS = (FillNulls, OneHotEncode, Custom)
_KEEP_VALUES = (Select, Drop, Rename)


@dataclass(frozen=True)
class BadRow:
    """A row without an answer: the columns at fault, and the problem."""

    columns: Sequence[str]
    problem: str


@dataclass(frozen=True)
class NanPolicy:
    """Reading of NaN in float columns for which the steps define a value for null.

    In all other columns NaN is a number. A NaN in a column of `as_null` means null, because the model's training rows
    had no NaN there. In a column of `unclear` it may mean either, because the checkpoint does not record whether they
    had. Picklable.
    """

    as_null: frozenset[str] = frozenset()
    unclear: frozenset[str] = frozenset()

    def nulls_for_nans(self, batch: Batch) -> Batch:
        """Return the batch with null for each NaN of `as_null`. Columns without NaN are not copied."""
        return {name: _null_for_nan(column) if name in self.as_null else column for name, column in batch.items()}

    def bad_rows(self, prepared: Array, read: Sequence[str], floats: Callable[[], Batch]) -> dict[int, BadRow]:
        """Return, by index, the rows with a NaN in a column of `unclear`, and those whose model input is not finite.

        `prepared`, float32 (B, *shape) or records (B,), is the steps' output for the columns `read`. `floats` returns
        the float columns among them, after `nulls_for_nans`; it is called only if needed.
        """
        bad = ~finite_rows(prepared)
        if not self.unclear and not bad.any():
            return {}
        batch = floats()
        for name in self.unclear:
            bad |= np.isnan(_numbers(batch[name]))
        rows = np.flatnonzero(bad)
        if not rows.size:
            return {}
        found: dict[int, list[tuple[str, float]]] = {row: [] for row in rows.tolist()}
        for name, column in batch.items():
            values = _numbers(column)[rows].reshape(len(rows), -1)
            for place in np.flatnonzero(~np.isfinite(values).all(axis=1)).tolist():
                first = values[place][~np.isfinite(values[place])][0]
                found[int(rows[place])].append((name, float(first)))
        return {row: self._bad_row(read, columns) for row, columns in found.items()}

    def _bad_row(self, read: Sequence[str], columns: Sequence[tuple[str, float]]) -> BadRow:
        if not columns:
            return BadRow(read, "the steps make a NaN or an infinity of this row")
        names = [name for name, _ in columns]
        value = columns[0][1]
        if np.isnan(value) and names[0] in self.unclear:
            why = "nan may mean null, and the checkpoint does not say whether its training had NaN here"
            return BadRow(names, f"{why}; make it null where that is meant")
        return BadRow(names, f"{value} is not finite, and no step fills it")


def nan_policy_of(
    content: CheckpointContent, steps: Sequence[Step], schema: Schema, gone: Sequence[Step] = ()
) -> NanPolicy:
    """Return how NaN is read in rows of `schema` columns, which go through `steps`.

    `gone` are the steps applied to them since ingest. A column that these have changed is no longer what clients send,
    and its NaN are numbers.
    """
    as_null, unclear = set(), set()
    before = Pipeline(gone)
    for name in _columns_with_null_value(steps, schema):
        ingested = _ingested_name(before, name, content.ingested_schema) if gone else name
        if ingested is None:
            continue
        counted = None if content.nan_counts is None else content.nan_counts.get(ingested)
        if counted is None:
            unclear.add(name)
        elif counted == 0:
            as_null.add(name)
    return NanPolicy(frozenset(as_null), frozenset(unclear))


def finite_rows(values: Array) -> NDArray[np.bool_]:
    """Return which rows (B,) of floats (B, *shape), or of records (B,), are entirely finite."""
    if values.dtype.names is not None:
        parts = [finite_rows(values[name]) for name in values.dtype.names]
        joint: NDArray[np.bool_] = np.logical_and.reduce(parts)
        return joint
    finite: Array = np.isfinite(values)
    # Nearly always all values are finite, which is faster to check than each row.
    if finite.all():
        return np.ones(len(values), np.bool_)
    whole: NDArray[np.bool_] = np.logical_and.reduce(finite.reshape(len(values), -1), axis=1)
    return whole


def may_be_non_finite(columns: Schema, images: Collection[str]) -> bool:
    """Return whether a model's input that is made of these columns must be checked.

    Pixels and other integer tensors need no check; `images` are the columns of encoded images.
    """
    return any(
        name not in images and (isinstance(column, ScalarType) or _is_float(column)) for name, column in columns.items()
    )


def float_columns(columns: Schema) -> list[str]:
    """Return the columns that hold floats, scalars or tensors."""
    return [name for name, column in columns.items() if _is_float(column)]


def _columns_with_null_value(steps: Sequence[Step], schema: Schema) -> list[str]:
    """Return the scalar float columns that are read by a step with a value for null."""
    floats = [name for name in float_columns(schema) if isinstance(schema[name], ScalarType)]
    if not floats:
        return []
    read: set[str] = set()
    for index, step in enumerate(steps):
        if isinstance(step, _TAKE_NULLS):
            read.update(Pipeline(steps[:index]).reads(step.reads, schema))
    return [name for name in floats if name in read]


def _ingested_name(gone: Pipeline, name: str, ingested: Schema) -> str | None:
    """Return the column's name at ingest. None if a step made it, or changed its values."""
    if not all(isinstance(step, _KEEP_VALUES) for step in gone.serving([name], ingested).steps):
        return None
    return gone.serving([name], ingested).reads([name], ingested)[0]


def _null_for_nan(column: pa.Array) -> pa.Array:
    numbers = _numbers(column)
    nans = np.isnan(numbers)
    if not nans.any():
        return column
    return pa.array(numbers, column.type, mask=nans | column.is_null().to_numpy(zero_copy_only=False))


def _numbers(column: Any) -> Array:
    """Return floats (B, *shape), 0 for null."""
    if isinstance(column, np.ndarray):
        return column
    filled = column.fill_null(pa.scalar(0.0).cast(column.type)) if column.null_count else column
    numbers: Array = filled.to_numpy(zero_copy_only=False)
    return numbers


def _is_float(column_type: ColumnType) -> bool:
    if isinstance(column_type, TensorType):
        return np.dtype(column_type.dtype).kind == "f"
    return bool(kinds.is_floating(column_type.arrow_type))
