"""The errors of calls: one family, `MillraceError`, with a subclass per kind of failure.

A server sends its errors as `google.rpc.Status` with ErrorInfo, BadRequest and RetryInfo. Only this module unpacks
them. Failed operations carry the same Status, so waiting for one raises the same errors as a call.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
from google.rpc import error_details_pb2, status_pb2

from shared.names import STATUS


@dataclass(frozen=True)
class FieldViolation:
    """A refused field: its path in the request, and its value with a remedy."""

    field: str
    description: str


class MillraceError(Exception):
    """Base of the family.

    `status` is the gRPC status' name, `reason` a constant that programs can switch on, and `metadata` has the ids and
    values concerned. `remedy` says what to do ("" if unknown). `request_id` finds the call in the server's log.
    `correlation_id` is set for faults of the server and finds their traceback.
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
        # Exception's own pickling loses keyword-only state, and process pools pickle.
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
        """Return the error as JSON values, as `--json` prints it."""
        return {
            "status": self.status,
            "reason": self.reason,
            "message": self.message,
            "remedy": self.remedy,
            "fields": [
                {"field": violation.field, "description": violation.description} for violation in self.field_violations
            ],
            "metadata": self.metadata,
            "retry_after_s": self.retry_after_s,
            "request_id": self.request_id,
        }


class InvalidArgument(MillraceError):
    """The request can never succeed unchanged. `field_violations` name its faulty fields."""

    status = "INVALID_ARGUMENT"


class NotFound(MillraceError):
    status = "NOT_FOUND"


class AlreadyExists(MillraceError):
    status = "ALREADY_EXISTS"


class Aborted(MillraceError):
    """Another caller changed the resource first. Read it again and decide again."""

    status = "ABORTED"


class FailedPrecondition(MillraceError):
    """The request is valid, but not in the present state."""

    status = "FAILED_PRECONDITION"


class OutOfRange(MillraceError):
    status = "OUT_OF_RANGE"


class ResourceExhausted(MillraceError):
    """Too much at once. `retry_after_s` is when to try again, if the server knows."""

    status = "RESOURCE_EXHAUSTED"


class Unavailable(MillraceError):
    """No server answers at the address, or the server lacks a dependency at present."""

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
    """The service demands a token that the call did not carry. `remedy` says how to give one."""

    status = "UNAUTHENTICATED"


class Internal(MillraceError):
    """A fault of the server; quote `correlation_id`."""

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
    """Return the client's own remedy, if it knows a better one than the service."""
    return TOKEN_REMEDY if status == Unauthenticated.status else ""


def from_status(status: status_pb2.Status, *, request_id: str = "") -> MillraceError:
    """Make the error for a `google.rpc.Status`."""
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
    violations = tuple(
        FieldViolation(violation.field, violation.description) for violation in bad_request.field_violations
    )
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
    """Make the error for a failed call. `address` is for the remedy if no server answered."""
    code = error.code()
    trailers: Iterable[tuple[str, bytes]] = error.trailing_metadata() or ()  # type: ignore[assignment]
    for key, value in trailers:
        if key == STATUS:
            return from_status(status_pb2.Status.FromString(value), request_id=request_id)
    # Without details the call reached none of the services, or gRPC itself ended it.
    message, remedy = error.details() or code.name, _remedy(code.name)
    if code is grpc.StatusCode.UNAVAILABLE:
        message = f"no service answers at {address} ({message.rpartition(': ')[2]})"
        remedy = "start the stack with `millrace up`, or name another address; `millrace status` shows what is up"
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
        message = f"{address} did not answer in time"
        remedy = "try again, or allow more time"
    kind = KINDS.get(code.name, MillraceError)
    return kind(message, remedy=remedy, request_id=request_id)
