"""Calls of the services: their addresses, the token, deadlines, request ids, retries and typed errors.

An address is an argument, a variable, what the running stack recorded, or the default. The token is read from its file
for every call. `RetryBudget` limits how long a client waits for an unreachable server, such as one that restarts.
`every_page` turns paged lists into iterators. An `Operation` is work that a call started: waiting, progress and
cancelling.
"""

from __future__ import annotations

import json
import os
import random
import stat
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import empty_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from millrace_client.errors import (
    TOKEN_REMEDY,
    Cancelled,
    DeadlineExceeded,
    Internal,
    MillraceError,
    Unauthenticated,
    Unavailable,
    from_rpc_error,
    from_status,
)
from millrace_client.stack.record import read_record
from shared.names import AUTHORIZATION, MAX_MESSAGE_BYTES, MAX_TOKEN_CHARACTERS, REQUEST_ID, STATUS, TOKEN_FILE_VARIABLE

# --- Addresses ---

SERVICES = ("data", "train", "inference")
DEFAULT_PORTS = {"data": 50051, "train": 50052, "inference": 50053}


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """The host:port of each service.

    `origins` names the source of each: `argument`, `environment`, `stack` or `default`.
    """

    data: str
    train: str
    inference: str
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    def address_of(self, service: str) -> str:
        return {"data": self.data, "train": self.train, "inference": self.inference}[service]


