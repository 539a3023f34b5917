"""Bounds how many calls a server works on at once, and refuses the others before it reads their messages.

gRPC has such a limit of its own (`maximum_concurrent_rpcs`), but it counts health checks with all other calls, so that
a busy server looks like a dead one, and its refusal carries neither `ErrorInfo` nor `RetryInfo`.

A server holds at most as many messages as the limit says. A refused call costs no message: it is not read, and gRPC's
core buffers no more of it than its flow-control window.
"""

from __future__ import annotations

import inspect
import logging
import time
from typing import Any, cast

import grpc
from grpc import aio

from shared.errors import InvalidArgument, ResourceExhausted
from shared.grpc_server.interceptor import REQUEST_ID, STATUS, request_id_of
from shared.grpc_server.registering import Handler, Registering
from shared.grpc_server.trailers import details_and_status

logger = logging.getLogger(__name__)

# Calls end when their answers do, within seconds on a busy server.
RETRY_AFTER_S = 1.0
LOG_EVERY_S = 5.0

Context = aio.ServicerContext[Any, Any]


class CallLimit:
    """Lives on one event loop. At most `most` calls of all handlers that it wraps run at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._active = 0
        self._refused = 0
        self._logged_s = -LOG_EVERY_S
        # Made once: a call is refused so that hardly any work is done for it.
        self._details, self._status = details_and_status(
            ResourceExhausted(
                f"this server works on {most} calls already, and on no more at a time; try again later",
                reason="TOO_MANY_CALLS",
                metadata={"max_calls": str(most)},
                retry_after_s=RETRY_AFTER_S,
            )
        )

    def around(self, server: aio.Server) -> aio.Server:
        """What to add servicers to, and for nothing else, so that their calls are limited."""
        return cast(aio.Server, Registering(server, lambda handler, _: self.wrap(handler)))

    def wrap(self, handler: Any) -> Handler:
        # On the wire a unary request is a stream of one message, and as such it is not read before it is asked for.
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        limited = self._limited(behaviour, read_first=not handler.request_streaming)
        return make(limited, handler.request_deserializer, handler.response_serializer)

    def _limited(self, behaviour: Any, *, read_first: bool) -> Any:
        async def call(requests: Any, context: Context) -> Any:
            if self._active >= self._most:
                self._refuse(context)
                return None
            self._active += 1
            try:
                if read_first:
                    requests = await context.read()
                    if requests is aio.EOF:
                        await _abort_without_request(context)
                answering = behaviour(requests, context)
                # A traceback, which gRPC keeps with a failed call, would keep its message with this frame.
                del requests
                if not inspect.isasyncgen(answering):
                    return await answering
                async for response in answering:
                    await context.write(response)
                return None
            finally:
                self._active -= 1

        return call

    def _refuse(self, context: Context) -> None:
        context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
        context.set_details(self._details)
        context.set_trailing_metadata((_request_id(context), (STATUS, self._status)))
        self._refused += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_EVERY_S:
            logger.warning("%d calls were refused: %d are under way", self._refused, self._active)
            self._refused, self._logged_s = 0, now_s


async def _abort_without_request(context: Context) -> None:
    error = InvalidArgument("the call came without a request", reason="MALFORMED_MESSAGE")
    details, status = details_and_status(error)
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, details, (_request_id(context), (STATUS, status)))


def _request_id(context: Context) -> tuple[str, str]:
    return REQUEST_ID, request_id_of(dict(context.invocation_metadata() or ()).get(REQUEST_ID))
