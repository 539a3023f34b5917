"""Real gRPC servers for the client's tests, and the errors that they answer with, as our services send them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

HOST = "127.0.0.1"


@contextmanager
def serving(register: Callable[[grpc.Server], None], port: int = 0, at_once: int = 8) -> Iterator[str]:
    """A server on loopback that answers that many calls at once; yields its address."""
    server = grpc.server(ThreadPoolExecutor(at_once), options=[("grpc.so_reuseport", 0)])
    register(server)
    bound = server.add_insecure_port(f"{HOST}:{port}")
    server.start()
    try:
        yield f"{HOST}:{bound}"
    finally:
        server.stop(None).wait()


def status(code: grpc.StatusCode, message: str, *details: Message) -> status_pb2.Status:
    made = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        made.details.add().Pack(detail)
    return made


def error_info(reason: str, **metadata: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain="millrace", metadata=metadata)


def bad_field(field: str, description: str) -> error_details_pb2.BadRequest:
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
    return error_details_pb2.BadRequest(field_violations=[violation])


def abort(context: grpc.ServicerContext, status: status_pb2.Status) -> Any:
    """End a call as the services' interceptor does."""
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    context.abort(code, status.message)
