"""A checkpoint, loaded to be served: its preprocessing, its model, and both together as one function of rows.

Only replicas import this: torch takes seconds, and the front does without it.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from inference_service.domain.batch_times import buckets
from inference_service.domain.signature import FREE, Rows, Signature, TensorSpec
from inference_service.domain.tensors import Array
from shared.checkpoint import CheckpointContent
from shared.errors import FailedPrecondition, InvalidArgument
from shared.models import build_model, load_weights

DATATYPE_OF = {"uint8": "UINT8", "float32": "FP32"}
WARM_UP_RUNS = 2  # the first pays for what the kernels prepare once per shape; the last is measured


class ServedModel:
    """Raises `FailedPrecondition` when the weights do not fit the model. Not for several threads at once."""

    def __init__(self, content: CheckpointContent, weights: bytes) -> None:
        """`weights` are the bytes of a safetensors file, verified."""
        try:
            self._pipeline = content.pipeline()
            prepared = self._pipeline.output(content.model_input)
            self.module = build_model(content.model)
            load_weights(self.module, load_safetensors(weights))
        except (InvalidArgument, RuntimeError, SafetensorError, ValueError) as error:
            raise FailedPrecondition(
                f"the model of {content.training_job} does not load: {error}", reason="MODEL_DOES_NOT_LOAD"
            ) from error
        self.module.eval()
        given = content.model_input
        self.signature = Signature(
            raw=TensorSpec(given.name, DATATYPE_OF[given.dtype], (FREE, *given.shape)),
            prepared=TensorSpec(given.name, DATATYPE_OF[prepared.dtype], (FREE, *prepared.shape)),
            outputs=(
                TensorSpec("logits", "FP32", (FREE, content.model.num_classes)),
                TensorSpec("probabilities", "FP32", (FREE, content.model.num_classes)),
                TensorSpec("label", "INT64", (FREE,)),
            ),
        )

    def forward(self, rows: Rows) -> list[Array]:
        """logits (B, classes) float32, probabilities (B, classes) float32 and label (B,) int64 of B rows."""
        prepared = self._pipeline(rows.values) if rows.form == "raw" else rows.values
        # torch wants memory that it may write to; rows that came by wire lie in memory that it may not.
        images_BCHW = torch.from_numpy(np.require(prepared, np.float32, ["C", "W"]))
        with torch.inference_mode():
            logits = self.module(images_BCHW)
            outputs = (logits, logits.softmax(dim=1), logits.argmax(dim=1))
        return [output.numpy() for output in outputs]

    def warm_up(self, max_rows: int) -> dict[int, float]:
        """Runs each batch size that is likely. Returns rows → seconds."""
        measured_s = {}
        for size in buckets(max_rows):
            rows = Rows("raw", np.zeros((size, *self.signature.raw.shape[1:]), self._raw_dtype))
            for _ in range(WARM_UP_RUNS):
                started = time.perf_counter()
                self.forward(rows)
                measured_s[size] = time.perf_counter() - started
        return measured_s

    @property
    def _raw_dtype(self) -> str:
        return next(dtype for dtype, name in DATATYPE_OF.items() if name == self.signature.raw.datatype)
