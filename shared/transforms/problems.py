"""What can be wrong with a step: with the step itself, with the columns given to it, or with one row."""

from __future__ import annotations

from typing import Any

from shared.errors import InvalidArgument


class StepError(ValueError):
    """The step makes no sense, or does not fit its columns.

    `at` is the path below the step of the field at fault, e.g. `resize.height`; empty: the step as a whole.
    """

    def __init__(self, message: str, at: str = "") -> None:
        super().__init__(message)
        self.at = at


class RowProblem(ValueError):
    """The step cannot work on one row: `row` is its index in the batch that the step was given."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


class RowError(InvalidArgument):
    """A row that a step cannot work on.

    `row` is its index in the batch that the pipeline was given, `path` the step's, e.g. `transform.steps[2]`, and
    `problem` what is wrong, without both: enough to say it again with the row's id.
    """

    def __init__(self, path: str, row: int, problem: str) -> None:
        super().__init__(
            f"{path}: row {row} of the batch: {problem}",
            reason="BAD_ROW",
            metadata={"field": path, "row": str(row)},
            fields=[(path, problem)],
        )
        self.path = path
        self.row = row
        self.problem = problem

    def __reduce__(self) -> tuple[Any, ...]:
        return (RowError, (self.path, self.row, self.problem))

    def as_record(self) -> dict[str, Any]:
        return {**super().as_record(), "kind": InvalidArgument.__name__}


def step_error(path: str, error: StepError) -> InvalidArgument:
    """The error that callers see of a step at `path`, e.g. `transform.steps[2]`."""
    where = f"{path}.{error.at}" if error.at else path
    return InvalidArgument(
        f"{where}: {error}", reason="INVALID_FIELD", metadata={"field": where}, fields=[(where, str(error))]
    )
