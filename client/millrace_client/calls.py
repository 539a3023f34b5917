"""How every RPC is called: a channel per service, a deadline, a request id, and errors of one family."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from millrace_client.errors import REQUEST_ID_KEY, from_rpc_error

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
DEFAULT_TIMEOUT_S = 30.0
# Safe for every method: reads change nothing, creates carry a request id, and inference is a pure function.
RETRIES = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}

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
    """Calls the stubs of one service. Every error that it raises is a `MillraceError`."""

    def __init__(self, channel: grpc.Channel, address: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.channel = channel
        self.address = address
        self.timeout_s = timeout_s

    def unary(
        self, method: Any, request: Any, response_type: type[Response], *, timeout_s: float | None = None
    ) -> Response:
        """One request, one response, within `timeout_s` (unset: the caller's default)."""
        request_id = uuid.uuid4().hex
        try:
            response = method(request, timeout=timeout_s or self.timeout_s, metadata=((REQUEST_ID_KEY, request_id),))
        except grpc.RpcError as error:
            raise from_rpc_error(error, address=self.address, request_id=request_id) from None
        assert isinstance(response, response_type)
        return response

    def stream(
        self,
        method: Any,
        request: Any,
        *,
        timeout_s: float | None = None,
        idle_s: float | None = None,
        server_ends: Callable[[Any], bool] = lambda _: False,
    ) -> Generator[Any, None, None]:
        """One request, a stream of responses; closing the iterator cancels the call. Unset: no deadline.

        With `idle_s` a stream that brings nothing for so long, after its first response, has ended; but not behind a
        response of which `server_ends` holds: what is still to come is waited for.
        """
        request_id = uuid.uuid4().hex
        call = method(request, timeout=timeout_s, metadata=((REQUEST_ID_KEY, request_id),))
        idle = _Idle(call, idle_s) if idle_s is not None else None
        try:
            for response in call:
                if idle is not None and server_ends(response):
                    idle.close()
                yield response
                if idle is not None:
                    idle.heard()
        except grpc.RpcError as error:
            if idle is None or not idle.ended:
                raise from_rpc_error(error, address=self.address, request_id=request_id) from None
        finally:
            call.cancel()
            if idle is not None:
                idle.close()


class _Idle:
    """Cancels a call once nothing was heard for a while, after the first response."""

    def __init__(self, call: Any, idle_s: float) -> None:
        self._call = call
        self._idle_s = idle_s
        self._heard = threading.Event()
        self._closed = False
        self.ended = False
        threading.Thread(target=self._watch, name="idle", daemon=True).start()

    def heard(self) -> None:
        self._heard.set()

    def close(self) -> None:
        self._closed = True
        self._heard.set()

    def _watch(self) -> None:
        self._heard.wait()
        while not self._closed:
            self._heard.clear()
            # It may have been closed between the look above and the event's clearing.
            if not self._heard.wait(self._idle_s) and not self._closed:
                self.ended = True
                self._call.cancel()
                return


def new_request_id() -> str:
    """A UUID4, by which a server knows a create that it has seen before."""
    return str(uuid.uuid4())
