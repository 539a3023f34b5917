"""Predictions by a program's checkpoint: its bundle's predictor on the rows of a part.

The predictor's code runs in workers of Ray alone, as in a replica. So what it takes and gives is found there first, and
checked against the source before any row is read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds

from data_service.domain.bad_rows import excerpt
from data_service.domain.transform_spec import CheckpointRef, PredictSpec, Workers
from data_service.transforms.checking import PredictionColumns
from data_service.transforms.plan import PartitionRange
from data_service.transforms.predict_work import set_threads, where
from data_service.transforms.work import LeftOut, SplitRows, TransformedRows, VersionRows, bad_row
from shared.bundle_predictor import FREE, Array, BundlePredictor, DeclaredTensor
from shared.checkpoint.format import load_program_checkpoint, node_copy
from shared.code_bundle_registry import load_code
from shared.dataset_version import Manifest
from shared.dataset_version.manifest import name_problem, tensor_array, tensor_field
from shared.errors import FailedPrecondition, InvalidArgument, invalid_field, invalid_fields
from shared.settings import StoreSettings
from shared.storage import open_store
from shared.transforms import TensorType
from shared.transforms.batch import ColumnType, Schema, batch_of, schema_of_columns

logger = logging.getLogger(__name__)

BYTES = "BYTES"

# --- What a predictor takes and gives ---


@dataclass(frozen=True)
class Declaration:
    """The inputs and outputs that a predictor declares."""

    inputs: tuple[DeclaredTensor, ...]
    outputs: tuple[DeclaredTensor, ...]


@dataclass(frozen=True)
class ProgramPredictor:
    """The predictor of a program's checkpoint. Picklable; `entry` is `PredictSpec.predictor`."""

    settings: StoreSettings
    checkpoint: CheckpointRef
    entry: str

    def load(self) -> BundlePredictor:
        """Make the predictor in this process.

        Only workers of Ray call it: the service that created the job has checked that such code may run. Raises
        `DataLoss` for a damaged checkpoint, and what `BundlePredictor` raises.
        """
        store = open_store(self.settings)
        content = load_program_checkpoint(store, self.checkpoint.folder, self.checkpoint.sha256)
        load_code(store, content.code_bundle)
        files = node_copy(store, self.checkpoint.folder, self.checkpoint.sha256)
        logger.info("making the predictor of %s", self.checkpoint.name)
        return BundlePredictor(content, self.entry, files)


@dataclass(frozen=True)
class Declare:
    """The work that finds a predictor's declaration. It reads no rows of its part."""

    program: ProgramPredictor

    def __call__(self, _part: PartitionRange) -> Declaration:
        predictor = self.program.load()
        return Declaration(predictor.inputs, predictor.outputs)


# --- Columns ---


def check_inputs(inputs: Sequence[DeclaredTensor], source: Manifest, source_name: str) -> None:
    """Raise `InvalidArgument` naming each input that no column of the source fits."""
    there = schema_of_columns(source.columns)
    problems = [
        ("source", source_name, problem) for one in inputs if (problem := _input_problem(one, there)) is not None
    ]
    if problems:
        raise invalid_fields(problems)


def _input_problem(declared_tensor: DeclaredTensor, schema: Schema) -> str | None:
    takes = f"the predictor takes {declared_tensor.datatype} of shape {list(declared_tensor.shape)}"
    if declared_tensor.name not in schema:
        remedy = "rename a column, or name another version"
        if len(declared_tensor.shape) == 1 and declared_tensor.datatype != BYTES:
            remedy = f"make it of several columns by the step concat, {remedy}"
        return f"column {declared_tensor.name!r} is missing: {takes}; {remedy}"
    given = schema[declared_tensor.name]
    if _fits_shape(given, declared_tensor) and _converts(given, declared_tensor):
        return None
    return f"column {declared_tensor.name!r} is {given}: {takes}; change it by a transform, or the predictor"


def _fits_shape(column_type: ColumnType, declared_tensor: DeclaredTensor) -> bool:
    if isinstance(column_type, TensorType):
        return None not in column_type.shape and declared_tensor.takes(tuple(size or 0 for size in column_type.shape))
    return declared_tensor.shape in ((), (1,), (FREE,))


