"""What happens to every call: the load shedder refuses it unread or lets it pass, and one interceptor wraps its
handler.

gRPC hands a process one call after the other. Further calls wait in gRPC's core, in order of arrival, without a limit
of time. Once they wait longer than their clients do, every call that is taken is too late, and the process works in
vain. `LoadShedder` therefore measures this wait with a probe, a call of the process to itself. It turns away a share of
the calls that grows with the wait, linearly between two thresholds, as routers drop packets before their queues are
full (Floyd and Jacobson, "Random Early Detection Gateways for Congestion Avoidance", 1993). Turning a call away costs a
third of reading and refusing it. A busy process therefore also turns away the calls that it would probably refuse
later.

It provides identity, span, deadline, the handling of malformed bytes, errors and the access log. A call that the load
shedder turns away gets only its identity.

`Registering` replaces the server while servicers are added, and passes wrapped handlers on to it.

Two features of `grpc.aio` are avoided because of their cost per call. Its interceptors take 0.05 ms of CPU, where a
servicer that only echoes takes 0.16 ms; wrapping handlers once is cheaper. With registered single methods the server
waits for the next call of each method separately, so every call costs more the more methods there are.

`check_fields` bounds the number of fields of a message before it is parsed. A sub-message takes two bytes on the wire
and 80 bytes of memory once it is parsed: 64 MiB of them took 2.6 GiB, and blocked the event loop for half a minute.
Only fields that can contain sub-messages are searched for further fields. Other content, such as elements of a repeated
number or string, is bounded by the message size alone; parsing makes at most 16 times as much of it.

Tells deadlines of cancelled calls apart from cancellations by clients.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias, cast

import grpc
from grpc import aio

from shared.errors import (
    DeadlineExceeded,
    InvalidArgument,
    MillraceError,
    ResourceExhausted,
    Unimplemented,
    invalid_field,
)
from shared.grpc_errors import details_and_status, status_code
from shared.logging_and_tracing import hidden, identity, log_outcome, tracing
from shared.names import REQUEST_ID, STATUS

# --- Load shedding ---

logger = logging.getLogger(__name__)

METHOD = "/millrace.LoadShedder/Probe"
# Thresholds of the wait in seconds: no call is turned away below the first, every eligible call above the second.
SOME_FROM_S, ALL_FROM_S = 0.015, 0.06
# Thresholds of the wait for calls that would probably be refused after reading: below the first none of these is turned
# away, above the second all are.
BUSY_FROM_S, FULLY_BUSY_S = 0.003, 0.01
# Adaptive throttling ("Site Reliability Engineering", ch. 21): the share of calls to refuse is max(0, ended - LET_IN *
# served) / (ended + FEW). REMEMBERED_S is the time constant of both counters. FEW keeps a handful of calls from
# triggering it.
REMEMBERED_S, LET_IN, FEW = 0.5, 1.2, 10
# Calls with more time left than MIN_WAITS_LEFT times the wait, and more than MIN_TIME_LEFT_S, are always let in.
MIN_WAITS_LEFT, MIN_TIME_LEFT_S = 10.0, 1.0
# Pauses between two probes: while calls wait, and while they do not. A probe costs as much CPU as a call that does
# nothing.
OFTEN_S, SELDOM_S = 0.01, 0.05
REPORT_INTERVAL_S = 5.0
RETRY_AFTER_S = 0.2
PROBE_TIMEOUT_S = 5.0

Context = aio.ServicerContext[Any, Any]


class LoadShedder:
    """Sheds load on the given methods of a server in the same event loop.

    `methods` are full names. `turned_away` is called for each refused call.
    """

    def __init__(self, methods: Collection[str], turned_away: Callable[[], None]) -> None:
        self.methods = frozenset(methods)
        self._turned_away = turned_away
        self._found_s = (0.0, 0.0)
        self._probed_s: float | None = None
        self._came = asyncio.Event()
        # Decaying counts of all calls that have ended, and of those that were not refused.
        self._ended, self._served = Decaying(REMEMBERED_S), Decaying(REMEMBERED_S)
        self._unreported = 0
        # The refusal is encoded once, so that refusing a call costs hardly any work.
        self.details, self.status = details_and_status(
            ResourceExhausted(
                "more calls come than this process can read; try again later",
                reason="OVERLOADED",
                retry_after_s=RETRY_AFTER_S,
            )
        )

    def wait_s(self) -> float:
        """Return the current estimate of how long calls wait before this process takes them.

        It is the smaller of the last two probes, because one of them may have met a delay that has already passed.
        """
        if self._probed_s is None:
            return min(self._found_s)
        # A probe that is still in flight has waited at least this long.
        return min(self._found_s[-1], asyncio.get_running_loop().time() - self._probed_s)

    def turns_away(self, remaining_s: float | None) -> bool:
        """Return whether a call that arrives now is to be refused unread.

        `remaining_s` is the time until its deadline; None: no deadline.
        """
        self._came.set()
        wait_s = self.wait_s()
        if wait_s <= BUSY_FROM_S or remaining_s is None or remaining_s > max(MIN_WAITS_LEFT * wait_s, MIN_TIME_LEFT_S):
            return False
        now_s = asyncio.get_running_loop().time()
        # A call without any time left is always refused, because its client no longer receives an answer.
        if remaining_s > 0 and random.random() >= self._share(wait_s, now_s):
            return False
        self._ended.add(now_s)
        self._unreported += 1
        self._turned_away()
        return True

    def ended(self, *, in_vain: bool) -> None:
        """Count a call that was let in and has ended.

        `in_vain` means that its servicer refused it for lack of time, or that its deadline passed.
        """
        now_s = asyncio.get_running_loop().time()
        self._ended.add(now_s)
        if not in_vain:
            self._served.add(now_s)

    def _share(self, wait_s: float, now_s: float) -> float:
        # Clients throttle themselves in the same way in "Site Reliability Engineering" (Beyer and others, 2016),
        # chapter 21.
        ended, served = self._ended.at(now_s), self._served.at(now_s)
        in_vain = max(ended - LET_IN * served, 0.0) / (ended + FEW)
        return max(_between(SOME_FROM_S, ALL_FROM_S, wait_s), in_vain * _between(BUSY_FROM_S, FULLY_BUSY_S, wait_s))

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler that answers the process's own probes."""
        return _Opening(self._opened)

    async def watch(self, address: str, metadata: Sequence[tuple[str, str]] = ()) -> None:
        """Probe this process's own server while calls arrive, until cancelled.

        `metadata` are the probe's headers. If probing is impossible, all calls are let in.
        """
        try:
            async with aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
                await self._keep_probing(partial(channel.unary_unary(METHOD), metadata=metadata))
        except Exception:
            logger.exception("this process no longer knows how long calls wait, and turns none away")
        finally:
            self._found_s = (0.0, 0.0)

    async def _keep_probing(self, probe: Any) -> None:
        loop = asyncio.get_running_loop()
        reported_s = loop.time()
        while True:
            if not self._came.is_set():
                self._found_s = (0.0, 0.0)
            await self._came.wait()
            self._came.clear()
            await self._probe(probe)
            if self._unreported and loop.time() - reported_s > REPORT_INTERVAL_S:
                logger.warning("%d calls were turned away: more come than can be read", self._unreported)
                self._unreported, reported_s = 0, loop.time()
            await asyncio.sleep(OFTEN_S if self._found_s[-1] > SOME_FROM_S / 2 else SELDOM_S)

    async def _probe(self, probe: Any) -> None:
        loop = asyncio.get_running_loop()
        began_s = self._probed_s = loop.time()
        try:
            await probe(b"", timeout=PROBE_TIMEOUT_S)
        except aio.AioRpcError as error:  # too late, or refused like other calls; either took as long
            logger.debug("the probe of this server failed: %s", error.details())
            self._find(loop.time() - began_s)
        finally:
            self._probed_s = None

    async def _opened(self, _: bytes, __: Context) -> bytes:
        if self._probed_s is not None:
            self._find(asyncio.get_running_loop().time() - self._probed_s)
            self._probed_s = None
        return b""

    def _find(self, wait_s: float) -> None:
        self._found_s = (self._found_s[-1], wait_s)


