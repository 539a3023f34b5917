"""Keeping some rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millrace.common.v1 import transform_pb2
from shared.errors import first_line
from shared.transforms.batch import Batch, StepKeys, row_count, take_rows
from shared.transforms.expression import Expression, ExpressionError
from shared.transforms.problems import RowProblem, StepError
from shared.transforms.schema import ScalarType, Schema
from shared.transforms.steps.step import Names, Step, first_failing_row


@dataclass(frozen=True)
class Filter(Step):
    """Keeps the rows for which the expression is true."""

    op: ClassVar[str] = "filter"
    drops_rows: ClassVar[bool] = True
    expression: Expression

    @classmethod
    def of(cls, message: transform_pb2.Filter, column: str) -> Self:
        try:
            return cls(Expression(message.expression))
        except ExpressionError as error:
            raise StepError(str(error), "filter.expression") from None

    def to_proto(self) -> transform_pb2.TransformStep:
        return transform_pb2.TransformStep(filter=transform_pb2.Filter(expression=self.expression.text))

    @property
    def reads(self) -> tuple[str, ...]:
        return self.expression.columns

    def output(self, given: Schema) -> Schema:
        columns = {}
        for name in self.reads:
            if name not in given:
                raise StepError(f"there is no column {name!r}; there are {', '.join(given)}", "filter.expression")
            one = given[name]
            if not isinstance(one, ScalarType):
                raise StepError(f"{name!r} is {one}; a filter reads scalars alone", "filter.expression")
            columns[name] = pa.array([], one.arrow_type)
        try:
            self.expression(columns)
        except (ExpressionError, pa.ArrowException) as error:
            raise StepError(first_line(error), "filter.expression") from None
        return dict(given)

    def apply(self, batch: Batch, keys: StepKeys | None) -> Batch:
        return take_rows(batch, self.keeps(batch))

    def keeps(self, batch: Batch) -> NDArray[np.bool_]:
        """Which rows stay, (B). Raises `RowProblem` for a row whose values do not fit, as by an overflow."""
        rows = row_count(batch)
        columns = {name: batch[name] for name in self.reads}
        try:
            kept = self.expression(columns)
        except pa.ArrowException as error:
            row = first_failing_row(rows, lambda start, end: self._works(columns, start, end))
            raise RowProblem(row, f"{self.expression.text!r} does not work out: {first_line(error)}") from None
        if isinstance(kept, pa.Scalar):
            return np.full(rows, bool(kept.as_py()))
        mask: NDArray[np.bool_] = kept.fill_null(False).to_numpy(zero_copy_only=False)
        return mask

    def _works(self, columns: Batch, start: int, end: int) -> bool:
        try:
            self.expression({name: one[start:end] for name, one in columns.items()})
        except pa.ArrowException:
            return False
        return True

    def sources(self, needed: Names, given: Schema) -> Names:
        return needed | frozenset(self.reads)

    def narrowed(self, needed: Names, given: Schema) -> Step | None:
        return self
