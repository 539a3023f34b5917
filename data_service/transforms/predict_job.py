"""A prediction as one attempt of the durable job: a version and a checkpoint in, a version out.

One pass over the source, whose parts are spread over workers that keep the model. If rows may be left out, a pass
before it only prepares the model's input and counts the remaining rows, because each part's row ids depend on the
counts.

The rows of a part get their predictions within one of Ray's workers, or within the process in a test. A checkpoint of a
program has its bundle's predictor for that.

The predictor's code runs in workers of Ray alone, as in a replica. So what it takes and gives is found there first, and
checked against the source before any row is read.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds
from numpy.typing import NDArray

from data_service.domain.bad_rows import build_report, excerpt
from data_service.domain.checks_rows import RowChecks
from data_service.domain.transform_spec import CheckpointRef, PredictSpec, Workers
from data_service.parallel import PartRunner, Passes, Pool, Progress, Results, Work, pool_of, run_on_ray
from data_service.transforms.checking import (
    CHAIN,
    Array,
    NewColumns,
    PredictionColumns,
    Preparation,
    columns_with,
    new_columns,
    preparation,
)
from data_service.transforms.job import Gathered, impure, lay_out, load_source
from data_service.transforms.passes import (
    CountPart,
    LeftOut,
    PartitionRange,
    SplitRows,
    TransformedRows,
    VersionRows,
    WritePart,
    bad_row,
    ended_in_time,
    parts_of,
    plan_parts,
)
from data_service.version_attempt import attempt_folder, commit_version
from shared.bundle_predictor import FREE, BundlePredictor, DeclaredTensor
from shared.checkpoint import load_checkpoint
from shared.checkpoint.format import is_program_checkpoint, load_program_checkpoint, node_copy
from shared.checkpoint.nan_values import BadRow
from shared.code_bundle_registry import load_code
from shared.dataset_version import Manifest, VersionReader
from shared.dataset_version.manifest import DatasetVersion, Parent, Prediction, name_problem, tensor_array, tensor_field
from shared.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, invalid_field, invalid_fields
from shared.jobs import AttemptContext
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from shared.transforms import Batch, RowError, TensorType, batch_of
from shared.transforms.batch import ColumnType, Schema, schema_of_columns
from shared.transforms.records import model_input

if TYPE_CHECKING:
    from shared.models.loaded import LoadedModel


# --- The attempt ---

# A model takes far longer for a row than a step does, so smaller parts are worth a task.
MIN_PART_BYTES = 1024 * 1024
# The batch size where rows are only counted.
COUNTED_ROWS = 256


def run_predict(context: AttemptContext, run_parts: PartRunner = run_on_ray) -> dict[str, Any]:
    """Run a prediction and return the manifest's name; the job's entry point.

    The job's spec is `{"predict": PredictSpec}`. Raises `InvalidArgument` (a step cannot process a row, named by its
    id, or too many rows), `FailedPrecondition` (the source is not the requested one, a split without rows, a model that
    does not load), `DataLoss` (a damaged source or checkpoint) and `Unavailable` (the cluster lost the work).
    """
    spec = PredictSpec.from_record(context.job.spec["predict"])
    source = load_source(context.store, spec.source, spec.source_sha256)
    with attempt_folder(context) as (folder, scratch):
        passes = Passes(context, folder, run_parts, Progress(context))
        model: _Model | _Program
        if is_program_checkpoint(context.store, spec.checkpoint.folder, spec.checkpoint.sha256):
            model = _Program(context.store, spec, source, passes)
        else:
            model = _Model(context.store, spec, source)
        return _Predict(context, spec, source, model, folder, scratch, passes).run()


class _Model:
    """A model of Millrace's loop: how its checkpoint predicts."""

    def __init__(self, store: ObjectStore, spec: PredictSpec, source: DatasetVersion) -> None:
        self._store = store
        self._spec = spec
        self._source = source
        content = load_checkpoint(store, spec.checkpoint.folder, spec.checkpoint.sha256).content
        self._preparation = preparation(content, source.manifest, source.name)
        self.new = new_columns(spec, source.manifest, content)
        self.trained_on = content.dataset_version
        self.runs_foreign_code = self._preparation.steps.has_custom

    def inputs(self, rows: int) -> Preparer:
        source = VersionRows(self._store.settings, self._source, None, rows)
        return Preparer(source, self._preparation, self.new.kept, self._spec.bad_rows.are_left_out)

    def predictions(self, schema: pa.Schema) -> Predictor:
        inputs = self.inputs(self._spec.workers.batch_size)
        return Predictor(inputs, self._spec.checkpoint, self.new.predictions, self._spec.workers, schema)


