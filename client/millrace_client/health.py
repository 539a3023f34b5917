"""Whether the services answer (`grpc.health.v1`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace_client.calls import Caller


class HealthClient:
    """Asks each service for its overall health; never raises for one that does not answer."""

    def __init__(self, callers: Mapping[str, Caller]) -> None:
        self._callers = callers

    def check(self, service: str, *, timeout_s: float = 2.0) -> str:
        """`SERVING`, `NOT_SERVING`, or `UNREACHABLE`. `service` is `data`, `train` or `inference`."""
        stub: Any = health_pb2_grpc.HealthStub(self._callers[service].channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return "UNREACHABLE"
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
