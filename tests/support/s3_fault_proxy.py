"""A proxy before the tests' S3 server that is slow, fails, resets connections or goes silent, as told at run time.

It speaks just enough HTTP/1.1 to tell requests apart, and changes no byte of them: their signatures stay good.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from shared.settings import StoreSettings
from tests.support.http_messages import Head, body_pieces, read_head

WRITES = frozenset({"PUT", "POST"})
CODES = {500: "InternalError", 503: "SlowDown", 507: "InsufficientStorage"}
REASONS = {500: "Internal Server Error", 503: "Slow Down", 507: "Insufficient Storage"}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What befalls requests; by default nothing does. Made by the functions below."""

    latency_s: float = 0.0
    # Of all connections together, each way; 0: no limit.
    bytes_per_s: int = 0
    # Of each connection by itself, towards the client; 0: no limit.
    connection_bytes_per_s: int = 0
    # Answers so instead of the server, which never sees the request; 0: no answer of ours.
    status: int = 0
    # The connection is reset (RST) after so many bytes of the body: of the "request", or of the "response", which is
    # after the server has done what was asked.
    reset: str = ""
    reset_after_bytes: int = 0
    # Sends so many bytes of the answer's body and no more, and keeps the connection open; 0: sends all.
    stall_after_bytes: int = 0
    # Takes the request and says nothing, until the fault is changed.
    is_unresponsive: bool = False
    # Which requests it befalls: of these methods (empty: all), the n-th since the fault was set (0: each), or a share.
    methods: frozenset[str] = field(default_factory=frozenset)
    nth: int = 0
    share: float = 1.0


NONE = Fault()


def slow(bytes_per_s: int, latency_s: float = 0.0) -> Fault:
    return Fault(bytes_per_s=bytes_per_s, latency_s=latency_s)


def slow_and_cut(connection_bytes_per_s: int, cut_after_bytes: int) -> Fault:
    """Each connection is slow, and breaks after so many bytes of an answer."""
    return Fault(
        connection_bytes_per_s=connection_bytes_per_s,
        reset="response",
        reset_after_bytes=cut_after_bytes,
        methods=frozenset({"GET"}),
    )


def failing(status: int = 503, *, share: float = 1.0, nth: int = 0, methods: frozenset[str] = frozenset()) -> Fault:
    return Fault(status=status, share=share, nth=nth, methods=methods)


def full() -> Fault:
    """No write has room any more: 507 Insufficient Storage."""
    return Fault(status=507, methods=WRITES)


def resetting(
    of: str = "response",
    after_bytes: int = 0,
    *,
    share: float = 1.0,
    nth: int = 0,
    methods: frozenset[str] = frozenset(),
) -> Fault:
    return Fault(reset=of, reset_after_bytes=after_bytes, share=share, nth=nth, methods=methods)


def stalling(after_bytes: int, *, nth: int = 0) -> Fault:
    return Fault(stall_after_bytes=after_bytes, nth=nth, methods=frozenset({"GET"}))


def unresponsive() -> Fault:
    return Fault(is_unresponsive=True)


