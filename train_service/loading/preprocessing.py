"""The preprocessing of a training job: the columns that it reads, and the model's input made of them.

It also fits a specification to its dataset version: checks that it fits, and fills in defaults that depend on the
version. A text model gets its vocabulary, its padding and the order of its two columns from the tokenizer of its input.

`Rows` are rows before they are prepared: columns as stored, with labels and ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds
from numpy.typing import NDArray

from shared import names
from shared.checkpoint.nan_values import finite_rows
from shared.dataset_version import DatasetVersion, load_version
from shared.dataset_version.manifest import Column, row_bytes
from shared.dataset_version.version import read_report
from shared.errors import InvalidArgument, NotFound, invalid_field
from shared.models import TRANSFORMERS, input_dimensions
from shared.storage import ObjectStore
from shared.transforms import (
    Batch,
    Pipeline,
    RowError,
    RowKeys,
    ScalarType,
    Schema,
    TensorSpec,
    TensorType,
    arrow_schema,
    schema_of_columns,
)
from shared.transforms.batch import Column as BatchColumn
from shared.transforms.batch import ColumnType, Step
from shared.transforms.pipeline import BatchContext, needed_columns, sliced
from shared.transforms.records import ModelInput, RecordSpec, UnusableColumn, model_input, record_of_columns
from shared.transforms.steps.columns import Concat, Normalize, ToFloat
from shared.transforms.steps.custom import Custom, functions_in_children
from shared.transforms.steps.images import CenterCrop, ColorJitter, RandomCrop, RandomFlip, image_columns, side_by_side
from shared.transforms.steps.tokenizing import Tokenize
from train_service.domain import spec_rules
from train_service.domain.order import Ints, steps_per_epoch, window_rows
from train_service.domain.spec import BY_DEVICE, CAUSAL_LM, REGRESSION, TrainingSpec
from train_service.domain.spec_rules import check_rows

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


# --- Preprocessing ---

FIELD = "spec.transform"
INPUTS_FIELD = "spec.input_columns"
NON_FINITE_REMEDY = (
    "import the version with nan_as_null and fill its nulls, filter such rows in TransformVersion, or set "
    "spec.allow_non_finite"
)
# From finite numbers and texts these steps make only finite numbers; `normalize` does so with any usual std.
MAKE_FINITE = frozenset(
    {
        *("to_float", "select", "drop", "rename", "ordinal_encode", "one_hot_encode", "bucketize", "concat"),
        *("decode_image", "resize", "center_crop", "grayscale", "random_crop", "random_flip", "random_rotation"),
        *("color_jitter", "tokenize"),
    }
)
MIN_STD = 1e-6
# Steps that a worker's device may compute, see `train_service.learning.ranks`.
DEVICE_STEPS = (CenterCrop, RandomCrop, RandomFlip, ColorJitter, ToFloat, Normalize)
# Steps that pass NaN and infinities through unchanged.
KEEP_NON_FINITE = frozenset({"select", "drop", "fill_nulls", "standardize", "normalize"})


class Preprocessing:
    """The steps of the job's own transform that its input columns depend on. Immutable."""

    def __init__(self, spec: TrainingSpec, columns: Sequence[Column], *, asked: bool = False) -> None:
        """Plan the preprocessing.

        `columns` are the version's; `asked` as in `Pipeline`. Raises `InvalidArgument` that names the step, or
        `spec.input_column`.
        """
        self.input_columns = spec.inputs
        self._version = spec.dataset_version
        given = schema_of_columns(columns)
        whole = Pipeline.from_config(spec.transform, spec.input_column, FIELD, asked=asked)
        _check_steps(whole)
        schemas = _schemas(whole, given, spec)
        for name in spec.inputs:
            if name not in schemas[-1]:
                raise invalid_field(FIELD, name, f"it takes the input column away and leaves {_names(schemas[-1])}")
        self._input_type = schemas[-1].get(spec.input_column)
        # For a model of several inputs.
        self._record = _record(spec, schemas[-1]) if spec.input_columns else None
        needed = needed_columns(whole.steps, schemas, frozenset(spec.inputs))
        # In the version's order, without the label: no step gets it, and it is read separately.
        self.columns = [name for name in given if name in needed[0]]
        read = {name: given[name] for name in self.columns}
        # Each step with its index in the whole transform, from which augmentations draw.
        self._steps = sliced(whole.steps, [read, *schemas[1:]], needed)
        self._images = image_columns([step for _, step in self._steps], read)
        self._floats = [name for name, one in read.items() if is_float(one)]
        makes_finite = all(_makes_finite(step) for _, step in self._steps)
        self._is_checked = not spec.allow_non_finite and not (makes_finite and not self._floats)
        # The device computes the steps from this index on.
        self._device_begins = len(self._steps)
        if spec.acceleration.transform_device == BY_DEVICE:
            self._device_begins = self._first_of_device(schemas)
        # Keyed by whether augmentations act; rows of the validation split have no keys.
        self._split = {True: spec.train_split, False: spec.validation_split}
        # The form that a checkpoint stores: every step names its column.
        self.config = whole.config

    @property
    def output(self) -> ModelInput:
        """The model's input for one row. Raises `InvalidArgument` unless it is a tensor of a fixed shape."""
        if self._record is not None:
            return self._record
        made = self._input_type
        lengths = [length for length in made.shape if length is not None] if isinstance(made, TensorType) else []
        if not isinstance(made, TensorType) or len(lengths) < len(made.shape):
            remedy = f"column {self.input_columns[0]!r} must become a float32 tensor of a fixed shape; add steps"
            raise invalid_field(FIELD, str(made), remedy)
        return TensorSpec(self.input_columns[0], made.dtype, tuple(lengths))

    @property
    def carried_floats(self) -> list[str]:
        """The float columns whose NaN and infinities always reach an input of the model."""
        origins = {name: {name} for name in self._floats}
        for _, step in self._steps:
            if isinstance(step, Concat):
                origins[step.into] = set().union(*(origins.get(name, set()) for name in step.columns))
            elif step.op not in KEEP_NON_FINITE:
                for name in step.reads:  # an encoder or a function may make anything of them
                    origins.pop(name, None)
        reaching = set[str]().union(*(origins.get(name, set()) for name in self.input_columns))
        return [name for name in self._floats if name in reaching]

    @property
    def device_steps(self) -> list[tuple[int, Step]]:
        """The steps that `for_device` leaves out, with their indices in the whole transform."""
        return self._steps[self._device_begins :]

    @property
    def is_quick(self) -> bool:
        """Whether the transform is fast: it decodes no images and calls no custom functions."""
        return not self._images and not any(isinstance(step, Custom) for _, step in self._steps)

    def __call__(self, rows: Rows, keys: RowKeys | None = None) -> Array:
        """Return the model's input of these rows, (B, *shape), or records (B,) of several inputs.

        Augmentations act if `keys`, the keys of the rows, are given. As many images are decoded at a time as there is
        room for. Raises `InvalidArgument` that names the id of a row that a step cannot process or, unless the job
        allows such, whose input is NaN or infinite.
        """
        made = self._prepared(rows, keys)
        if self._is_checked and not finite_rows(made).all():
            raise self._non_finite(rows, made, self._split[keys is not None])
        return made

    def for_device(self, rows: Rows, keys: RowKeys | None = None) -> Array:
        """Apply all steps except `device_steps` to these rows: uint8 (B, H, W) or (B, H, W, C).

        Without device steps it is the same as calling the object.
        """
        if not self.device_steps:
            return self(rows, keys)
        return self._prepared(rows, keys, self._device_begins)

    def _first_of_device(self, schemas: Sequence[Schema]) -> int:
        """Return the index of the first step that the device computes.

        Raises `InvalidArgument` if a device cannot compute the last steps.
        """
        first = len(self._steps)
        for place, step in reversed(self._steps):
            before = schemas[place].get(self.input_columns[0])
            if not isinstance(step, DEVICE_STEPS) or step.column != self.input_columns[0]:
                break
            if not isinstance(before, TensorType) or None in before.shape:
                break
            first -= 1
        if not any(isinstance(step, ToFloat) for _, step in self._steps[first:]) or self._is_checked:
            remedy = (
                "the transform must end with to_float and, after it, normalize with every std at least "
                f"{MIN_STD:g}; a worker's device also does {', '.join(one.op for one in DEVICE_STEPS)} before it, on "
                "images of one size; or leave it out"
            )
            raise invalid_field("spec.acceleration.transform_device", BY_DEVICE, remedy)
        return first

    def _prepared(self, rows: Rows, keys: RowKeys | None, end: int | None = None) -> Array:
        """Apply the steps before index `end`."""
        if not self._images:
            return self._made_of(rows, keys, end)
        images = [rows.batch()[name] for name in self._images]
        parts = []
        for begin, upto in side_by_side(images, len(rows.row_ids)):
            few_keys = keys and RowKeys(keys.seed, keys.epoch, keys.row_ids[begin:upto])
            parts.append(self._made_of(rows.slice(begin, upto), few_keys, end))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _made_of(self, rows: Rows, keys: RowKeys | None, end: int | None) -> Array:
        try:
            walk = BatchContext(rows.batch(), keys)
            for place, step in self._steps[:end]:
                walk.through(step, f"{FIELD}.steps[{place}]", place)
            if self._record is not None:
                return model_input(walk.batch, self._record, INPUTS_FIELD)
        except RowError as error:
            row_id = int(rows.row_ids[error.row])
            raise InvalidArgument(
                f"{error.path}: row {row_id} of {self._version}: {error.problem}",
                reason="BAD_ROW",
                metadata={"resource": self._version, "row_id": str(row_id)},
                fields=[(error.path, f"row {row_id}: {error.problem}")],
            ) from error
        # torch needs a contiguous, writable array. Most transforms return one.
        dtype = np.float32 if end is None else np.uint8
        return np.require(walk.batch[self.input_columns[0]], dtype, ["C", "W"])

    def _non_finite(self, rows: Rows, made: Array, split: str) -> InvalidArgument:
        place = int(np.flatnonzero(~finite_rows(made))[0])
        inputs = (
            {name: made[name] for name in self.input_columns} if made.dtype.names else {self.input_columns[0]: made}
        )
        column = next(name for name, values in inputs.items() if not np.isfinite(values[place]).all())
        value = _first_non_finite(inputs[column][place : place + 1])
        row_id = int(rows.row_ids[place])
        given = rows.slice(place, place + 1).batch()
        culprits = [name for name in self._floats if not np.isfinite(_numbers(given[name])).all()]
        if culprits:
            problem = f"column {culprits[0]!r} is {_first_non_finite(given[culprits[0]])}"
        else:
            problem = f"its values are finite, and {FIELD} makes {value} of them in column {column!r}"
        return InvalidArgument(
            f"spec.dataset_version: row {row_id} of split {split!r} of {self._version}: {problem}; {NON_FINITE_REMEDY}",
            reason="NON_FINITE_VALUES",
            metadata={
                "resource": self._version,
                "row_id": str(row_id),
                "split": split,
                "column": culprits[0] if culprits else column,
            },
            fields=[("spec.dataset_version", f"row {row_id}: {problem}")],
        )


