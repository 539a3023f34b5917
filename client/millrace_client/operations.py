"""Long-running operations that a call started: waiting, progress and cancelling."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import empty_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from millrace_client.calls import Caller, RetryBudget
from millrace_client.errors import DeadlineExceeded, MillraceError, from_status

# The limit of one WaitOperation, so that progress is seen in between.
POLL_INTERVAL_S = 1.0

OperationResult = TypeVar("Result", bound=Message)


class Operation(Generic[OperationResult]):
    """A `google.longrunning.Operation` with the types of its result and metadata."""

    def __init__(
        self,
        caller: Caller,
        proto: operations_pb2.Operation,
        result_type: Callable[[], OperationResult],
        metadata_type: Callable[[], Message],
    ) -> None:
        self._caller = caller
        self._stub: Any = operations_pb2_grpc.OperationsStub(caller.channel)
        self._result_type = result_type
        self._metadata_type = metadata_type
        self.proto = proto

    @property
    def name(self) -> str:
        return str(self.proto.name)

    @property
    def done(self) -> bool:
        return bool(self.proto.done)

    @property
    def metadata(self) -> Any:
        """The last known progress, e.g. an `ImportVersionMetadata`."""
        metadata = self._metadata_type()
        self.proto.metadata.Unpack(metadata)
        return metadata

    def refresh(self) -> None:
        """Ask the server once for the present state."""
        self.proto = self._caller.unary(
            self._stub.GetOperation, operations_pb2.GetOperationRequest(name=self.name), operations_pb2.Operation
        )

    def cancel(self) -> None:
        """Ask the server to end the operation, which may still succeed first."""
        request = operations_pb2.CancelOperationRequest(name=self.name)
        self._caller.unary(self._stub.CancelOperation, request, empty_pb2.Empty)

    def wait(
        self,
        timeout_s: float = 3600.0,
        on_progress: Callable[[Operation[OperationResult]], object] | None = None,
    ) -> OperationResult:
        """Wait for the result.

        Raises the operation's error, or `DeadlineExceeded` after `timeout_s`; the operation then continues. The server
        may be unreachable for a while, for example during a restart: the operation outlives it.
        """
        until = time.monotonic() + timeout_s
        retry_budget = RetryBudget()
        while not self.done:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded(
                    f"{self.name} is not done after {timeout_s:g} s",
                    remedy="it still goes on; wait for it again, or cancel it",
                )
            hang = Duration()
            hang.FromNanoseconds(int(min(left_s, POLL_INTERVAL_S) * 1e9))
            request = operations_pb2.WaitOperationRequest(name=self.name, timeout=hang)
            try:
                self.proto = self._caller.unary(
                    self._stub.WaitOperation, request, operations_pb2.Operation, reconnect_for_s=0.0
                )
            except MillraceError as error:
                retry_budget.pause_after(error, at_most_s=left_s)
                continue
            retry_budget.progressed()
            if on_progress is not None:
                on_progress(self)
        if self.proto.HasField("error"):
            raise from_status(self.proto.error)
        result = self._result_type()
        self.proto.response.Unpack(result)
        return result
