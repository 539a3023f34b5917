"""Handlers that are added to a server are wrapped once each, and served by their generic handlers alone."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import grpc

from millrace.data.v1 import data_service_pb2_grpc
from shared.grpc_server.interceptor import Handler, Registering

GET, DELETE = "/millrace.data.v1.DataService/GetDataset", "/millrace.data.v1.DataService/DeleteDataset"


class Server:
    """Keeps what is added to it. It has no `add_registered_method_handlers`: that would fail."""

    def __init__(self) -> None:
        self.handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self.handlers += handlers

    def handler(self, method: str) -> Handler | None:
        (one,) = self.handlers
        return one.service(cast(grpc.HandlerCallDetails, SimpleNamespace(method=method, invocation_metadata=())))


def served(wrap: Any) -> Server:
    server = Server()
    servicer = data_service_pb2_grpc.DataServiceServicer()
    data_service_pb2_grpc.add_DataServiceServicer_to_server(servicer, Registering(cast(Any, server), wrap))
    return server


def test_each_handler_is_wrapped_once_with_its_method_s_name() -> None:
    wrapped: list[str] = []

    def wrap(handler: Handler, method: str) -> Handler:
        wrapped.append(method)
        return cast(Handler, cast(Any, handler)._replace(request_deserializer=None))

    server = served(wrap)
    first, again, other = server.handler(GET), server.handler(GET), server.handler(DELETE)
    assert first is again
    assert first is not None
    assert first.request_deserializer is None
    assert other is not first
    assert wrapped == [GET, DELETE]


def test_a_method_that_is_not_served_has_no_handler() -> None:
    server = served(lambda handler, _: handler)
    assert server.handler("/millrace.data.v1.DataService/Nothing") is None
    assert server.handler("/other.Service/GetDataset") is None


def test_without_a_wrap_handlers_are_as_they_are() -> None:
    handler = served(None).handler(GET)
    assert handler is not None
    assert handler.request_deserializer is not None
