"""Many requests over one stream (`ModelStreamInfer`)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from typing import Any

from inference import grpc_service_pb2 as pb
from millrace_client.answers import Answer, answer_of
from millrace_client.calls import Caller
from millrace_client.errors import KINDS, MillraceError, Unavailable


def streamed_answers(
    caller: Caller, method: Any, requests: Iterable[pb.ModelInferRequest], timeout_s: float | None
) -> Generator[Answer | MillraceError, None, None]:
    """An answer for each request, in their order, or what that one failed with: the stream goes on behind it.

    Raises what ends the stream itself, `Unavailable` where it ends before all are answered, and what `requests` raises.
    Closing the iterator ends the call.
    """
    sending = _Sending(requests)
    try:
        with closing(caller.stream(method, sending.requests(), timeout_s=timeout_s)) as responses:
            for response in responses:
                latency_s = time.perf_counter() - sending.sent_s.popleft()
                if response.error_message:
                    yield _error_of(response)
                else:
                    yield answer_of(response.infer_response, latency_s)
        if sending.sent_s or not sending.all_sent:
            raise Unavailable(
                f"{caller.address} ended the stream before all requests were answered",
                remedy="ask again for those that have no answer",
            )
    except MillraceError:
        # gRPC says only that there was an exception.
        if sending.failure is not None:
            raise sending.failure from None
        raise


class _Sending:
    """The requests as gRPC takes them, in a thread of its own: when each that is not answered was sent, whether all
    were, and what making one failed with."""

    def __init__(self, requests: Iterable[pb.ModelInferRequest]) -> None:
        self._requests = requests
        self.sent_s: deque[float] = deque()
        self.all_sent = False
        self.failure: Exception | None = None

    def requests(self) -> Iterator[pb.ModelInferRequest]:
        try:
            for request in self._requests:
                self.sent_s.append(time.perf_counter())
                yield request
            self.all_sent = True
        except Exception as failure:
            self.failure = failure
            raise


def _error_of(response: pb.ModelStreamInferResponse) -> MillraceError:
    """Out of "STATUS_NAME: text"; other servers send the text alone."""
    status, colon, text = response.error_message.partition(": ")
    if not colon or status not in KINDS:
        status, text = "", response.error_message
    return KINDS.get(status, MillraceError)(text, request_id=response.infer_response.id)
