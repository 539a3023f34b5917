"""How every RPC is called: a channel per service, a deadline, a request id, and errors of one family.

`RetryBudget` is how long a client waits for a server that is away, as while it restarts; `every_page` makes lists
without pages.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from millrace_client.addresses import Headers
from millrace_client.errors import (
    DETAILS_KEY,
    REQUEST_ID_KEY,
    Cancelled,
    DeadlineExceeded,
    Internal,
    MillraceError,
    Unavailable,
    from_rpc_error,
)

# --- Calls ---

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
DEFAULT_TIMEOUT_S = 30.0
# Streams of answers to one request, all of which only read: gRPC begins them again where nothing has come of them yet.
# Of other calls `Caller` knows better which may be made again, and for how long.
READING_STREAMS = {
    "millrace.data.v1.DataService": ("ReadVersion", "ReadQuarantine", "VerifyVersion"),
    "millrace.inference.v1.DeploymentService": ("WatchDeployment",),
    "millrace.train.v1.TrainService": ("WatchTrainingJob", "StreamLogs", "GetCheckpoint"),
}
RETRIES = {
    "methodConfig": [
        {
            "name": [
                {"service": service, "method": method}
                for service, methods in READING_STREAMS.items()
                for method in methods
            ],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        },
    ]
}
# Requests that only read, by how their names begin.
READS = (
    *("Get", "List", "Wait", "Preview", "Suggest"),
    *("Server", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex"),
)
# How gRPC begins to say that it found no connection to send a call over. Should it ever say it in other words, such
# calls are made once only; a call that was sent is never taken for one that was not.
NEVER_SENT = ("failed to connect to all addresses", "errors resolving", "DNS resolution failed")

Response = TypeVar("Response", bound=Message)


def open_channel(address: str) -> grpc.Channel:
    """A channel to host:port; it connects when it is first used."""
    options = [*channel_options(address), ("grpc.service_config", json.dumps(RETRIES))]
    return grpc.insecure_channel(address, options=options)


def channel_options(address: str) -> list[tuple[str, Any]]:
    """What every channel to host:port is opened with."""
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # By itself gRPC finds a server that was away as late as two minutes after it came back.
        ("grpc.max_reconnect_backoff_ms", 5_000),
    ]
    if address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]"):
        # gRPC obeys http_proxy even for this machine itself.
        options.append(("grpc.enable_http_proxy", 0))
    return options


class Caller:
    """Calls the stubs of one service. Every error that it raises is a `MillraceError`.

    `timeout_s` and `reconnect_for_s` are what `unary` takes where it is given none; `authorization` are the headers
    that bring the token.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        address: str,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        reconnect_for_s: float | None = None,
        authorization: Headers = (),
    ) -> None:
        self.channel = channel
        self.address = address
        self.timeout_s = timeout_s
        self.reconnect_for_s = reconnect_for_s
        self._authorization = authorization

    def headers(self, request_id: str) -> Headers:
        """What every call is sent with: its id, and the token where there is one."""
        return ((REQUEST_ID_KEY, request_id), *self._authorization)

    def unary(
        self,
        method: Any,
        request: Any,
        response_type: type[Response],
        *,
        timeout_s: float | None = None,
        reconnect_for_s: float | None = None,
    ) -> Response:
        """One request, one response, within `timeout_s` (unset: the caller's default).

        Where the service is UNAVAILABLE, as while it restarts, the call is made again for `reconnect_for_s` (unset: the
        caller's default, and without that until the deadline; 0: never), if `may_repeat` allows it.
        """
        request_id = uuid.uuid4().hex
        began = time.monotonic()
        until = began + (timeout_s or self.timeout_s)
        if reconnect_for_s is None:
            reconnect_for_s = self.reconnect_for_s
        repeat_until = until if reconnect_for_s is None else min(until, began + reconnect_for_s)
        backoff = Backoff()
        while True:
            timeout = until - time.monotonic()
            try:
                response = method(request, timeout=timeout, metadata=self.headers(request_id))
            except grpc.RpcError as failed:
                error = from_rpc_error(failed, address=self.address, request_id=request_id)
                pause_s = max(backoff.next_s(), error.retry_after_s or 0.0)
                if not may_repeat(request, failed) or time.monotonic() + pause_s >= repeat_until:
                    raise error from None
            else:
                assert isinstance(response, response_type)
                return response
            time.sleep(pause_s)

    def send(
        self,
        method: Any,
        requests: Callable[[], Iterator[Any]],
        response_type: type[Response],
        *,
        timeout_s: float,
    ) -> Response:
        """A stream of requests, which `requests` begins anew for each try, and one response, within `timeout_s`.

        Where the service is UNAVAILABLE the call is made again, as in `unary`: it must be one that may be made twice.
        """
        request_id = uuid.uuid4().hex
        began = time.monotonic()
        until = began + timeout_s
        repeat_until = until if self.reconnect_for_s is None else min(until, began + self.reconnect_for_s)
        backoff = Backoff()
        while True:
            timeout = until - time.monotonic()
            try:
                response = method(requests(), timeout=timeout, metadata=self.headers(request_id))
            except grpc.RpcError as failed:
                error = from_rpc_error(failed, address=self.address, request_id=request_id)
                pause_s = max(backoff.next_s(), error.retry_after_s or 0.0)
                unavailable = failed.code() is grpc.StatusCode.UNAVAILABLE
                if not unavailable or time.monotonic() + pause_s >= repeat_until:
                    raise error from None
            else:
                assert isinstance(response, response_type)
                return response
            time.sleep(pause_s)

    def stream(
        self,
        method: Any,
        request: Any,
        *,
        timeout_s: float | None = None,
    ) -> Generator[Any, None, None]:
        """One request, a stream of responses; closing the iterator cancels the call. Unset: no deadline."""
        request_id = uuid.uuid4().hex
        call = method(request, timeout=timeout_s, metadata=self.headers(request_id))
        try:
            yield from call
        except grpc.RpcError as error:
            raise from_rpc_error(error, address=self.address, request_id=request_id) from None
        finally:
            call.cancel()