class Decaying:
    """An exponentially decaying count with the time constant `forgotten_s`.

    For events at a constant rate, the count is that rate times `forgotten_s`.
    """

    def __init__(self, forgotten_s: float) -> None:
        self._forgotten_s = forgotten_s
        self._count = self._at_s = 0.0

    def add(self, now_s: float, count: float = 1.0) -> None:
        self._count = self.at(now_s) + count
        self._at_s = now_s

    def at(self, now_s: float) -> float:
        return self._count * math.exp((self._at_s - now_s) / self._forgotten_s)


def _between(low: float, high: float, value: float) -> float:
    """Return 0 at `low`, 1 at `high`, and linear values between."""
    return min(max((value - low) / (high - low), 0.0), 1.0)


class _Opening(grpc.GenericRpcHandler):
    def __init__(self, behaviour: Any) -> None:
        self._handler: Any = grpc.unary_unary_rpc_method_handler(behaviour)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._handler if handler_call_details.method == METHOD else None


# --- Calls ---


DEFAULT_DEADLINE_S = 60.0
# A client that takes no message of its stream for this long counts as gone.
SEND_TIMEOUT_S = 300.0

# Statuses by which a servicer says that it has no time for a call.
REFUSALS = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED)


_message_bytes: ContextVar[int] = ContextVar("message_bytes", default=0)


