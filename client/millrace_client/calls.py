"""How every RPC is called: a channel per service, a deadline, a request id, and errors of one family."""

from __future__ import annotations

import json
import uuid
from collections.abc import Generator
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
        },
        # But for streams of requests: replaying one that broke, gRPC now and then leaves a message out.
        {"name": [{"service": "inference.GRPCInferenceService", "method": "ModelStreamInfer"}]},
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
    ) -> Generator[Any, None, None]:
        """One request, a stream of responses; closing the iterator cancels the call. Unset: no deadline."""
        request_id = uuid.uuid4().hex
        call = method(request, timeout=timeout_s, metadata=((REQUEST_ID_KEY, request_id),))
        try:
            yield from call
        except grpc.RpcError as error:
            raise from_rpc_error(error, address=self.address, request_id=request_id) from None
        finally:
            call.cancel()


def new_request_id() -> str:
    """A UUID4, by which a server knows a create that it has seen before."""
    return str(uuid.uuid4())
