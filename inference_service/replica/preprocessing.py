"""From the rows of a request to the model's input: every row-wise step since ingest, with the code that training ran.

It needs no torch, so it can be had without loading a model.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import numpy as np

from inference_service.domain.rows import PREPARED, Rows
from inference_service.domain.signature import FREE, TensorSpec
from inference_service.domain.tensors import Array
from inference_service.replica.pixels import Beyond, beyond_limits
from inference_service.replica.raw_columns import column_of_tensor, tensor_of_column
from shared.checkpoint import CheckpointContent
from shared.checkpoint.missing_values import NanReading, float_columns, may_be_non_finite, nan_reading
from shared.errors import FailedPrecondition, InvalidArgument, MillraceError
from shared.own_code import check_functions
from shared.telemetry import hidden
from shared.transforms import Batch, Pipeline, RowError, TensorType
from shared.transforms.steps.custom import DEFAULT_TIMEOUT_S, Custom
from shared.transforms.steps.decoding import PIXELS_AT_ONCE, DecodeImage, claimed_pixels, image_columns

logger = logging.getLogger(__name__)

REMEDY = "; send finite numbers, or have the deployment allow_non_finite"
_STEP = re.compile(r"steps\[(\d+)\]")


class Preprocessing:
    """`raw` are the inputs that raw rows have, `prepared` is the model's own; `custom_s` is how long its custom
    functions may take together, by their own limits. Immutable."""

    def __init__(
        self, content: CheckpointContent, custom_allowed: Collection[str] = (), *, allow_non_finite: bool = False
    ) -> None:
        """`custom_allowed` are the functions that this node's operator lets custom steps name; `allow_non_finite` says
        that rows with a NaN or an infinity that no step fills are computed like others.

        Raises `InvalidArgument` where the steps do not fit, and `FailedPrecondition` for a column that cannot be sent
        or a function that is not allowed.
        """
        check_functions(content.transforms, custom_allowed, "on the nodes that serve")
        pipeline = content.serving()
        self._pipeline = pipeline.with_steps(
            [
                replace(step, at_once=PIXELS_AT_ONCE) if isinstance(step, DecodeImage) else step
                for step in pipeline.steps
            ]
        )
        self._input_column = content.input_column
        ingested = content.ingested_schema
        needed = self._pipeline.reads([self._input_column], ingested)
        self._columns = {name: ingested[name] for name in needed}
        self.raw = tuple(tensor_of_column(name, one) for name, one in self._columns.items())
        self.prepared = self._prepared()
        self._images = image_columns(pipeline.steps, self._columns)
        self._nans = nan_reading(content, self._pipeline.steps, self._columns)
        self._floats = float_columns(self._columns)
        self._allows_non_finite = allow_non_finite
        self._raw_may_be_non_finite = may_be_non_finite(self._columns, self._images)
        custom_s = [one.timeout_s or DEFAULT_TIMEOUT_S for one in pipeline.steps if isinstance(one, Custom)]
        self.custom_s = sum(custom_s)
        self._overlong_s = min(custom_s, default=math.inf)

    def prepare(
        self, rows: Rows, moved: Callable[[], None] = lambda: None
    ) -> tuple[Array, dict[int, str], dict[int, MillraceError]]:
        """The model's input of these rows, float32 (B, *shape), what is wrong with those that it cannot be made of, and
        with what error others failed, by their place; both are zeros.

        A row comes out the same in any company, so where one of many fails, each half is tried alone, and so on: the
        fault of one request is not that of the others in its batch. Where many fail, what fails is no longer halved but
        tried one by one, so that all take little more than a call for each. Images are, too: they may hold too many
        pixels to be decoded side by side, and would be decoded anew in each half; and so is what a custom function took
        all its time for, which would be as much in each half. `moved` is called before each try.

        A row whose input would have a NaN or an infinity is refused, too, unless the deployment allows them.
        """
        prepared, refused, failed = self._made(rows, moved)
        if self._allows_non_finite or not (rows.form == PREPARED or self._raw_may_be_non_finite):
            return prepared, refused, failed
        if rows.form == PREPARED:
            found = NanReading().bad_rows(prepared, [self._input_column], lambda: {self._input_column: prepared})
        else:
            found = self._nans.bad_rows(prepared, list(self._columns), lambda: self._ingested(rows, self._floats))
        bad = {row: one for row, one in found.items() if row not in refused and row not in failed}
        if bad:
            prepared = prepared.copy()  # a request's own lies in memory that is not to be written to
            prepared[list(bad)] = 0
        return (
            prepared,
            {**refused, **{row: _of_tensors(one.columns, one.problem + REMEDY) for row, one in bad.items()}},
            failed,
        )

    def _made(self, rows: Rows, moved: Callable[[], None]) -> tuple[Array, dict[int, str], dict[int, MillraceError]]:
        if rows.form == PREPARED:
            return rows.values[self._input_column], {}, {}
        began_s = time.monotonic()
        try:
            return self._apply(rows), {}, {}
        except Exception as error:
            if len(rows) == 1:
                return self._zeros(1), *self._blamed(0, error)
        beyond = self._beyond_limits(rows)
        prepared, refused, failed = self._zeros(len(rows)), {**beyond.refused}, {**beyond.crowded}
        # The last is tried first.
        if self._images or self._took_all_its_time(began_s):
            parts = [one for one in _singles(0, len(rows)) if one[0] not in beyond.skipped]
        else:
            parts = _halves(0, len(rows))
        # As often as it takes to find four bad rows.
        may_halve = 4 * (len(rows) - 1).bit_length()
        while parts:
            start, stop = parts.pop()
            moved()
            began_s = time.monotonic()
            try:
                prepared[start:stop] = self._apply(rows.slice(start, stop))
            except Exception as error:
                if stop - start > 1:
                    may_halve -= 1
                    halved = may_halve > 0 and not self._took_all_its_time(began_s)
                    parts += _halves(start, stop) if halved else _singles(start, stop)
                    continue
                its_own, ours = self._blamed(start, error)
                refused.update(its_own)
                failed.update(ours)
        return prepared, refused, failed

    def _took_all_its_time(self, began_s: float) -> bool:
        """Whether a custom function may have, in a try that began then and failed."""
        return time.monotonic() - began_s >= self._overlong_s

    def _blamed(self, row: int, error: Exception) -> tuple[dict[int, str], dict[int, MillraceError]]:
        """For what is wrong with the row, or for what went wrong with us."""
        if isinstance(error, InvalidArgument):
            return {row: self._told(error)}, {}
        return {}, {row: hidden(error, logger, "the preprocessing of a row failed")}

    def _beyond_limits(self, rows: Rows) -> Beyond:
        pixels = np.zeros(len(rows), np.int64)
        for name in self._images:
            pixels += np.fromiter(map(claimed_pixels, rows.values[name]), np.int64, len(rows))
        return beyond_limits(pixels, rows.requests or (len(rows),), f"tensor {', '.join(map(repr, self._images))}")

    def _apply(self, rows: Rows) -> Array:
        made: Array = self._pipeline(self._ingested(rows, self._columns))[self._input_column]
        return made

    def _ingested(self, rows: Rows, names: Iterable[str]) -> Batch:
        """These columns as a version would have them."""
        batch = {
            name: column_of_tensor(name, self._columns[name], rows.values[name], rows.nulls.get(name)) for name in names
        }
        return self._nans.nulls_for_nans(batch)

    def _prepared(self) -> TensorSpec:
        made = self._pipeline.output(self._columns)[self._input_column]
        if not isinstance(made, TensorType) or made.dtype != "float32" or None in made.shape:
            raise FailedPrecondition(
                f"the preprocessing makes {made} of column {self._input_column!r}, not float32 of a fixed shape",
                reason="MODEL_DOES_NOT_LOAD",
            )
        return TensorSpec(self._input_column, "FP32", (FREE, *(length or 0 for length in made.shape)))

    def _zeros(self, rows: int) -> Array:
        return np.zeros((rows, *self.prepared.shape[1:]), np.float32)

    def _told(self, error: InvalidArgument) -> str:
        """What is wrong with a row, naming the tensors that it may come from."""
        if not isinstance(error, RowError):
            return error.message
        place = _STEP.search(error.path)
        names = list(self._columns)
        if place is not None:
            before = Pipeline(self._pipeline.steps[: int(place.group(1))])
            names = before.reads(self._pipeline.steps[int(place.group(1))].reads, self._columns)
        return _of_tensors(names, error.problem)


def _of_tensors(names: Iterable[str], problem: str) -> str:
    return f"tensor {', '.join(map(repr, names))}: {problem}"


def _halves(start: int, stop: int) -> list[tuple[int, int]]:
    """The second one first."""
    middle = (start + stop) // 2
    return [(middle, stop), (start, middle)]


def _singles(start: int, stop: int) -> list[tuple[int, int]]:
    """The last one first."""
    return [(row, row + 1) for row in reversed(range(start, stop))]