def _converts(column_type: ColumnType, declared_tensor: DeclaredTensor) -> bool:
    """Return whether all values may be converted: integers without loss, and numbers to floats of any width."""
    if isinstance(column_type, TensorType):
        dtype = np.dtype(column_type.dtype)
    elif declared_tensor.datatype == BYTES:
        return bool(kinds.is_string(column_type.arrow_type) or kinds.is_binary(column_type.arrow_type))
    elif (
        kinds.is_boolean(column_type.arrow_type)
        or kinds.is_integer(column_type.arrow_type)
        or kinds.is_floating(column_type.arrow_type)
    ):
        dtype = np.dtype(column_type.arrow_type.to_pandas_dtype())
    else:
        return False
    if declared_tensor.dtype.kind == "O":
        return False
    return bool(np.can_cast(dtype, declared_tensor.dtype, "safe")) or (
        dtype.kind in "iuf" and declared_tensor.dtype.kind == "f"
    )


@dataclass(frozen=True)
class OutputColumns(PredictionColumns):
    """The added columns, by the name of the output.

    Picklable.
    """

    outputs: Sequence[DeclaredTensor] = ()

    def arrays(self, outputs: Sequence[Array]) -> list[pa.Array]:
        """Returns an array of B values for each column; `outputs` are those of `BundlePredictor.predict`."""
        by_name = {output.name: array for output, array in zip(self.outputs, outputs, strict=True)}
        return [_column(by_name[name], field.type) for name, field in self.fields.items()]


def output_columns(spec: PredictSpec, declared: Sequence[DeclaredTensor]) -> OutputColumns:
    """Raises `InvalidArgument` for an output that the predictor lacks, or that no version can keep as a column."""
    there = {one.name: one for one in declared}
    for index, name in enumerate(spec.outputs):
        if name not in there:
            raise invalid_field(f"outputs[{index}]", name, f"use some of {', '.join(there)}")
    wanted = [name for name in there if not spec.outputs or name in spec.outputs]
    fields = {name: _output_field(spec.column_prefix + name, there[name]) for name in wanted}
    return OutputColumns(fields, outputs=tuple(declared))


def _output_field(name: str, declared: DeclaredTensor) -> pa.Field:
    if problem := name_problem(name):
        raise invalid_field("column_prefix", name, problem)
    if declared.datatype == BYTES:
        if declared.shape:
            raise _no_column(declared, "a column of text has one value a row")
        return pa.field(name, pa.string(), nullable=False)
    if FREE in declared.shape:
        raise _no_column(declared, "the values of a column have one shape")
    if not declared.shape:
        return pa.field(name, pa.from_numpy_dtype(declared.dtype), nullable=False)
    # A tensor holds numbers only.
    dtype = np.dtype(np.uint8) if declared.dtype.kind == "b" else declared.dtype
    return tensor_field(name, pa.from_numpy_dtype(dtype), declared.shape)


def _no_column(declared: DeclaredTensor, why: str) -> InvalidArgument:
    given = f"{declared.datatype} of shape {list(declared.shape)}"
    return invalid_field("outputs", declared.name, f"it is {given}, and {why}; name the others in outputs")


def _column(values: Array, kind: pa.DataType) -> pa.Array:
    if kinds.is_string(kind):
        return pa.array([_text(one) for one in values.tolist()], pa.string())
    if isinstance(kind, pa.FixedShapeTensorType):
        return tensor_array(values.astype(np.uint8) if values.dtype.kind == "b" else values)
    return pa.array(values, kind)


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, str):
        return value
    raise ValueError(f"a {type(value).__name__} in an output of BYTES")


# --- Rows ---


@dataclass(frozen=True)
class PreparedInputs:
    """Rows with the predictor's inputs by name, each (B, *shape)."""

    rows: SplitRows
    values: Mapping[str, Array]
    left_out: Sequence[LeftOut] = ()


