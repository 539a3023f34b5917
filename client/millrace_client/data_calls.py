"""What the parts of `DataClient` share."""

from __future__ import annotations

from typing import Any

from millrace.data.v1 import data_service_pb2_grpc
from millrace_client.calls import Caller


class DataCalls:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._stub: Any = data_service_pb2_grpc.DataServiceStub(caller.channel)
