"""What a step is: a pure function of a batch of rows, bit for bit the same for a row in any company."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

from millrace.common.v1 import transform_pb2
from shared.errors import shown
from shared.transforms.batch import Batch, Column, StepKeys
from shared.transforms.schema import ColumnType, ScalarType, Schema, StepError

Names = frozenset[str]


class FitAccumulator(Protocol):
    """Learns from any number of batches, in any order and cut: the result is the same to the last bit."""

    def update(self, column: Column) -> None:
        """Raises `RowProblem` for a row to learn nothing from, `StepError` where there is too much to keep."""

    def merge(self, other: Any) -> None:
        """Takes in what a learner of the same step has seen."""

    def fitted_step(self) -> Step:
        """The step with what it learnt. Raises `StepError` where the rows seen do not suffice."""


class Step(ABC):
    """`op` is the step's field in `TransformStep.op`."""

    op: ClassVar[str]
    # Drops rows (only `filter`): all other steps work row by row.
    drops_rows: ClassVar[bool] = False
    # Draws from the row's keys in training.
    augments: ClassVar[bool] = False
    # Works on the column that `TransformStep.column` names.
    takes_column: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def of(cls, message: Any, column: str) -> Self:
        """The step that a message of the type of `op` describes. Raises `StepError`."""

    @abstractmethod
    def to_proto(self) -> transform_pb2.TransformStep:
        """The inverse of `of`, with what was learnt."""

    @property
    @abstractmethod
    def reads(self) -> tuple[str, ...]:
        """The columns that the step works on."""

    @property
    def row_wise(self) -> bool:
        return not self.drops_rows

    @property
    def fitted(self) -> bool:
        """Whether there is nothing to learn, or it was learnt."""
        return True

    def accumulator(self, given: ColumnType) -> FitAccumulator:
        """Learns the step from its one column, which is `given`; only of a step that is not fitted."""
        raise NotImplementedError(f"{self.op} learns nothing")

    @abstractmethod
    def output(self, given: Schema) -> Schema:
        """The columns after the step. Raises `StepError` saying what it needs instead."""

    def check_request(self, given: Schema) -> None:
        """Refuses what nobody may ask for any longer; a step that was recorded earlier still does it. Raises
        `StepError`."""
        return

    @abstractmethod
    def apply(self, batch: Batch, keys: StepKeys | None) -> Batch:
        """Works on all rows at once, never in place; `keys` are those of rows of training, else None.

        Raises `RowProblem` for a row that it cannot work on.
        """

    @abstractmethod
    def sources(self, needed: Names, given: Schema) -> Names:
        """The columns of `given` that it takes to make the `needed` columns after the step."""

    @abstractmethod
    def narrowed(self, needed: Names, given: Schema) -> Step | None:
        """The step as far as the `needed` columns need it; None where they do not."""

    def serving_form(self) -> Step | None:
        """The step as it acts in serving; None where it has no meaning there."""
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

    def output(self, given: Schema) -> Schema:
        known(given, [self.column], "column")
        return {name: self.output_type(one) if name == self.column else one for name, one in given.items()}

    def apply(self, batch: Batch, keys: StepKeys | None) -> Batch:
        return {name: self.work(one, keys) if name == self.column else one for name, one in batch.items()}

    def sources(self, needed: Names, given: Schema) -> Names:
        return needed

    def narrowed(self, needed: Names, given: Schema) -> Step | None:
        return self if self.column in needed else None

    @abstractmethod
    def output_type(self, given: ColumnType) -> ColumnType:
        """The column's type after the step. Raises `StepError`."""

    @abstractmethod
    def work(self, column: Column, keys: StepKeys | None) -> Column:
        """The column's values after the step. Raises `RowProblem`."""


def known(given: Schema, names: Collection[str], at: str) -> None:
    """Raises `StepError` for a column that is not there; `at` is the path of the field that names it."""
    for index, name in enumerate(names):
        if name not in given:
            where = at if at == "column" else f"{at}[{index}]"
            raise StepError(f"there is no column {shown(name)}; there are {', '.join(given) or 'none'}", where)


def scalar(given: ColumnType, needs: str) -> ScalarType:
    """Raises `StepError` with `needs`, e.g. `cast needs a scalar column`, for a tensor."""
    if not isinstance(given, ScalarType):
        raise StepError(f"{needs}, not {given}")
    return given


def first_failing_row(rows: int, works: Callable[[int, int], bool]) -> int:
    """The first of `rows` rows that does not work by itself, found by halving; `works(start, end)` tries some of them.

    One of them must fail.
    """
    start, end = 0, rows
    while end - start > 1:
        middle = (start + end) // 2
        if works(start, middle):
            start = middle
        else:
            end = middle
    return start
