"""A loaded checkpoint for serving: a model, or the predictor of a program.

A model's device, memory layout, preprocessing and layers are combined to one function of rows. A program's checkpoint
is served by the predictor class in the program's own bundle (`shared/bundle_predictor.py`).

B = rows of the batch, along the first axis of every array. Only replicas import this, since torch takes seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import nn

from inference_service.domain.batch_policy import bucket, buckets
from inference_service.domain.signature import (
    DATATYPES,
    FREE,
    RAW,
    Array,
    Outputs,
    Rows,
    Signature,
    TensorSpec,
)
from inference_service.serve.preprocessing import Preprocessing
from shared.bundle_predictor import BundlePredictor, DeclaredTensor
from shared.checkpoint import Checkpoint
from shared.checkpoint.format import ProgramContent
from shared.checkpoint.nan_values import finite_rows
from shared.errors import FailedPrecondition, InvalidArgument, MillraceError
from shared.model_spec import REGRESSION, ModelSpec
from shared.models.loaded import LoadedModel, does_not_load
from shared.models.loaded import Outputs as ModelOutputs

# --- Served model ---

CPU = torch.device("cpu")
WARM_UP_RUNS = 2  # the first run includes one-time kernel setup per shape; the last is measured


class ServedModel:
    """Serves one checkpoint.

    Raises `FailedPrecondition` if the weights do not fit the model, or if a column of the model's input cannot be sent.
    Not safe for several threads.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        custom_allowed: Collection[str] = (),
        device: torch.device = CPU,
        *,
        allow_non_finite: bool = False,
    ) -> None:
        """Read the checkpoint's weights.

        `custom_allowed` are the functions that custom steps may name. The model runs on `device`, the preprocessing
        always on the CPU, as in training. `allow_non_finite` is as in `Preprocessing`.
        """
        content = checkpoint.content
        try:
            self.preprocessing = Preprocessing(content, custom_allowed, allow_non_finite=allow_non_finite)
        except (InvalidArgument, ValueError) as error:
            raise does_not_load(content, error) from error
        run = LoadedModel(checkpoint, device)
        self.module = run.module
        self._run = MemoryFormats(run)
        self.signature = Signature(
            raw=self.preprocessing.raw,
            prepared=self.preprocessing.prepared,
            outputs=_outputs(content.model, tuple(content.class_names)),
        )

    @property
    def custom_s(self) -> float:
        """The total time limit of its custom functions for a batch, in seconds."""
        return self.preprocessing.custom_s

    def forward(self, rows: Rows, note_progress: Callable[[], None] = lambda: None) -> Outputs:
        """Compute the outputs of B rows; those of refused rows are undefined.

        A classifier returns logits (B, classes) float32, probabilities (B, classes) float32 and label (B,) int64. A
        regression returns values (B, numbers) float32. `note_progress` is as in `Preprocessing.prepare`.
        """
        started_s = time.perf_counter()
        prepared, refused, failed = self.preprocessing.prepare(rows, note_progress)
        prepared_s = time.perf_counter()
        arrays = self._run(prepared)
        infer_s = time.perf_counter() - prepared_s
        non_finite = _non_finite(arrays, refused, failed)
        return Outputs(arrays, refused, prepared_s - started_s, infer_s, failed=failed, non_finite=non_finite)

    def warm_up(self, max_rows: int) -> dict[int, float]:
        """Run each likely batch size and choose its memory layout; return rows → seconds."""
        if self.signature.prepared is not None:
            self._run.choose_fastest(self.signature.prepared.shape[1:], buckets(max_rows))
        measured_s = {}
        for size in buckets(max_rows):
            rows = self._zeros(size)
            for _ in range(WARM_UP_RUNS):
                started = time.perf_counter()
                self.forward(rows)
                measured_s[size] = time.perf_counter() - started
        return measured_s

    def _zeros(self, size: int) -> Rows:
        """Return rows of zeros for the warm-up.

        They are raw if the model has one tensor of numbers. No value is right for every other column type, so other
        models are measured without their preprocessing.
        """
        first, *others = self.signature.raw
        if others or len(first.shape) == 1:
            return self.preprocessing.zeros(size)
        return Rows(RAW, {first.name: np.zeros((size, *first.shape[1:]), DATATYPES[first.datatype].dtype)})


def _non_finite(
    arrays: Sequence[Array], refused: Mapping[int, str], failed: Mapping[int, MillraceError]
) -> tuple[int, ...]:
    """Return the rows with non-finite answers.

    The first output, logits or values, shows it for all outputs.
    """
    rows = np.flatnonzero(~finite_rows(arrays[0])).tolist()
    return tuple(row for row in rows if row not in refused and row not in failed)