def is_float(column_type: ColumnType) -> bool:
    if isinstance(column_type, TensorType):
        return np.dtype(column_type.dtype).kind == "f"
    return bool(kinds.is_floating(column_type.arrow_type))


def _makes_finite(step: Step) -> bool:
    return step.op in MAKE_FINITE or (isinstance(step, Normalize) and min(step.std) >= MIN_STD)


def _numbers(column: BatchColumn) -> Array:
    """Return a column's numbers without nulls, which pandas would convert to NaN."""
    return column if isinstance(column, np.ndarray) else column.drop_null().to_numpy(zero_copy_only=False)


def _first_non_finite(column: BatchColumn) -> float:
    numbers = _numbers(column)
    return float(numbers[~np.isfinite(numbers)].reshape(-1)[0])


def _check_steps(pipeline: Pipeline) -> None:
    unfitted = pipeline.unfitted
    for index, step in enumerate(pipeline.steps):
        path = f"{FIELD}.steps[{index}]"
        if step.drops_rows:
            raise invalid_field(
                path, step.op, "a training job takes every row of its split; filter in TransformVersion"
            )
        if index in unfitted:
            raise invalid_field(path, step.op, "training learns no step; set what it learns, or use TransformVersion")


def _schemas(pipeline: Pipeline, schema: Schema, spec: TrainingSpec) -> list[Schema]:
    """Return the columns before each step and, last, after all steps.

    If no step can have made an input column by the time a step needs it, the error names that column's field, not the
    step.
    """
    schemas = [schema]
    missing: str | None = None
    for index, step in enumerate(pipeline.steps):
        missing = next((name for name in spec.inputs if name not in schemas[-1] and name in step.reads), None)
        if missing is not None:
            break
        schemas.append(pipeline.with_steps(pipeline.steps[: index + 1]).output(schema))
    else:
        missing = next((name for name in spec.inputs if name not in {*schema, *schemas[-1]}), None)
        if missing is None:
            return schemas
    field = f"{INPUTS_FIELD}[{spec.inputs.index(missing)}]" if spec.input_columns else "spec.input_column"
    raise invalid_field(field, missing, f"{spec.dataset_version} has {_names(schema)}, and no step makes it")


