"""The errors that domain code raises.

They do not depend on gRPC: `shared.grpc_errors` holds the one table that maps each kind to a status. They can be
written into a resource log and read back, so that a failed job can still report its error later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import Any, ClassVar

MAX_SHOWN_VALUE = 200
# Reported fields of one invalid request. The message also has their total number.
MAX_REPORTED_FIELDS = 100


class MillraceError(Exception):
    """Base of all errors that a caller may see.

    `reason` is a constant in UPPER_SNAKE_CASE that programs can switch on. `metadata` has ids and values. `fields` are
    (field path, description) pairs of refused input.
    """

    reason: ClassVar[str] = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
        fields: Iterable[tuple[str, str]] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.specific_reason = reason or self.reason
        self.metadata = dict(metadata or {})
        self.fields = [tuple(field) for field in fields]
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own pickling loses keyword-only state, and these errors cross Ray.
        return (error_from_record, (self.as_record(),))

    def as_record(self) -> dict[str, Any]:
        """Return the error as JSON values, for a resource log."""
        return {
            "kind": type(self).__name__,
            "message": self.message,
            "reason": self.specific_reason,
            "metadata": self.metadata,
            "fields": [list(field) for field in self.fields],
            "retry_after_s": self.retry_after_s,
        }


class InvalidArgument(MillraceError):
    """The request can never succeed unchanged."""

    reason = "INVALID_ARGUMENT"


class NotFound(MillraceError):
    reason = "NOT_FOUND"


class AlreadyExists(MillraceError):
    reason = "ALREADY_EXISTS"


class Conflict(MillraceError):
    """Another caller changed the resource first. Read it again and decide again."""

    reason = "CONFLICT"


class FailedPrecondition(MillraceError):
    """The request is valid, but not in the present state."""

    reason = "FAILED_PRECONDITION"


class OutOfRange(MillraceError):
    reason = "OUT_OF_RANGE"


class DataLoss(MillraceError):
    """Stored bytes are not those that were committed."""

    reason = "DATA_LOSS"


class ResourceExhausted(MillraceError):
    reason = "RESOURCE_EXHAUSTED"


class Unavailable(MillraceError):
    """A dependency does not answer at present."""

    reason = "UNAVAILABLE"


# Errors of a store that pass by themselves or with an operator's help: it does not answer, or it is full.
STORE_OUTAGES = (Unavailable, ResourceExhausted)


class DeadlineExceeded(MillraceError):
    reason = "DEADLINE_EXCEEDED"


class Unauthenticated(MillraceError):
    """The call has no token, or a wrong one."""

    reason = "UNAUTHENTICATED"


class Cancelled(MillraceError):
    reason = "CANCELLED"


class Unimplemented(MillraceError):
    reason = "UNIMPLEMENTED"


class Internal(MillraceError):
    """A fault of the service, reported without its internals."""

    reason = "INTERNAL"


KINDS: dict[str, type[MillraceError]] = {
    kind.__name__: kind
    for kind in (
        InvalidArgument,
        NotFound,
        AlreadyExists,
        Conflict,
        FailedPrecondition,
        OutOfRange,
        DataLoss,
        ResourceExhausted,
        Unavailable,
        DeadlineExceeded,
        Unauthenticated,
        Cancelled,
        Unimplemented,
        Internal,
    )
}


def shown(value: object) -> str:
    """Format a value for an error message: quoted, and shortened if it is long."""
    # Only a prefix is formatted, because the value may have many megabytes.
    text = repr(value[: MAX_SHOWN_VALUE + 1] if isinstance(value, str | bytes) else value)
    return text if len(text) <= MAX_SHOWN_VALUE else text[:MAX_SHOWN_VALUE] + "…"


def first_line(error: BaseException) -> str:
    """Return the first line of a foreign error's text, shortened if it is long."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return text if len(text) <= MAX_SHOWN_VALUE else text[:MAX_SHOWN_VALUE] + "…"


def invalid_field(field: str, value: object, remedy: str) -> InvalidArgument:
    """Refuse one field of a request. `field` is its path, e.g. `spec.optimizer.name`."""
    return invalid_fields([(field, value, remedy)])


def invalid_fields(problems: Iterable[tuple[str, object, str]]) -> InvalidArgument:
    """Refuse several fields of one request at once: (path, value, remedy) each.

    Only the first MAX_REPORTED_FIELDS are described.
    """
    described = []
    count = 0
    for count, (field, value, remedy) in enumerate(problems, 1):
        if count <= MAX_REPORTED_FIELDS:
            described.append((field, f"{shown(value)}: {remedy}"))
    # The number comes first, because long messages are cut at their end.
    number = f"{count} fields are wrong, the first {MAX_REPORTED_FIELDS} are " if count > MAX_REPORTED_FIELDS else ""
    return InvalidArgument(
        number + "; ".join(f"{field}: {text}" for field, text in described),
        reason="INVALID_FIELD",
        metadata={"field": described[0][0]},
        fields=described,
    )


def check_count(field: str, sized: Sized, most: int, remedy: str = "") -> None:
    """Refuse a repeated field of more entries than `most`, before its entries are checked one by one."""
    if len(sized) > most:
        raise invalid_field(field, f"{len(sized)} entries", remedy or f"send at most {most}")


def not_found(name: str, remedy: str = "") -> NotFound:
    return NotFound(f"{name} does not exist{remedy and '; ' + remedy}", metadata={"resource": name})


def already_exists(name: str, remedy: str = "choose another id") -> AlreadyExists:
    return AlreadyExists(f"{name} exists already; {remedy}", metadata={"resource": name})


def error_from_record(record: Mapping[str, Any]) -> MillraceError:
    """Invert `MillraceError.as_record`."""
    return KINDS.get(record["kind"], Internal)(
        record["message"],
        reason=record["reason"],
        metadata=record["metadata"],
        fields=[(field, text) for field, text in record["fields"]],
        retry_after_s=record.get("retry_after_s"),
    )
