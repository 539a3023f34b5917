"""A real server of the kit, with a servicer whose behaviour each test gives, in the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc import aio
from grpc_status.rpc_status import from_call

from millrace.data.v1 import data_service_pb2, data_service_pb2_grpc, resources_pb2
from shared.grpc_server import serve
from tests.support.ports import free_ports

T = TypeVar("T")
Unary = Callable[[Any, Any], Awaitable[Message]]
Stream = Callable[[Any, Any], AsyncIterator[Message]]

GET_DATASET = "/millrace.data.v1.DataService/GetDataset"
READ_VERSION = "/millrace.data.v1.DataService/ReadVersion"
ECHO = "/test.Streams/Echo"


async def echo(request: Any, _: Any) -> resources_pb2.Dataset:
    return resources_pb2.Dataset(name=request.name)


async def echo_thrice(request: Any, _: Any) -> AsyncIterator[data_service_pb2.ReadVersionResponse]:
    for _number in range(3):
        yield data_service_pb2.ReadVersionResponse(arrow_ipc=request.name.encode())


class Data(data_service_pb2_grpc.DataServiceServicer):
    """`unary` and `stream` are what the test makes of GetDataset and ReadVersion; no other method is written."""

    def __init__(self, unary: Unary, stream: Stream) -> None:
        self._unary = unary
        self._stream = stream

    async def GetDataset(self, request: Any, context: Any) -> Message:  # noqa: N802
        return await self._unary(request, context)

    async def ReadVersion(self, request: Any, context: Any) -> AsyncIterator[Message]:  # noqa: N802
        async for response in self._stream(request, context):
            yield response


async def echo_each(requests: AsyncIterator[Any], _context: Any) -> AsyncIterator[Message]:
    async for request in requests:
        yield resources_pb2.Dataset(name=request.name)


# No service of ours streams both ways yet.
STREAMS = grpc.method_handlers_generic_handler(
    "test.Streams",
    {
        "Echo": grpc.stream_stream_rpc_method_handler(
            echo_each,
            data_service_pb2.GetDatasetRequest.FromString,
            resources_pb2.Dataset.SerializeToString,
        )
    },
)


@dataclass
class Kit:
    """A client's side of the server."""

    channel: aio.Channel
    address: str
    stop: asyncio.Event

    @property
    def data(self) -> data_service_pb2_grpc.DataServiceStub:
        return data_service_pb2_grpc.DataServiceStub(self.channel)

    @property
    def raw(self) -> Any:
        """The channel for calls whose messages are bytes, for which its types have no room."""
        return self.channel

    async def get(self, name: str = "n", **options: Any) -> Any:
        return await self.data.GetDataset(data_service_pb2.GetDatasetRequest(name=name), **options)

    def read(self, name: str = "n", **options: Any) -> Any:
        return self.data.ReadVersion(data_service_pb2.ReadVersionRequest(name=name), **options)


@asynccontextmanager
async def kit_server(unary: Unary = echo, stream: Stream = echo_thrice, **options: Any) -> AsyncIterator[Kit]:
    """A fresh server, which is stopped at the end."""

    def register(server: aio.Server) -> list[str]:
        data_service_pb2_grpc.add_DataServiceServicer_to_server(Data(unary, stream), server)
        server.add_generic_rpc_handlers((STREAMS,))
        return ["millrace.data.v1.DataService"]

    async with running(register, **options) as kit:
        yield kit


def with_kit(
    scenario: Callable[[Kit], Awaitable[T]], unary: Unary = echo, stream: Stream = echo_thrice, **options: Any
) -> T:
    """Run the scenario against a fresh server, and stop it."""

    async def main() -> T:
        async with kit_server(unary, stream, **options) as kit:
            return await scenario(kit)

    return asyncio.run(main())


@asynccontextmanager
async def running(register: Callable[[aio.Server], list[str]], **options: Any) -> AsyncIterator[Kit]:
    address, stop = f"127.0.0.1:{free_ports(1)[0]}", asyncio.Event()
    server = asyncio.create_task(serve(address, register, stop=stop, **{"grace_s": 1.0, **options}))
    limits = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with aio.insecure_channel(address, options=limits) as channel:
        await asyncio.wait_for(channel.channel_ready(), 120)
        if server.done():  # its port was taken meanwhile: a server of another test answers there
            await server
        yield Kit(channel, address, stop)
    stop.set()
    await server


@dataclass
class CallError:
    """What a failed call told its client."""

    code: grpc.StatusCode
    message: str
    trailers: dict[str, Any]
    info: error_details_pb2.ErrorInfo = field(default_factory=error_details_pb2.ErrorInfo)
    violations: list[tuple[str, str]] = field(default_factory=list)
    retry_after_s: float | None = None


async def call_error(call: Awaitable[Any]) -> CallError:
    """Return the error that the call ends with."""
    with pytest.raises(aio.AioRpcError) as raised:
        await call
    error = raised.value
    answer = CallError(error.code(), error.details() or "", dict(error.trailing_metadata()))
    status = from_call(cast(grpc.Call, error))
    for detail in status.details if status else ():
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            detail.Unpack(answer.info)
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            answer.violations = [(one.field, one.description) for one in bad.field_violations]
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            answer.retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    return answer


async def everything(stream: AsyncIterable[Any]) -> list[Any]:
    return [one async for one in stream]


def raising(error: Exception) -> Unary:
    async def behaviour(_request: Any, _context: Any) -> Message:
        raise error

    return behaviour


def raising_after(count: int, error: Exception) -> Stream:
    async def behaviour(_request: Any, _context: Any) -> AsyncIterator[Message]:
        for _ in range(count):
            yield data_service_pb2.ReadVersionResponse(arrow_ipc=b"x")
        raise error

    return behaviour
