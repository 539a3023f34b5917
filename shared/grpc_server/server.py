"""Builds, runs and gracefully stops a server."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer

from shared.grpc_server.bearer_token import BearerToken, TokenCheck
from shared.grpc_server.call_limit import CallLimit
from shared.grpc_server.door import Door
from shared.grpc_server.interceptor import DEFAULT_DEADLINE_S, CallInterceptor
from shared.grpc_server.registering import Handler, Registering

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# Of all services but health, which has as many of its own: a busy server is no dead one.
MAX_CALLS = 2048
MAX_HEALTH_CALLS = 1024
# Calls that wait in gRPC's core until the event loop takes them. Above it, core refuses them as CANCELLED and without
# details, so the limit of calls must come first. Each takes at most its flow-control window, 64 KiB at first.
MAX_PENDING_CALLS = 16 * 1024
# All tasks of calls, refused ones among them. It is reached only by clients that take no answers.
MAX_CALL_TASKS = 16 * 1024
# Blocking calls of the object store run in threads; each waits mostly for the network.
BLOCKING_THREADS = 32
GRACE_S = 5.0
# A client whose machine or network is gone says nothing: it is asked so often, and given up when it does not answer.
# Otherwise its streams would be held for hours.
KEEPALIVE_EVERY_S = 60.0
KEEPALIVE_WITHIN_S = 60.0


class Health:
    """What `grpc.health.v1` answers for the whole server (the empty service name)."""

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
    door: Door | None = None,
    max_calls: int = MAX_CALLS,
    token: BearerToken | None = None,
) -> None:
    """Serves on `listen` (host:port) until SIGTERM, SIGINT or `stop`, then drains for at most `grace_s` seconds.

    `register` adds servicers to the server and returns their full names for reflection. With `ready=False` the caller
    says through `health` when it serves. With `shared_port` others that say so may serve on the same one, and the
    kernel shares out the connections. Calls above `max_calls`, health checks aside, are refused unread as
    RESOURCE_EXHAUSTED with `RetryInfo`. With a `token`, calls that do not bring it are refused as UNAUTHENTICATED,
    health checks apart. Raises `RuntimeError` where the port cannot be bound.
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
            # Not grpc.keepalive_timeout_ms: a peer whose kernel still acknowledges is given up by this one alone.
            ("grpc.http2.ping_timeout_ms", round(KEEPALIVE_WITHIN_S * 1000)),
            ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
            # Two services by mistake on one port would each get half of the calls.
            ("grpc.so_reuseport", int(shared_port)),
        ],
    )
    if token is not None:
        # First of all handlers: those behind it are not asked about a call without the token.
        server.add_generic_rpc_handlers([TokenCheck(token)])
    limited = CallLimit(max_calls).around(server)
    names = list(register(CallInterceptor(default_deadline_s, door).around(limited)))
    # Health and reflection come from grpc itself and keep their own manners.
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, cast(aio.Server, Registering(server, _limit_alone)))
    reflected = ReflectionServicer((*names, "grpc.health.v1.Health", reflection.SERVICE_NAME))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflected, limited)  # type: ignore[no-untyped-call]
    server.add_insecure_port(listen)
    watching = None
    if door is not None:
        server.add_generic_rpc_handlers([door.handler()])
        # Of this process alone, also where others have the same port.
        own = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    # Said before the first call can come: grpc's own servicer begins with SERVING.
    await health.set(ready)
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    await server.start()
    if door is not None:
        watching = loop.create_task(door.watch(own, token.metadata if token is not None else ()))
    logger.info("serving on %s", listen)
    await stop.wait()
    logger.info("stopping: draining calls for at most %.0f s", grace_s)
    await health.leave()
    if watching is not None:
        watching.cancel()
    await server.stop(grace_s)


def _limit_alone(handler: Any, _: str) -> Handler:
    """With a limit of its own for each method: who watches health takes nothing from those who check it."""
    return CallLimit(MAX_HEALTH_CALLS).wrap(handler)
