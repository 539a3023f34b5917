"""What a training job does to the rows of its version: which columns it reads, and the model's input made of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow.types as kinds

from shared.dataset_version.manifest import Column
from shared.errors import InvalidArgument, invalid_field
from shared.transforms import Pipeline, RowError, RowKeys, Schema, TensorSpec, TensorType, schema_of_columns
from shared.transforms.batch import Column as BatchColumn
from shared.transforms.pipeline import BatchContext, needed_columns, sliced
from shared.transforms.schema import ColumnType
from shared.transforms.steps.custom import Custom
from shared.transforms.steps.decoding import image_columns, side_by_side
from shared.transforms.steps.images import CenterCrop, ColorJitter, RandomCrop, RandomFlip
from shared.transforms.steps.step import Step
from shared.transforms.steps.tensors import Concat, Normalize, ToFloat
from train_service.domain.spec import BY_DEVICE, TrainingSpec
from train_service.loading.rows import Array, Rows

FIELD = "spec.transform"
NON_FINITE_REMEDY = (
    "import the version with nan_as_null and fill its nulls, filter such rows in TransformVersion, or set "
    "spec.allow_non_finite"
)
# Of finite numbers and texts these steps make finite numbers alone, and `normalize` does by any usual std.
MAKE_FINITE = frozenset(
    {
        *("to_float", "select", "drop", "rename", "ordinal_encode", "one_hot_encode", "bucketize", "concat"),
        *("decode_image", "resize", "center_crop", "grayscale", "random_crop", "random_flip", "random_rotation"),
        *("color_jitter", "tokenize"),
    }
)
MIN_STD = 1e-6
# What a worker's device may do of the transform: see `train_service.learning.device`.
DEVICE_STEPS = (CenterCrop, RandomCrop, RandomFlip, ColorJitter, ToFloat, Normalize)
# What is NaN or infinite before these steps is so behind them.
KEEP_NON_FINITE = frozenset({"select", "drop", "fill_nulls", "standardize", "normalize"})


class Preprocessing:
    """The steps of the job's own transform that its input column depends on, and no others. Immutable."""

    def __init__(self, spec: TrainingSpec, columns: Sequence[Column], *, asked: bool = False) -> None:
        """`columns` are the version's; `asked` as in `Pipeline`. Raises `InvalidArgument` naming the step, or
        `spec.input_column`."""
        self.input_column = spec.input_column
        self._version = spec.dataset_version
        given = schema_of_columns(columns)
        whole = Pipeline.from_config(spec.transform, spec.input_column, FIELD, asked=asked)
        _check_steps(whole)
        schemas = _schemas(whole, given, spec)
        self._made = schemas[-1].get(spec.input_column)
        if self._made is None:
            raise invalid_field(
                FIELD, spec.input_column, f"it takes the input column away and leaves {_names(schemas[-1])}"
            )
        needed = needed_columns(whole.steps, schemas, frozenset([spec.input_column]))
        # In the version's order; the label is read beside them, for no step gets it.
        self.columns = [name for name in given if name in needed[0]]
        read = {name: given[name] for name in self.columns}
        # Each with its place in the whole transform, from which augmentations draw.
        self._steps = sliced(whole.steps, [read, *schemas[1:]], needed)
        self._images = image_columns([step for _, step in self._steps], read)
        self._floats = [name for name, one in read.items() if is_float(one)]
        makes_finite = all(_makes_finite(step) for _, step in self._steps)
        self._is_checked = not spec.allow_non_finite and not (makes_finite and not self._floats)
        # From here on the steps are the device's.
        self._device_begins = len(self._steps)
        if spec.acceleration.transform_device == BY_DEVICE:
            self._device_begins = self._first_of_device(schemas)
        # By whether augmentations act: those of validation have no keys.
        self._split = {True: spec.train_split, False: spec.validation_split}
        # As a checkpoint keeps it: every step names its column.
        self.config = whole.config

    @property
    def output(self) -> TensorSpec:
        """The model's input for one row. Raises `InvalidArgument` unless it is a tensor of a fixed shape."""
        made = self._made
        lengths = [length for length in made.shape if length is not None] if isinstance(made, TensorType) else []
        if not isinstance(made, TensorType) or len(lengths) < len(made.shape):
            remedy = f"column {self.input_column!r} must become a float32 tensor of a fixed shape; add steps"
            raise invalid_field(FIELD, str(made), remedy)
        return TensorSpec(self.input_column, made.dtype, tuple(lengths))

    @property
    def carried_floats(self) -> list[str]:
        """The columns of floats whose NaN and infinities reach the model's input, whatever else a row has."""
        origins = {name: {name} for name in self._floats}
        for _, step in self._steps:
            if isinstance(step, Concat):
                origins[step.into] = set().union(*(origins.get(name, set()) for name in step.columns))
            elif step.op not in KEEP_NON_FINITE:
                for name in step.reads:  # an encoder, a function: they may make anything of them
                    origins.pop(name, None)
        reaching = origins.get(self.input_column, set())
        return [name for name in self._floats if name in reaching]

    @property
    def device_steps(self) -> list[tuple[int, Step]]:
        """Those that `for_device` leaves, with their places in the whole transform."""
        return self._steps[self._device_begins :]

    @property
    def is_quick(self) -> bool:
        """Whether no step decodes images or calls a function of somebody else's, which take their time."""
        return not self._images and not any(isinstance(step, Custom) for _, step in self._steps)

    def __call__(self, rows: Rows, keys: RowKeys | None = None) -> Array:
        """The model's input of these rows (B, *shape). With `keys`, those of the rows, augmentations act.

        As many images are decoded side by side as there is room for. Raises `InvalidArgument` naming the id of a row
        that a step cannot work on or, unless such are allowed, whose input is NaN or infinite.
        """
        made = self._prepared(rows, keys)
        if self._is_checked and not np.isfinite(made).all():
            raise self._non_finite(rows, made, self._split[keys is not None])
        return made

    def for_device(self, rows: Rows, keys: RowKeys | None = None) -> Array:
        """What the steps but `device_steps` make of these rows, uint8 (B, H, W) or (B, H, W, C); where the device has
        none, as the call."""
        if not self.device_steps:
            return self(rows, keys)
        return self._prepared(rows, keys, self._device_begins)

    def _first_of_device(self, schemas: Sequence[Schema]) -> int:
        """Raises `InvalidArgument` where the last steps are none that a device does."""
        first = len(self._steps)
        for place, step in reversed(self._steps):
            before = schemas[place].get(self.input_column)
            if not isinstance(step, DEVICE_STEPS) or step.column != self.input_column:
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
        """What the steps before the one numbered `end` make."""
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
        except RowError as error:
            row_id = int(rows.row_ids[error.row])
            raise InvalidArgument(
                f"{error.path}: row {row_id} of {self._version}: {error.problem}",
                reason="BAD_ROW",
                metadata={"resource": self._version, "row_id": str(row_id)},
                fields=[(error.path, f"row {row_id}: {error.problem}")],
            ) from error
        # As torch takes it: contiguous, and its own to write to. Most transforms make it so.
        dtype = np.float32 if end is None else np.uint8
        return np.require(walk.batch[self.input_column], dtype, ["C", "W"])

    def _non_finite(self, rows: Rows, made: Array, split: str) -> InvalidArgument:
        finite = np.isfinite(made).reshape(len(made), -1)
        place = int(np.flatnonzero(~finite.all(axis=1))[0])
        value = made[place].reshape(-1)[int(np.flatnonzero(~finite[place])[0])]
        row_id = int(rows.row_ids[place])
        given = rows.slice(place, place + 1).batch()
        culprits = [name for name in self._floats if not np.isfinite(_numbers(given[name])).all()]
        if culprits:
            problem = f"column {culprits[0]!r} is {_first_non_finite(given[culprits[0]])}"
        else:
            problem = f"its values are finite, and {FIELD} makes {value} of them in column {self.input_column!r}"
        return InvalidArgument(
            f"spec.dataset_version: row {row_id} of split {split!r} of {self._version}: {problem}; {NON_FINITE_REMEDY}",
            reason="NON_FINITE_VALUES",
            metadata={
                "resource": self._version,
                "row_id": str(row_id),
                "split": split,
                "column": culprits[0] if culprits else self.input_column,
            },
            fields=[("spec.dataset_version", f"row {row_id}: {problem}")],
        )


def is_float(one: ColumnType) -> bool:
    if isinstance(one, TensorType):
        return np.dtype(one.dtype).kind == "f"
    return bool(kinds.is_floating(one.arrow_type))


def _makes_finite(step: Step) -> bool:
    return step.op in MAKE_FINITE or (isinstance(step, Normalize) and min(step.std) >= MIN_STD)


def _numbers(column: BatchColumn) -> Array:
    """Nulls, which pandas writes as NaN, are left out."""
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


def _schemas(pipeline: Pipeline, given: Schema, spec: TrainingSpec) -> list[Schema]:
    """The columns before each step and, last, after all. An input column that no step could have made by the time it
    is worked on is the fault of `spec.input_column`, not of the step."""
    schemas = [given]
    for index, step in enumerate(pipeline.steps):
        if spec.input_column not in schemas[-1] and spec.input_column in step.reads:
            break
        schemas.append(pipeline.with_steps(pipeline.steps[: index + 1]).output(given))
    else:
        if spec.input_column in {*given, *schemas[-1]}:
            return schemas
    raise invalid_field(
        "spec.input_column", spec.input_column, f"{spec.dataset_version} has {_names(given)}, and no step makes it"
    )


def _names(schema: Schema) -> str:
    return ", ".join(schema)