class S3FaultProxy:
    """`fault` may be set at any time, and holds for the requests that begin after it."""

    def __init__(self, upstream: str, *, seed: int = 0) -> None:
        self.endpoint = ""
        # host:port
        self.upstream = upstream
        # Requests since the fault was set, and those of them that it befell.
        self.requests = 0
        self.struck = 0
        # Of the bodies that are being sent, the bytes passed on so far, by the request's path.
        self.sending: dict[str, int] = {}
        # The paths of those whose connection broke before they were answered.
        self.broken: list[str] = []
        self._seed = seed
        self._fault = NONE
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._changed = asyncio.Event()
        self._line_free_at = 0.0

    @property
    def fault(self) -> Fault:
        return self._fault

    @fault.setter
    def fault(self, fault: Fault) -> None:
        with self._lock:
            self._fault, self.requests, self.struck = fault, 0, 0
            self._random = random.Random(self._seed)
        self._loop.call_soon_threadsafe(self._changed.set)

    def settings(self, behind: StoreSettings) -> StoreSettings:
        """Those of the same store, by way of the proxy."""
        return replace(behind, s3_endpoint=self.endpoint)

    async def serve(self, started: threading.Event, stop: asyncio.Event) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._client, "127.0.0.1", 0, limit=1 << 20)
        self.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        async with server:
            await stop.wait()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError):  # the client went away
            while head := await read_head(reader):
                if not await self._request(head, reader, writer):
                    break
        with suppress(OSError):
            writer.close()
            await writer.wait_closed()

    async def _request(self, head: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Return whether the connection can take another request."""
        fault = self._befalls(head.method)
        if fault.is_unresponsive:
            await self._hold(reader)
            _abort(writer)
            return False
        if fault.latency_s:
            await asyncio.sleep(fault.latency_s)
        if fault.status:
            return await self._refuse(fault.status, head, reader, writer)
        try:
            async with _connected(self.upstream) as (answers, requests):
                return await self._pass_on(fault, head, (reader, requests), (answers, writer))
        except _Stalled:
            await self._hold(reader)
            _abort(writer)
            return False
        except (_Reset, OSError, EOFError):
            # Whatever goes wrong on the other side, too: that is how a bad network looks.
            self.broken.append(head.path)
            _abort(writer)
            return False

    def _befalls(self, method: str) -> Fault:
        with self._lock:
            fault = self._fault
            if fault.methods and method not in fault.methods:
                return NONE
            self.requests += 1
            is_struck = self.requests == fault.nth if fault.nth else self._random.random() < fault.share
            self.struck += is_struck and fault is not NONE
            return fault if is_struck else NONE

    async def _hold(self, reader: asyncio.StreamReader) -> None:
        self._changed.clear()
        drained = asyncio.create_task(_drain(reader))
        changed = asyncio.create_task(self._changed.wait())
        _, waiting = await asyncio.wait([drained, changed], return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()

    async def _refuse(
        self, status: int, head: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        waits_for_leave = head.fields.get("expect", "").lower() == "100-continue"
        if not waits_for_leave:
            async for _piece in body_pieces(head, reader):
                pass
        body = f"<Error><Code>{CODES[status]}</Code><Message>from the fault proxy</Message></Error>".encode()
        if head.method == "HEAD":
            body = b""
        fields = f"Content-Type: application/xml\r\nContent-Length: {len(body)}\r\nConnection: close"
        writer.write(f"HTTP/1.1 {status} {REASONS[status]}\r\n{fields}\r\n\r\n".encode() + body)
        await writer.drain()
        return False

    async def _pass_on(
        self,
        fault: Fault,
        head: Head,
        asking: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        answering: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> bool:
        reader, requests = asking
        requests.write(head.raw)
        sending = asyncio.create_task(self._carry(fault, "request", head, reader, requests))
        receiving = asyncio.create_task(self._answer(fault, head, *answering))
        try:
            done, _ = await asyncio.wait([sending, receiving], return_when=asyncio.FIRST_COMPLETED)
            if sending in done:
                sending.result()
                return await receiving
            # Answered before the body was sent: what comes of it now has no meaning.
            receiving.result()
            return False
        finally:
            sending.cancel()
            receiving.cancel()
            self.sending.pop(head.path, None)

    async def _answer(
        self, fault: Fault, asked: Head, answers: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        head = await read_head(answers)
        while head and head.is_interim:
            writer.write(head.raw)
            head = await read_head(answers)
        if head is None:
            raise ConnectionResetError
        if fault.reset == "response" and not fault.reset_after_bytes:
            raise _Reset
        writer.write(head.raw)
        await self._carry(fault, "response", replace(head, method=asked.method), answers, writer)
        return not (head.closes or asked.closes)

    async def _carry(
        self, fault: Fault, way: str, head: Head, source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        carried = 0
        async for piece in body_pieces(head, source):
            if fault.reset == way and carried + len(piece) > fault.reset_after_bytes:
                target.write(piece[: fault.reset_after_bytes - carried])
                await target.drain()
                raise _Reset
            if way == "response" and fault.stall_after_bytes and carried + len(piece) > fault.stall_after_bytes:
                target.write(piece[: fault.stall_after_bytes - carried])
                await target.drain()
                raise _Stalled
            carried += len(piece)
            if fault.bytes_per_s:
                await self._wait_for_line(len(piece), fault.bytes_per_s)
            if fault.connection_bytes_per_s and way == "response":
                await asyncio.sleep(len(piece) / fault.connection_bytes_per_s)
            target.write(piece)
            await target.drain()
            if way == "request":
                self.sending[head.path] = carried
        if fault.reset == way == "request" and not fault.reset_after_bytes:
            raise _Reset
        await target.drain()

    async def _wait_for_line(self, size_bytes: int, bytes_per_s: int) -> None:
        now = asyncio.get_running_loop().time()
        self._line_free_at = max(self._line_free_at, now) + size_bytes / bytes_per_s
        await asyncio.sleep(self._line_free_at - now)


@contextmanager
def fault_proxy(behind: StoreSettings, *, seed: int = 0) -> Iterator[S3FaultProxy]:
    """A proxy before the server of an `s3://` store, in a thread of its own."""
    proxy = S3FaultProxy(urlsplit(behind.s3_endpoint).netloc, seed=seed)
    started, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(proxy.serve(started, stop))
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    thread = threading.Thread(target=run, name="s3-fault-proxy", daemon=True)
    thread.start()
    if not started.wait(60):
        raise RuntimeError("the fault proxy did not start")
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


class _Reset(Exception):
    """It is time to break the connection."""


class _Stalled(Exception):
    """It is time to send no more."""


@asynccontextmanager
async def _connected(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    try:
        yield reader, writer
    finally:
        _abort(writer)


async def _drain(reader: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await reader.read(1 << 16):
            pass


def _abort(writer: asyncio.StreamWriter) -> None:
    """Let the system send RST, not FIN."""
    with suppress(OSError):
        connection: socket.socket = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