def message_bytes() -> int:
    """Return the wire size, in bytes, of the last message that this task read."""
    return _message_bytes.get()


class Malformed:
    """Replaces a message whose bytes are invalid or refused. grpc itself would answer UNKNOWN."""

    def __init__(self, why: InvalidArgument) -> None:
        self.why = why


class CallInterceptor:
    """Wraps every handler.

    Unary calls without a deadline get `default_deadline_s`; streams get none. It is not one of grpc's own interceptors;
    see `Registering`.
    """

    def __init__(self, default_deadline_s: float = DEFAULT_DEADLINE_S, load_shedder: LoadShedder | None = None) -> None:
        self._default_deadline_s = default_deadline_s
        self._load_shedder = load_shedder

    def around(self, server: aio.Server) -> aio.Server:
        """Return a stand-in for the server. Calls of servicers that are added to it are intercepted."""
        return cast(aio.Server, Registering(server, self._wrap))

    def _wrap(self, handler: Any, method: str) -> Handler:
        deserializer = _tolerant(handler.request_deserializer)
        serializer = _or_bytes(handler.response_serializer)
        if handler.response_streaming:
            stream = self._stream(handler.stream_stream or handler.unary_stream, method)
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else (grpc.unary_stream_rpc_method_handler)
            )
            return make(stream, deserializer, serializer)
        unary = self._unary(handler.stream_unary or handler.unary_unary, method)
        if self._load_shedder is not None and method in self._load_shedder.methods and handler.unary_unary is not None:
            # Handled as a stream of one message, which is read only on request. On the wire it is the same.
            return grpc.stream_unary_rpc_method_handler(_behind(self._load_shedder, unary), deserializer, serializer)
        make = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else (grpc.unary_unary_rpc_method_handler)
        )
        return make(unary, deserializer, serializer)

    def _unary(self, behaviour: Any, method: str) -> Callable[[Any, Context], Awaitable[Any]]:
        async def answered(request: Any, context: Context) -> Any:
            if context.time_remaining() is not None:
                # grpc itself cancels a call at its deadline.
                return await behaviour(_well_formed(request, context), context)
            limit = self._default_deadline_s
            limited = _Limited(context, limit)
            try:
                async with asyncio.timeout(limit) as timer:
                    return await behaviour(_well_formed(request, context), limited)
            except TimeoutError:
                if not timer.expired():
                    raise
                raise DeadlineExceeded(f"not done within the default deadline of {limit} s") from None

        async def call(request: Any, context: Context) -> Any:
            try:
                async with _call(context, method, aborts=True):
                    return await answered(request, context)
            except aio.AbortError as aborted:
                del request
                raise _bare(aborted) from None

        return call

    def _stream(self, behaviour: Any, method: str) -> Callable[[Any, Context], Awaitable[None]]:
        # Not a generator, because a generator would not notice that its client has disconnected, and would end later,
        # elsewhere.
        async def call(request: Any, context: Context) -> None:
            async with (
                _call(context, method, aborts=False),
                aclosing(behaviour(_well_formed(request, context), context)) as responses,
            ):
                async for response in responses:
                    await _send(context, response)
                    del response  # free it before the next one is made

        return call