def _record(spec: TrainingSpec, schema: Schema) -> RecordSpec:
    """Return the record of the model's several inputs, of columns after the transform."""
    try:
        return record_of_columns(schema, spec.input_columns, INPUTS_FIELD)
    except UnusableColumn as error:
        raise invalid_field(error.path, error.name, error.problem) from None


def _names(schema: Schema) -> str:
    return ", ".join(schema)


# --- Fit with the version ---

DEFAULT_VALIDATION_SPLIT = "validation"
# Limit on the columns that an error names.
MAX_PROBLEMS = 20


def fitted(store: ObjectStore, spec: TrainingSpec) -> tuple[TrainingSpec, DatasetVersion, ModelInput]:
    """Return the spec with the version's defaults, the version, and the model's input for one row.

    Raises what `CreateTrainingJob` documents for a specification, except for its model and initial checkpoint.
    """
    names.parse("spec.dataset_version", spec.dataset_version, "datasets/{d}/versions/{v}")
    spec_rules.check(spec)
    version = _version_of(store, spec)
    spec = with_defaults(spec, version)
    prepared = check_fits(spec, version)
    check_finite(store, spec, version)
    check_classes(store, spec, version)
    return with_order(spec, version), version, prepared


def fitted_program(store: ObjectStore, spec: TrainingSpec) -> TrainingSpec:
    """Return a program's spec with the defaults of its version, if it names one. Raises as `fitted`."""
    spec_rules.check(spec)
    if not spec.dataset_version:
        return spec
    names.parse("spec.dataset_version", spec.dataset_version, "datasets/{d}/versions/{v}")
    version = _version_of(store, spec)
    spec = with_defaults(spec, version)
    _check_splits(spec, version)
    # The columns that the program reads are unknown, so a row counts with all of them.
    row_bytes = bytes_of_row(version, spec.train_split, [column.name for column in version.columns])
    return replace(spec, window_rows=window_rows(row_bytes, spec.lanes))


