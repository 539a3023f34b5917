"""Builds, runs and gracefully stops a server, demands its token, and limits its concurrent calls.

The token comes from the file that MILLRACE_TOKEN_FILE names. Callers send it as the header `authorization: Bearer
TOKEN`. gRPC asks generic handlers in the order in which they were added. `TokenCheck` is added first, so it sees the
method and the headers of each call before any other handler is chosen, and ends a call without the token. The server
then reads none of the call's messages and does not count the call for its limits, and a method that does not exist
looks like one that does. Health checks need no token. See docs/decisions/0022-tokens.md, also for what a token does not
protect.

Calls above the limit are refused before their messages are read. gRPC's own limit (`maximum_concurrent_rpcs`) is
unsuitable: it counts health checks with all other calls, so that a busy server looks like a dead one, and its refusal
carries neither `ErrorInfo` nor `RetryInfo`.

A server holds at most as many messages as the limit says. A refused call costs no message, because it is not read and
gRPC's core buffers no more of it than its flow-control window.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import logging
import os
import signal
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer

from shared.errors import InvalidArgument, ResourceExhausted, Unauthenticated
from shared.grpc_errors import details_and_status
from shared.grpc_server.interceptor import (
    DEFAULT_DEADLINE_S,
    CallInterceptor,
    Handler,
    LoadShedder,
    Registering,
    request_id_of,
)
from shared.names import AUTHORIZATION, MAX_MESSAGE_BYTES, MAX_TOKEN_CHARACTERS, REQUEST_ID, STATUS, TOKEN_FILE_VARIABLE
from shared.settings import SettingsError

# --- Bearer token ---

logger = logging.getLogger(__name__)

SCHEME = "Bearer"
# `openssl rand -hex 32` writes 64.
MIN_CHARACTERS = 16
# Orchestrators call the health service without a token.
EXEMPT = "/grpc.health.v1.Health/"
LOG_EVERY_S = 5.0

Context = aio.ServicerContext[Any, Any]


class BearerToken:
    """A server's token. It is never logged, and its `repr` does not show it."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        # The headers for the server's calls to its own port.
        self.metadata = ((AUTHORIZATION, f"{SCHEME} {token}"),)

    def is_in(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Return whether a call with these headers carries the token.

        The time depends only on the length of a wrong token, not on how much of it is right.
        """
        for key, value in metadata:
            if key == AUTHORIZATION and isinstance(value, str):
                scheme, _, token = value.partition(" ")
                if scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._token):
                    return True
        return False


def bearer_token(environ: Mapping[str, str]) -> BearerToken | None:
    """Read the file that MILLRACE_TOKEN_FILE names; None if the variable is unset or empty.

    The file holds one token of 16 to 1024 visible ASCII characters; surrounding white space is ignored. Raises
    `SettingsError` for any other file, and for one that other users of the machine may read.
    """
    path = environ.get(TOKEN_FILE_VARIABLE, "")
    if not path:
        return None
    token = _read(path)
    if not token:
        raise _refusal(path, "is empty", "write a token into it, e.g. openssl rand -hex 32")
    if len(token) < MIN_CHARACTERS:
        problem = f"holds a token of {len(token)} characters, which can be guessed"
        raise _refusal(path, problem, f"use at least {MIN_CHARACTERS}, e.g. openssl rand -hex 32")
    if not all("!" <= character <= "~" for character in token):
        raise _refusal(path, "holds more than one token of visible ASCII characters", "write one token, on one line")
    return BearerToken(token)


def _read(path: str) -> str:
    # The checks use the descriptor, because the name may refer to another file later. A named pipe would block without
    # O_NONBLOCK.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise _refusal(path, "is no regular file", "name a file that holds the token")
            if mode & 0o077:
                problem = f"may be read or changed by other users (mode {stat.S_IMODE(mode):04o})"
                raise _refusal(path, problem, f"run chmod 600 {path}")
            content = os.read(descriptor, 4 * MAX_TOKEN_CHARACTERS)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _refusal(path, f"cannot be read: {error.strerror}", "name a file that this user can read") from error
    token = content.decode("ascii", errors="replace").strip()
    if len(token) > MAX_TOKEN_CHARACTERS:
        raise _refusal(path, f"holds more than {MAX_TOKEN_CHARACTERS} characters", "write one token, on one line")
    return token


def _refusal(path: str, problem: str, remedy: str) -> SettingsError:
    return SettingsError(f"{TOKEN_FILE_VARIABLE}={path!r}: the file {problem}; {remedy}")


class TokenCheck(grpc.GenericRpcHandler):
    """Refuses calls that do not carry the token.

    Other calls go on to the handlers that were added after it. A refused call ends with UNAUTHENTICATED and
    `ErrorInfo`: TOKEN_REQUIRED if the header is missing, TOKEN_INVALID if it holds another token or another scheme.
    """

    def __init__(self, token: BearerToken) -> None:
        self._token = token
        self._refused = 0
        self._logged_s = -LOG_EVERY_S
        send = f"send the header {AUTHORIZATION}: {SCHEME} TOKEN, with the token that the service was started with"
        self._required = self._refusing(f"this service demands a token; {send}", "TOKEN_REQUIRED")
        self._invalid = self._refusing(f"the call's token is not that of this service; {send}", "TOKEN_INVALID")

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        metadata = handler_call_details.invocation_metadata or ()
        if self._token.is_in(metadata) or handler_call_details.method.startswith(EXEMPT):
            return None
        return self._invalid if any(key == AUTHORIZATION for key, _ in metadata) else self._required

    def _refusing(self, message: str, reason: str) -> Handler:
        # Computed once, so that refusing a call costs hardly any work.
        details, status = details_and_status(
            Unauthenticated(message, reason=reason, metadata={"header": AUTHORIZATION, "scheme": SCHEME})
        )

        async def refuse(_: Any, context: Context) -> None:
            request_id = request_id_of(dict(context.invocation_metadata() or ()).get(REQUEST_ID))
            context.set_code(grpc.StatusCode.UNAUTHENTICATED)
            context.set_details(details)
            context.set_trailing_metadata(((REQUEST_ID, request_id), (STATUS, status)))
            self._log_refusal(context.peer())

        # On the wire every call is a stream. A stream handler reads no message until it asks for one.
        return grpc.stream_stream_rpc_method_handler(refuse)

    def _log_refusal(self, peer: str) -> None:
        self._refused += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_EVERY_S:
            logger.warning(
                "%d calls were refused: they brought no valid token; the last came from %s", self._refused, peer
            )
            self._refused, self._logged_s = 0, now_s


# --- Server ---


# The limit for all services but health, which has its own: a busy server is not a dead one.
MAX_CALLS = 2048
MAX_HEALTH_CALLS = 1024
# Calls that wait in gRPC's core until the event loop takes them. Above this limit core refuses calls as CANCELLED and
# without details, so MAX_CALLS must apply first. Each call takes at most its flow-control window, initially 64 KiB.
MAX_PENDING_CALLS = 16 * 1024
# All tasks of calls, including refused ones. Only clients that take no answers can reach this limit.
MAX_CALL_TASKS = 16 * 1024
# Blocking calls of the object store run in threads, which mostly wait for the network.
BLOCKING_THREADS = 32
GRACE_S = 5.0
# A client whose machine or network has failed sends nothing. The server pings it at this interval and closes the
# connection if no answer comes. Otherwise its streams would be held for hours.
KEEPALIVE_EVERY_S = 60.0
KEEPALIVE_TIMEOUT_S = 60.0


class Health:
    """The answer of `grpc.health.v1` for the whole server (the empty service name)."""

    def __init__(self) -> None:
        self.servicer = HealthServicer()

    async def set(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self.servicer.set("", status)

    async def leave(self) -> None:
        await self.servicer.enter_graceful_shutdown()


async def serve(
    listen: str,
    register: Callable[[aio.Server], Sequence[str]],
    *,
    health: Health | None = None,
    ready: bool = True,
    stop: asyncio.Event | None = None,
    grace_s: float = GRACE_S,
    default_deadline_s: float = DEFAULT_DEADLINE_S,
    shared_port: bool = False,
    load_shedder: LoadShedder | None = None,
    max_calls: int = MAX_CALLS,
    token: BearerToken | None = None,
) -> None:
    """Serve on `listen` (host:port) until SIGTERM, SIGINT or `stop`, then drain for at most `grace_s` seconds.

    `register` adds servicers to the server and returns their full names for reflection. With `ready=False` the caller
    sets `health` once it serves. With `shared_port` other processes may serve on the same port, and the kernel
    distributes the connections. Calls above `max_calls`, except health checks, are refused unread as RESOURCE_EXHAUSTED
    with `RetryInfo`. With a `token`, calls without it are refused as UNAUTHENTICATED, except health checks. Raises
    `RuntimeError` if the port cannot be bound.
    """
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(BLOCKING_THREADS, thread_name_prefix="blocking"))
    health = health or Health()
    stop = stop or asyncio.Event()
    server = aio.server(
        maximum_concurrent_rpcs=MAX_CALL_TASKS,
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.keepalive_time_ms", round(KEEPALIVE_EVERY_S * 1000)),
            # grpc.keepalive_timeout_ms would not do: only the ping timeout detects a peer whose kernel still
            # acknowledges.
            ("grpc.http2.ping_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
            ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
            # Two services on one port by mistake would each get half of the calls.
            ("grpc.so_reuseport", int(shared_port)),
        ],
    )
    if token is not None:
        # Added first, so that later handlers never see a call without the token.
        server.add_generic_rpc_handlers([TokenCheck(token)])
    limited = CallLimit(max_calls).around(server)
    names = list(register(CallInterceptor(default_deadline_s, load_shedder).around(limited)))
    # grpc's own health and reflection servicers are not intercepted.
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, cast(aio.Server, Registering(server, _limit_alone)))
    reflected = ReflectionServicer((*names, "grpc.health.v1.Health", reflection.SERVICE_NAME))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflected, limited)  # type: ignore[no-untyped-call]
    server.add_insecure_port(listen)
    watching = None
    if load_shedder is not None:
        server.add_generic_rpc_handlers([load_shedder.handler()])
        # A port of this process alone, even if others share the public port.
        own = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    # Set before the first call can arrive, because grpc's own servicer starts with SERVING.
    await health.set(ready)
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    await server.start()
    if load_shedder is not None:
        watching = loop.create_task(load_shedder.watch(own, token.metadata if token is not None else ()))
    logger.info("serving on %s", listen)
    await stop.wait()
    logger.info("stopping: draining calls for at most %.0f s", grace_s)
    await health.leave()
    if watching is not None:
        watching.cancel()
    await server.stop(grace_s)


def _limit_alone(handler: Any, _: str) -> Handler:
    """Give each method its own limit, so that watchers of health do not block health checks."""
    return CallLimit(MAX_HEALTH_CALLS).wrap(handler)


# --- Calls at once ---

# Calls end when their answers do, within seconds on a busy server.
RETRY_AFTER_S = 1.0


class CallLimit:
    """Limits the concurrent calls of all handlers that it wraps to `most`. Lives on one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._active = 0
        self._refused = 0
        self._logged_s = -LOG_EVERY_S
        # Encoded once, so that refusing a call costs hardly any work.
        self._details, self._status = details_and_status(
            ResourceExhausted(
                f"this server works on {most} calls already, and on no more at a time; try again later",
                reason="TOO_MANY_CALLS",
                metadata={"max_calls": str(most)},
                retry_after_s=RETRY_AFTER_S,
            )
        )

    def around(self, server: aio.Server) -> aio.Server:
        """Return a stand-in for the server. Calls of servicers that are added to it are limited."""
        return cast(aio.Server, Registering(server, lambda handler, _: self.wrap(handler)))

    def wrap(self, handler: Any) -> Handler:
        # On the wire a unary request is a stream of one message. As a stream, it is read only on request.
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
                # gRPC keeps the traceback of a failed call, which would keep the message with this frame.
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