class _Limited:
    """A call's context with the deadline that the server set."""

    def __init__(self, context: Context, limit_s: float) -> None:
        self._context = context
        self._until_s = time.monotonic() + limit_s

    def time_remaining(self) -> float:
        return max(self._until_s - time.monotonic(), 0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _behind(
    load_shedder: LoadShedder, unary: Callable[[Any, Context], Awaitable[Any]]
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def call(_: Any, context: Context) -> Any:
        if load_shedder.turns_away(context.time_remaining()):
            context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
            context.set_details(load_shedder.details)
            request_id = request_id_of(dict(context.invocation_metadata() or ()).get(REQUEST_ID))
            context.set_trailing_metadata(((REQUEST_ID, request_id), (STATUS, load_shedder.status)))
            return None
        in_vain = False
        started, remaining_s = time.perf_counter(), context.time_remaining()
        try:
            request = await context.read()
            if request is aio.EOF:
                request = Malformed(InvalidArgument("the call came without a request", reason="MALFORMED_MESSAGE"))
            return await unary(request, context)
        except aio.AbortError as aborted:
            in_vain = context.code() in REFUSALS
            request = None
            raise _bare(aborted) from None
        except asyncio.CancelledError:
            in_vain = is_deadline(remaining_s, time.perf_counter() - started)
            raise
        finally:
            load_shedder.ended(in_vain=in_vain)

    return call


def _bare(aborted: aio.AbortError) -> aio.AbortError:
    """Remove the error's traceback and context.

    grpc keeps the error with the call's state. Its frames would keep all data of the call until the garbage collector
    runs.
    """
    aborted.__context__ = None
    return aborted.with_traceback(None)


async def _send(context: Context, response: Any) -> None:
    """Send a response. Raises `DeadlineExceeded` if the client takes nothing, because the stream's resources would be
    held for ever."""
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await context.write(response)
    except TimeoutError:
        raise DeadlineExceeded(f"the client took no message for {SEND_TIMEOUT_S:.0f} s") from None


@asynccontextmanager
async def _call(context: Context, method: str, *, aborts: bool) -> AsyncIterator[None]:
    """Give one call its identity and access log, and translate its exceptions.

    A call with one answer `aborts`. Otherwise grpc would send an empty answer before the status, and clients that have
    received an answer never retry by themselves.
    """
    started, remaining_s = time.perf_counter(), context.time_remaining()
    metadata = context.invocation_metadata() or ()
    request_id = request_id_of(dict(metadata).get(REQUEST_ID))
    context.set_trailing_metadata(((REQUEST_ID, request_id),))
    span = tracing().call(method, metadata)
    with identity(request_id=request_id, method=method, **(span.ids if span is not None else {})):
        error: MillraceError | None = None
        outcome = "CANCELLED"
        try:
            yield
            outcome = "OK"
        except MillraceError as raised:
            error = raised
        except asyncio.CancelledError:
            if is_deadline(remaining_s, time.perf_counter() - started):
                outcome = "DEADLINE_EXCEEDED"
            raise
        except aio.AbortError:
            raise
        except aio.InternalError:  # grpc could not send, because the call has ended
            pass
        except NotImplementedError:
            error = Unimplemented(f"{method} is not served")
        except Exception as unexpected:
            error = hidden(unexpected, logger, f"{method} raised an unexpected exception")
        finally:
            if error is not None:
                outcome = status_code(error).name
            why = error.message if error is not None else ""
            log_outcome(logger, method, outcome, time.perf_counter() - started, why)
            if span is not None:
                span.end(outcome, why)
        if error is not None:
            code, (message, status) = status_code(error), details_and_status(error)
            trailers = ((REQUEST_ID, request_id), (STATUS, status))
            error = None  # this frame is in the error's traceback; see `_bare`
            if aborts:
                await context.abort(code, message, trailers)
            context.set_code(code)
            context.set_details(message)
            context.set_trailing_metadata(trailers)


def request_id_of(given: str | bytes | None) -> str:
    """Return the id that the client gave the call, or a new one if it is missing or malformed."""
    if isinstance(given, str) and re.fullmatch(r"[A-Za-z0-9._-]{1,64}", given):
        return given
    return os.urandom(16).hex()


def _tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserialize is None:
        return None
    # Generated code passes the message class's own method.
    descriptor = getattr(getattr(deserialize, "__self__", None), "DESCRIPTOR", None)

    def parse(data: bytes) -> Any:
        _message_bytes.set(len(data))
        try:
            if descriptor is not None:
                check_fields(data, descriptor)
            return deserialize(data)
        except InvalidArgument as error:
            return Malformed(error)
        except Exception:  # protobuf can raise anything on malformed bytes
            why = "the request's bytes are not a valid protobuf message"
            return Malformed(InvalidArgument(why, reason="MALFORMED_MESSAGE"))

    return parse


def _or_bytes(serialize: Callable[[Any], bytes] | None) -> Callable[[Any], bytes] | None:
    """Let a servicer return a message that it has serialized itself, to save copies."""
    if serialize is None:
        return None
    return lambda message: message if isinstance(message, bytes) else serialize(message)


def _well_formed(request: Any, context: Context) -> Any:
    if isinstance(request, Malformed):
        raise request.why
    return _each_well_formed(context) if hasattr(request, "__aiter__") else request


async def _each_well_formed(context: Context) -> AsyncIterator[Any]:
    # grpc's iterator would keep each message until the next one arrives, possibly for ever.
    while (request := await context.read()) is not aio.EOF:
        yield _well_formed(request, context)
        del request


# --- Registering servicers ---

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# Takes a handler and its method's full name.
Wrap = Callable[[Handler, str], Handler]


class Registering:
    """The `server` that generated code calls."""

    def __init__(self, server: aio.Server, wrap: Wrap | None = None) -> None:
        self._server = server
        self._wrap = wrap

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        wrap = self._wrap
        self._server.add_generic_rpc_handlers(
            [handler if wrap is None else _Wrapped(handler, wrap) for handler in generic_rpc_handlers]
        )

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Handler]) -> None:
        """Do nothing: the generic handlers have the same methods."""


