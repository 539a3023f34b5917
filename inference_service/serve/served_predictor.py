"""A program's checkpoint, served by the predictor class in the program's own bundle.

    class Predictor:
        inputs = {"image": ("FP32", [1, 28, 28])}      # by name: a datatype and the shape of a row
        outputs = {"logits": ("FP32", [10])}

        def __init__(self, checkpoint_dir: str): ...
        def predict(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]: ...

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
from inference_service.domain.signature import FREE, NULLS, Outputs, Rows, Signature, TensorSpec
from inference_service.domain.tensors import DATATYPES, Array, datatype_of
from shared.checkpoint.missing_values import finite_rows
from shared.checkpoint.program import ProgramContent
from shared.code_loading import entry_failed, find_entry
from shared.errors import FailedPrecondition, MillraceError

SCRIPT_SUFFIX = ".py"
DEFAULT_NAME = "Predictor"
MAX_TENSORS = 100
MAX_DIMENSIONS = 8
WARM_UP_RUNS = 2  # the first run includes one-time setup; the last is measured


class ServedPredictor:
    """Serves a program's checkpoint.

    Not safe for several threads.
    """

    # A predictor does not declare a time limit for a batch.
    custom_s = 0.0

    def __init__(self, content: ProgramContent, entry: str, checkpoint_dir: Path) -> None:
        """`entry` is `module:name`; empty: `Predictor` of the program's own module.

        The bundle's code must be loaded. Raises `FailedPrecondition`, naming the user's line, for a class that cannot
        be instantiated, and BAD_PREDICTOR for one that does not declare its inputs and outputs.
        """
        self._bundle = content.code_bundle
        if not entry and content.entry.endswith(SCRIPT_SUFFIX):
            raise FailedPrecondition(
                f"{content.entry} of {self._bundle} is a script, which would run from its first line: name a predictor "
                f"in a module beside it, as module:{DEFAULT_NAME}",
                reason="BAD_PREDICTOR",
                metadata={"resource": self._bundle, "entry": content.entry},
            )
        self._entry = entry or f"{content.entry.partition(':')[0]}:{DEFAULT_NAME}"
        made = find_entry(self._bundle, self._entry)
        self._predictor = self._called(lambda: made(str(checkpoint_dir)))
        if not callable(getattr(self._predictor, "predict", None)):
            raise self._bad("has no method predict(inputs)")
        inputs, outputs = self._tensors("inputs"), self._tensors("outputs")
        # There is only one row form: a tensor that fits both forms is raw.
        self.signature = Signature(raw=inputs, prepared=inputs[0], outputs=outputs)

    def forward(self, rows: Rows, moved: Callable[[], None] = lambda: None) -> Outputs:
        """Computes the outputs.

        If a batch of several requests fails, each is tried by itself, so that only the bad request fails.
        """
        started_s = time.perf_counter()
        failed: dict[int, MillraceError] = {}
        try:
            arrays = self._predict(rows.values, len(rows))
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
        example = getattr(self._predictor, "example", None)
        measured_s = {}
        for size in buckets(max_rows):
            values = self._zeros(size) if example is None else self._repeated(example, size)
            for _ in range(WARM_UP_RUNS):
                started_s = time.perf_counter()
                try:
                    self._predict(values, size)
                except FailedPrecondition as error:
                    hint = "" if example is not None else "; give it an attribute `example` where zeros are no input"
                    raise FailedPrecondition(
                        f"{error.message} (with {size} rows, before the first request{hint})",
                        reason=error.specific_reason,
                        metadata=error.metadata,
                    ) from error
                measured_s[size] = time.perf_counter() - started_s
        return measured_s

    def _predict(self, values: Mapping[str, Array], count: int) -> list[Array]:
        """Returns the outputs in the signature's order; raises `FailedPrecondition`."""
        # A copy: a predictor may write to its inputs, and the same rows may be tried again.
        given = {name: np.array(one, order="C") for name, one in values.items()}
        made = self._called(lambda: self._predictor.predict(given))
        if not isinstance(made, Mapping):
            raise self._bad(f"predict returned a {type(made).__name__} instead of a dict of arrays by name")
        return [self._output(spec, made, count) for spec in self.signature.outputs]

    def _output(self, spec: TensorSpec, made: Mapping[Any, Any], count: int) -> Array:
        if spec.name not in made:
            raise self._bad(f"predict returned {', '.join(map(str, made))}, and not the output {spec.name!r}")
        wanted = DATATYPES[spec.datatype].dtype
        try:
            array = np.asarray(made[spec.name])
            array = array.astype(wanted, copy=False, casting="unsafe" if wanted.kind == "O" else "same_kind")
        except (TypeError, ValueError) as error:
            raise self._bad(f"output {spec.name!r} is not {spec.datatype}: {error}") from error
        fits = array.ndim == len(spec.shape) and array.shape[:1] == (count,)
        if not fits or not all(
            want in (FREE, size) for want, size in zip(spec.shape[1:], array.shape[1:], strict=True)
        ):
            wanted_shape = [count, *spec.shape[1:]]
            raise self._bad(f"output {spec.name!r} has the shape {list(array.shape)} instead of {wanted_shape}")
        return array

    def _each_alone(self, rows: Rows, failed: dict[int, MillraceError], moved: Callable[[], None]) -> list[Array]:
        parts: list[list[Array] | None] = []
        ends = list(accumulate(rows.requests))
        for start, end in zip([0, *ends], ends, strict=False):
            moved()
            try:
                parts.append(self._predict(rows.slice(start, end).values, end - start))
            except MillraceError as error:
                failed.update(dict.fromkeys(range(start, end), error))
                parts.append(None)
        good = next((one for one in parts if one is not None), None)
        if good is None:
            raise failed[0]
        filled = [
            one or [np.zeros((count, *array.shape[1:]), array.dtype) for array in good]
            for one, count in zip(parts, rows.requests, strict=True)
        ]
        return [np.concatenate(columns) for columns in zip(*filled, strict=True)]

    def _non_finite(self, arrays: Sequence[Array], failed: Mapping[int, MillraceError]) -> tuple[int, ...]:
        """Returns the rows with a NaN or an infinity in an output."""
        floats = [array for array in arrays if array.dtype.kind == "f"]
        bad = {row for array in floats for row in np.flatnonzero(~finite_rows(array)).tolist()}
        return tuple(sorted(bad - failed.keys()))

    def _tensors(self, attribute: str) -> tuple[TensorSpec, ...]:
        declared = getattr(self._predictor, attribute, None)
        if not isinstance(declared, Mapping) or not 1 <= len(declared) <= MAX_TENSORS:
            raise self._bad(f'needs {attribute}, e.g. {attribute} = {{"image": ("FP32", [1, 28, 28])}}')
        return tuple(self._tensor(attribute, name, one) for name, one in declared.items())

    def _tensor(self, attribute: str, name: Any, one: Any) -> TensorSpec:
        if not isinstance(name, str) or not name or name.endswith(NULLS):
            raise self._bad(f"{attribute}: {name!r} is no name of a tensor")
        try:
            kind, shape = one
            sizes = tuple(FREE if size in (None, FREE) else int(size) for size in shape)
        except (TypeError, ValueError):
            raise self._bad(f"{attribute}[{name!r}] is {one!r}, and no pair of a datatype and a row's shape") from None
        if len(sizes) >= MAX_DIMENSIONS or any(size < 1 and size != FREE for size in sizes):
            raise self._bad(f"{attribute}[{name!r}]: {list(sizes)} is no shape of a row")
        return TensorSpec(name, self._datatype(attribute, name, kind), (FREE, *sizes))

    def _datatype(self, attribute: str, name: str, kind: Any) -> str:
        if isinstance(kind, str) and kind in DATATYPES:
            return kind
        try:
            found = datatype_of(np.dtype(kind))
        except TypeError:
            found = None
        if found is None:
            raise self._bad(
                f"{attribute}[{name!r}]: {kind!r} is none of {', '.join(DATATYPES)}, nor a dtype of NumPy's"
            )
        return found

    def _zeros(self, size: int) -> dict[str, Array]:
        values = {}
        for spec in self.signature.raw:
            shape = (size, *(max(one, 1) for one in spec.shape[1:]))
            dtype = DATATYPES[spec.datatype].dtype
            values[spec.name] = np.full(shape, b"", object) if dtype.kind == "O" else np.zeros(shape, dtype)
        return values

    def _repeated(self, example: Any, size: int) -> dict[str, Array]:
        if not isinstance(example, Mapping) or {*example} != {one.name for one in self.signature.raw}:
            raise self._bad("example must be a dict with an array for each of the inputs")
        values = {}
        for spec in self.signature.raw:
            rows = np.asarray(example[spec.name], DATATYPES[spec.datatype].dtype)
            if rows.ndim != len(spec.shape) or not len(rows):
                raise self._bad(f"example[{spec.name!r}] must have rows along its first axis, as {spec}")
            values[spec.name] = np.resize(rows, (size, *rows.shape[1:]))
        return values

    def _called(self, call: Callable[[], Any]) -> Any:
        """Calls the user's code, which may raise anything, SystemExit too."""
        try:
            return call()
        except (KeyboardInterrupt, MillraceError):
            raise
        except BaseException as error:
            raise entry_failed(self._bundle, self._entry, error) from error

    def _bad(self, what: str) -> FailedPrecondition:
        return FailedPrecondition(
            f"{self._entry} of {self._bundle} {what}",
            reason="BAD_PREDICTOR",
            metadata={"resource": self._bundle, "entry": self._entry},
        )
