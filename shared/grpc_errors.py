"""The one table from domain errors to gRPC statuses, and how an error travels in `google.rpc.Status`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from shared import errors

DOMAIN = "millrace"

STATUS: dict[type[errors.MillraceError], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.Conflict: grpc.StatusCode.ABORTED,
    errors.FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OutOfRange: grpc.StatusCode.OUT_OF_RANGE,
    errors.DataLoss: grpc.StatusCode.DATA_LOSS,
    errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.Unimplemented: grpc.StatusCode.UNIMPLEMENTED,
    errors.Internal: grpc.StatusCode.INTERNAL,
}


def status_code(error: errors.MillraceError) -> grpc.StatusCode:
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    return grpc.StatusCode.INTERNAL


def status_proto(error: errors.MillraceError) -> status_pb2.Status:
    """The error with ErrorInfo, and BadRequest and RetryInfo where they apply."""
    number, _ = status_code(error).value
    status = status_pb2.Status(code=number, message=error.message)
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(reason=error.specific_reason, domain=DOMAIN, metadata=error.metadata)
    )
    if error.fields:
        violations = [
            error_details_pb2.BadRequest.FieldViolation(field=field, description=text) for field, text in error.fields
        ]
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=violations))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromTimedelta(timedelta(seconds=error.retry_after_s))
        status.details.add().Pack(retry)
    return status


def status_proto_from_record(record: Mapping[str, Any]) -> status_pb2.Status:
    """The same for an error that a resource log holds (`MillraceError.as_record`)."""
    return status_proto(errors.error_from_record(record))
