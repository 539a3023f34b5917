"""A batch of rows, column by column, as steps pass it on; and a step, which is a pure function of a batch of rows.

The schema has the types of the columns, known before any row is read. An error concerns the step itself, the columns
given to it, or one row. A row's result is bit for bit the same whatever the other rows of the batch are.

B = rows of the batch, H = height, W = width, C = channels.

The random numbers of augmentations are a pure function of (seed, epoch, row id, index of the step), so no generator
state is kept. SplitMix64 (Steele, Lea and Flood 2014) is used as a hash: each part is mixed into the state in turn, so
the streams of neighbouring rows, epochs and steps are independent. Overflow of uint64 is intended.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millrace.common.v1 import transform_pb2
from shared.dataset_version.manifest import Column as ManifestColumn
from shared.dataset_version.manifest import is_tensor, refuse_nulls, tensor_array, tensor_field
from shared.errors import InvalidArgument, shown

# --- Schema ---

_TENSOR = re.compile(r"fixed_shape_tensor\[value_type=(\w+)")
# Any zone; `scalar_remedy` decides which zones a version keeps.
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns), tz=(.+)\]", re.DOTALL)
_DECIMAL = re.compile(r"decimal(?:128)?\((\d+), ?(-?\d+)\)")
_FIXED_BINARY = re.compile(r"fixed_size_binary\[(\d+)\]")


@dataclass(frozen=True)
class ScalarType:
    """One value per row."""

    arrow_type: pa.DataType
    nullable: bool = True

    def __str__(self) -> str:
        return str(self.arrow_type)


@dataclass(frozen=True)
class TensorType:
    """An array per row: its numpy dtype name, and its shape without B.

    None is a length that is not fixed, or not yet known.
    """

    dtype: str
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        lengths = ", ".join("?" if length is None else str(length) for length in self.shape)
        return f"{self.dtype} of shape ({lengths})"


ColumnType = ScalarType | TensorType
# In the order of the columns.
Schema = dict[str, ColumnType]


@dataclass(frozen=True)
class TensorSpec:
    """One row of a tensor: its name, numpy dtype name and shape without the batch axis."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def schema_of(arrow: pa.Schema) -> Schema:
    """Return the schema of logical columns."""
    schema: Schema = {}
    for field in arrow:
        if is_tensor(field.type):
            schema[field.name] = TensorType(_dtype_name(field.type.value_type), tuple(field.type.shape))
        else:
            schema[field.name] = ScalarType(field.type, field.nullable)
    return schema


def arrow_schema(schema: Schema) -> pa.Schema:
    """Return the logical columns. Raises `ValueError`, naming a column whose shape is not fixed."""
    fields = []
    for name, given in schema.items():
        if isinstance(given, ScalarType):
            fields.append(pa.field(name, given.arrow_type, nullable=given.nullable))
            continue
        shape = tuple(length for length in given.shape if length is not None)
        if len(shape) < len(given.shape):
            raise ValueError(f"column {name!r} is {given}; fix its shape, images by resize, center_crop or random_crop")
        fields.append(tensor_field(name, pa.from_numpy_dtype(np.dtype(given.dtype)), shape))
    return pa.schema(fields)


def schema_of_columns(columns: Iterable[ManifestColumn]) -> Schema:
    """Return the schema of a manifest's columns."""
    schema: Schema = {}
    for column in columns:
        tensor = _TENSOR.search(column.arrow_type)
        if tensor is not None:
            schema[column.name] = TensorType(_dtype_name(arrow_type_of(tensor.group(1))), tuple(column.shape))
        else:
            schema[column.name] = ScalarType(arrow_type_of(column.arrow_type))
    return schema


def arrow_type_of(spelling: str) -> pa.DataType:
    """Invert `str` of the scalar types that a version may keep; Arrow's aliases are accepted, too.

    Raises `ValueError` for any other spelling.
    """
    if match := _TIMESTAMP.fullmatch(spelling):
        return pa.timestamp(match.group(1), match.group(2))
    if match := _DECIMAL.fullmatch(spelling):
        return pa.decimal128(int(match.group(1)), int(match.group(2)))
    if match := _FIXED_BINARY.fullmatch(spelling):
        return pa.binary(int(match.group(1)))
    return pa.type_for_alias(spelling)


def _dtype_name(value_type: pa.DataType) -> str:
    # Arrow's `float` is numpy's float32.
    return str(np.dtype(value_type.to_pandas_dtype()).name)


# --- Problems of steps ---


class StepError(ValueError):
    """The step is invalid, or does not fit its columns.

    `at` is the path below the step of the faulty field, e.g. `resize.height`; empty: the whole step.
    """

    def __init__(self, message: str, at: str = "") -> None:
        super().__init__(message)
        self.at = at


