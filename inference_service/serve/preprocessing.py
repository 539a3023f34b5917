"""Preprocessing: from the rows of a request to the model's input.

It runs every row-wise step since ingest, with the code that training ran. It needs no torch, so it can be used without
loading a model.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds

from inference_service.domain.signature import FREE, PREPARED, Array, Rows, TensorSpec, datatype_of
from shared.checkpoint import CheckpointContent
from shared.checkpoint.nan_values import NanPolicy, float_columns, may_be_non_finite, nan_policy_of
from shared.errors import FailedPrecondition, InvalidArgument, MillraceError, ResourceExhausted
from shared.logging_and_tracing import hidden
from shared.settings import check_functions
from shared.transforms import Batch, Column, Pipeline, RowError, ScalarType, TensorType
from shared.transforms.batch import ColumnType
from shared.transforms.records import ModelInput, RecordSpec, model_input, zero_rows
from shared.transforms.steps.custom import DEFAULT_TIMEOUT_S, Custom
from shared.transforms.steps.images import PIXELS_AT_ONCE, DecodeImage, claimed_pixels, image_columns

logger = logging.getLogger(__name__)


# --- Preprocessing ---
# From the rows of a request to the model's input: every row-wise step since ingest, with the code that training ran.


REMEDY = "; send finite numbers, or have the deployment allow_non_finite"
# The path of a problem with a model's input that no step is to blame for.
INPUT = "input"
_STEP = re.compile(r"steps\[(\d+)\]")


class Preprocessing:
    """Computes the model's input.

    `raw` are the inputs of raw rows, `prepared` is the model's own input; of several inputs it is None: such a
    model takes raw rows. `custom_s` is the total time limit of its custom functions, in seconds. Immutable.
    """

    def __init__(
        self, content: CheckpointContent, custom_allowed: Collection[str] = (), *, allow_non_finite: bool = False
    ) -> None:
        """`custom_allowed` are the functions that this node's operator allows in custom steps.

        With `allow_non_finite`, rows with a NaN or an infinity that no step fills are computed like others.

        Raises `InvalidArgument` if the steps do not fit, and `FailedPrecondition` for a column that cannot be sent or a
        function that is not allowed.
        """
        check_functions(content.transforms, custom_allowed, "on the nodes that serve")
        pipeline = content.serving()
        self._pipeline = pipeline.with_steps(
            [
                replace(step, at_once=PIXELS_AT_ONCE) if isinstance(step, DecodeImage) else step
                for step in pipeline.steps
            ]
        )
        ingested = content.ingested_schema
        needed = self._pipeline.reads(content.inputs, ingested)
        self._columns = {name: ingested[name] for name in needed}
        self.raw = tuple(tensor_of_column(name, column) for name, column in self._columns.items())
        self._row = self._row_of_input(content)
        self.prepared = _prepared_of(self._row)
        self._images = image_columns(pipeline.steps, self._columns)
        self._nans = nan_policy_of(content, self._pipeline.steps, self._columns)
        self._floats = float_columns(self._columns)
        self._allows_non_finite = allow_non_finite
        self._raw_may_be_non_finite = may_be_non_finite(self._columns, self._images)
        custom_s = [one.timeout_s or DEFAULT_TIMEOUT_S for one in pipeline.steps if isinstance(one, Custom)]
        self.custom_s = sum(custom_s)
        self._overlong_s = min(custom_s, default=math.inf)

    def prepare(
        self, rows: Rows, note_progress: Callable[[], None] = lambda: None
    ) -> tuple[Array, dict[int, str], dict[int, MillraceError]]:
        """Compute the model's input of these rows, float32 (B, *shape), or records (B,) of several inputs.

        Also returns the problems of refused rows and the errors of failed rows, by row index; both kinds of rows are
        zeros in the input.

        A row's result does not depend on the other rows. So if one of many fails, each half is tried separately, and so
        on: one request's bad row must not fail the other requests of its batch. After several failures, rows are no
        longer halved but tried one by one, so that the total is little more than a call for each. Rows with images are
        tried one by one from the start: they may have too many pixels to be decoded together, and each half would
        decode them again. The same holds if a custom function used its whole time limit. `note_progress` is called
        before each try.

        A row whose input would have a NaN or an infinity is refused, too, unless the deployment allows them.
        """
        prepared, refused, failed = self._prepare(rows, note_progress)
        if self._allows_non_finite or not (rows.form == PREPARED or self._raw_may_be_non_finite):
            return prepared, refused, failed
        if rows.form == PREPARED:
            found = NanPolicy().bad_rows(prepared, list(rows.values), lambda: dict(rows.values))
        else:
            found = self._nans.bad_rows(prepared, list(self._columns), lambda: self._ingested(rows, self._floats))
        bad = {row: one for row, one in found.items() if row not in refused and row not in failed}
        if bad:
            prepared = prepared.copy()  # a single request's input lies in memory that must not be written to
            prepared[list(bad)] = 0
        return (
            prepared,
            {**refused, **{row: _of_tensors(one.columns, one.problem + REMEDY) for row, one in bad.items()}},
            failed,
        )

    def _prepare(
        self, rows: Rows, note_progress: Callable[[], None]
    ) -> tuple[Array, dict[int, str], dict[int, MillraceError]]:
        if rows.form == PREPARED:
            return model_input(dict(rows.values), self._row, INPUT), {}, {}
        began_s = time.monotonic()
        try:
            return self._apply(rows), {}, {}
        except Exception as error:
            if len(rows) == 1:
                return self._zeros(1), *self._blamed(0, error)
        beyond = self._beyond_limits(rows)
        prepared, refused, failed = self._zeros(len(rows)), {**beyond.refused}, {**beyond.crowded}
        # A stack: the last part is tried first.
        if self._images or self._took_all_its_time(began_s):
            parts = [single for single in _singles(0, len(rows)) if single[0] not in beyond.skipped]
        else:
            parts = _halves(0, len(rows))
        # The tries that it takes to find four bad rows.
        may_halve = 4 * (len(rows) - 1).bit_length()
        while parts:
            start, stop = parts.pop()
            note_progress()
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
        """Return whether a custom function may have used its whole time limit in a failed try."""
        return time.monotonic() - began_s >= self._overlong_s

    def _blamed(self, row: int, error: Exception) -> tuple[dict[int, str], dict[int, MillraceError]]:
        """Sort an error into (refused, failed): the row is bad, or the preprocessing itself failed."""
        if isinstance(error, InvalidArgument):
            return {row: self._format_row_error(error)}, {}
        return {}, {row: hidden(error, logger, "the preprocessing of a row failed")}

    def _beyond_limits(self, rows: Rows) -> Beyond:
        pixels = np.zeros(len(rows), np.int64)
        for name in self._images:
            pixels += np.fromiter(map(claimed_pixels, rows.values[name]), np.int64, len(rows))
        return beyond_limits(pixels, rows.requests or (len(rows),), f"tensor {', '.join(map(repr, self._images))}")

    def _apply(self, rows: Rows) -> Array:
        return model_input(self._pipeline(self._ingested(rows, self._columns)), self._row, INPUT)

    def _ingested(self, rows: Rows, names: Iterable[str]) -> Batch:
        """Return these columns as a dataset version would have them."""
        batch = {
            name: column_of_tensor(name, self._columns[name], rows.values[name], rows.nulls.get(name)) for name in names
        }
        return self._nans.nulls_for_nans(batch)

    def _row_of_input(self, content: CheckpointContent) -> ModelInput:
        made = self._pipeline.output(self._columns)
        row = content.model_input(made)
        if row is None:
            columns = ", ".join(f"{made[name]} of column {name!r}" for name in content.inputs)
            wanted = "numbers of fixed shapes" if content.input_columns else "float32 of a fixed shape"
            raise FailedPrecondition(f"the preprocessing makes {columns}, not {wanted}", reason="MODEL_DOES_NOT_LOAD")
        return row

    def zeros(self, rows: int) -> Rows:
        """Return prepared rows of zeros."""
        made = zero_rows(self._row, rows)
        if isinstance(self._row, RecordSpec):
            return Rows(PREPARED, {one.name: made[one.name] for one in self._row.tensors})
        return Rows(PREPARED, {self._row.name: made})

    def _zeros(self, rows: int) -> Array:
        return zero_rows(self._row, rows)

    def _format_row_error(self, error: InvalidArgument) -> str:
        """Return the problem of a row, naming the tensors that it may come from."""
        if not isinstance(error, RowError):
            return error.message
        place = _STEP.search(error.path)
        names = list(self._columns)
        if place is not None:
            before = Pipeline(self._pipeline.steps[: int(place.group(1))])
            names = before.reads(self._pipeline.steps[int(place.group(1))].reads, self._columns)
        return _of_tensors(names, error.problem)


def _prepared_of(row: ModelInput) -> TensorSpec | None:
    return None if isinstance(row, RecordSpec) else TensorSpec(row.name, "FP32", (FREE, *row.shape))


def _of_tensors(names: Iterable[str], problem: str) -> str:
    return f"tensor {', '.join(map(repr, names))}: {problem}"


def _halves(start: int, stop: int) -> list[tuple[int, int]]:
    """Return two halves, the second one first."""
    middle = (start + stop) // 2
    return [(middle, stop), (start, middle)]


def _singles(start: int, stop: int) -> list[tuple[int, int]]:
    """Return single rows, the last one first."""
    return [(row, row + 1) for row in reversed(range(start, stop))]


# --- Pixels ---
# Limits the pixels of encoded images that a replica decodes for one request and for one batch.
#
# A few kilobytes may hold 100 megapixels, which take seconds of the model's thread and hundreds of megabytes. Image
# headers give the pixel counts before any image is decoded.

# The limit of one request's rows in one batch: some 5 s of decoding. A single image is refused from 100 megapixels on.
REQUEST_PIXELS = 150_000_000
# The limit of all requests in one batch. Each request of a full batch is sure of an equal share.
BATCH_PIXELS = 4 * REQUEST_PIXELS
RETRY_AFTER_S = 1.0


@dataclass(frozen=True)
class Beyond:
    """Rows that are not decoded because of the pixel limits.

    `refused` has the last row of each request over its limit, and the problem. `crowded` has the last row of requests
    that may fit another batch. `skipped` are all rows of both.
    """

    refused: dict[int, str]
    crowded: dict[int, MillraceError]
    skipped: frozenset[int]


def beyond_limits(pixels: Array, requests: Sequence[int], name: str) -> Beyond:
    """Apply the pixel limits.

    `pixels` (rows,) has the pixels of each row, `requests` the row count of each request, `name` the tensors' names.
    """
    ends = np.cumsum(requests)
    sums = [int(pixels[end - rows : end].sum()) for rows, end in zip(requests, ends, strict=True)]
    refused: dict[int, str] = {}
    crowded: dict[int, MillraceError] = {}
    skipped: set[int] = set()
    left = sum(one for one in sums if one <= REQUEST_PIXELS)
    # Turn away the requests with the most pixels first, until the rest fit the batch.
    for place in sorted(range(len(sums)), key=lambda place: -sums[place]):
        row = int(ends[place]) - 1
        if sums[place] > REQUEST_PIXELS:
            refused[row] = (
                f"{name}: the images of the request's rows up to this one have {sums[place]:,} pixels together; send "
                f"at most {REQUEST_PIXELS:,}: fewer images in one request, or smaller ones"
            )
        elif left > BATCH_PIXELS:
            left -= sums[place]
            crowded[row] = ResourceExhausted(
                f"{name}: other requests' images have taken the room for pixels of this batch; try again, or send "
                "fewer images in one request, or smaller ones",
                reason="TOO_MANY_PIXELS",
                retry_after_s=RETRY_AFTER_S,
            )
        else:
            continue
        skipped.update(range(row + 1 - requests[place], row + 1))
    return Beyond(refused, crowded, frozenset(skipped))


# --- Raw columns ---
# Converts columns, as they were ingested, to tensors of the Open Inference Protocol, and back.
#
#     column                            tensor
#     tensors, integers, floats, bool   their own datatype
#     string                            BYTES, in UTF-8
#     binary (encoded images, too)      BYTES
#     date32, time32                    INT32 in the column's unit
#     timestamp, time64                 INT64 in the column's unit, timestamps since 1970-01-01 (UTC, where zoned)
#
# A decimal has no datatype. B = rows.


def tensor_of_column(name: str, column_type: ColumnType) -> TensorSpec:
    """Return the tensor of a column.

    Raises `FailedPrecondition` naming a column for which the protocol has no datatype.
    """
    if isinstance(column_type, TensorType):
        return TensorSpec(
            name, _datatype(name, column_type, np.dtype(column_type.dtype)), (FREE, *map(_fixed, column_type.shape))
        )
    if _is_bytes(column_type.arrow_type):
        return TensorSpec(name, "BYTES", (FREE,), nullable=True)
    number = _sent_as(column_type.arrow_type)
    if number is None:
        raise _unsendable(name, column_type)
    datatype = _datatype(name, column_type, np.dtype(number.to_pandas_dtype()))
    times = str(column_type.arrow_type) if kinds.is_temporal(column_type.arrow_type) else ""
    return TensorSpec(name, datatype, (FREE,), nullable=True, column_type=times)


def column_of_tensor(name: str, column_type: ColumnType, values: Array, nulls: Array | None) -> Column:
    """Return the column of `values`, (B) or (B, *shape), with nulls at `nulls`, bool (B).

    Raises `InvalidArgument` naming the tensor for bytes that are no UTF-8, or that do not have the column's width.
    """
    if isinstance(column_type, TensorType):
        return values
    if _is_bytes(column_type.arrow_type):
        items = [None if null else item for item, null in zip(values, _flags(nulls, len(values)), strict=True)]
        try:
            return pa.array(items, pa.binary()).cast(column_type.arrow_type)
        except pa.ArrowInvalid as error:
            raise InvalidArgument(f"tensor {name!r} holds bytes that are no {column_type}: {error}") from None
    sent = pa.array(values, _sent_as(column_type.arrow_type), mask=nulls)
    return sent.view(column_type.arrow_type)


def values_of_column(column_type: ColumnType, column: Column) -> tuple[Array, Array]:
    """Return a column's values, (B) or (B, *shape), and its nulls, bool (B).

    The inverse of `column_of_tensor`.
    """
    if isinstance(column_type, TensorType):
        return column, np.zeros(len(column), np.bool_)
    nulls = column.is_null().to_numpy(zero_copy_only=False)
    if _is_bytes(column_type.arrow_type):
        items = [item or b"" for item in column.cast(pa.binary()).to_pylist()]
        values = np.empty(len(items), np.object_)
        values[:] = items
        return values, nulls
    sent = column.view(_sent_as(column_type.arrow_type))
    filled = sent.fill_null(pa.scalar(0).cast(sent.type)) if sent.null_count else sent
    return filled.to_numpy(zero_copy_only=False), nulls


def _is_bytes(arrow_type: pa.DataType) -> bool:
    return bool(kinds.is_string(arrow_type) or kinds.is_binary(arrow_type) or kinds.is_fixed_size_binary(arrow_type))


def _sent_as(arrow_type: pa.DataType) -> pa.DataType | None:
    """Return the number type with the same bits as the column's values."""
    if kinds.is_integer(arrow_type) or kinds.is_floating(arrow_type) or kinds.is_boolean(arrow_type):
        return arrow_type
    if kinds.is_timestamp(arrow_type) or kinds.is_time64(arrow_type):
        return pa.int64()
    if kinds.is_date32(arrow_type) or kinds.is_time32(arrow_type):
        return pa.int32()
    return None


def _datatype(name: str, column_type: ColumnType, dtype: np.dtype[np.generic]) -> str:
    found = datatype_of(dtype)
    if found is None:
        raise _unsendable(name, column_type)
    return found


def _fixed(length: int | None) -> int:
    assert length is not None, "a version's tensors have fixed shapes"
    return length


def _flags(nulls: Array | None, rows: int) -> Array:
    return np.zeros(rows, np.bool_) if nulls is None else nulls


def _unsendable(name: str, column_type: ColumnType) -> FailedPrecondition:
    kind = column_type.arrow_type if isinstance(column_type, ScalarType) else column_type
    return FailedPrecondition(
        f"column {name!r} is {kind}, for which the Open Inference Protocol has no datatype; cast it to a float or to "
        "a string before it is imported, and train again",
        reason="COLUMN_NOT_SERVABLE",
        metadata={"column": name},
    )
