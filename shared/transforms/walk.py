"""A batch on its way through the steps, with what tells which of the rows given at first are left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from shared.transforms.batch import Batch, take_rows
from shared.transforms.problems import RowError, RowProblem, StepError, step_error
from shared.transforms.randomness import RowKeys
from shared.transforms.steps.filtering import Filter
from shared.transforms.steps.step import Learner, Step


class Walk:
    """`keys` are those of the batch's rows in training, else None."""

    def __init__(self, batch: Batch, keys: RowKeys | None = None) -> None:
        self.batch = batch
        self._keys = keys
        # Of the rows that are left, the indices in the batch given at first; None while all are.
        self._origin: NDArray[np.intp] | None = None

    def through(self, step: Step, path: str, place: int) -> None:
        """Raises `RowError`, and `InvalidArgument` for a step that fails as a whole, naming `path`."""
        with self._named(path):
            if not step.fitted:
                raise StepError(f"{step.op} has not learnt yet; fit the pipeline first")
            if isinstance(step, Filter):
                self._keep(step.keeps(self.batch))
            else:
                keys = self._keys.at(place) if self._keys is not None and step.augments else None
                self.batch = step.apply(self.batch, keys)

    def teach(self, learner: Learner, column: str, path: str) -> None:
        """Raises as `through` does."""
        with self._named(path):
            learner.update(self.batch[column])

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