class RowProblem(ValueError):
    """The step cannot process one row. `row` is its index in the step's batch."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


class RowError(InvalidArgument):
    """A row that a step cannot process.

    `row` is its index in the pipeline's batch, `path` is the step's, e.g. `transform.steps[2]`. `problem` omits both,
    so that the error can be reported again with the row's id.
    """

    def __init__(self, path: str, row: int, problem: str) -> None:
        super().__init__(
            f"{path}: row {row} of the batch: {problem}",
            reason="BAD_ROW",
            metadata={"field": path, "row": str(row)},
            fields=[(path, problem)],
        )
        self.path = path
        self.row = row
        self.problem = problem

    def __reduce__(self) -> tuple[Any, ...]:
        return (RowError, (self.path, self.row, self.problem))

    def as_record(self) -> dict[str, Any]:
        return {**super().as_record(), "kind": InvalidArgument.__name__}


def step_error(path: str, error: StepError) -> InvalidArgument:
    """Make the error that callers see for a step at `path`, e.g. `transform.steps[2]`."""
    where = f"{path}.{error.at}" if error.at else path
    return InvalidArgument(
        f"{where}: {error}", reason="INVALID_FIELD", metadata={"field": where}, fields=[(where, str(error))]
    )


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


# --- Interface of a step ---

Names = frozenset[str]


class FitAccumulator(Protocol):
    """Learns from any number of batches.

    The result is the same to the last bit for any order and cut of the rows.
    """

    def update(self, column: Column) -> None:
        """Add a batch. Raises `RowProblem` for an unsuitable row, `StepError` if there is too much to keep."""

    def merge(self, other: Any) -> None:
        """Add what an accumulator of the same step has seen."""

    def fitted_step(self) -> Step:
        """Return the fitted step. Raises `StepError` if the rows seen do not suffice."""


class Step(ABC):
    """Base of all steps. `op` is the step's field in `TransformStep.op`."""

    op: ClassVar[str]
    # Whether the step drops rows (only `filter`). All other steps work row by row.
    drops_rows: ClassVar[bool] = False
    # Whether the step draws random numbers from the rows' keys in training.
    augments: ClassVar[bool] = False
    # Whether the step works on the column that `TransformStep.column` names.
    takes_column: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def from_message(cls, message: Any, column: str) -> Self:
        """Make the step from a message of the type of `op`. Raises `StepError`."""

    @abstractmethod
    def to_proto(self) -> transform_pb2.TransformStep:
        """Invert `from_message`, including what was learned."""

    @property
    @abstractmethod
    def reads(self) -> tuple[str, ...]:
        """The columns that the step works on."""

    @property
    def row_wise(self) -> bool:
        return not self.drops_rows

    @property
    def fitted(self) -> bool:
        """True if the step has nothing left to learn."""
        return True

    def accumulator(self, column_type: ColumnType) -> FitAccumulator:
        """Return an accumulator for the step's one column, `column_type`. Only for a step that is not fitted."""
        raise NotImplementedError(f"{self.op} learns nothing")

    @abstractmethod
    def output(self, schema: Schema) -> Schema:
        """Return the columns after the step. Raises `StepError`, saying what the step needs instead."""

    def check_request(self, schema: Schema) -> None:
        """Refuse what new requests may no longer ask for; earlier recorded steps still run.

        Raises `StepError`.
        """
        return

    @abstractmethod
    def apply(self, batch: Batch, keys: StepKeys | None) -> Batch:
        """Process all rows at once, never in place; `keys` are those of training rows, else None.

        Raises `RowProblem` for a row that the step cannot process.
        """

    @abstractmethod
    def sources(self, needed: Names, schema: Schema) -> Names:
        """Return the columns of `schema` that the step needs to make the `needed` columns."""

    @abstractmethod
    def narrowed(self, needed: Names, schema: Schema) -> Step | None:
        """Return the step reduced to the `needed` columns; None if they do not need it."""

    def serving_form(self) -> Step | None:
        """Return the step for serving; None if it has no meaning there."""
        return None if self.augments or self.drops_rows else self


@dataclass(frozen=True)
class ColumnStep(Step):
    """Reads one column and replaces it."""

    takes_column: ClassVar[bool] = True
    column: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.column,)

    def message(self) -> Any:
        """The step's own message, of the type of `op`."""
        return getattr(transform_pb2.TransformStep(), self.op)

    def to_proto(self) -> transform_pb2.TransformStep:
        step = transform_pb2.TransformStep(column=self.column)
        getattr(step, self.op).CopyFrom(self.message())
        getattr(step, self.op).SetInParent()
        return step

    def output(self, schema: Schema) -> Schema:
        known(schema, [self.column], "column")
        return {name: self.output_type(one) if name == self.column else one for name, one in schema.items()}

    def apply(self, batch: Batch, keys: StepKeys | None) -> Batch:
        return {name: self.work(one, keys) if name == self.column else one for name, one in batch.items()}

    def sources(self, needed: Names, schema: Schema) -> Names:
        return needed

    def narrowed(self, needed: Names, schema: Schema) -> Step | None:
        return self if self.column in needed else None

    @abstractmethod
    def output_type(self, column_type: ColumnType) -> ColumnType:
        """Return the column's type after the step. Raises `StepError`."""

    @abstractmethod
    def work(self, column: Column, keys: StepKeys | None) -> Column:
        """Return the column's values after the step. Raises `RowProblem`."""


def known(schema: Schema, names: Collection[str], at: str) -> None:
    """Raise `StepError` for a missing column; `at` is the path of the field that names it."""
    for index, name in enumerate(names):
        if name not in schema:
            where = at if at == "column" else f"{at}[{index}]"
            raise StepError(f"there is no column {shown(name)}; there are {', '.join(schema) or 'none'}", where)


def scalar(column_type: ColumnType, needs: str) -> ScalarType:
    """Return a scalar type. Raises `StepError` with `needs`, e.g. `cast needs a scalar column`, for a tensor."""
    if not isinstance(column_type, ScalarType):
        raise StepError(f"{needs}, not {column_type}")
    return column_type


def first_failing_row(rows: int, works: Callable[[int, int], bool]) -> int:
    """Find the first of `rows` rows that does not work by itself, by halving.

    `works(start, end)` tries some of them. One of them must fail.
    """
    start, end = 0, rows
    while end - start > 1:
        middle = (start + end) // 2
        if works(start, middle):
            start = middle
        else:
            end = middle
    return start