class _Program:
    """A program's checkpoint: how its bundle's predictor predicts.

    A worker finds first what the predictor takes and gives.
    """

    runs_foreign_code = True

    def __init__(self, store: ObjectStore, spec: PredictSpec, source: DatasetVersion, passes: Passes) -> None:
        self._store = store
        self._spec = spec
        self._source = source
        self._program = ProgramPredictor(store.settings, spec.checkpoint, spec.predictor)
        content = load_program_checkpoint(store, spec.checkpoint.folder, spec.checkpoint.sha256)
        self._inputs, outputs = self._declared(passes)
        check_inputs(self._inputs, source.manifest, source.name)
        self._outputs = output_columns(spec, outputs)
        self.new = columns_with(spec, source.manifest, self._outputs)
        self.trained_on = content.dataset_version

    def inputs(self, rows: int) -> InputRows:
        source = VersionRows(self._store.settings, self._source, None, rows)
        return InputRows(source, self._inputs, self.new.kept, self._spec.bad_rows.are_left_out)

    def predictions(self, schema: pa.Schema) -> PredictorRows:
        inputs = self.inputs(self._spec.workers.batch_size)
        return PredictorRows(inputs, self._program, self._outputs, self._spec.workers, schema)

    def _declared(self, passes: Passes) -> tuple[tuple[DeclaredTensor, ...], tuple[DeclaredTensor, ...]]:
        reader = VersionReader(self._store, self._source)
        first_split = self._source.manifest.splits[0].name
        one_part = list(islice(parts_of(reader, reader.schema, [first_split], MIN_PART_BYTES), 1))
        pool = replace(pool_of(self._spec.workers), most=1)
        work = Declare(self._program)
        with closing(passes.over("CHECKING", work, one_part, foreign_code=True, pool=pool)) as results:
            ((_, declaration),) = results
        return declaration.inputs, declaration.outputs


class _Predict:
    def __init__(
        self,
        context: AttemptContext,
        spec: PredictSpec,
        source: DatasetVersion,
        model: _Model | _Program,
        folder: str,
        scratch: Path,
        passes: Passes,
    ) -> None:
        self._context = context
        self._spec = spec
        self._source = source
        self._model = model
        self._folder = folder
        self._scratch = scratch
        self._passes = passes
        self._reader = VersionReader(context.store, source)
        self._new = model.new
        # From the source's files, since a manifest does not record which columns have no nulls.
        kept = self._reader.select(self._new.kept)
        self._schema = pa.schema([*kept, *list(self._new.schema)[len(kept) :]])

    def run(self) -> dict[str, Any]:
        splits = [self._spec.split] if self._spec.split else []
        parts = plan_parts(self._reader, self._schema, splits, MIN_PART_BYTES)
        counts = self._counts(parts)
        there = [split for split in self._source.manifest.splits if not splits or split.name in splits]
        ranges, parts = lay_out(None, there, parts, counts)
        gathered = Gathered(self._schema, ranges, self._scratch)
        work = WritePart(self._model.predictions(self._schema), self._no_checks(), None, self._folder)
        with closing(self._pass("PREDICTING", work, parts, pool_of(self._spec.workers))) as results:
            for part, written in results:
                if written.rows != counts[part.number]:
                    raise impure(part)
                gathered.add(part, written)
        self._context.raise_if_stopped(fresh=True)
        bad_rows = gathered.bad_rows()
        return commit_version(
            self._context.store,
            self._folder,
            columns=self._new.columns,
            ranges=ranges,
            files=gathered.files,
            report=build_report(gathered.statistics, {}, bad_rows),
            quarantine=bad_rows.path,
            quarantined_row_count=bad_rows.row_count,
            parents=[Parent(version=self._source.name, manifest_sha256=self._source.manifest_sha256)],
            ingested=self._new.ingested,
            transforms=self._new.transforms,
            prediction=self._prediction(self._new),
        )

    def _counts(self, parts: list[PartitionRange]) -> list[Counter[str]]:
        """Return how many rows remain of each part.

        Raises `InvalidArgument` if there are more bad rows than allowed.
        """
        if not self._spec.bad_rows.are_left_out:
            return [Counter({part.split: part.row_count}) for part in parts]
        counts: list[Counter[str]] = [Counter() for _ in parts]
        bad = 0
        work = CountPart(self._model.inputs(COUNTED_ROWS), self._no_checks(), None)
        with closing(self._pass("CHECKING", work, parts, None)) as results:
            for part, counted in results:
                counts[part.number] = counted.rows
                bad += part.row_count - counted.rows.total()
                self._check_bad_rows(bad)
        return counts

    def _check_bad_rows(self, bad: int) -> None:
        most = self._spec.bad_rows.max_rows
        if most and bad > most:
            raise InvalidArgument(
                f"the checkpoint's steps cannot work on more than {most:,} rows of {self._source.name}; mend them, or "
                "allow more",
                reason="TOO_MANY_BAD_ROWS",
                metadata={"source": self._source.name, "max_rows": str(most)},
            )

    def _no_checks(self) -> RowChecks:
        return RowChecks([], self._schema)

    def _prediction(self, new: NewColumns) -> Prediction:
        return Prediction(
            checkpoint=self._spec.checkpoint.name,
            checkpoint_sha256=self._spec.checkpoint.sha256,
            trained_on=self._model.trained_on,
            columns=new.predictions.names,
        )

    def _pass(
        self, phase: str, work: Work[PartitionRange], parts: list[PartitionRange], pool: Pool | None
    ) -> Results[PartitionRange]:
        return self._passes.over(phase, work, parts, foreign_code=self._model.runs_foreign_code, pool=pool)