def _version_of(store: ObjectStore, spec: TrainingSpec) -> DatasetVersion:
    """Load the version. Raises as `load_version`; a `NotFound` names the field."""
    try:
        return load_version(store, spec.dataset_version)
    except NotFound as error:
        text = f"{error.message}; name a version that ListVersions shows"
        raise NotFound(
            f"spec.dataset_version: {text}",
            reason=error.specific_reason,
            metadata=error.metadata,
            fields=[("spec.dataset_version", text)],
        ) from None


def with_defaults(spec: TrainingSpec, version: DatasetVersion) -> TrainingSpec:
    """Set the validation split: `validation` if the version has it, else none; and a text model's vocabulary."""
    spec = with_vocabulary(spec, version)
    names = [split.name for split in version.manifest.splits]
    if not spec.validation_split and DEFAULT_VALIDATION_SPLIT in names:
        return replace(spec, validation_split=DEFAULT_VALIDATION_SPLIT)
    return spec


def check_fits(spec: TrainingSpec, version: DatasetVersion) -> ModelInput:
    """Return the model's prepared input for one row. Raises `InvalidArgument` that names the bad field."""
    _check_splits(spec, version)
    _check_label(spec, version)
    check_rows(spec, version.split(spec.train_split).row_count)
    return check_prepared(spec, version.columns)