class _Wrapped(grpc.GenericRpcHandler):
    """Wraps each handler when it is first requested."""

    def __init__(self, handlers: grpc.GenericRpcHandler, wrap: Wrap) -> None:
        self._handlers = handlers
        self._wrap = wrap
        self._wrapped: dict[str, Handler] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        method = handler_call_details.method
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler: Handler | None = self._handlers.service(handler_call_details)
            if handler is None:
                return None
            wrapped = self._wrapped[method] = self._wrap(handler, method)
        return wrapped


# --- Number of fields ---

# More than any useful request has: 10,000 columns as tensors, with flags for their nulls, have 120,000 fields.
MAX_FIELDS = 2**17

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def check_fields(data: bytes, descriptor: Any) -> None:
    """Raise `InvalidArgument` for a message of more than `MAX_FIELDS` fields.

    The error names the field that holds the first one too many. Bytes that are no message pass, because the parser
    refuses them.
    """
    if len(data) < 2 * MAX_FIELDS:  # a field has at least two bytes
        return
    left = MAX_FIELDS
    # Parts still to read: start, end, message descriptor, path.
    parts = [(0, len(data), descriptor, "")]
    while parts:
        at, end, kind, path = parts.pop()
        fields = kind.fields_by_number
        try:
            while at < end:
                tag, at = _varint(data, at)
                field = fields.get(tag >> 3)
                left -= 1
                if left < 0:
                    where = f"{path}{field.name}" if field is not None else path.rstrip(".")
                    remedy = f"a message may have {MAX_FIELDS} fields in all; send less in one request"
                    raise invalid_field(where, f"more than {MAX_FIELDS} fields", remedy)
                wire_type = tag & 7
                if wire_type == _VARINT:
                    _, at = _varint(data, at)
                elif wire_type == _BYTES:
                    length, at = _varint(data, at)
                    if field is not None and _may_hold_messages(field):
                        inner = f"{path}{field.name}." if not kind.GetOptions().map_entry else path
                        parts.append((at, min(at + length, end), field.message_type, inner))
                    at += length
                elif wire_type in (_FIXED64, _FIXED32):
                    at += 8 if wire_type == _FIXED64 else 4
        except IndexError:
            return


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number and the position after it. Raises `IndexError` if there is none."""
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value = byte & 0x7F
    for place in range(1, 10):
        byte = data[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise IndexError("longer than a number may be")


def _may_hold_messages(field: Any) -> bool:
    kind = field.message_type
    return kind is not None and any(one.message_type is not None for one in kind.fields)


# --- Deadlines ---

# The server counts the deadline from when the request arrived. The client cancels at its own deadline, which is earlier
# by the time that the request took longer on its way than the cancellation, and by what gRPC adds on the wire: it
# rounds the remaining time up by up to a hundredth. So a call that is cancelled within the last part of its time has
# met its deadline: within this share of a short time, and of a long time within the way and the rounding.
LAST_SHARE = 0.1
LONGEST_WAY_S = 0.25
ROUNDED_SHARE = 0.01
# The timers of client, gRPC and server differ by up to this time.
TIMERS_DIFFER_S = 0.005


def is_deadline(remaining_s: float | None, passed_s: float) -> bool:
    """Return whether a call was cancelled because of its deadline.

    The call had `remaining_s` when it began and was cancelled after `passed_s`.
    """
    if remaining_s is None:
        return False
    last_s = min(LAST_SHARE * remaining_s, LONGEST_WAY_S + ROUNDED_SHARE * remaining_s)
    return passed_s + TIMERS_DIFFER_S >= remaining_s - last_s
