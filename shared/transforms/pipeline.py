"""A pipeline: the steps of one `millrace.common.v1.Transform`, applied in order to batches of rows.

`build_step` makes a step from its message. A `BatchContext` is a batch on its way through the steps, and records which
of the original rows are left. `sliced` is the part of a chain that some columns depend on, found by walking backwards
over what each step reads. A `Fitter` lets steps learn from training rows, exactly: the result is the same to the last
bit however the rows are ordered and cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from google.protobuf import json_format
from numpy.typing import NDArray

from millrace.common.v1 import transform_pb2
from shared.dataset_version.manifest import MAX_COLUMNS, ROW_ID, name_problem
from shared.errors import InvalidArgument
from shared.transforms.batch import (
    Batch,
    FitAccumulator,
    Names,
    RowError,
    RowKeys,
    RowProblem,
    Schema,
    Step,
    StepError,
    step_error,
    take_rows,
)
from shared.transforms.steps.columns import Cast, Concat, Drop, Normalize, Rename, Select, ToFloat
from shared.transforms.steps.custom import Custom
from shared.transforms.steps.filtering import Filter
from shared.transforms.steps.fitted import Bucketize, FillNulls, MinMaxScale, OneHotEncode, OrdinalEncode, Standardize
from shared.transforms.steps.images import (
    CenterCrop,
    ColorJitter,
    DecodeImage,
    Grayscale,
    RandomCrop,
    RandomFlip,
    RandomRotation,
    Resize,
)
from shared.transforms.steps.tokenizing import Tokenize

# --- Pipeline ---

MAX_STEPS = 256


class Pipeline:
    """An ordered chain of steps. Immutable and picklable.

    `field` is the path under which errors name the steps. `asked` means that a new request asks for them, so limits
    that were introduced later, such as that on the number of columns, apply; recorded pipelines stay valid.
    """

    def __init__(
        self, steps: Sequence[Step], default_column: str = "", field: str = "transform", *, asked: bool = False
    ) -> None:
        self.steps = list(steps)
        self._column = default_column
        self._field = field
        self._asked = asked

    @classmethod
    def from_proto(
        cls,
        transform: transform_pb2.Transform,
        default_column: str = "",
        field: str = "transform",
        custom_allowed: Collection[str] | None = None,
    ) -> Pipeline:
        """Make the pipeline that a request asks for.

        `default_column` is the column of steps that name none. Custom functions must be among `custom_allowed`; None
        allows all. Raises `InvalidArgument`, naming the step, below the path `field`.
        """
        return cls._built(transform, default_column, field, custom_allowed, asked=True)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], default_column: str = "", field: str = "transform", *, asked: bool = False
    ) -> Pipeline:
        """Invert `config`."""
        transform = json_format.ParseDict(dict(config), transform_pb2.Transform())
        return cls._built(transform, default_column, field, None, asked=asked)

    @classmethod
    def _built(
        cls,
        transform: transform_pb2.Transform,
        default_column: str,
        field: str,
        custom_allowed: Collection[str] | None,
        *,
        asked: bool,
    ) -> Pipeline:
        if len(transform.steps) > MAX_STEPS:
            raise step_error(
                field, StepError(f"there are {len(transform.steps)} steps; use at most {MAX_STEPS}", "steps")
            )
        steps = []
        for index, message in enumerate(transform.steps):
            try:
                if asked:
                    _refuse_very_many(message)
                steps.append(build_step(message, default_column, custom_allowed))
            except StepError as error:
                raise step_error(f"{field}.steps[{index}]", error) from None
        return cls(steps, default_column, field, asked=asked)

    @property
    def config(self) -> dict[str, Any]:
        """Return the `Transform` as JSON, with everything learned. Applied again, it gives the same bits."""
        config: dict[str, Any] = json_format.MessageToDict(self.to_proto())
        return config

    def to_proto(self) -> transform_pb2.Transform:
        return transform_pb2.Transform(steps=[step.to_proto() for step in self.steps])

    @property
    def unfitted(self) -> list[int]:
        """The indices of the steps that still have to learn."""
        return [index for index, step in enumerate(self.steps) if not step.fitted]

    @property
    def drops_rows(self) -> bool:
        return any(step.drops_rows for step in self.steps)

    @property
    def has_augmentations(self) -> bool:
        return any(step.augments for step in self.steps)

    @property
    def has_custom(self) -> bool:
        return any(isinstance(step, Custom) for step in self.steps)

    def output(self, schema: Schema, field: str = "") -> Schema:
        """Return the columns that `schema` becomes. Lengths that are not learned yet are None.

        Raises `InvalidArgument`, naming the step that does not fit, below `field` (empty: the pipeline's own).
        """
        return self._schemas(schema, field)[-1]

    def __call__(self, batch: Batch, keys: RowKeys | None = None) -> Batch:
        """Apply all steps to the batch, never in place.

        With `keys`, those of the batch's rows, augmentations are active (training). Without keys they are not
        (evaluation, serving, preparation). Raises `RowError` for a row that a step cannot process, and
        `InvalidArgument` for a step that has not learned.
        """
        context = BatchContext(batch, keys)
        for place, step in enumerate(self.steps):
            context.through(step, f"{self._field}.steps[{place}]", place)
        return context.batch

    def fitter(self, schema: Schema) -> Fitter:
        """Return a fitter for every unfitted step that one pass can teach.

        These are the steps whose column depends on no unfitted step. Call it again on the result while any step is
        `unfitted`.
        """
        return Fitter(self, self._schemas(schema), self._field)

    def reads(self, outputs: Collection[str] | None, schema: Schema) -> list[str]:
        """Return the columns of `schema`, in order, that these outputs need (None: all). Filters count.

        Raises `InvalidArgument` for an output that is not made.
        """
        schemas = self._schemas(schema)
        wanted = frozenset(schemas[-1] if outputs is None else outputs)
        self._check_outputs(wanted, schemas[-1])
        needed = needed_columns(self.steps, schemas, wanted)[0]
        return [name for name in schema if name in needed]

    def serving(self, outputs: Collection[str], schema: Schema) -> Pipeline:
        """Return the pipeline that makes only these columns, in this order, of single rows.

        It has no filters and augmentations, and takes batches of `reads(outputs, given)`, or of more columns. Raises
        `InvalidArgument` as `reads` does.
        """
        schemas = self._schemas(schema)
        self._check_outputs(outputs, schemas[-1])
        forms = [(index, form) for index, step in enumerate(self.steps) if (form := step.serving_form()) is not None]
        steps, before = [form for _, form in forms], [*(schemas[index] for index, _ in forms), schemas[-1]]
        needed = needed_columns(steps, before, frozenset(outputs))
        part = [step for _, step in sliced(steps, before, needed)]
        serving = self.with_steps(part)
        if list(serving.output(schema)) == list(outputs):
            return serving
        return self.with_steps([*part, Select(tuple(outputs))])

    def then(self, other: Pipeline) -> Pipeline:
        """Return this pipeline followed by `other`."""
        return Pipeline([*self.steps, *other.steps], other._column, self._field, asked=self._asked)

    def with_steps(self, steps: Sequence[Step]) -> Pipeline:
        """Return the same pipeline with other steps."""
        return Pipeline(steps, self._column, self._field, asked=self._asked)

    def _schemas(self, schema: Schema, field: str = "") -> list[Schema]:
        """Return the columns before each step and, last, after all steps."""
        schemas = [dict(schema)]
        for index, step in enumerate(self.steps):
            path = f"{field or self._field}.steps[{index}]"
            try:
                made = _checked(step.output(schemas[-1]))
                if self._asked:
                    step.check_request(schemas[-1])
                    _refuse_new_columns(made, schemas[-1])
                schemas.append(made)
            except StepError as error:
                raise step_error(path, error) from None
        return schemas

    def _check_outputs(self, outputs: Collection[str], schema: Schema) -> None:
        for name in outputs:
            if name not in schema:
                raise InvalidArgument(
                    f"{self._field}: it makes no column {name!r}, only {', '.join(schema)}",
                    reason="INVALID_FIELD",
                    metadata={"field": self._field},
                )


def _checked(schema: Schema) -> Schema:
    if not schema:
        raise StepError("it leaves no column; keep at least one")
    for name in schema:
        if name in ("", ROW_ID):
            raise StepError(f"a column must not be named {name!r}; choose another name")
    return schema


def _refuse_very_many(message: transform_pb2.TransformStep) -> None:
    """Refuse a step that names too many columns."""
    op = message.WhichOneof("op")
    named = len(getattr(getattr(message, op), "columns", ())) if op else 0
    if named > MAX_COLUMNS:
        raise StepError(f"{named}: name at most {MAX_COLUMNS}", f"{op}.columns")


def _refuse_new_columns(made: Schema, schema: Schema) -> None:
    """Check new columns as imports check those of a source."""
    if len(made) > max(MAX_COLUMNS, len(schema)):
        raise StepError(f"it makes {len(made)} columns; a version has at most {MAX_COLUMNS}")
    for name in made:
        if name not in schema and (problem := name_problem(name)):
            raise StepError(problem)


# --- Registry of steps ---

STEPS: dict[str, type[Step]] = {
    step.op: step
    for step in (
        ToFloat,
        Normalize,
        Select,
        Drop,
        Rename,
        Cast,
        Filter,
        FillNulls,
        Standardize,
        MinMaxScale,
        OrdinalEncode,
        OneHotEncode,
        Bucketize,
        Concat,
        DecodeImage,
        Resize,
        CenterCrop,
        Grayscale,
        RandomCrop,
        RandomFlip,
        RandomRotation,
        ColorJitter,
        Custom,
        Tokenize,
    )
}


def build_step(
    message: transform_pb2.TransformStep, default_column: str, custom_allowed: Collection[str] | None
) -> Step:
    """Make a step from its message. Raises `StepError`, naming the faulty field.

    `custom_allowed` is as in `Pipeline.from_proto`.
    """
    op = message.WhichOneof("op")
    if op is None:
        raise StepError(f"choose one of {', '.join(STEPS)}")
    kind = STEPS[op]
    if kind.takes_column:
        column = message.column or default_column
        if not column:
            raise StepError(f"name the column that {op} works on", "column")
    elif message.column:
        raise StepError(f"leave it empty: {op} names its columns itself", "column")
    else:
        column = ""
    step = kind.from_message(getattr(message, op), column)
    if isinstance(step, Custom) and custom_allowed is not None and step.function not in custom_allowed:
        allowed = ", ".join(sorted(custom_allowed)) or "none"
        raise StepError(f"{step.function!r} is not allowed here; allowed are: {allowed}", "custom.function")
    return step


# --- Walk ---


class BatchContext:
    """A batch on its way through the steps. `keys` are those of its rows in training, else None."""

    def __init__(self, batch: Batch, keys: RowKeys | None = None) -> None:
        self.batch = batch
        self._keys = keys
        # The indices in the original batch of the rows that are left; None while all are.
        self._origin: NDArray[np.intp] | None = None

    def through(self, step: Step, path: str, place: int) -> None:
        """Apply a step. Raises `RowError`; `InvalidArgument`, naming `path`, if the step fails as a whole."""
        with self._named(path):
            if not step.fitted:
                raise StepError(f"{step.op} has not learnt yet; fit the pipeline first")
            if isinstance(step, Filter):
                self._keep(step.keeps(self.batch))
            else:
                keys = self._keys.at(place) if self._keys is not None and step.augments else None
                self.batch = step.apply(self.batch, keys)

    def teach(self, accumulator: FitAccumulator, column: str, path: str) -> None:
        """Pass a column to an accumulator. Raises as `through` does."""
        with self._named(path):
            accumulator.update(self.batch[column])

    def _keep(self, kept: NDArray[np.bool_]) -> None:
        if kept.all():
            return
        self.batch = take_rows(self.batch, kept)
        self._origin = np.flatnonzero(kept) if self._origin is None else self._origin[kept]
        self._keys = self._keys and self._keys.take(kept)

    @contextmanager
    def _named(self, path: str) -> Iterator[None]:
        try:
            yield
        except RowProblem as problem:
            row = problem.row if self._origin is None else int(self._origin[problem.row])
            raise RowError(path, row, str(problem)) from problem
        except StepError as error:
            raise step_error(path, error) from error


# --- Slices of a chain ---

# (index of the step in the chain, the part of the step that is left).
Sliced = list[tuple[int, Step]]


def needed_columns(
    steps: Sequence[Step], schemas: Sequence[Schema], outputs: Names, taps: Mapping[int, Names] | None = None
) -> list[Names]:
    """Return the columns needed before each step and, last, after all steps: len(steps) + 1 sets.

    `schemas[i]` are the columns before step i; `taps` are columns needed before a step in addition to what `outputs`
    need.
    """
    needed = [outputs]
    for index in range(len(steps) - 1, -1, -1):
        sources = steps[index].sources(needed[-1], schemas[index])
        needed.append(sources | (taps or {}).get(index, frozenset()))
    return needed[::-1]


def sliced(steps: Sequence[Step], schemas: Sequence[Schema], needed: Sequence[Names]) -> Sliced:
    """Narrow the steps to what is needed (`needed` comes from `needed_columns`), starting from the columns `needed[0]`.

    Columns are dropped as soon as no step needs them, so a name that the chain removes and makes again cannot collide.
    Steps added to drop columns carry the index of the step that they follow.
    """
    part: Sliced = []
    present = {name: schema for name, schema in schemas[0].items() if name in needed[0]}
    if len(present) < len(schemas[0]):
        part.append((0, Select(tuple(present))))
    for index, step in enumerate(steps):
        narrowed = step.narrowed(needed[index + 1], schemas[index])
        if narrowed is not None:
            part.append((index, narrowed))
            present = narrowed.output(present)
        dead = tuple(name for name in present if name not in needed[index + 1])
        if dead:
            part.append((index, Drop(dead)))
            present = {name: one for name, one in present.items() if name not in dead}
    return part


# --- Fitting ---


class Fitter:
    """Fits, in one pass over the training rows, the steps whose column depends on no unfitted step.

    Picklable. Several fitters may each see a part of the rows and then be merged. `schemas` are the columns before each
    step of the pipeline; `field` is the path under which errors name its steps.
    """

    def __init__(self, pipeline: Pipeline, schemas: Sequence[Schema], field: str) -> None:
        self._pipeline = pipeline
        self._field = field
        steps = pipeline.steps
        taps = {
            index: step.reads[0]
            for index, step in enumerate(steps)
            if not step.fitted and _can_be_fitted(steps, schemas, index)
        }
        # An accumulator sees the column before its step is applied.
        self._accumulators: dict[int, tuple[str, FitAccumulator]] = {
            index: (column, steps[index].accumulator(schemas[index][column])) for index, column in taps.items()
        }
        self._steps = _steps_towards(taps, steps, schemas)

    @property
    def fitting_steps(self) -> list[int]:
        """The indices of the steps that this pass fits."""
        return list(self._accumulators)

    @property
    def applies(self) -> list[Step]:
        """The steps that the rows pass through before those steps."""
        return [step for steps in self._steps.values() for step in steps]

    def update(self, batch: Batch) -> None:
        """Learn from training rows. Raises as `Pipeline.__call__` does."""
        context = BatchContext(batch)
        for index in range(len(self._pipeline.steps)):
            if index in self._accumulators:
                column, accumulator = self._accumulators[index]
                context.teach(accumulator, column, self._path(index))
            for step in self._steps.get(index, []):
                context.through(step, self._path(index), index)

    def merge(self, other: Fitter) -> None:
        """Add what `other`, a fitter of the same pipeline, has seen.

        Raises `InvalidArgument` as `update` does.
        """
        if self.fitting_steps != other.fitting_steps:
            raise ValueError(
                f"a fitter of the steps {other.fitting_steps} cannot be merged into one of {self.fitting_steps}"
            )
        for index, (_, accumulator) in self._accumulators.items():
            try:
                accumulator.merge(other._accumulators[index][1])
            except StepError as error:
                raise step_error(self._path(index), error) from None

    def fitted(self) -> Pipeline:
        """Return the fitted pipeline. Raises `InvalidArgument` for a step that saw too little."""
        steps = list(self._pipeline.steps)
        for index, (_, accumulator) in self._accumulators.items():
            try:
                steps[index] = accumulator.fitted_step()
            except StepError as error:
                raise step_error(self._path(index), error) from None
        return self._pipeline.with_steps(steps)

    def _path(self, index: int) -> str:
        return f"{self._field}.steps[{index}]"


def _can_be_fitted(steps: Sequence[Step], schemas: Sequence[Schema], index: int) -> bool:
    before = steps[:index]
    needed = needed_columns(before, schemas, frozenset(steps[index].reads))
    return all(step.fitted for _, step in sliced(before, schemas, needed))


def _steps_towards(taps: dict[int, str], steps: Sequence[Step], schemas: Sequence[Schema]) -> dict[int, list[Step]]:
    """Return the parts of the steps that bring each tapped column to its tap."""
    if not taps:
        return {}
    last = max(taps)
    wanted: dict[int, Names] = {index: frozenset([column]) for index, column in taps.items()}
    needed = needed_columns(steps[:last], schemas, wanted[last], wanted)
    by_index: dict[int, list[Step]] = {}
    for index, step in sliced(steps[:last], schemas, needed):
        by_index.setdefault(index, []).append(step)
    return by_index