# --- Rows with predictions of a model ---

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedRows:
    """Rows with the model's input: `prepared` float32 (B, *shape)."""

    rows: SplitRows
    prepared: Array
    left_out: Sequence[LeftOut] = ()


@dataclass(frozen=True)
class Preparer:
    """Prepares the model's input.

    With `quarantines`, rows without a valid input are left out; otherwise the first one is an `InvalidArgument` that
    names it. As a `RowMaker` it makes no column, so it can count the valid rows.
    """

    source: VersionRows
    preparation: Preparation
    kept: Sequence[str]
    quarantines: bool
    schema: pa.Schema = pa.schema([])  # noqa: RUF009 (it is immutable)

    def rows(self, part: PartitionRange) -> Iterator[TransformedRows]:
        for one in self.prepared(part):
            yield TransformedRows(part.split, pa.table({}), one.rows.row_ids, one.left_out)

    def prepared(self, part: PartitionRange) -> Iterator[PreparedRows]:
        columns = [*self.kept, *(name for name in self.preparation.reads if name not in self.kept)]
        for rows in self.source.divided(part, columns):
            try:
                made = [few.apply_to_rows(self._prepare) for few in rows.few_pixels(self.preparation.images)]
            except InvalidArgument:
                if not self.quarantines:
                    raise
                yield self._one_by_one(rows)
            else:
                yield self._without_bad_rows(rows, made)

    def _prepare(self, batch: Batch) -> tuple[Array, dict[int, BadRow]]:
        """Return the model's input, and the rows with a NaN or an infinity in it.

        Serving refuses such rows, too. Unless bad rows are left out, the first of them raises a `RowError`.
        """
        preparation = self.preparation
        steps, nans = preparation.steps, preparation.nans
        read = nans.nulls_for_nans({name: batch[name] for name in preparation.reads})
        with ended_in_time(steps.steps):
            made: Array = model_input(steps(read), preparation.row, CHAIN)
        if not preparation.is_complete:
            return made, {}
        bad = nans.bad_rows(made, preparation.reads, lambda: {name: read[name] for name in preparation.floats})
        if bad and not self.quarantines:
            raise RowError(CHAIN, min(bad), _problem_text(bad[min(bad)]))
        return made, bad

    def _without_bad_rows(self, rows: SplitRows, made: Sequence[tuple[Array, dict[int, BadRow]]]) -> PreparedRows:
        """Remove the bad rows.

        `made` has the results of `_prepare` for consecutive pieces of the rows.
        """
        prepared = made[0][0] if len(made) == 1 else np.concatenate([one for one, _ in made])
        begins = np.cumsum([0, *(len(one) for one, _ in made)]).tolist()
        bad = {begin + row: one for begin, (_, found) in zip(begins, made, strict=False) for row, one in found.items()}
        if not bad:
            return PreparedRows(rows, prepared)
        good = np.ones(len(rows.row_ids), np.bool_)
        good[list(bad)] = False
        left_out = [
            LeftOut(
                int(rows.row_ids[row]), f"{CHAIN}: {_problem_text(one)}", excerpt(rows.table.select(self.kept), row)
            )
            for row, one in sorted(bad.items())
        ]
        return PreparedRows(where(rows, good), prepared[good], left_out)

    def _one_by_one(self, rows: SplitRows) -> PreparedRows:
        """Prepare each row by itself, since a row's result does not depend on the others."""
        good = np.zeros(len(rows.row_ids), np.bool_)
        prepared: list[Array] = []
        left_out: list[LeftOut] = []
        for place, row_id in enumerate(rows.row_ids.tolist()):
            table = rows.table.slice(place, 1)
            try:
                made, bad = self._prepare(batch_of(table))
                why = f"{CHAIN}: {_problem_text(bad[0])}" if bad else ""
            except InvalidArgument as error:
                why = f"{error.path}: {error.problem}" if isinstance(error, RowError) else error.message
            if why:
                left_out.append(LeftOut(row_id, why, excerpt(table.select(self.kept), 0)))
            else:
                prepared.append(made)
                good[place] = True
        return PreparedRows(where(rows, good), np.concatenate(prepared) if prepared else np.empty(0), left_out)