def check_prepared(spec: TrainingSpec, columns: Sequence[Column]) -> ModelInput:
    """Check the transform and the model's input, as `check_fits` does, for rows with these columns.

    Splits and labels are not checked.
    """
    # An operator's function must not hang or end the service that answers.
    with functions_in_children():
        prepared = Preprocessing(spec, columns, asked=True).output
    if isinstance(prepared, RecordSpec):
        _check_lengths(spec, columns)
        return prepared
    dimensions = input_dimensions(spec.model.builder)
    fits = bool(prepared.shape) and dimensions in (None, len(prepared.shape))
    # A user's model may leave its channels open.
    channels = spec.model.in_channels or (prepared.shape[0] if prepared.shape else 0)
    if prepared.dtype != "float32" or not fits or prepared.shape[0] != channels:
        wanted = f"float32 of {_wanted(channels, dimensions)}, as spec.model.in_channels says"
        made = f"{prepared.dtype} of {prepared.shape}"
        hint = "concat" if dimensions == 1 else "to_float"
        raise invalid_field(FIELD, made, f"must make {wanted}; add steps such as {hint}")
    _check_lengths(spec, columns)
    if spec.acceleration.channels_last and len(prepared.shape) != 3:
        remedy = f"the model's input has shape {prepared.shape}, and no channels to put last; leave it out"
        raise invalid_field("spec.acceleration.channels_last", True, remedy)
    return prepared


def _check_lengths(spec: TrainingSpec, columns: Sequence[Column]) -> None:
    """Raise `InvalidArgument` unless the column of `spec.group_by_length` is read and has lengths."""
    if not spec.group_by_length:
        return
    with functions_in_children():
        read = Preprocessing(spec, columns).columns
    given = schema_of_columns(columns)
    usable = [name for name in read if _has_lengths(given[name])]
    if spec.group_by_length not in usable:
        wanted = f"use one of {', '.join(usable)}" if usable else "leave it out"
        remedy = f"it must be a column of texts, bytes or whole numbers that the transform reads; {wanted}"
        raise invalid_field("spec.group_by_length", spec.group_by_length, remedy)


def _has_lengths(column_type: ColumnType) -> bool:
    if isinstance(column_type, TensorType):
        return np.dtype(column_type.dtype).kind in "iu" and None not in column_type.shape
    arrow_type = column_type.arrow_type
    texts = kinds.is_string(arrow_type) or kinds.is_large_string(arrow_type)
    return bool(
        texts or kinds.is_binary(arrow_type) or kinds.is_large_binary(arrow_type) or kinds.is_integer(arrow_type)
    )


def _check_splits(spec: TrainingSpec, version: DatasetVersion) -> None:
    names = {split.name: split for split in version.manifest.splits}
    for field, split in (("train_split", spec.train_split), ("validation_split", spec.validation_split)):
        if split and split not in names:
            raise invalid_field(f"spec.{field}", split, f"{version.name} has {', '.join(names)}")
        if split and not names[split].row_count:
            raise invalid_field(f"spec.{field}", split, "it has no rows; choose another")


def check_finite(store: ObjectStore, spec: TrainingSpec, version: DatasetVersion) -> None:
    """Check the version's statistics for NaN and infinities, before any row is read.

    The specification must fit the version. Values that a step makes of finite values are found only when rows are read.

    Raises `InvalidArgument` that names each column with NaN or infinities in a split, unless the job allows such.
    """
    if spec.allow_non_finite:
        return
    with functions_in_children():
        floats = Preprocessing(spec, version.columns).carried_floats
    label = schema_of_columns(version.columns)[spec.label_column]
    if spec.task == REGRESSION and is_float(label):
        floats.append(spec.label_column)
    if not floats:
        return  # usually pixels: nothing to check
    splits = (spec.train_split, spec.validation_split)
    found = {
        (one["column"], one["split"]): what
        for one in read_report(store, version).get("columns", ())
        if one["column"] in floats and one["split"] in splits and (what := _non_finite(one))
    }
    if found:
        problems = [f"column {column!r} has {what} in split {split!r}" for (column, split), what in found.items()]
        raise InvalidArgument(
            f"spec.dataset_version: {'; '.join(problems[:MAX_PROBLEMS])} of {version.name}; {NON_FINITE_REMEDY}",
            reason="NON_FINITE_VALUES",
            metadata={"resource": version.name, "column": next(iter(found))[0]},
            fields=[("spec.dataset_version", problem) for problem in problems[:MAX_PROBLEMS]],
        )


