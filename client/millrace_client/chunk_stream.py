"""One `UploadChunks` call: requests go out as they are given, acknowledgements come in beside."""

from __future__ import annotations

import queue
import threading
import uuid
from typing import Any

import grpc

from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1 import data_service_pb2_grpc
from millrace_client.calls import MAX_MESSAGE_BYTES, Caller
from millrace_client.errors import MillraceError, Unavailable, from_rpc_error

CANCEL_TIMEOUT_S = 5.0
# A channel of its own, without gRPC's retries: replaying a stream that broke, they now and then leave a message out, or
# hang. Whoever sends knows better what to send again.
CHANNEL_OPTIONS = [
    ("grpc.enable_retries", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


class ChunkStream:
    """It bounds nothing: whoever sends must wait for acknowledgements."""

    def __init__(self, caller: Caller) -> None:
        self.acknowledged = 0
        self.error: MillraceError | None = None
        self._address = caller.address
        self._request_id = uuid.uuid4().hex
        self._changed = threading.Condition()
        self._ended = False
        self._requests: queue.SimpleQueue[pb.UploadChunksRequest | None] = queue.SimpleQueue()
        # gRPC obeys http_proxy even for this machine itself.
        is_here = caller.address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]")
        proxy_options = [("grpc.enable_http_proxy", 0)] if is_here else []
        self._channel = grpc.insecure_channel(caller.address, options=[*CHANNEL_OPTIONS, *proxy_options])
        stub: Any = data_service_pb2_grpc.DataServiceStub(self._channel)
        metadata = caller.headers(self._request_id)
        self._call = stub.UploadChunks(iter(self._requests.get, None), metadata=metadata)
        self._thread = threading.Thread(target=self._read, name="upload-acknowledgements", daemon=True)
        self._thread.start()

    def send(self, chunk: pb.UploadChunksRequest) -> None:
        self._requests.put(chunk)

    def wait_beyond(self, size_bytes: int, timeout_s: float) -> None:
        """Until more than `size_bytes` are acknowledged, or the call is over, or the time."""
        with self._changed:
            self._changed.wait_for(lambda: self.acknowledged > size_bytes or self._ended, timeout_s)

    def finish(self, timeout_s: float) -> None:
        """Says that nothing more comes, and waits for the server's end of the call."""
        self._requests.put(None)
        self._thread.join(timeout_s)
        self.cancel()

    def cancel(self) -> None:
        self._call.cancel()
        self._requests.put(None)  # ends grpc's thread that waits for the next
        self._thread.join(CANCEL_TIMEOUT_S)
        self._channel.close()

    def _read(self) -> None:
        error: MillraceError = Unavailable(f"{self._address} ended the call early", request_id=self._request_id)
        try:
            for response in self._call:
                with self._changed:
                    self.acknowledged = response.acknowledged_size
                    self._changed.notify_all()
        except grpc.RpcError as raised:
            error = from_rpc_error(raised, address=self._address, request_id=self._request_id)
        with self._changed:
            self.error = error
            self._ended = True
            self._changed.notify_all()
