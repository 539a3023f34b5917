"""Brings the rows of requests to the batchers: as many as this process has room for, and copies of some to a shadow."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from inference_service.batching.batcher import Batcher
from inference_service.batching.models import Models
from inference_service.batching.shadowing import Shadowing
from inference_service.domain.applications import application_name
from inference_service.domain.classification import check_classifiable
from inference_service.domain.deployment import Deployment, ModelVersion
from inference_service.domain.held_bytes import HeldBytes
from inference_service.domain.request_parameters import DEFAULT_PRIORITY, RequestedOutput
from inference_service.domain.routing import find_version, signature_of
from inference_service.domain.rows import Rows
from inference_service.domain.signature import (
    LABEL,
    LABEL_NAME,
    TensorSpec,
    check_answer_fits,
    count_rows,
    outputs_wanted,
    rows_of,
)
from inference_service.domain.tensors import Array, WireTensor
from inference_service.domain.traffic import Shadow
from shared.grpc_server.server import MAX_MESSAGE_BYTES

# Of the outputs alone: beside them an answer has names and parameters.
MAX_OUTPUT_BYTES = MAX_MESSAGE_BYTES - 64 * 1024


@dataclass(frozen=True)
class Answer:
    """The outputs that were asked for, of so many `rows`, and who gave them. The batcher had the request for `model_s`;
    `input_s` and `infer_s` are how long its batches were preprocessed and computed."""

    deployment: Deployment
    version: ModelVersion
    outputs: list[tuple[TensorSpec, Array]]
    rows: int
    model_s: float
    input_s: float
    infer_s: float


@dataclass(frozen=True)
class Decoding:
    """`run` decodes tensors in another thread, once it is their turn; until then they take about `size_bytes`."""

    run: Callable[[Sequence[WireTensor]], Awaitable[Sequence[WireTensor]]]
    size_bytes: int


class Dispatcher:
    """Lives on the event loop of `models`. `held` bounds the requests of all of them together."""

    def __init__(self, models: Models, held: HeldBytes | None = None) -> None:
        self._models = models
        self._held = held or HeldBytes()
        self._shadowing = Shadowing(self._held)

    async def infer(
        self,
        deployment: Deployment,
        version: ModelVersion,
        inputs: Sequence[WireTensor],
        requested: Sequence[RequestedOutput],
        remaining_s: float | None,
        priority: int = DEFAULT_PRIORITY,
        decoding: Decoding | None = None,
    ) -> Answer:
        """The outputs themselves, also where a classification of them is `requested`; for `LABEL_NAME` the labels.

        `remaining_s` is the caller's time left, None for no deadline; `decoding` what is to decode the `inputs`, where
        others should not wait for that.
        Raises `InvalidArgument` naming the tensor, or `outputs` that no answer has room for, `Unavailable`,
        `ResourceExhausted` (the model's queue is full, or this process's memory), `DeadlineExceeded`.
        """
        signature = signature_of(deployment, version)
        wanted = outputs_wanted(signature, [output.name for output in requested])
        check_classifiable(wanted, requested)
        batcher = self._models.batcher(deployment, version)
        # A refusal costs the less, the less of a request was read before: its tensors are not.
        max_rows = deployment.spec.max_queued_rows
        if decoding is not None:
            began_s = time.perf_counter()
            count, form = count_rows(signature, inputs, max_rows)
            batcher.admit(count, form, remaining_s, priority)
            # What waits to be decoded takes memory like what waits for the model.
            with self._holding(decoding.size_bytes):
                inputs = await decoding.run(inputs)
            if remaining_s is not None:
                remaining_s = max(remaining_s - (time.perf_counter() - began_s), 0.0)
            batcher = self._models.batcher(deployment, version)
        rows = rows_of(
            signature,
            inputs,
            max_rows,
            # Others came while a large request was decoded, so it is looked at again.
            lambda rows, form: batcher.admit(rows, form, remaining_s, priority, again=decoding is not None),
        )
        del inputs  # what bytes objects were cut from need not wait with them
        if len(rows) * signature.answer_row_bytes > MAX_OUTPUT_BYTES:
            check_answer_fits(_unclassified(wanted, requested), len(rows), MAX_OUTPUT_BYTES)
        began_s = time.perf_counter()
        with self._holding(rows.size_bytes):
            # Of admitted requests alone: the shadow is to see what the version beside it sees.
            if deployment.shadow is not None:
                self._shadow(deployment, version, deployment.shadow, rows, batcher)
            outputs = await batcher.submit(rows, remaining_s, priority, admitted=True)
        by_name = {spec.name: array for spec, array in zip(signature.outputs, outputs.arrays, strict=True)}
        if LABEL in by_name:
            by_name[LABEL_NAME] = by_name[LABEL]
        return Answer(
            deployment,
            version,
            [(spec, by_name[spec.name]) for spec in wanted],
            rows=len(rows),
            model_s=time.perf_counter() - began_s,
            input_s=outputs.input_s,
            infer_s=outputs.infer_s,
        )

    def turned_away(self) -> None:
        """Counts a request that was refused before anybody read for which model it is. No model is told of it, so none
        is scaled by it: this process was short of time, and no replica of any model makes up for that."""
        self._models.unchosen.failed(status="RESOURCE_EXHAUSTED", now_s=time.time(), total_s=0.0)

    @contextmanager
    def _holding(self, size_bytes: int) -> Iterator[None]:
        """Holds `size_bytes` of a request within it. Raises `MemoryFull`, which counts as load of no model: the memory
        is this process's, and may be held by requests for others. These scale by the rows that wait."""
        self._held.take(size_bytes)
        try:
            yield
        finally:
            self._held.give_back(size_bytes)

    def _shadow(
        self, deployment: Deployment, version: ModelVersion, shadow: Shadow, rows: Rows, batcher: Batcher
    ) -> None:
        """Sends a copy on, if this request is one of those that the shadow is to get."""
        target = find_version(deployment, shadow.version)
        # One with traffic of its own would have copies and real requests in the same batches.
        if target is None or target.weight or target.number == version.number or target.signature != version.signature:
            return
        if random.random() * 100 < shadow.percent:
            other = self._models.find_batcher(application_name(deployment, target))
            statistics = self._models.statistics(deployment, target)
            self._shadowing.copy(rows, batcher, target.number, other, statistics)


def _unclassified(wanted: Sequence[TensorSpec], requested: Sequence[RequestedOutput]) -> Sequence[TensorSpec]:
    """Those that are sent as they are; `wanted` are those `requested`, or all."""
    return [spec for spec, asked in zip(wanted, requested, strict=True) if not asked.top] if requested else wanted
