"""A real gRPC server of the uploads over a real store, in a thread of its own: stopped and started at one address."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from grpc import aio

from data_service.datasets import Datasets
from data_service.servicer import UploadServicerPart
from data_service.uploads.uploads import Uploads
from millrace.data.v1 import data_service_pb2_grpc
from millrace_client.calls import Caller, open_channel
from shared.grpc_server.interceptor import CallInterceptor
from shared.storage import ObjectStore
from shared.storage.presigning import presigner
from tests.support.ports import free_ports

DATASET = "datasets/d"
LIMITS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.so_reuseport", 0)]


def uploads_of(store: ObjectStore) -> Uploads:
    """With the dataset `datasets/d` to put them into."""
    datasets = Datasets(store)
    if not store.exists(f"{DATASET}/log/{1:012d}.json"):
        datasets.create("d", display_name="", description="", request_id="", body_sha256="", validate_only=False)
    return Uploads(store, datasets, presigner(store.settings))


class UploadServer:
    def __init__(self, store: ObjectStore) -> None:
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self.store = store
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def start(self) -> None:
        """A server that knows nothing but the store, as after a restart."""
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(120)

    def stop(self) -> None:
        """Break the calls in flight."""
        if self._thread and self._loop and self._stop:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(120)
            assert not self._thread.is_alive()
        self._thread = None

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = aio.server(options=LIMITS)
        part = UploadServicerPart(uploads_of(self.store))
        data_service_pb2_grpc.add_DataServiceServicer_to_server(part, CallInterceptor().around(server))
        server.add_insecure_port(self.address)
        await server.start()
        ready.set()
        await self._stop.wait()
        await server.stop(0)


@contextmanager
def upload_server(store: ObjectStore) -> Iterator[UploadServer]:
    server = UploadServer(store)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def calling(server: UploadServer) -> Iterator[tuple[Caller, Any]]:
    """The client's caller, and its stub."""
    with open_channel(server.address) as channel:
        yield Caller(channel, server.address), data_service_pb2_grpc.DataServiceStub(channel)


@contextmanager
def stub_of(server: UploadServer) -> Iterator[Any]:
    """A stub without any retries."""
    with grpc.insecure_channel(server.address, options=[("grpc.enable_retries", 0)]) as channel:
        yield data_service_pb2_grpc.DataServiceStub(channel)