def check_classes(store: ObjectStore, spec: TrainingSpec, version: DatasetVersion) -> None:
    """Check the version's statistics for labels that are no class of the model, before any row is read.

    Raises `InvalidArgument` for such a label. The specification must fit the version. A user's model whose width is
    unknown is not checked.
    """
    classes = spec.model.num_classes
    if spec.task == REGRESSION or not classes:
        return
    splits = (spec.train_split, spec.validation_split)
    for one in read_report(store, version).get("columns", ()):
        numbers = one.get("numbers")
        if one["column"] != spec.label_column or one["split"] not in splits or not numbers:
            continue
        least, most = int(numbers.get("min", 0)), int(numbers.get("max", 0))  # JSON omits a zero
        if least < 0 or most >= classes:
            label = least if least < 0 else most
            where = f"column {spec.label_column!r} has the label {label} in split {one['split']!r} of {version.name}"
            remedy = f"{where}, and labels must be 0 to num_classes - 1; " + (
                "encode them by ordinal_encode in TransformVersion" if least < 0 else f"use {most + 1} or more"
            )
            field, text = "spec.model.num_classes", f"{classes}: {remedy}"
            raise InvalidArgument(f"{field}: {text}", reason="LABEL_OUT_OF_RANGE", fields=[(field, text)])


def _non_finite(statistics: Mapping[str, Any]) -> str:
    """Return a column's NaN and infinities, by its statistics as JSON, as text. Empty if there are none."""
    count = int(statistics.get("nanCount", 0))
    found = [f"{count:,} NaN"] if count else []
    numbers = statistics.get("numbers", {})
    if any(isinstance(numbers.get(bound), str) for bound in ("min", "max")):  # JSON spells infinities as strings
        found.append("infinities")
    return " and ".join(found)


def with_order(spec: TrainingSpec, version: DatasetVersion) -> TrainingSpec:
    """Set the shuffle window, on which the order of rows depends besides lanes and seed.

    The specification must fit the version.
    """
    with functions_in_children():
        columns = Preprocessing(spec, version.columns).columns
    return replace(spec, window_rows=window_rows(bytes_of_row(version, spec.train_split, columns), spec.lanes))


def steps_of_run(spec: TrainingSpec, version: DatasetVersion) -> int:
    """Return the optimizer steps of all epochs. The split must exist."""
    (rows,) = (split.row_count for split in version.manifest.splits if split.name == spec.train_split)
    return steps_per_epoch(rows, spec.global_batch_size) * spec.epochs


def _wanted(channels: int, dimensions: int | None) -> str:
    return {1: f"({channels},)", 3: f"({channels}, H, W)"}.get(dimensions or 0, f"({channels}, ...)")


def ingested_columns(version: DatasetVersion) -> Sequence[Column]:
    """Return the columns of the rows as ingested. By default the version's own."""
    return version.manifest.ingested or version.columns


def class_names(spec: TrainingSpec, version: DatasetVersion) -> Sequence[str]:
    """Return the version's names of the model's classes 0, 1, …

    Return none if the version has no names, and for regression.
    """
    if spec.task == REGRESSION:
        return ()
    labels = next(column for column in version.columns if column.name == spec.label_column)
    return tuple(labels.value_names[: spec.model.num_classes])


def _check_label(spec: TrainingSpec, version: DatasetVersion) -> None:
    given = schema_of_columns(version.columns).get(spec.label_column)
    if given is None:
        names = ", ".join(column.name for column in version.columns)
        raise invalid_field("spec.label_column", spec.label_column, f"{version.name} has {names}")
    if spec.task == REGRESSION:
        _check_numbers(spec, given)
    elif not isinstance(given, ScalarType) or not kinds.is_integer(given.arrow_type):
        remedy = f"is {given}; name integers, such as ordinal_encode makes in TransformVersion"
        raise invalid_field("spec.label_column", spec.label_column, remedy)


