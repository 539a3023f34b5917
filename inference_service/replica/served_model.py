"""A checkpoint, loaded to be served: its preprocessing, its model, and both together as one function of rows.

Only replicas import this: `shared.models.loaded` brings torch, which takes seconds, and the front does without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch

from inference_service.domain.batch_times import buckets
from inference_service.domain.datatypes import DATATYPES
from inference_service.domain.rows import PREPARED, RAW, Outputs, Rows
from inference_service.domain.signature import FREE, Signature, TensorSpec
from inference_service.domain.tensors import Array
from inference_service.replica.layouts import Layouts
from inference_service.replica.preprocessing import Preprocessing
from shared.checkpoint import CheckpointContent
from shared.checkpoint.missing_values import finite_rows
from shared.errors import InvalidArgument, MillraceError
from shared.model_spec import REGRESSION, ModelSpec
from shared.models.loaded import LoadedModel, does_not_load

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