def _outputs(model: ModelSpec, class_names: tuple[str, ...]) -> tuple[TensorSpec, ...]:
    width = (FREE, model.num_classes)
    if model.task == REGRESSION:
        return (TensorSpec("values", "FP32", width),)
    return (
        TensorSpec("logits", "FP32", width, class_names=class_names),
        TensorSpec("probabilities", "FP32", width, class_names=class_names),
        TensorSpec("label", "INT64", (FREE,)),
    )


# --- Memory formats ---
# The memory format of images in a model: channels first, as rows arrive, or channels last. The faster one depends on
# the model, the processor, and the size and number of the images.

# The fraction of a batch's time that the other layout must save: less is noise, and does not justify a second copy of
# the weights.
WORTH_IT = 0.1
# After one run for kernel setup. The fastest counts, because other load on the machine only makes runs slower.
TIMED_RUNS = 3
# Batch sizes that could not be tried within this time use the layout of the largest that was.
TRIED_FOR_S = 5.0

Run = Callable[[NDArray[Any]], ModelOutputs]


def fastest_s(run: Run, inputs: NDArray[Any]) -> float:
    run(inputs)
    return min(_seconds(run, inputs) for _ in range(TIMED_RUNS))


class MemoryFormats:
    """Runs a model in the faster memory layout for each batch size."""

    def __init__(self, model: LoadedModel) -> None:
        self._usual = model
        # By batch size, in buckets of powers of two; the usual layout for all others.
        self._chosen: dict[int, LoadedModel] = {}

    def __call__(self, prepared: NDArray[Any]) -> ModelOutputs:
        return self._chosen.get(bucket(len(prepared)), self._usual)(prepared)

    @property
    def channels_last(self) -> frozenset[int]:
        """The batch sizes, in buckets, that use channels last."""
        return frozenset(size for size, model in self._chosen.items() if model is not self._usual)

    def choose_fastest(
        self, shape: Sequence[int], sizes: Sequence[int], seconds: Callable[[Run, NDArray[Any]], float] = fastest_s
    ) -> None:
        """Time batches of `sizes`, ascending, in both layouts.

        Does nothing unless the model convolves images. `shape` is an input's shape without the rows. `seconds` measures
        a run.
        """
        if len(shape) != 3 or not any(isinstance(module, nn.Conv2d) for module in self._usual.module.modules()):
            return
        other = self._usual.channels_last()
        faster, give_up_at = self._usual, time.monotonic() + TRIED_FOR_S
        for size in sizes:
            if time.monotonic() < give_up_at:
                inputs = np.zeros((size, *shape), np.float32)
                saves = seconds(other, inputs) < (1 - WORTH_IT) * seconds(self._usual, inputs)
                faster = other if saves else self._usual
            self._chosen[bucket(size)] = faster


def _seconds(run: Run, inputs: NDArray[Any]) -> float:
    began = time.perf_counter()
    run(inputs)
    return time.perf_counter() - began


# --- Device ---
# The device of a replica's model: the GPU that Ray assigned to the replica. Only replicas import this, since torch
# takes seconds.


def assigned_device() -> torch.device:
    """Return the GPU that Ray has assigned to this replica; the CPU if there is none.

    Ray may assign a fraction of a GPU, and shows only that GPU to the process. Raises `FailedPrecondition` if torch
    cannot use it.
    """
    gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", []) if ray.is_initialized() else []
    if not gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise FailedPrecondition(
            f"Ray gave this replica GPU {gpus[0]} of its node, which torch {torch.__version__} cannot use there; "
            "install a driver and a torch for it, or deploy with gpus_per_replica=0",
            reason="GPU_CANNOT_BE_USED",
        )
    # Otherwise torch rounds convolutions to TF32, and a replica on a GPU would answer differently from one on a CPU.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device("cuda", 0)


# --- Served predictor ---


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

    def forward(self, rows: Rows, note_progress: Callable[[], None] = lambda: None) -> Outputs:
        """Compute the outputs.

        If a batch of several requests fails, each is tried by itself, so that only the bad request fails.
        """
        started_s = time.perf_counter()
        failed: dict[int, MillraceError] = {}
        try:
            arrays = self._predictor.predict(rows.values, len(rows))
        except MillraceError:
            if len(rows.requests) < 2:
                raise
            arrays = self._each_alone(rows, failed, note_progress)
        infer_s = time.perf_counter() - started_s
        return Outputs(arrays, infer_s=infer_s, failed=failed, non_finite=self._non_finite(arrays, failed))

    def warm_up(self, max_rows: int) -> dict[int, float]:
        """Run each likely batch size; return rows → seconds.

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

    def _each_alone(
        self, rows: Rows, failed: dict[int, MillraceError], note_progress: Callable[[], None]
    ) -> list[Array]:
        parts: list[list[Array] | None] = []
        ends = list(accumulate(rows.requests))
        for start, end in zip([0, *ends], ends, strict=False):
            note_progress()
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
        """Return the rows with a NaN or an infinity in an output."""
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
