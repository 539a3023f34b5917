"""What a call can fail with: one family, `MillraceError`, with one subclass per kind of failure.

A server sends its errors as `google.rpc.Status` with ErrorInfo, BadRequest and RetryInfo; they are unpacked here, and
nowhere else. Failed operations carry the same Status, so waiting for one raises the same errors as a call.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
from google.rpc import error_details_pb2, status_pb2

DETAILS_KEY = "grpc-status-details-bin"
REQUEST_ID_KEY = "x-request-id"


@dataclass(frozen=True)
class FieldViolation:
    """One field that was refused: its path in the request, and the value with what to use instead."""

    field: str
    description: str


class MillraceError(Exception):
    """Base of the family.

    `status` is the gRPC status' name, `reason` a constant that programs can switch on, `metadata` the ids and values it
    is about, `remedy` what to do ("" where nobody knows). `request_id` finds the call in the server's log;
    `correlation_id` is set for faults of the server's own and finds the trace of it.
    """

    status: ClassVar[str] = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        field_violations: tuple[FieldViolation, ...] = (),
        remedy: str = "",
        retry_after_s: float | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.status
        self.metadata = dict(metadata or {})
        self.field_violations = field_violations
        self.remedy = remedy
        self.retry_after_s = retry_after_s
        self.request_id = request_id

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword-only state does not survive Exception's own pickling, and process pools pickle.
        state: dict[str, Any] = {
            "reason": self.reason,
            "metadata": self.metadata,
            "field_violations": self.field_violations,
            "remedy": self.remedy,
            "retry_after_s": self.retry_after_s,
            "request_id": self.request_id,
        }
        return (functools.partial(type(self), **state), (self.message,))

    @property
    def correlation_id(self) -> str:
        return self.metadata.get("correlation_id", "")

    def as_dict(self) -> dict[str, Any]:
        """The error as JSON-able values, as `--json` prints it."""
        return {
            "status": self.status,
            "reason": self.reason,
            "message": self.message,
            "remedy": self.remedy,
            "fields": [{"field": one.field, "description": one.description} for one in self.field_violations],
            "metadata": self.metadata,
            "retry_after_s": self.retry_after_s,
            "request_id": self.request_id,
        }


class InvalidArgument(MillraceError):
    """The request can never succeed as it stands; `field_violations` say where."""

    status = "INVALID_ARGUMENT"


class NotFound(MillraceError):
    status = "NOT_FOUND"


class AlreadyExists(MillraceError):
    status = "ALREADY_EXISTS"


class Aborted(MillraceError):
    """Somebody else changed it first: read again, decide again."""

    status = "ABORTED"


class FailedPrecondition(MillraceError):
    """The request is fine, but not in this state of things."""

    status = "FAILED_PRECONDITION"


class OutOfRange(MillraceError):
    status = "OUT_OF_RANGE"


class ResourceExhausted(MillraceError):
    """Too much at once; `retry_after_s` says when to try again, where the server knows."""

    status = "RESOURCE_EXHAUSTED"


class Unavailable(MillraceError):
    """Nobody answers at the address, or the server lacks something that it needs at present."""

    status = "UNAVAILABLE"


class DeadlineExceeded(MillraceError):
    status = "DEADLINE_EXCEEDED"


class DataLoss(MillraceError):
    """Stored bytes are not those that were committed."""

    status = "DATA_LOSS"


class Cancelled(MillraceError):
    status = "CANCELLED"


class Unimplemented(MillraceError):
    status = "UNIMPLEMENTED"


class PermissionDenied(MillraceError):
    status = "PERMISSION_DENIED"


class Unauthenticated(MillraceError):
    """The service demands a token, and the call did not bring it; `remedy` says how to give one."""

    status = "UNAUTHENTICATED"


class Internal(MillraceError):
    """A fault of the server's own; quote `correlation_id`."""

    status = "INTERNAL"


KINDS: dict[str, type[MillraceError]] = {
    kind.status: kind
    for kind in (
        InvalidArgument,
        NotFound,
        AlreadyExists,
        Aborted,
        FailedPrecondition,
        OutOfRange,
        ResourceExhausted,
        Unavailable,
        DeadlineExceeded,
        DataLoss,
        Cancelled,
        Unimplemented,
        PermissionDenied,
        Unauthenticated,
        Internal,
    )
}
_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}
TOKEN_REMEDY = (
    "give the service's token: set MILLRACE_TOKEN_FILE to a file that holds it and that only you may read, or in "
    "Python connect(token=…)"
)


def _remedy(status: str) -> str:
    """Where the client knows better than the service what its user can do."""
    return TOKEN_REMEDY if status == Unauthenticated.status else ""


def from_status(status: status_pb2.Status, *, request_id: str = "") -> MillraceError:
    """The error that a `google.rpc.Status` tells of."""
    info, bad_request, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    retry_after_s = None
    for detail in status.details:
        detail.Unpack(info) or detail.Unpack(bad_request)
        if detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    violations = tuple(FieldViolation(one.field, one.description) for one in bad_request.field_violations)
    return KINDS.get(_NAMES.get(status.code, ""), MillraceError)(
        status.message,
        reason=info.reason,
        metadata=info.metadata,
        field_violations=violations,
        remedy=info.metadata.get("remedy", "") or _remedy(_NAMES.get(status.code, "")),
        retry_after_s=retry_after_s,
        request_id=request_id,
    )


def from_rpc_error(error: grpc.RpcError, *, address: str, request_id: str) -> MillraceError:
    """The error that a failed call tells of. `address` is for the remedy where nobody answered."""
    code = error.code()
    trailers: Iterable[tuple[str, bytes]] = error.trailing_metadata() or ()  # type: ignore[assignment]
    for key, value in trailers:
        if key == DETAILS_KEY:
            return from_status(status_pb2.Status.FromString(value), request_id=request_id)
    # No details: the call did not reach one of our servers, or gRPC itself ended it.
    message, remedy = error.details() or code.name, _remedy(code.name)
    if code is grpc.StatusCode.UNAVAILABLE:
        message = f"nobody answers at {address} ({message.rpartition(': ')[2]})"
        remedy = "start the stack with `millrace up`, or name another address; `millrace status` shows what is up"
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
        message = f"{address} did not answer in time"
        remedy = "try again, or allow more time"
    kind = KINDS.get(code.name, MillraceError)
    return kind(message, remedy=remedy, request_id=request_id)
