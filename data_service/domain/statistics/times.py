"""Dates and timestamps as reports tell them."""

from __future__ import annotations

import pyarrow as pa

from shared.value_texts import moment_text, whole_seconds

# What google.protobuf.Timestamp can hold, in seconds since 1970: 0001-01-01 to the end of 9999-12-31.
_FIRST_SECOND, _LAST_SECOND = -62_135_596_800, 253_402_300_799


def rfc3339(value: int, arrow_type: pa.DataType) -> str:
    """A date or timestamp as google.protobuf.Timestamp has it in JSON; cut to the years 1 to 9999."""
    seconds, rest = whole_seconds(value, arrow_type)
    if seconds < _FIRST_SECOND:
        seconds, rest = _FIRST_SECOND, 0
    if seconds > _LAST_SECOND:
        seconds, rest = _LAST_SECOND, 0
    return moment_text(seconds, rest)
