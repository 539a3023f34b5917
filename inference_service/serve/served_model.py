"""A checkpoint, loaded to be served: its device, its memory layout, its preprocessing, its model, and all of them
together as one function of rows. Only replicas import this: torch takes seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import nn

from inference_service.domain.batch_policy import bucket, buckets
from inference_service.domain.signature import FREE, PREPARED, RAW, Outputs, Rows, Signature, TensorSpec
from inference_service.domain.tensors import DATATYPES, Array
from inference_service.serve.preprocessing import Preprocessing
from shared.checkpoint import CheckpointContent
from shared.checkpoint.missing_values import finite_rows
from shared.errors import FailedPrecondition, InvalidArgument, MillraceError
from shared.model_spec import REGRESSION, ModelSpec
from shared.models.loaded import LoadedModel, does_not_load
from shared.models.loaded import Outputs as ModelOutputs

# --- Served model ---
# A checkpoint, loaded to be served: its preprocessing, its model, and both together as one function of rows.
#
# Only replicas import this: `shared.models.loaded` brings torch, which takes seconds, and the front does without it.

CPU = torch.device("cpu")
WARM_UP_RUNS = 2  # the first pays for what the kernels prepare once per shape; the last is measured


class ServedModel:
    """Raises `FailedPrecondition` when the weights do not fit the model, or when a column that the model's input is
    made of cannot be sent. Not for several threads at once."""

    def __init__(
        self,
        content: CheckpointContent,
        weights: bytes,
        custom_allowed: Collection[str] = (),
        device: torch.device = CPU,
        *,
        allow_non_finite: bool = False,
    ) -> None:
        """`weights` are the bytes of a safetensors file, verified; `custom_allowed` the functions that custom steps may
        name. The model is on `device`, the preprocessing always on the CPU, as in training. `allow_non_finite` is
        that of `Preprocessing`."""
        try:
            self.preprocessing = Preprocessing(content, custom_allowed, allow_non_finite=allow_non_finite)
        except (InvalidArgument, ValueError) as error:
            raise does_not_load(content, error) from error
        run = LoadedModel(content, weights, device)
        self.module = run.module
        self._run = Layouts(run)
        self.signature = Signature(
            raw=self.preprocessing.raw,
            prepared=self.preprocessing.prepared,
            outputs=_outputs(content.model, tuple(content.class_names)),
        )

    @property
    def custom_s(self) -> float:
        """What the custom functions of its steps may take for a batch by their own limits."""
        return self.preprocessing.custom_s

    def forward(self, rows: Rows, moved: Callable[[], None] = lambda: None) -> Outputs:
        """Of B rows, without those that the preprocessing refuses: logits (B, classes) float32, probabilities
        (B, classes) float32 and label (B,) int64 of a classifier, values (B, numbers) float32 of a regression.
        `moved` is that of `Preprocessing.prepare`."""
        started_s = time.perf_counter()
        prepared, refused, failed = self.preprocessing.prepare(rows, moved)
        prepared_s = time.perf_counter()
        arrays = self._run(prepared)
        infer_s = time.perf_counter() - prepared_s
        non_finite = _non_finite(arrays, refused, failed)
        return Outputs(arrays, refused, prepared_s - started_s, infer_s, failed=failed, non_finite=non_finite)

    def warm_up(self, max_rows: int) -> dict[int, float]:
        """Runs each batch size that is likely, and decides on its layout in memory. Returns rows → seconds."""
        self._run.choose(self.signature.prepared.shape[1:], buckets(max_rows))
        measured_s = {}
        for size in buckets(max_rows):
            rows = self._zeros(size)
            for _ in range(WARM_UP_RUNS):
                started = time.perf_counter()
                self.forward(rows)
                measured_s[size] = time.perf_counter() - started
        return measured_s

    def _zeros(self, size: int) -> Rows:
        """Raw rows where the model takes one tensor of numbers; no value is right for every other column, and such
        models are measured without their preprocessing."""
        (first, *others), prepared = self.signature.raw, self.signature.prepared
        form, spec = (PREPARED, prepared) if others or len(first.shape) == 1 else (RAW, first)
        return Rows(form, {spec.name: np.zeros((size, *spec.shape[1:]), DATATYPES[spec.datatype].dtype)})


def _non_finite(
    arrays: Sequence[Array], refused: Mapping[int, str], failed: Mapping[int, MillraceError]
) -> tuple[int, ...]:
    """The places of the rows whose answers are not finite; the first output, logits or values, tells it of all."""
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


# --- Layouts ---
# How images lie in memory while a model works on them: channel after channel as rows come, or pixel after pixel with
# the channels side by side. Which is faster depends on the model, the processor, and the images' size and number.

# What the other layout must save of a batch's time: less is noise, and not worth a second copy of the weights.
WORTH_IT = 0.1
# After one that pays for what kernels prepare. The fastest counts: what else the machine does only makes runs slower.
TIMED_RUNS = 3
# Larger batches than could be tried in this time are laid out as the largest that was.
TRIED_FOR_S = 5.0

Run = Callable[[NDArray[Any]], ModelOutputs]


def fastest_s(run: Run, inputs: NDArray[Any]) -> float:
    run(inputs)
    return min(_seconds(run, inputs) for _ in range(TIMED_RUNS))


class Layouts:
    """A model as one function of its prepared input, in whichever layout is faster for so many rows."""

    def __init__(self, model: LoadedModel) -> None:
        self._usual = model
        # By batch size, in buckets of powers of two; the usual one for all others.
        self._chosen: dict[int, LoadedModel] = {}

    def __call__(self, prepared: NDArray[Any]) -> ModelOutputs:
        return self._chosen.get(bucket(len(prepared)), self._usual)(prepared)

    @property
    def channels_last(self) -> frozenset[int]:
        """The batch sizes, in buckets, whose images have their channels last."""
        return frozenset(size for size, model in self._chosen.items() if model is not self._usual)

    def choose(
        self, shape: Sequence[int], sizes: Sequence[int], seconds: Callable[[Run, NDArray[Any]], float] = fastest_s
    ) -> None:
        """Tries batches of `sizes`, ascending, of inputs of `shape` (without the rows) in both layouts, where the model
        has convolutions of images. `seconds` tells how long a run takes."""
        if len(shape) != 3 or not any(isinstance(one, nn.Conv2d) for one in self._usual.module.modules()):
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
# Where a replica's model runs: on what Ray gave the replica. Only replicas import this: torch takes seconds.


def assigned_device() -> torch.device:
    """The GPU that Ray keeps for this replica, or keeps a part of, and alone shows to it; the CPU where there is none.

    Raises `FailedPrecondition` where torch cannot use it.
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
    # Else torch rounds in convolutions to TF32, and a replica on a GPU would answer otherwise than one on a CPU.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device("cuda", 0)