def where(rows: SplitRows, good: NDArray[np.bool_]) -> SplitRows:
    return SplitRows(rows.split, rows.table.filter(pa.array(good)).combine_chunks(), rows.row_ids[good])


def _problem_text(bad: BadRow) -> str:
    names = ", ".join(map(repr, bad.columns))
    return f"column {names}: {bad.problem}"


@dataclass(frozen=True)
class Predictor:
    """The `RowMaker` of predictions: the kept columns and the predictions.

    Loads the model with the first rows, and keeps it.
    """

    preparer: Preparer
    checkpoint: CheckpointRef
    predictions: PredictionColumns
    workers: Workers
    schema: pa.Schema

    @property
    def source(self) -> VersionRows:
        return self.preparer.source

    def rows(self, part: PartitionRange) -> Iterator[TransformedRows]:
        run = self._model
        set_threads(self.workers.cpus)
        for one in self.preparer.prepared(part):
            table = one.rows.table.select(self.preparer.kept)
            if table.num_rows:
                outputs = _fitting(run, one.prepared)
                yield TransformedRows(
                    part.split, self._with_predictions(table, outputs), one.rows.row_ids, one.left_out
                )
            else:
                yield TransformedRows(part.split, self.schema.empty_table(), one.rows.row_ids, one.left_out)

    def _with_predictions(self, table: pa.Table, outputs: Sequence[NDArray[np.generic]]) -> pa.Table:
        return pa.Table.from_arrays([*table.columns, *self.predictions.arrays(outputs)], schema=self.schema)

    @cached_property
    def _model(self) -> LoadedModel:
        """Loads the model.

        Raises `DataLoss` for a damaged checkpoint, and `FailedPrecondition` if the model does not load.
        """
        found = load_checkpoint(open_store(self.source.settings), self.checkpoint.folder, self.checkpoint.sha256)
        if found.content.model.is_own:
            # Only in this Ray worker: the service that created the job has checked that such code may run.
            load_code(open_store(self.source.settings), found.content.model.code_bundle)
        from shared.models.loaded import LoadedModel

        device = _device(self.workers)
        logger.info("loading %s on %s", self.checkpoint.name, device)
        return LoadedModel(found, device)


def _fitting(run: LoadedModel, prepared: Array) -> Sequence[NDArray[np.generic]]:
    import torch

    try:
        return run(prepared)
    except torch.OutOfMemoryError as error:
        raise ResourceExhausted(
            f"{len(prepared)} rows do not fit into the memory of a GPU; use a smaller workers.batch_size, or more of a "
            "GPU for each worker",
            reason="GPU_OUT_OF_MEMORY",
        ) from error


def set_threads(threads: int) -> None:
    """Set torch's thread count for each part, since OpenMP keeps it per calling thread.

    The last bits of outputs depend on it.
    """
    import torch

    torch.set_num_threads(threads)


def _device(workers: Workers) -> str:
    import torch

    if not workers.gpus:
        return "cpu"
    if not torch.cuda.is_available():
        raise FailedPrecondition(
            "workers.gpus: Ray gave the worker a GPU, but torch finds none there; install torch for it on that node",
            reason="NO_GPU",
            fields=[("workers.gpus", "torch finds no GPU")],
        )
    # The same rows must give the same bytes again.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    # The precision of the CPU, so that predictions are close to a deployment's answers.
    torch.backends.cudnn.allow_tf32 = False
    return "cuda"


# --- Rows with predictions of a program ---

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
        """Return an array of B values for each column; `outputs` are those of `BundlePredictor.predict`."""
        by_name = {output.name: array for output, array in zip(self.outputs, outputs, strict=True)}
        return [_column(by_name[name], field.type) for name, field in self.fields.items()]


def output_columns(spec: PredictSpec, declared: Sequence[DeclaredTensor]) -> OutputColumns:
    """Raise `InvalidArgument` for an output that the predictor lacks, or that no version can keep as a column."""
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
