"""Dates, times and timestamps as texts."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.types as kinds

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_SECONDS_A_DAY = 86_400
# What google.protobuf.Timestamp can hold, in seconds since 1970: 0001-01-01 to the end of 9999-12-31.
_FIRST_SECOND, _LAST_SECOND = -62_135_596_800, 253_402_300_799
# Days from 0000-03-01 to 1970-01-01, and in 400 years.
_DAYS_TO_1970, _DAYS_OF_ERA = 719_468, 146_097


def rfc3339(value: int, arrow_type: pa.DataType) -> str:
    """A date or timestamp as google.protobuf.Timestamp has it in JSON; cut to the years 1 to 9999."""
    seconds, rest = _seconds(value, arrow_type)
    if seconds < _FIRST_SECOND:
        seconds, rest = _FIRST_SECOND, 0
    if seconds > _LAST_SECOND:
        seconds, rest = _LAST_SECOND, 0
    return f"{_date(seconds // _SECONDS_A_DAY)}T{_clock(seconds % _SECONDS_A_DAY, rest)}Z"


def value_text(value: int, arrow_type: pa.DataType) -> str:
    """A value as people write it; timestamps with a zone are given in UTC, with a Z."""
    seconds, rest = _seconds(value, arrow_type)
    if kinds.is_time(arrow_type):
        return _clock(seconds, rest)
    day = _date(seconds // _SECONDS_A_DAY)
    if kinds.is_date(arrow_type):
        return day
    return f"{day}T{_clock(seconds % _SECONDS_A_DAY, rest)}{'Z' if arrow_type.tz else ''}"


def _seconds(value: int, arrow_type: pa.DataType) -> tuple[int, int]:
    """Whole seconds and nanoseconds."""
    if kinds.is_date32(arrow_type):
        return value * _SECONDS_A_DAY, 0
    per_second = _PER_SECOND["ms" if kinds.is_date64(arrow_type) else arrow_type.unit]
    seconds, rest = divmod(value, per_second)
    return seconds, rest * (10**9 // per_second)


def _clock(seconds: int, nanoseconds: int) -> str:
    whole = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    if not nanoseconds:
        return whole
    digits = 3 if nanoseconds % 10**6 == 0 else 6 if nanoseconds % 10**3 == 0 else 9
    return f"{whole}.{nanoseconds // 10 ** (9 - digits):0{digits}d}"


def _date(days: int) -> str:
    """The proleptic Gregorian date, for years that Python's own calendar does not have, too.

    Source: Howard Hinnant, chrono-Compatible Low-Level Date Algorithms, civil_from_days.
    """
    era, day = divmod(days + _DAYS_TO_1970, _DAYS_OF_ERA)
    year = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    day_of_year = day - (365 * year + year // 4 - year // 100)
    month = (5 * day_of_year + 2) // 153
    day_of_month = day_of_year - (153 * month + 2) // 5 + 1
    month = month + 3 if month < 10 else month - 9
    return f"{year + era * 400 + (month <= 2):04d}-{month:02d}-{day_of_month:02d}"