def _check_numbers(spec: TrainingSpec, column_type: ColumnType) -> None:
    """Check that the label has one number per output of the model.

    That is a scalar column for one output, and a tensor column for more.
    """
    width, outputs = None, spec.model.num_classes
    if not outputs and spec.model.is_own:
        return  # checked again once the model's code has set it
    if isinstance(column_type, TensorType):
        width = column_type.shape[0] if len(column_type.shape) == 1 else None
    elif kinds.is_integer(column_type.arrow_type) or kinds.is_floating(column_type.arrow_type):
        width = 1
    if width != outputs:
        wanted = "numbers" if outputs == 1 else f"tensors of ({outputs},) numbers"
        remedy = (
            f"is {column_type}; name {wanted}, one for each of the {outputs} outputs that spec.model.num_classes says"
        )
        raise invalid_field("spec.label_column", spec.label_column, remedy)


# --- Text models ---

SIZE, PAD = "vocab_size", "pad_token_id"


def with_vocabulary(spec: TrainingSpec, version: DatasetVersion) -> TrainingSpec:
    """Set `vocab_size` and `pad_token_id` of a text model where the specification leaves them out.

    They are those of the tokenizer that makes the input, in the job's transform or in one of the version's. Tokens that
    the version brings without a tokenizer are not checked. Raises `InvalidArgument` for a vocabulary that is too small,
    and for columns in another order than ids, mask.
    """
    if not spec.model.builder.startswith(TRANSFORMERS):
        return spec
    own = Pipeline.from_config(spec.transform, spec.input_column, FIELD).steps
    joins = [(place, step) for place, step in enumerate(own) if isinstance(step, Concat)]
    joined = next(((place, step) for place, step in reversed(joins) if step.into == spec.input_column), None)
    if joined is None:
        return spec
    place, concat = joined
    found = [step for step in (*_of_version(version), *own) if isinstance(step, Tokenize)]
    tokenize = next((step for step in reversed(found) if step.ids_column in concat.columns), None)
    if tokenize is None:
        return spec
    columns = (tokenize.ids_column, tokenize.mask_column)
    if tuple(concat.columns) != columns:
        path = f"{FIELD}.steps[{place}].concat.columns"
        raise invalid_field(path, ",".join(concat.columns), f"the model takes ids and mask; use {','.join(columns)}")
    # An import needs no label column.
    if spec.model.builder == CAUSAL_LM and spec.label_column not in ("", tokenize.ids_column):
        remedy = f"a causal language model predicts the tokens of its input; use {tokenize.ids_column}"
        raise invalid_field("spec.label_column", spec.label_column, remedy)
    size, pad = tokenize.vocabulary
    kwargs = {SIZE: size, PAD: pad, **spec.model.kwargs}
    if isinstance(kwargs[SIZE], int) and kwargs[SIZE] < size:
        path = f"spec.model.kwargs.{SIZE}"
        raise invalid_field(path, kwargs[SIZE], f"the tokenizer has ids up to {size - 1:,}; use {size:,} or more")
    return replace(spec, model=replace(spec.model, kwargs=kwargs))


def check_padding(spec: TrainingSpec) -> None:
    """Raise `InvalidArgument` for trained weights that would find the end of a text by an id that is only assumed."""
    from shared.models.transformers_models import (
        lacks_padding_id,  # imports torch, which the tasks of Ray Data do without
    )

    if lacks_padding_id(spec.model):
        remedy = "name the id that its tokenizer pads with: the model takes the last token before it for a text's end"
        raise invalid_field(f"spec.model.kwargs.{PAD}", None, remedy)


def _of_version(version: DatasetVersion) -> Iterator[Step]:
    for transform in version.manifest.transforms:
        for step in transform.get("steps", ()):
            if "tokenize" in step:
                yield from Pipeline.from_config({"steps": [step]}, field=f"{version.name}.transforms").steps
