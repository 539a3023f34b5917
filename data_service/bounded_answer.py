"""A preview that fits into one message: what is long of the version and of its quality report is left out."""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence
from typing import Any

from google.protobuf.message import Message

from millrace.data.v1 import data_service_pb2
from shared.paging import PAGE_BYTES

# As of a page.
ANSWER_BYTES = PAGE_BYTES


def bound_answer(answer: data_service_pb2.PreviewVersionResponse) -> None:
    """Takes from the version and the report of `answer` what makes the whole larger than `ANSWER_BYTES`; nothing where
    it fits.

    What says least for its size goes first, and only as much as must: the `values` of columns, and of the version its
    `files`, its `transform` and the `value_names` of columns, the largest first; then histograms, and the examples of
    quarantine reasons, the last ones first; then whole entries, those of columns, of quarantine reasons and of checks,
    the last ones first, and at last the version's columns, so, too. What is left is right as it stands, and the same
    for equal answers. The stored report keeps all, and GetVersion has the whole version.
    """
    excess = answer.ByteSize() - ANSWER_BYTES
    for message, field in _parts(answer):
        if excess <= 0:
            return
        excess += _without(message, field)
    report = answer.report
    for entries in (report.columns, report.quarantine, report.checks, answer.version.columns):
        excess = keep_first(entries, excess)


def keep_first(entries: MutableSequence[Any], excess_bytes: int) -> int:
    """Takes the last messages away until they had `excess_bytes` together. How many bytes are still too many."""
    keep = len(entries)
    while keep and excess_bytes > 0:
        keep -= 1
        excess_bytes -= entries[keep].ByteSize()
    del entries[keep:]
    return excess_bytes


def _parts(answer: data_service_pb2.PreviewVersionResponse) -> Iterator[tuple[Message, str]]:
    """What can be cleared: a message and its field, that which goes first first."""
    version, report = answer.version, answer.report
    lists: list[tuple[int, Message, str]] = [
        *((sum(value.ByteSize() for value in column.values), column, "values") for column in report.columns),
        *((sum(map(len, column.value_names)), column, "value_names") for column in version.columns),
        (sum(file.ByteSize() for file in version.files), version, "files"),
        (version.transform.ByteSize(), version, "transform"),
    ]
    yield from ((message, field) for size, message, field in sorted(lists, key=lambda one: -one[0]) if size)
    for column in reversed(report.columns):
        yield from ((getattr(column, kind), "histogram") for kind in ("numbers", "times") if column.HasField(kind))
    yield from ((reason, "examples") for reason in reversed(report.quarantine))


def _without(message: Message, field: str) -> int:
    """Clears the field. By how many bytes the message grows: less than 0."""
    before = message.ByteSize()
    message.ClearField(field)
    return message.ByteSize() - before
