"""One inference request, from its message to the message of its answer.

A request is checked, passed to the batcher of its version, answered within its time limit, and counted.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from inference import grpc_service_pb2 as pb
from inference_service.convert import (
    answer_to_proto,
    check_tensor_counts,
    decode_typed,
    inputs_from_proto,
    many_elements,
    outputs_from_proto,
    parameters_from_proto,
    streamed_answer,
    streamed_error,
)
from inference_service.domain.deployment import Deployment, ModelVersion, Shadow, application_name, headers_of
from inference_service.domain.signature import (
    DEFAULT_PRIORITY,
    LABEL,
    LABEL_NAME,
    PRIORITY_LEVELS,
    RequestedOutput,
    RequestOptions,
    Rows,
    TensorSpec,
    WireTensor,
    check_answer_fits,
    check_classifiable,
    count_rows,
    outputs_wanted,
    request_options_of,
    rows_of,
)
from inference_service.domain.statistics import LATE, OK, Statistics
from inference_service.serve.batcher import Batcher
from inference_service.serve.models import Answer, Models, find_version, signature_of
from shared.errors import DeadlineExceeded, MillraceError, ResourceExhausted, invalid_field
from shared.grpc_errors import status_code
from shared.grpc_server import message_bytes
from shared.grpc_server.interceptor import is_deadline
from shared.logging_and_tracing import hidden, identify, log_outcome, tracing
from shared.names import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)


# --- Inference ---

# The number of values that classification ranks within a few milliseconds on the event loop.
CLASSIFIED_AT_ONCE = 5000
# Outputs of up to this many bytes are converted on the event loop. That takes a few milliseconds at most, even as typed
# contents.
CONVERTED_AT_ONCE = 256 * 1024
# Separate threads: the default executor also waits for the object store, which may not answer, and must not delay
# answers.
CONVERTING = ThreadPoolExecutor(2, thread_name_prefix="answers")
# Separate from CONVERTING, so that answers do not wait for requests.
DECODING = ThreadPoolExecutor(2, thread_name_prefix="inputs")
# The limit of an answer's message: a stream adds a few bytes to it.
MAX_ANSWER_BYTES = MAX_MESSAGE_BYTES - 1024
# Characters of a request's id that are logged; an id may be as long as a message.
MAX_SHOWN_ID = 100
# Returns a call's metadata as (str, str or bytes) pairs, or None. Called only when the metadata matters.
Metadata = Callable[[], Any]


class Inference:
    """Answers inference requests.

    Safe to use from many tasks of one event loop.
    """

    def __init__(self, models: Models, dispatcher: Dispatcher) -> None:
        self._models = models
        self._dispatcher = dispatcher

    async def answer(
        self,
        request: pb.ModelInferRequest,
        remaining_s: float | None,
        metadata: Metadata,
        *,
        ends_itself: bool = False,
    ) -> pb.ModelInferResponse:
        """Answer one request.

        `remaining_s` is the caller's remaining time, None for no deadline. `metadata` returns the metadata of the call.
        With `ends_itself` the caller cancels this coroutine when the time has passed.

        Raises the errors of `Models.choose` and `Dispatcher.infer`, and `DeadlineExceeded`.
        """
        began_s = time.perf_counter()
        statistics = self._models.unchosen
        status: str | None = "INTERNAL"
        limit_s, counts_against_version = remaining_s, True
        deployment: Deployment | None = None
        try:
            deployment, version = self._models.choose(
                request.model_name,
                request.model_version,
                lambda: headers_of(metadata() or (), parameters_from_proto(request.parameters)),
            )
            statistics = self._models.statistics(deployment, version)
            which = {"model": deployment.model_name, "model_version": version.number}
            identify(**which)
            tracing().describe(**which)
            counts_against_version = version.signature is not None and self._models.answers(deployment, version)
            check_tensor_counts(request, version.signature)
            requests = request_options_of(parameters_from_proto(request.parameters))
            inputs, requested = inputs_from_proto(request), outputs_from_proto(request)
            limit_s = _limit(requests, remaining_s)
            decoding = None
            if elements := many_elements(inputs):
                # Values take 8 bytes each while they are decoded.
                decoding = Decoding(partial(_decoded, request), max(8 * elements, message_bytes()))
            inferring = self._dispatcher.infer(
                deployment, version, inputs, requested, limit_s, requests.priority, decoding
            )
            del inputs  # frees the inputs early, as in `Dispatcher.infer`
            if limit_s == remaining_s and ends_itself:
                answer = await inferring
            else:
                answer = await _ended_within(limit_s, inferring)
            answered_s = time.perf_counter()
            response = await _message(request, answer, requested)
            now_s = time.perf_counter()
            statistics.answered(
                rows=answer.rows,
                now_s=time.time(),
                total_s=now_s - began_s,
                model_s=answer.model_s,
                input_s=answer.input_s,
                infer_s=answer.infer_s,
                output_s=now_s - answered_s,
            )
            status = None
            return response
        except MillraceError as error:
            status = status_code(error).name
            counts_against_version = counts_against_version and not isinstance(error, MemoryFull)
            raise
        except asyncio.CancelledError:
            ran_out = is_deadline(remaining_s, time.perf_counter() - began_s)
            status = LATE if ran_out else "CANCELLED"
            raise
        finally:
            if status:
                late = deployment if status == LATE else None
                statistics.failed(
                    status=status,
                    now_s=time.time(),
                    total_s=time.perf_counter() - began_s,
                    limit_s=limit_s,
                    min_s=self._models.min_s(late, _rows_of(request)) if late is not None else 0.0,
                    counts_against_version=counts_against_version,
                )

    async def streamed(
        self, request: pb.ModelInferRequest, remaining_s: float, metadata: Metadata
    ) -> pb.ModelStreamInferResponse:
        """Answer one request of a stream.

        Errors become error messages, so the stream continues after a failed request. Runs as its own task and logs one
        line, as a call does.
        """
        began_s = time.perf_counter()
        outcome, why = "CANCELLED", ""
        try:
            with tracing().span("request"):
                answered = streamed_answer(await self.answer(request, remaining_s, metadata))
            outcome = "OK"
            return answered
        except MillraceError as error:
            outcome, why = status_code(error).name, error.message
            return streamed_error(request, error)
        except Exception as unexpected:
            internal = hidden(unexpected, logger, "a request of a stream failed")
            outcome, why = status_code(internal).name, internal.message
            return streamed_error(request, internal)
        finally:
            took_s = time.perf_counter() - began_s
            log_outcome(logger, "a request of a stream", outcome, took_s, why, id=request.id[:MAX_SHOWN_ID])


async def _decoded(request: pb.ModelInferRequest, inputs: Sequence[WireTensor]) -> Sequence[WireTensor]:
    """Decode large typed contents in a thread.

    A cancelled call that has not started decodes nothing.
    """
    return await asyncio.get_running_loop().run_in_executor(DECODING, decode_typed, request, inputs)


async def _message(
    request: pb.ModelInferRequest, answer: Answer, requested: Sequence[RequestedOutput]
) -> pb.ModelInferResponse:
    """Convert the answer to its message, which carries the lineage of the version as parameters.

    Outputs are raw, or typed contents if the inputs were typed, and classes if requested (`answer_to_proto`). A large
    answer is converted in a thread, so that other requests do not wait.

    Raises `InvalidArgument` if the message would be too large. The model's signature cannot predict the size of
    classifications and of integers in typed contents.
    """
    in_words = any(output.top or output.name == LABEL_NAME for output in requested)
    classes = sum(values.size for _, values in answer.outputs) if in_words else 0
    size_bytes = sum(values.nbytes for _, values in answer.outputs)
    if classes <= CLASSIFIED_AT_ONCE and size_bytes <= CONVERTED_AT_ONCE:
        return answer_to_proto(request, answer, requested)
    return await asyncio.get_running_loop().run_in_executor(CONVERTING, _large_message, request, answer, requested)


def _large_message(
    request: pb.ModelInferRequest, answer: Answer, requested: Sequence[RequestedOutput]
) -> pb.ModelInferResponse:
    response = answer_to_proto(request, answer, requested)
    if (size_bytes := response.ByteSize()) > MAX_ANSWER_BYTES:
        remedy = f"an answer may have {MAX_ANSWER_BYTES}; send fewer rows, or ask for less"
        raise invalid_field("outputs", f"{size_bytes} bytes for {answer.rows} rows", remedy)
    return response


def _rows_of(request: pb.ModelInferRequest) -> int:
    """Return the row count that the first tensor declares, without checking it."""
    return request.inputs[0].shape[0] if request.inputs and request.inputs[0].shape else 1


def _limit(requests: RequestOptions, remaining_s: float | None) -> float | None:
    return min((one for one in (remaining_s, requests.timeout_s) if one is not None), default=None)


async def _ended_within(limit_s: float | None, inferring: Awaitable[Answer]) -> Answer:
    """Await the answer and raise `DeadlineExceeded` after `limit_s`."""
    try:
        async with asyncio.timeout(limit_s) as timer:
            return await inferring
    except TimeoutError:
        if not timer.expired():
            raise
        raise DeadlineExceeded(
            f"not answered within the {limit_s} s that the request has", reason="DEADLINE_EXCEEDED"
        ) from None


# --- Dispatcher ---
# Passes the rows of requests to the batchers, within this process's memory limit, and copies some to a shadow.

# The limit of the outputs alone: an answer also has names and parameters.
MAX_OUTPUT_BYTES = MAX_MESSAGE_BYTES - 64 * 1024


@dataclass(frozen=True)
class Decoding:
    """A pending decode of large inputs.

    `run` decodes the tensors in another thread, once the request is admitted. Until then they take about `size_bytes`.
    """

    run: Callable[[Sequence[WireTensor]], Awaitable[Sequence[WireTensor]]]
    size_bytes: int


class Dispatcher:
    """Passes rows to the batchers of `models`.

    Lives on the event loop of `models`. `in_flight_bytes` bounds the bytes of the requests of all models together.
    """

    def __init__(self, models: Models, in_flight_bytes: InFlightBytes | None = None) -> None:
        self._models = models
        self._in_flight_bytes = in_flight_bytes or InFlightBytes()
        self._shadowing = Shadowing(self._in_flight_bytes)

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
        """Run the model and return its raw outputs.

        The outputs are not classified, even if `requested` asks for a classification; `LABEL_NAME` has the label's
        values. `remaining_s` is the caller's remaining time, None for no deadline. `decoding`, if given, decodes the
        `inputs` without blocking other requests.

        Raises `InvalidArgument` naming the tensor, or `outputs` that do not fit an answer, `Unavailable`,
        `ResourceExhausted` (the model's queue or this process's memory is full), `DeadlineExceeded`.
        """
        signature = signature_of(deployment, version)
        wanted = outputs_wanted(signature, [output.name for output in requested])
        check_classifiable(wanted, requested)
        batcher = self._models.batcher(deployment, version)
        # Admission comes before the tensors are read, because a cheap refusal saves the most under overload.
        max_rows = deployment.spec.max_queued_rows
        if decoding is not None:
            began_s = time.perf_counter()
            count, form = count_rows(signature, inputs, max_rows)
            batcher.admit(count, form, remaining_s, priority)
            # Inputs that wait to be decoded take memory as rows that wait for the model do.
            with self._reserving(decoding.size_bytes):
                inputs = await decoding.run(inputs)
            if remaining_s is not None:
                remaining_s = max(remaining_s - (time.perf_counter() - began_s), 0.0)
            batcher = self._models.batcher(deployment, version)
        rows = rows_of(
            signature,
            inputs,
            max_rows,
            # Other requests arrived while a large request was decoded, so it is checked again.
            lambda rows, form: batcher.admit(rows, form, remaining_s, priority, again=decoding is not None),
        )
        del inputs  # frees the bytes objects that the rows were cut from
        if len(rows) * signature.answer_row_bytes > MAX_OUTPUT_BYTES:
            check_answer_fits(_unclassified(wanted, requested), len(rows), MAX_OUTPUT_BYTES)
        began_s = time.perf_counter()
        with self._reserving(rows.size_bytes):
            # Only admitted requests are copied: the shadow must see the same requests as the real version.
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
        """Count a request that was refused before its model was known.

        It counts as load of no model: this process was short of time, and more replicas would not help.
        """
        self._models.unchosen.failed(status="RESOURCE_EXHAUSTED", now_s=time.time(), total_s=0.0)

    @contextmanager
    def _reserving(self, size_bytes: int) -> Iterator[None]:
        """Reserve `size_bytes` for a request within the block.

        Raises `MemoryFull`, which counts as load of no model: the memory is this process's and may be held by requests
        for other models. Models scale by the rows that wait.
        """
        self._in_flight_bytes.reserve(size_bytes)
        try:
            yield
        finally:
            self._in_flight_bytes.release(size_bytes)

    def _shadow(
        self, deployment: Deployment, version: ModelVersion, shadow: Shadow, rows: Rows, batcher: Batcher
    ) -> None:
        """Send a copy to the shadow for the configured percentage of requests."""
        target = find_version(deployment, shadow.version)
        # A target with traffic of its own would have copies and real requests in the same batches.
        if target is None or target.weight or target.number == version.number or target.signature != version.signature:
            return
        if random.random() * 100 < shadow.percent:
            other = self._models.find_batcher(application_name(deployment, target))
            statistics = self._models.statistics(deployment, target)
            self._shadowing.copy(rows, batcher, target.number, other, statistics)


def _unclassified(tensor_specs: Sequence[TensorSpec], requested: Sequence[RequestedOutput]) -> Sequence[TensorSpec]:
    """Return the outputs that are sent unclassified.

    `tensor_specs` has the outputs `requested`, or all outputs.
    """
    return (
        [spec for spec, asked in zip(tensor_specs, requested, strict=True) if not asked.top]
        if requested
        else tensor_specs
    )


# --- Shadowing ---
# Copies of requests for a version under test. No caller waits for them, and real requests go first.


AT_ONCE = 16
TIMEOUT_S = 10.0
SHED = "SHED"


class Shadowing:
    """Sends copies of requests to shadow versions.

    Lives on one event loop. At most `AT_ONCE` copies are in progress. A copy costs its request only the creation of a
    task.
    """

    def __init__(self, in_flight_bytes: InFlightBytes) -> None:
        self._in_flight_bytes = in_flight_bytes
        self._copies: set[asyncio.Task[None]] = set()

    def copy(self, rows: Rows, real: Batcher, version: str, shadow: Batcher | None, statistics: Statistics) -> None:
        """Send the rows to the shadow's model and return at once.

        Copies never share a batch with real requests. The copy is shed if anything waits for either model, so that a
        busy machine does not get busier, or if it would leave real requests less than half of the memory limit.
        `version`, its number, and `statistics` are the shadow's.
        """
        waits = shadow is None or real.queued_rows or shadow.queued_rows or shadow.background().queued_rows
        size_bytes = rows.size_bytes
        many = len(self._copies) >= AT_ONCE or not self._in_flight_bytes.would_leave_half(size_bytes)
        if shadow is None or waits or many:
            statistics.shadow_ended(SHED)
            return
        self._in_flight_bytes.reserve(size_bytes)
        task = asyncio.create_task(_send(rows, version, shadow.background(), statistics))
        self._copies.add(task)
        task.add_done_callback(self._copies.discard)
        task.add_done_callback(lambda _: self._in_flight_bytes.release(size_bytes))


async def _send(rows: Rows, version: str, shadow: Batcher, statistics: Statistics) -> None:
    identify(model_version=version)  # a task inherits the log fields of its creator: here, those of the real version
    status = OK
    try:
        await shadow.submit(rows, TIMEOUT_S, PRIORITY_LEVELS)
    except MillraceError as error:
        status = status_code(error).name
    except Exception as unexpected:
        status = status_code(hidden(unexpected, logger, "a copy for a shadow failed")).name
    statistics.shadow_ended(status)


# --- Bytes in flight ---
# The bytes of requests that this process has accepted and not answered, over all models.
#
# Queues are bounded in rows, which does not bound their size: 4,096 encoded images may take some megabytes, or 200
# gigabytes.

# Sixteen of the largest messages. Each takes two to three times its size in memory, since the message waits with its
# rows.
MAX_IN_FLIGHT_BYTES = 2**30
RETRY_AFTER_S = 0.2


class MemoryFull(ResourceExhausted):
    """The memory limit of this process is reached.

    The limit covers all models, so the error is not about the requested model.
    """


class InFlightBytes:
    """Counts the bytes in flight.

    Lives on one event loop.
    """

    def __init__(self, max_bytes: int = MAX_IN_FLIGHT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._reserved = 0

    def reserve(self, size: int) -> None:
        """Reserve `size` bytes until `release`.

        A request is always accepted if nothing else is in flight, whatever its size. Otherwise raises `MemoryFull` if
        the limit would be exceeded.
        """
        if self._reserved and self._reserved + size > self._max_bytes:
            raise MemoryFull(
                f"requests of {self._reserved} bytes wait already, of all models, and at most {self._max_bytes} may",
                reason="QUEUE_FULL",
                metadata={"queued_bytes": str(self._reserved), "max_queued_bytes": str(self._max_bytes)},
                retry_after_s=RETRY_AFTER_S,
            )
        self._reserved += size

    def release(self, size: int) -> None:
        self._reserved -= size

    def would_leave_half(self, size: int) -> bool:
        """Return whether half of the limit would remain for others."""
        return self._reserved + size <= self._max_bytes // 2
