"""The interface of a step: a pure function of a batch of rows.

A row's result is bit for bit the same whatever the other rows of the batch are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

from millrace.common.v1 import transform_pb2
from shared.errors import shown
from shared.transforms.batch import Batch, Column, ColumnType, ScalarType, Schema, StepError, StepKeys

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
        """Invert `of`, including what was learned."""

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
