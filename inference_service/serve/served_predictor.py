"""A program's checkpoint, served by the predictor class in the program's own bundle (`shared/bundle_predictor.py`).

B = rows of the batch, along the first axis of every array. Only replicas import this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from inference_service.domain.batch_policy import buckets
from inference_service.domain.signature import FREE, Outputs, Rows, Signature, TensorSpec
from inference_service.domain.tensors import DATATYPES, Array
from shared.bundle_predictor import BundlePredictor, DeclaredTensor
from shared.checkpoint.format import ProgramContent
from shared.checkpoint.missing_values import finite_rows
from shared.errors import FailedPrecondition, MillraceError

WARM_UP_RUNS = 2  # the first run includes one-time setup; the last is measured


class ServedPredictor:
    """Serves a program's checkpoint.

    Not safe for several threads.
    """

    # A predictor does not declare a time limit for a batch.
    custom_s = 0.0

    def __init__(self, content: ProgramContent, entry: str, checkpoint_dir: Path) -> None:
        """`entry` is `module:name`; empty: `Predictor` of the program's own module.

        Raises as `BundlePredictor` does.
        """
        self._predictor = BundlePredictor(content, entry, checkpoint_dir)
        inputs, outputs = _tensors(self._predictor.inputs), _tensors(self._predictor.outputs)
        # There is only one row form: a tensor that fits both forms is raw.
        self.signature = Signature(raw=inputs, prepared=inputs[0], outputs=outputs)

    def forward(self, rows: Rows, moved: Callable[[], None] = lambda: None) -> Outputs:
        """Computes the outputs.

        If a batch of several requests fails, each is tried by itself, so that only the bad request fails.
        """
        started_s = time.perf_counter()
        failed: dict[int, MillraceError] = {}
        try:
            arrays = self._predictor.predict(rows.values, len(rows))
        except MillraceError:
            if len(rows.requests) < 2:
                raise
            arrays = self._each_alone(rows, failed, moved)
        infer_s = time.perf_counter() - started_s
        return Outputs(arrays, infer_s=infer_s, failed=failed, non_finite=self._non_finite(arrays, failed))

    def warm_up(self, max_rows: int) -> dict[int, float]:
        """Runs each likely batch size; returns rows → seconds.

        The rows are those of the predictor's `example`, a dict as `predict` takes it, if it has one, else zeros.
        """
        example = getattr(self._predictor.made, "example", None)
        measured_s = {}
        for size in buckets(max_rows):
            values = self._zeros(size) if example is None else self._repeated(example, size)
            for _ in range(WARM_UP_RUNS):
                started_s = time.perf_counter()
                try:
                    self._predictor.predict(values, size)
                except FailedPrecondition as error:
                    hint = "" if example is not None else "; give it an attribute `example` where zeros are no input"
                    raise FailedPrecondition(
                        f"{error.message} (with {size} rows, before the first request{hint})",
                        reason=error.specific_reason,
                        metadata=error.metadata,
                    ) from error
                measured_s[size] = time.perf_counter() - started_s
        return measured_s

    def _each_alone(self, rows: Rows, failed: dict[int, MillraceError], moved: Callable[[], None]) -> list[Array]:
        parts: list[list[Array] | None] = []
        ends = list(accumulate(rows.requests))
        for start, end in zip([0, *ends], ends, strict=False):
            moved()
            try:
                parts.append(self._predictor.predict(rows.slice(start, end).values, end - start))
            except MillraceError as error:
                failed.update(dict.fromkeys(range(start, end), error))
                parts.append(None)
        good = next((one for one in parts if one is not None), None)
        if good is None:
            raise failed[0]
        filled = [
            part or [np.zeros((count, *array.shape[1:]), array.dtype) for array in good]
            for part, count in zip(parts, rows.requests, strict=True)
        ]
        return [np.concatenate(columns) for columns in zip(*filled, strict=True)]

    def _non_finite(self, arrays: Sequence[Array], failed: Mapping[int, MillraceError]) -> tuple[int, ...]:
        """Returns the rows with a NaN or an infinity in an output."""
        floats = [array for array in arrays if array.dtype.kind == "f"]
        bad = {row for array in floats for row in np.flatnonzero(~finite_rows(array)).tolist()}
        return tuple(sorted(bad - failed.keys()))

    def _zeros(self, size: int) -> dict[str, Array]:
        values = {}
        for spec in self.signature.raw:
            shape = (size, *(max(one, 1) for one in spec.shape[1:]))
            dtype = DATATYPES[spec.datatype].dtype
            values[spec.name] = np.full(shape, b"", object) if dtype.kind == "O" else np.zeros(shape, dtype)
        return values

    def _repeated(self, example: Any, size: int) -> dict[str, Array]:
        if not isinstance(example, Mapping) or {*example} != {one.name for one in self.signature.raw}:
            raise self._predictor.refusal("example must be a dict with an array for each of the inputs")
        values = {}
        for spec in self.signature.raw:
            rows = np.asarray(example[spec.name], DATATYPES[spec.datatype].dtype)
            if rows.ndim != len(spec.shape) or not len(rows):
                raise self._predictor.refusal(f"example[{spec.name!r}] must have rows along its first axis, as {spec}")
            values[spec.name] = np.resize(rows, (size, *rows.shape[1:]))
        return values


def _tensors(declared: Sequence[DeclaredTensor]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(one.name, one.datatype, (FREE, *one.shape)) for one in declared)
