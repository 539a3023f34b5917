"""One request, from its message to the message of its answer: checked, answered within its time, and counted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from inference import grpc_service_pb2 as pb
from inference_service.batching.dispatcher import Answer, Decoding, Dispatcher
from inference_service.batching.models import Models
from inference_service.converters.open_inference import (
    answer_to_proto,
    check_tensor_counts,
    inputs_from_proto,
    outputs_from_proto,
    parameters_from_proto,
    streamed_answer,
    streamed_error,
)
from inference_service.converters.typed_contents import decode_typed, many_elements
from inference_service.domain.deployment import Deployment
from inference_service.domain.held_bytes import MemoryFull
from inference_service.domain.recent import LATE
from inference_service.domain.request_parameters import RequestedOutput, Wishes, wishes_of
from inference_service.domain.signature import LABEL_NAME
from inference_service.domain.tensors import WireTensor
from inference_service.domain.traffic import headers_of
from shared.errors import DeadlineExceeded, MillraceError, invalid_field
from shared.grpc_errors import status_code
from shared.grpc_server import message_bytes
from shared.grpc_server.deadlines import is_deadline
from shared.grpc_server.server import MAX_MESSAGE_BYTES
from shared.telemetry import hidden, identify, log_outcome
from shared.tracing import tracing

logger = logging.getLogger(__name__)

# Numbers of which the greatest are found within a few milliseconds.
CLASSIFIED_AT_ONCE = 5000
# Bytes of outputs that become a message as fast, in typed contents, too.
CONVERTED_AT_ONCE = 256 * 1024
# Threads of their own: the loop's wait for the store, which may be silent, and answers have nothing to do with it.
CONVERTING = ThreadPoolExecutor(2, thread_name_prefix="answers")
# Nor do answers wait for requests.
DECODING = ThreadPoolExecutor(2, thread_name_prefix="inputs")
# Of an answer: in a stream it gets some bytes more.
MAX_ANSWER_BYTES = MAX_MESSAGE_BYTES - 1024
# What the log has of a request's id, which may be as long as a message.
MAX_SHOWN_ID = 100
# Gives a call's pairs of str and str or bytes, or None: asked for only where it matters.
Metadata = Callable[[], Any]


class Inference:
    """Safe to use from many tasks of one event loop."""

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
        """`remaining_s` is the caller's time left, None for no deadline; `metadata` that of its call. With
        `ends_itself` who calls cancels this when the time has passed.

        Raises what `Models.choose` and `Dispatcher.infer` raise, and `DeadlineExceeded`.
        """
        began_s = time.perf_counter()
        statistics = self._models.unchosen
        status: str | None = "INTERNAL"
        limit_s, had_part = remaining_s, True
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
            had_part = version.signature is not None and self._models.answers(deployment, version)
            check_tensor_counts(request, version.signature)
            wishes = wishes_of(parameters_from_proto(request.parameters))
            inputs, requested = inputs_from_proto(request), outputs_from_proto(request)
            limit_s = _limit(wishes, remaining_s)
            decoding = None
            if elements := many_elements(inputs):
                # Numbers are of 64 bits while they are decoded.
                decoding = Decoding(partial(_decoded, request), max(8 * elements, message_bytes()))
            inferring = self._dispatcher.infer(
                deployment, version, inputs, requested, limit_s, wishes.priority, decoding
            )
            del inputs  # as in `Dispatcher.infer`
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
            had_part = had_part and not isinstance(error, MemoryFull)
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
                    least_s=self._models.least_s(late, _rows_of(request)) if late is not None else 0.0,
                    had_part=had_part,
                )

    async def streamed(
        self, request: pb.ModelInferRequest, remaining_s: float, metadata: Metadata
    ) -> pb.ModelStreamInferResponse:
        """The same for a request of a stream, which goes on whatever is wrong with this one: a task of its own, with a
        line in the log as a call has."""
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
    """Of large typed contents, in a thread. Cancelled before its turn has come, it decodes nothing."""
    return await asyncio.get_running_loop().run_in_executor(DECODING, decode_typed, request, inputs)


async def _message(
    request: pb.ModelInferRequest, answer: Answer, requested: Sequence[RequestedOutput]
) -> pb.ModelInferResponse:
    """Of the answer. Others' requests need not wait while many numbers become strings, or a large message.

    Raises `InvalidArgument` where it is larger than a message may be, which is not told by the model's signature for
    classifications and for integers in typed contents.
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
    """As its first tensor says, be it wrong."""
    return request.inputs[0].shape[0] if request.inputs and request.inputs[0].shape else 1


def _limit(wishes: Wishes, remaining_s: float | None) -> float | None:
    return min((one for one in (remaining_s, wishes.timeout_s) if one is not None), default=None)


async def _ended_within(limit_s: float | None, inferring: Awaitable[Answer]) -> Answer:
    """Raises `DeadlineExceeded` where it takes longer."""
    try:
        async with asyncio.timeout(limit_s) as timer:
            return await inferring
    except TimeoutError:
        if not timer.expired():
            raise
        raise DeadlineExceeded(
            f"not answered within the {limit_s} s that the request has", reason="DEADLINE_EXCEEDED"
        ) from None
