"""Learning steps from training rows: exact, so the same to the last bit however the rows are ordered and cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shared.transforms.batch import Batch
from shared.transforms.problems import StepError, step_error
from shared.transforms.schema import Schema
from shared.transforms.slicing import needed_columns, sliced
from shared.transforms.steps.step import Learner, Names, Step
from shared.transforms.walk import Walk

if TYPE_CHECKING:
    from shared.transforms.pipeline import Pipeline


class Fitter:
    """Learns, in one pass over the training rows, the steps whose column depends on no step that is still unfitted.

    Picklable; several may learn from a part of the rows each, and be merged. `schemas` are the columns before each step
    of the pipeline, `field` the path under which errors name its steps.
    """

    def __init__(self, pipeline: Pipeline, schemas: Sequence[Schema], field: str) -> None:
        self._pipeline = pipeline
        self._field = field
        steps = pipeline.steps
        taps = {
            index: step.reads[0]
            for index, step in enumerate(steps)
            if not step.fitted and _learnable(steps, schemas, index)
        }
        # Before a step is applied, its learner, if any, sees the column.
        self._learners: dict[int, tuple[str, Learner]] = {
            index: (column, steps[index].learner(schemas[index][column])) for index, column in taps.items()
        }
        self._steps = _steps_towards(taps, steps, schemas)

    @property
    def learns(self) -> list[int]:
        """The indices of the steps that this pass teaches."""
        return list(self._learners)

    @property
    def applies(self) -> list[Step]:
        """The steps that the rows go through on their way to those."""
        return [step for steps in self._steps.values() for step in steps]

    def update(self, batch: Batch) -> None:
        """Learns from training rows. Raises as `Pipeline.__call__` does."""
        walk = Walk(batch)
        for index in range(len(self._pipeline.steps)):
            if index in self._learners:
                column, learner = self._learners[index]
                walk.teach(learner, column, self._path(index))
            for step in self._steps.get(index, []):
                walk.through(step, self._path(index), index)

    def merge(self, other: Fitter) -> None:
        """Takes in what `other`, a fitter of the same pipeline, has seen. Raises `InvalidArgument` as `update` does."""
        if self.learns != other.learns:
            raise ValueError(f"a fitter of the steps {other.learns} cannot be merged into one of {self.learns}")
        for index, (_, learner) in self._learners.items():
            try:
                learner.merge(other._learners[index][1])
            except StepError as error:
                raise step_error(self._path(index), error) from None

    def fitted(self) -> Pipeline:
        """The pipeline with what was learnt. Raises `InvalidArgument` for a step that saw too little."""
        steps = list(self._pipeline.steps)
        for index, (_, learner) in self._learners.items():
            try:
                steps[index] = learner.learnt()
            except StepError as error:
                raise step_error(self._path(index), error) from None
        return self._pipeline.with_steps(steps)

    def _path(self, index: int) -> str:
        return f"{self._field}.steps[{index}]"


def _learnable(steps: Sequence[Step], schemas: Sequence[Schema], index: int) -> bool:
    before = steps[:index]
    needed = needed_columns(before, schemas, frozenset(steps[index].reads))
    return all(step.fitted for _, step in sliced(before, schemas, needed))


def _steps_towards(taps: dict[int, str], steps: Sequence[Step], schemas: Sequence[Schema]) -> dict[int, list[Step]]:
    """What it takes of the steps to bring each tapped column to its tap."""
    if not taps:
        return {}
    last = max(taps)
    wanted: dict[int, Names] = {index: frozenset([column]) for index, column in taps.items()}
    needed = needed_columns(steps[:last], schemas, wanted[last], wanted)
    by_index: dict[int, list[Step]] = {}
    for index, step in sliced(steps[:last], schemas, needed):
        by_index.setdefault(index, []).append(step)
    return by_index