def millrace_home(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder in which `millrace up` keeps its state on this machine."""
    return Path(environ.get("MILLRACE_HOME") or ".millrace").absolute()


def variable(service: str) -> str:
    return f"MILLRACE_{service.upper()}_ADDRESS"


def resolve(
    *,
    data: str | None = None,
    train: str | None = None,
    inference: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Addresses:
    """Find each service's address by the precedence above.

    A stack whose supervisor is dead counts as absent.
    """
    arguments = {"data": data, "train": train, "inference": inference}
    record = read_record(millrace_home(environ))
    running = record.addresses if record is not None and record.is_running() else {}
    found: dict[str, str] = {}
    origins: dict[str, str] = {}
    for service in SERVICES:
        candidates = {
            "argument": arguments[service],
            "environment": environ.get(variable(service)),
            "stack": running.get(service),
            "default": f"127.0.0.1:{DEFAULT_PORTS[service]}",
        }
        origin, address = next((origin, value) for origin, value in candidates.items() if value)
        found[service], origins[service] = address, origin
    return Addresses(**found, origins=origins)


# --- Token ---

Headers = tuple[tuple[str, str], ...]


def authorization(token: str | None = None, environ: Mapping[str, str] = os.environ) -> Headers:
    """Return the headers that carry the token.

    There are none if neither the argument nor the environment names a token. An empty argument sends none, whatever the
    environment says.

    Raises `Unauthenticated` (TOKEN_UNUSABLE) if the token or its file is malformed, or if other users of this machine
    may read the file.
    """
    if token is None:
        path = environ.get(TOKEN_FILE_VARIABLE, "")
        if not path:
            return ()
        named, token = f"{TOKEN_FILE_VARIABLE}={path!r}: the file", _read(path)
        if not token.strip():
            raise _unusable(f"{named} is empty", "write the service's token into it")
    else:
        named = "token: the argument"
    token = token.strip()
    if len(token) > MAX_TOKEN_CHARACTERS or not all("!" <= character <= "~" for character in token):
        problem = f"holds something else than one token of at most {MAX_TOKEN_CHARACTERS} visible ASCII characters"
        raise _unusable(f"{named} {problem}", TOKEN_REMEDY)
    return ((AUTHORIZATION, f"Bearer {token}"),) if token else ()


def _read(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if os.name == "posix" and mode & 0o077:
                problem = f"may be read or changed by other users (mode {stat.S_IMODE(mode):04o})"
                raise _unusable(f"{TOKEN_FILE_VARIABLE}={path!r}: the file {problem}", f"run chmod 600 {path}")
            return file.read(4 * MAX_TOKEN_CHARACTERS).decode("ascii", errors="replace")
    except OSError as error:
        problem = f"{TOKEN_FILE_VARIABLE}={path!r}: the file cannot be read: {error.strerror}"
        raise _unusable(problem, "name a file that this user can read") from error


def _unusable(problem: str, remedy: str) -> Unauthenticated:
    return Unauthenticated(problem, reason="TOKEN_UNUSABLE", metadata={"variable": TOKEN_FILE_VARIABLE}, remedy=remedy)


# --- Calls ---

DEFAULT_TIMEOUT_S = 30.0
# Read-only calls that stream their answers. gRPC repeats them if no answer has arrived yet. `Caller` decides which
# other calls may be repeated, and for how long.
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
# Name prefixes of requests that only read.
READS = (
    *("Get", "List", "Wait", "Preview", "Suggest"),
    *("Server", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex"),
)
# Beginnings of gRPC's messages for a call that found no connection. If gRPC changes the wording, such calls are no
# longer repeated; a call that was sent is never mistaken for an unsent one.
NEVER_SENT = ("failed to connect to all addresses", "errors resolving", "DNS resolution failed")

Response = TypeVar("Response", bound=Message)


def open_channel(address: str) -> grpc.Channel:
    """Open a channel to host:port, which connects on first use."""
    options = [*channel_options(address), ("grpc.service_config", json.dumps(RETRIES))]
    return grpc.insecure_channel(address, options=options)


def channel_options(address: str) -> list[tuple[str, Any]]:
    """Return the options of every channel to host:port."""
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # By default gRPC may notice only after two minutes that a server is back.
        ("grpc.max_reconnect_backoff_ms", 5_000),
    ]
    if address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]"):
        # gRPC uses http_proxy even for loopback addresses.
        options.append(("grpc.enable_http_proxy", 0))
    return options


class Caller:
    """Calls the stubs of one service, and raises only `MillraceError`.

    `timeout_s` and `reconnect_for_s` are the defaults of `unary`; `authorization` are the headers that carry the
    token.
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
        """Return every call's headers: its id and, if there is one, the token."""
        return ((REQUEST_ID, request_id), *self._authorization)

    def unary(
        self,
        method: Any,
        request: Any,
        response_type: type[Response],
        *,
        timeout_s: float | None = None,
        reconnect_for_s: float | None = None,
    ) -> Response:
        """Send one request and return its response within `timeout_s`.

        While the service is UNAVAILABLE, for example during a restart, the call is repeated for `reconnect_for_s` if
        `may_repeat` allows it. `timeout_s` unset: the caller's default. `reconnect_for_s` unset: the caller's default,
        or until the deadline if that is unset; 0: no repetition.

        If the last try met the deadline after an outage that took most of the time, the error is the outage's. Not so
        for a request that is not safe to repeat: the service may have done what it asks.
        """
        request_id = uuid.uuid4().hex
        began = time.monotonic()
        until = began + (timeout_s or self.timeout_s)
        if reconnect_for_s is None:
            reconnect_for_s = self.reconnect_for_s
        repeat_until = until if reconnect_for_s is None else min(until, began + reconnect_for_s)
        backoff, outage = Backoff(), None
        while True:
            called_at = time.monotonic()
            timeout = until - called_at
            try:
                response = method(request, timeout=timeout, metadata=self.headers(request_id))
            except grpc.RpcError as failed:
                error = from_rpc_error(failed, address=self.address, request_id=request_id)
                if outage is not None and isinstance(error, DeadlineExceeded):
                    if may_change_something(request):
                        raise _maybe_done(error) from None
                    if called_at - began > timeout:
                        # The service was away for the greater part of the time.
                        raise outage from None
                pause_s = max(backoff.next_s(), error.retry_after_s or 0.0)
                if not may_repeat(request, failed) or time.monotonic() + pause_s >= repeat_until:
                    raise error from None
                outage = error
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
        """Send a stream of requests and return one response within `timeout_s`.

        `requests` starts the stream anew for each try. While the service is UNAVAILABLE the call is repeated, as in
        `unary`, so the call must be safe to repeat, by a request id in its first message.
        """
        request_id = uuid.uuid4().hex
        began = time.monotonic()
        until = began + timeout_s
        repeat_until = until if self.reconnect_for_s is None else min(until, began + self.reconnect_for_s)
        backoff, outage = Backoff(), None
        while True:
            called_at = time.monotonic()
            timeout = until - called_at
            try:
                response = method(requests(), timeout=timeout, metadata=self.headers(request_id))
            except grpc.RpcError as failed:
                error = from_rpc_error(failed, address=self.address, request_id=request_id)
                if outage is not None and isinstance(error, DeadlineExceeded) and called_at - began > timeout:
                    # The service was away for the greater part of the time.
                    raise outage from None
                pause_s = max(backoff.next_s(), error.retry_after_s or 0.0)
                unavailable = failed.code() is grpc.StatusCode.UNAVAILABLE
                if not unavailable or time.monotonic() + pause_s >= repeat_until:
                    raise error from None
                outage = error
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
        """Send one request and yield its responses. Closing the iterator cancels the call. `timeout_s` unset: no
        deadline."""
        request_id = uuid.uuid4().hex
        call = method(request, timeout=timeout_s, metadata=self.headers(request_id))
        try:
            yield from call
        except grpc.RpcError as error:
            raise from_rpc_error(error, address=self.address, request_id=request_id) from None
        finally:
            call.cancel()


def may_repeat(request: Message, failed: grpc.RpcError) -> bool:
    """Return whether the call may be repeated, and whether that can help.

    The service must be UNAVAILABLE. In addition, either the call was certainly not sent, or the request is safe to
    repeat.
    """
    if failed.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    return is_safe_to_repeat(request) or was_never_sent(failed)


def is_safe_to_repeat(request: Message) -> bool:
    """Return whether the request only reads, or carries a request id by which the server recognises it."""
    descriptor = request.DESCRIPTOR
    has_request_id = "request_id" in descriptor.fields_by_name and bool(getattr(request, "request_id"))  # noqa: B009
    return has_request_id or descriptor.name.startswith(READS)


def may_change_something(request: Message) -> bool:
    """Return whether the service may have changed something that its answer alone would show."""
    return not is_safe_to_repeat(request) and request.DESCRIPTOR.name != "ModelInferRequest"


def was_never_sent(failed: grpc.RpcError) -> bool:
    """Return whether gRPC certainly found no connection for the call.

    False for a call that broke off before its answer, because the server may have executed it.
    """
    trailers: Iterable[tuple[str, bytes]] = failed.trailing_metadata() or ()  # type: ignore[assignment]
    return (
        failed.code() is grpc.StatusCode.UNAVAILABLE
        and all(key != STATUS for key, _ in trailers)
        and (failed.details() or "").startswith(NEVER_SENT)
    )


def _maybe_done(error: DeadlineExceeded) -> DeadlineExceeded:
    """Return the error of a write whose last try met the deadline."""
    return DeadlineExceeded(
        f"{error.message}; the last try was sent and may have been done",
        reason=error.reason,
        metadata=error.metadata,
        remedy="find out whether it was done before you try again",
        request_id=error.request_id,
    )


def new_request_id() -> str:
    """Return a UUID4 by which a server recognises a repeated create."""
    return str(uuid.uuid4())


# --- Waiting for a server that is away ---

# How long a server may be unreachable without any progress before the client gives up.
OUTAGE_TIMEOUT_S = 120.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0

Result = TypeVar("Result")


class Backoff:
    """Pauses that double, each randomly cut to between half and all of it.

    The jitter keeps the clients of a restarted server from all returning at once.
    """

    def __init__(self) -> None:
        self._pause_s = FIRST_PAUSE_S

    def next_s(self) -> float:
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return pause_s * random.uniform(0.5, 1.0)


class RetryBudget:
    """Pauses between tries for at most `allowed_s` without progress.

    The pauses grow while there is no progress. `allowed_s` defaults to `OUTAGE_TIMEOUT_S`.
    """

    def __init__(self, allowed_s: float | None = None) -> None:
        self._allowed_s = allowed_s
        self.progressed()

    def allow(self, allowed_s: float | None = None) -> None:
        """Set a new limit and restart the count."""
        self._allowed_s = allowed_s
        self.progressed()

    def progressed(self) -> None:
        self._progressed_at, self._backoff = time.monotonic(), Backoff()

    def calling(self, call: Callable[[], Result]) -> Result:
        """Repeat the call until it returns, or until the budget is used up."""
        while True:
            try:
                return call()
            except MillraceError as error:
                self.pause_after(error)

    def pause_after(self, error: MillraceError, at_most_s: float = LONGEST_PAUSE_S) -> None:
        """Pause before another try.

        Raises the error if another try cannot help, or if there was no progress for too long.
        """
        allowed_s = OUTAGE_TIMEOUT_S if self._allowed_s is None else self._allowed_s
        if not _may_pass(error) or time.monotonic() - self._progressed_at > allowed_s:
            raise error
        time.sleep(min(self._backoff.next_s(), at_most_s))


def _may_pass(error: MillraceError) -> bool:
    """Return whether another try may succeed.

    A broken connection shows as many different statuses, data corrupted in transit can be sent again, and a taken place
    becomes free. An error that the server itself reports would occur again.
    """
    passing = ("WRONG_CRC32C", "TOO_MANY_UPLOADS", "TOO_MANY_DOWNLOADS")
    if isinstance(error, (Unavailable, DeadlineExceeded)) or error.reason in passing:
        return True
    broken = isinstance(error, (Cancelled, Internal)) or error.status == "UNKNOWN"
    return broken and not error.correlation_id


# --- Pages of lists ---


def every_page(caller: Caller, method: Any, request: Any, field: str) -> Iterator[Any]:
    """Yield the items in `field` of the responses, and request the next page when it is needed."""
    while True:
        response: Any = caller.unary(method, request, Message)
        yield from getattr(response, field)
        if not response.next_page_token:
            return
        request.page_token = response.next_page_token


# --- Long-running operations ---

# The limit of one WaitOperation, so that progress is seen in between.
POLL_INTERVAL_S = 1.0

OperationResult = TypeVar("OperationResult", bound=Message)


class Operation(Generic[OperationResult]):
    """A `google.longrunning.Operation` with the types of its result and metadata."""

    def __init__(
        self,
        caller: Caller,
        proto: operations_pb2.Operation,
        result_type: Callable[[], OperationResult],
        metadata_type: Callable[[], Message],
    ) -> None:
        self._caller = caller
        self._stub: Any = operations_pb2_grpc.OperationsStub(caller.channel)
        self._result_type = result_type
        self._metadata_type = metadata_type
        self.proto = proto

    @property
    def name(self) -> str:
        return str(self.proto.name)

    @property
    def done(self) -> bool:
        return bool(self.proto.done)

    @property
    def metadata(self) -> Any:
        """The last known progress, e.g. an `ImportVersionMetadata`."""
        metadata = self._metadata_type()
        self.proto.metadata.Unpack(metadata)
        return metadata

    def refresh(self) -> None:
        """Ask the server once for the present state."""
        self.proto = self._caller.unary(
            self._stub.GetOperation, operations_pb2.GetOperationRequest(name=self.name), operations_pb2.Operation
        )

    def cancel(self) -> None:
        """Ask the server to end the operation, which may still succeed first."""
        request = operations_pb2.CancelOperationRequest(name=self.name)
        self._caller.unary(self._stub.CancelOperation, request, empty_pb2.Empty)

    def wait(
        self,
        timeout_s: float = 3600.0,
        on_progress: Callable[[Operation[OperationResult]], object] | None = None,
    ) -> OperationResult:
        """Wait for the result.

        Raises the operation's error, or `DeadlineExceeded` after `timeout_s`; the operation then continues. The server
        may be unreachable for a while, for example during a restart: the operation outlives it.
        """
        until = time.monotonic() + timeout_s
        retry_budget = RetryBudget()
        while not self.done:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded(
                    f"{self.name} is not done after {timeout_s:g} s",
                    remedy="it still goes on; wait for it again, or cancel it",
                )
            hang = Duration()
            hang.FromNanoseconds(int(min(left_s, POLL_INTERVAL_S) * 1e9))
            request = operations_pb2.WaitOperationRequest(name=self.name, timeout=hang)
            try:
                self.proto = self._caller.unary(
                    self._stub.WaitOperation, request, operations_pb2.Operation, reconnect_for_s=0.0
                )
            except MillraceError as error:
                retry_budget.pause_after(error, at_most_s=left_s)
                continue
            retry_budget.progressed()
            if on_progress is not None:
                on_progress(self)
        if self.proto.HasField("error"):
            raise from_status(self.proto.error)
        result = self._result_type()
        self.proto.response.Unpack(result)
        return result
