"""A pipeline: the steps of one `millrace.common.v1.Transform`, applied in order to batches of rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from google.protobuf import json_format

from millrace.common.v1 import transform_pb2
from shared.dataset_version.column_names import MAX_COLUMNS, name_problem
from shared.dataset_version.columns import ROW_ID
from shared.errors import InvalidArgument
from shared.transforms.batch import Batch
from shared.transforms.fitting import Fitter
from shared.transforms.problems import StepError, step_error
from shared.transforms.randomness import RowKeys
from shared.transforms.registry import build_step
from shared.transforms.schema import Schema
from shared.transforms.slicing import needed_columns, sliced
from shared.transforms.steps.columns import Select
from shared.transforms.steps.custom import Custom
from shared.transforms.steps.step import Step
from shared.transforms.walk import Walk

MAX_STEPS = 256


class Pipeline:
    """Immutable and picklable. `field` is the path under which errors name the steps; `asked` says that somebody asks
    for them now: what was recorded before such a request was refused, as names of columns beyond a bound, stays."""

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
        """The pipeline that a request asks for. `default_column` is the column of steps that name none. Custom
        functions must be among `custom_allowed`; None allows all.

        Raises `InvalidArgument` naming the step, below the path `field`.
        """
        return cls._built(transform, default_column, field, custom_allowed, asked=True)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], default_column: str = "", field: str = "transform", *, asked: bool = False
    ) -> Pipeline:
        """The inverse of `config`."""
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
        """The `Transform` as JSON, with all that was learnt: applied again it gives the same bits."""
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

    def output(self, given: Schema, field: str = "") -> Schema:
        """The columns that `given` becomes; lengths that are still to be learnt are None.

        Raises `InvalidArgument` naming the step that does not fit, below `field` (empty: as the pipeline was built).
        """
        return self._schemas(given, field)[-1]

    def __call__(self, batch: Batch, keys: RowKeys | None = None) -> Batch:
        """The batch after all steps, never changed in place.

        With `keys`, those of the batch's rows, augmentations act: training. Without: evaluation, serving, preparation.
        Raises `RowError` for a row that a step cannot work on, and `InvalidArgument` for a step that did not learn.
        """
        walk = Walk(batch, keys)
        for place, step in enumerate(self.steps):
            walk.through(step, f"{self._field}.steps[{place}]", place)
        return walk.batch

    def fitter(self, given: Schema) -> Fitter:
        """Learns, from the training rows of `given`, every unfitted step that one pass can teach: those whose column
        does not depend on a step that is still unfitted. Call it again on the result while any is `unfitted`."""
        return Fitter(self, self._schemas(given), self._field)

    def reads(self, outputs: Collection[str] | None, given: Schema) -> list[str]:
        """The columns of `given`, in order, that it takes to make these outputs (None: all). Filters count.

        Raises `InvalidArgument` for an output that is not made.
        """
        schemas = self._schemas(given)
        wanted = frozenset(schemas[-1] if outputs is None else outputs)
        self._check_outputs(wanted, schemas[-1])
        needed = needed_columns(self.steps, schemas, wanted)[0]
        return [name for name in given if name in needed]

    def serving(self, outputs: Collection[str], given: Schema) -> Pipeline:
        """Only what makes these columns, in this order, of single rows: without filters and augmentations.

        It takes batches of `reads(outputs, given)`, or of more. Raises `InvalidArgument` as `reads` does.
        """
        schemas = self._schemas(given)
        self._check_outputs(outputs, schemas[-1])
        forms = [(index, form) for index, step in enumerate(self.steps) if (form := step.serving_form()) is not None]
        steps, before = [form for _, form in forms], [*(schemas[index] for index, _ in forms), schemas[-1]]
        needed = needed_columns(steps, before, frozenset(outputs))
        part = [step for _, step in sliced(steps, before, needed)]
        serving = self.with_steps(part)
        if list(serving.output(given)) == list(outputs):
            return serving
        return self.with_steps([*part, Select(tuple(outputs))])

    def then(self, other: Pipeline) -> Pipeline:
        """This pipeline, and `other` on what it makes."""
        return Pipeline([*self.steps, *other.steps], other._column, self._field, asked=self._asked)

    def with_steps(self, steps: Sequence[Step]) -> Pipeline:
        """The same with other steps."""
        return Pipeline(steps, self._column, self._field, asked=self._asked)

    def _schemas(self, given: Schema, field: str = "") -> list[Schema]:
        """The columns before each step and, last, after all."""
        schemas = [dict(given)]
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

    def _check_outputs(self, outputs: Collection[str], made: Schema) -> None:
        for name in outputs:
            if name not in made:
                raise InvalidArgument(
                    f"{self._field}: it makes no column {name!r}, only {', '.join(made)}",
                    reason="INVALID_FIELD",
                    metadata={"field": self._field},
                )


def _checked(made: Schema) -> Schema:
    if not made:
        raise StepError("it leaves no column; keep at least one")
    for name in made:
        if name in ("", ROW_ID):
            raise StepError(f"a column must not be named {name!r}; choose another name")
    return made


def _refuse_very_many(message: transform_pb2.TransformStep) -> None:
    """Names of columns in one step."""
    op = message.WhichOneof("op")
    named = len(getattr(getattr(message, op), "columns", ())) if op else 0
    if named > MAX_COLUMNS:
        raise StepError(f"{named}: name at most {MAX_COLUMNS}", f"{op}.columns")


def _refuse_new_columns(made: Schema, given: Schema) -> None:
    """As imports check the columns of a source."""
    if len(made) > max(MAX_COLUMNS, len(given)):
        raise StepError(f"it makes {len(made)} columns; a version has at most {MAX_COLUMNS}")
    for name in made:
        if name not in given and (problem := name_problem(name)):
            raise StepError(problem)