@dataclass(frozen=True)
class InputRows:
    """Makes the predictor's inputs of columns.

    With `quarantines`, rows with a null in an input are left out; otherwise the first one is an `InvalidArgument` that
    names it. As a `RowMaker` it makes no column, so it can count the remaining rows.
    """

    source: VersionRows
    inputs: Sequence[DeclaredTensor]
    kept: Sequence[str]
    quarantines: bool
    schema: pa.Schema = pa.schema([])  # noqa: RUF009 (it is immutable)

    def rows(self, part: PartitionRange) -> Iterator[TransformedRows]:
        for one in self.prepared(part):
            yield TransformedRows(part.split, pa.table({}), one.rows.row_ids, one.left_out)

    def prepared(self, part: PartitionRange) -> Iterator[PreparedInputs]:
        names = [one.name for one in self.inputs]
        columns = [*self.kept, *(name for name in names if name not in self.kept)]
        for rows in self.source.divided(part, columns):
            nulls = {name: rows.table.column(name).is_null().to_numpy() for name in names}
            good = ~np.logical_or.reduce(list(nulls.values()))
            left_out = [
                LeftOut(int(rows.row_ids[row]), _null_of(nulls, row), excerpt(rows.table.select(self.kept), row))
                for row in np.flatnonzero(~good).tolist()
            ]
            if left_out and not self.quarantines:
                first = left_out[0]
                raise bad_row("predictor", f"row {first.row_id}: {first.reason}", {"row_id": str(first.row_id)})
            left = where(rows, good) if left_out else rows
            batch = batch_of(left.table.select(names))
            yield PreparedInputs(left, {one.name: _values(batch[one.name], one) for one in self.inputs}, left_out)


def _null_of(nulls: Mapping[str, Array], row: int) -> str:
    names = ", ".join(repr(name) for name, flags in nulls.items() if flags[row])
    return f"column {names}: null, which the predictor's inputs have no place for"


def _values(column: Any, declared_tensor: DeclaredTensor) -> Array:
    if declared_tensor.datatype == BYTES:
        made = np.empty(len(column), object)
        made[:] = column.cast(pa.binary()).to_pylist()
    elif isinstance(column, np.ndarray):
        return column.astype(declared_tensor.dtype, copy=False)
    else:
        made = column.to_numpy(zero_copy_only=False).astype(declared_tensor.dtype, copy=False)
    return made.reshape(-1, 1) if declared_tensor.shape else made


@dataclass(frozen=True)
class PredictorRows:
    """The `RowMaker` of predictions by a program's checkpoint: the kept columns and the predictor's outputs.

    Makes the predictor with the first rows, and keeps it.
    """

    inputs: InputRows
    program: ProgramPredictor
    outputs: OutputColumns
    workers: Workers
    schema: pa.Schema

    @property
    def source(self) -> VersionRows:
        return self.inputs.source

    def rows(self, part: PartitionRange) -> Iterator[TransformedRows]:
        predictor = self._predictor
        set_threads(self.workers.cpus)
        for one in self.inputs.prepared(part):
            table = one.rows.table.select(self.inputs.kept)
            made = self.schema.empty_table()
            if table.num_rows:
                made = pa.Table.from_arrays([*table.columns, *self._made(predictor, one)], schema=self.schema)
            yield TransformedRows(part.split, made, one.rows.row_ids, one.left_out)

    def _made(self, predictor: BundlePredictor, prepared_inputs: PreparedInputs) -> list[pa.Array]:
        first, last = prepared_inputs.rows.row_ids[0], prepared_inputs.rows.row_ids[-1]
        try:
            return self.outputs.arrays(predictor.predict(prepared_inputs.values, len(prepared_inputs.rows.row_ids)))
        except FailedPrecondition as error:
            raise FailedPrecondition(
                f"{error.message} (in the batch of the rows {first} to {last} of split {prepared_inputs.rows.split!r})",
                reason=error.specific_reason,
                metadata={**error.metadata, "rows": f"{first} to {last}"},
            ) from error
        except ValueError as error:  # UnicodeDecodeError is one
            raise predictor.refusal(
                f"gave text that no column can hold, for one of the rows {first} to {last}: {error}"
            ) from error

    @cached_property
    def _predictor(self) -> BundlePredictor:
        predictor = self.program.load()
        if predictor.outputs != self.outputs.outputs or predictor.inputs != tuple(self.inputs.inputs):
            raise predictor.refusal("declares other inputs or outputs each time that it is made")
        return predictor