def may_repeat(request: Message, failed: grpc.RpcError) -> bool:
    """Whether the call can be made again, and that may help: the service was UNAVAILABLE, and either it is certain that
    nothing was sent, or the request only reads, or it carries a request id, by which the server knows it again."""
    if failed.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    descriptor = request.DESCRIPTOR
    has_request_id = "request_id" in descriptor.fields_by_name and bool(getattr(request, "request_id"))  # noqa: B009
    return has_request_id or descriptor.name.startswith(READS) or was_never_sent(failed)


def was_never_sent(failed: grpc.RpcError) -> bool:
    """Whether gRPC found no connection for the call. False where that is not certain: also of a call that broke off
    before its answer nobody knows whether the server has done it."""
    trailers: Iterable[tuple[str, bytes]] = failed.trailing_metadata() or ()  # type: ignore[assignment]
    return (
        failed.code() is grpc.StatusCode.UNAVAILABLE
        and all(key != DETAILS_KEY for key, _ in trailers)
        and (failed.details() or "").startswith(NEVER_SENT)
    )


def new_request_id() -> str:
    """A UUID4, by which a server knows a create that it has seen before."""
    return str(uuid.uuid4())


# --- Waiting for a server that is away ---

# For so long without any progress a server may be away, before it is given up.
OUTAGE_TIMEOUT_S = 120.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0

Result = TypeVar("Result")


class Backoff:
    """Pauses that double, each cut at random to between a half and all of it: the clients of a server that restarts do
    not all come back in the same moment."""

    def __init__(self) -> None:
        self._pause_s = FIRST_PAUSE_S

    def next_s(self) -> float:
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return pause_s * random.uniform(0.5, 1.0)


class RetryBudget:
    """Pauses between tries, the longer the longer nothing goes on, for at most `allowed_s` without progress, by default
    `OUTAGE_TIMEOUT_S`."""

    def __init__(self, allowed_s: float | None = None) -> None:
        self._allowed_s = allowed_s
        self.progressed()

    def allow(self, allowed_s: float | None = None) -> None:
        """From now on that long; it begins anew."""
        self._allowed_s = allowed_s
        self.progressed()

    def progressed(self) -> None:
        self._progressed_at, self._backoff = time.monotonic(), Backoff()

    def calling(self, call: Callable[[], Result]) -> Result:
        """What it returns, also where the server is away for a while."""
        while True:
            try:
                return call()
            except MillraceError as error:
                self.pause_after(error)

    def pause_after(self, error: MillraceError, at_most_s: float = LONGEST_PAUSE_S) -> None:
        """Raises it where another try cannot help, or there was no progress for too long."""
        allowed_s = OUTAGE_TIMEOUT_S if self._allowed_s is None else self._allowed_s
        if not _may_pass(error) or time.monotonic() - self._progressed_at > allowed_s:
            raise error
        time.sleep(min(self._backoff.next_s(), at_most_s))


def _may_pass(error: MillraceError) -> bool:
    """A broken connection has many statuses, what went wrong on the wire is sent again, and a place becomes free; a
    fault that the server tells of would come again."""
    passing = ("WRONG_CRC32C", "TOO_MANY_UPLOADS", "TOO_MANY_DOWNLOADS")
    if isinstance(error, (Unavailable, DeadlineExceeded)) or error.reason in passing:
        return True
    broken = isinstance(error, (Cancelled, Internal)) or error.status == "UNKNOWN"
    return broken and not error.correlation_id


# --- Pages of lists ---


def every_page(caller: Caller, method: Any, request: Any, field: str) -> Iterator[Any]:
    """Yields what `field` of the responses holds, asking for the next page when it is needed."""
    while True:
        response: Any = caller.unary(method, request, Message)
        yield from getattr(response, field)
        if not response.next_page_token:
            return
        request.page_token = response.next_page_token
