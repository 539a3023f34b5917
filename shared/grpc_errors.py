"""The one table from domain errors to gRPC statuses, and their encoding as `google.rpc.Status`.

In a call's trailers an error stays below gRPC's limit of 8 KiB. Beyond it the status itself would be lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from shared import errors
from shared.errors import MillraceError

# --- Grpc errors ---

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
    """Encode the error with ErrorInfo and, if they apply, BadRequest and RetryInfo."""
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
    """Encode an error from a resource log (`MillraceError.as_record`)."""
    return status_proto(errors.error_from_record(record))


# --- Trailers ---

# Limits whose sum, in base64 and with keys, is about 7.5 KiB.
MESSAGE_BYTES = 1000
METADATA_BYTES = 1200
FIELDS_BYTES = 1800
KEY_BYTES = 120
VALUE_BYTES = 400


def details_and_status(error: MillraceError) -> tuple[str, bytes]:
    """Return the status's message and the serialized `google.rpc.Status`, both shortened if too long."""
    # Clients (grpc-status) refuse a status whose message differs from the call's.
    message = _cut(error.message, MESSAGE_BYTES, percent_encoded=True)
    short = type(error).__new__(type(error))
    MillraceError.__init__(
        short,
        message,
        reason=error.specific_reason,
        metadata=dict(_within(METADATA_BYTES, error.metadata.items())),
        fields=_within(FIELDS_BYTES, error.fields),
        retry_after_s=error.retry_after_s,
    )
    return message, status_proto(short).SerializeToString()


def _within(budget: int, pairs: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    """Yield the leading pairs that fit, each shortened."""
    for key, value in pairs:
        pair = _cut(key, KEY_BYTES), _cut(value, VALUE_BYTES)
        budget -= sum(len(text.encode()) for text in pair)
        if budget < 0:
            return
        yield pair


def _cut(text: str, limit: int, *, percent_encoded: bool = False) -> str:
    """Shorten the text to at most `limit` bytes on the wire."""
    if len(text) < limit - 9 and text.isascii() and text.isprintable() and "%" not in text:
        return text  # one byte per character
    capacity = limit - 9  # for the ellipsis
    for index, character in enumerate(text):
        plain = " " <= character <= "~" and character != "%"
        capacity -= 1 if plain else len(character.encode()) * (3 if percent_encoded else 1)
        if capacity < 0:
            return text[:index] + "…"
    return text
