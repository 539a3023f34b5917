"""Uploads by the protos alone, chunk by chunk, so that a test knows what is on its way when it strikes.

As a program, it is a client to be killed: `python -m tests.support.chunk_sender ADDRESS UPLOAD` sends its standard
input, and prints each acknowledged size.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import google_crc32c
import grpc

from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1 import data_service_pb2_grpc
from millrace.data.v1.resources_pb2 import Upload

CHUNK_BYTES = 256 * 1024
TIMEOUT_S = 90.0
# What a broken connection, a killed service or a silent store look like.
MAY_PASS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


def chunk(name: str, offset: int, data: bytes) -> pb.UploadChunksRequest:
    return pb.UploadChunksRequest(name=name, offset=offset, data=data, crc32c=google_crc32c.value(data))


def chunks(name: str, data: bytes, begin: int, end: int, pause_s: float = 0.0) -> Iterator[pb.UploadChunksRequest]:
    for offset in range(begin, end, CHUNK_BYTES):
        yield chunk(name, offset, data[offset : min(offset + CHUNK_BYTES, end)])
        time.sleep(pause_s)


def send(stub: Any, name: str, data: bytes, begin: int, end: int) -> int:
    """In one call; returns the last acknowledged size."""
    acknowledged = begin
    for answer in stub.UploadChunks(chunks(name, data, begin, end), timeout=TIMEOUT_S):
        acknowledged = answer.acknowledged_size
    return acknowledged


def commit(stub: Any, name: str, data: bytes) -> Upload:
    request = pb.CommitUploadRequest(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    committed: Upload = retry_on_outage(lambda: stub.CommitUpload(request, timeout=60))
    return committed


def retry_on_outage(call: Any) -> Any:
    """Again while the service or its store is away."""
    until = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return call()
        except grpc.RpcError as error:
            if error.code() not in MAY_PASS or time.monotonic() > until:
                raise
            time.sleep(0.1)


class Sending(threading.Thread):
    """Sends the rest of `data` in a thread, a chunk every `pause_s`, and goes on after breaks where it was. A call that
    is to break waits before its last chunk until it `may_end`, so that it cannot be over before."""

    def __init__(self, stub: Any, name: str, data: bytes, pause_s: float) -> None:
        super().__init__(name="sending", daemon=True)
        self.may_end = threading.Event()
        self.may_end.set()
        self.acknowledged = 0
        self.breaks = 0
        # Sizes that the server took back: there must be none.
        self.forgotten: list[tuple[int, int]] = []
        self._error: BaseException | None = None
        self._stub = stub
        self._name = name
        self._data = data
        self._pause_s = pause_s

    def run(self) -> None:
        try:
            while self.acknowledged < len(self._data):
                retry_on_outage(self._send_rest)
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        """Raise what it ended with."""
        self.join(2 * TIMEOUT_S)
        if self._error:
            raise self._error
        assert not self.is_alive(), "the upload does not end"

    def _send_rest(self) -> None:
        durable = int(self._stub.GetUpload(pb.GetUploadRequest(name=self._name), timeout=60).acknowledged_size)
        if durable < self.acknowledged:
            self.forgotten.append((self.acknowledged, durable))
        last = max(durable, len(self._data) - 1)
        rest = itertools.chain(
            chunks(self._name, self._data, durable, last, self._pause_s),
            self._last_chunk(last),
        )
        try:
            for answer in self._stub.UploadChunks(rest, timeout=TIMEOUT_S):
                self.acknowledged = answer.acknowledged_size
        except grpc.RpcError:
            self.breaks += 1
            raise

    def _last_chunk(self, begin: int) -> Iterator[pb.UploadChunksRequest]:
        self.may_end.wait(TIMEOUT_S)
        yield from chunks(self._name, self._data, begin, len(self._data))


def main() -> None:
    address, name = sys.argv[1:]
    with grpc.insecure_channel(address) as channel:
        stub: Any = data_service_pb2_grpc.DataServiceStub(channel)

        def requests() -> Iterator[pb.UploadChunksRequest]:
            offset = 0
            while piece := sys.stdin.buffer.read(CHUNK_BYTES):
                yield chunk(name, offset, piece)
                offset += len(piece)

        for answer in stub.UploadChunks(requests()):
            print(answer.acknowledged_size, flush=True)


if __name__ == "__main__":
    main()
