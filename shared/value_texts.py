"""Converts values of Arrow arrays to texts and back.

Single values are shown as people read them. A text becomes the half float that is nearest to its digits, which neither
Arrow nor two successive roundings achieve. Dates, times and timestamps are written and read in any year that Arrow
holds.
"""

from __future__ import annotations

import re
from datetime import date, time, timedelta
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
from numpy.typing import NDArray

from shared.errors import MAX_SHOWN_VALUE, shown

# --- Dates, times and timestamps ---

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_SECONDS_A_DAY = 86_400
# Days from 0000-03-01 to 1970-01-01, and in 400 years, the period of the Gregorian calendar.
_DAYS_TO_1970, _DAYS_OF_ERA, _YEARS_OF_ERA = 719_468, 146_097, 400
# Years of more digits than Arrow reads, or before the year 0.
_FAR = re.compile(r"(-\d{1,9}|\d{5,9})(-.*)", re.DOTALL)


def value_text(value: int, arrow_type: pa.DataType) -> str:
    """Format a value as people write it. Timestamps with a zone are given in UTC, with a Z."""
    seconds, rest = whole_seconds(value, arrow_type)
    if kinds.is_time(arrow_type):
        return _clock(seconds, rest)
    day, of_day = divmod(seconds, _SECONDS_A_DAY)
    if kinds.is_date(arrow_type):
        return _date(day)
    return moment_text(seconds, rest) if arrow_type.tz else f"{_date(day)}T{_clock(of_day, rest)}"


def zone_problem(data_type: pa.DataType, wanted: pa.DataType) -> str | None:
    """Explain why dates and times without a zone cannot become moments of `wanted`.

    A cast would assume UTC. None for all other casts.
    """
    naive = kinds.is_date(data_type) or (kinds.is_timestamp(data_type) and data_type.tz is None)
    if not (naive and kinds.is_timestamp(wanted) and wanted.tz is not None):
        return None
    return (
        f"{data_type} has no time zone, and {wanted} would take it for UTC; keep it as {pa.timestamp(wanted.unit)}, or "
        "write the times with their zone"
    )


def zone_hint(data_type: pa.DataType) -> str:
    """Return the hint for texts that do not fit `data_type`. Empty for all types but moments."""
    if not (kinds.is_timestamp(data_type) and data_type.tz is not None):
        return ""
    return "; each text needs its offset, such as 2024-07-01T12:00:00+02:00 or …Z"


def moment_text(seconds: int, nanoseconds: int) -> str:
    """Format a moment since 1970 in UTC."""
    day, of_day = divmod(seconds, _SECONDS_A_DAY)
    return f"{_date(day)}T{_clock(of_day, nanoseconds)}Z"


def whole_seconds(value: int, arrow_type: pa.DataType) -> tuple[int, int]:
    """Return whole seconds and nanoseconds."""
    if kinds.is_date32(arrow_type):
        return value * _SECONDS_A_DAY, 0
    per_second = _PER_SECOND["ms" if kinds.is_date64(arrow_type) else arrow_type.unit]
    seconds, rest = divmod(value, per_second)
    return seconds, rest * (10**9 // per_second)


def value_of_text(text: str, arrow_type: pa.DataType) -> pa.Scalar:
    """Invert `value_text`. Arrow's other spellings are accepted, too. Raises `pa.ArrowInvalid`."""
    if kinds.is_time(arrow_type):
        return times_of_day(pa.array([text]), arrow_type)[0]
    far = _FAR.fullmatch(text)
    if far is None:
        return pa.scalar(text).cast(arrow_type)
    # Arrow parses the same day in a 400-year period that it knows.
    eras, year = divmod(int(far[1]) - 2000, _YEARS_OF_ERA)
    near = pa.scalar(f"{2000 + year}{far[2]}").cast(arrow_type)
    per_day = 1 if kinds.is_date32(arrow_type) else _SECONDS_A_DAY * _PER_SECOND[arrow_type.unit]
    width = pa.int32() if kinds.is_date32(arrow_type) else pa.int64()
    try:
        return pa.scalar(near.value + eras * _DAYS_OF_ERA * per_day, width).cast(arrow_type)
    except OverflowError:
        raise pa.ArrowInvalid(f"{arrow_type} ends before the year {far[1]}") from None


def times_of_day(texts: pa.Array, arrow_type: pa.DataType) -> pa.Array:
    """Convert a string array to times, such as 12:00 or 12:00:00.5; nulls stay null. Arrow has no such cast.

    Raises `pa.ArrowInvalid` if a text is no time, or has more digits than the type.
    """
    on_a_day = pc.binary_join_element_wise(pa.scalar("1970-01-01T"), texts, pa.scalar(""))
    return on_a_day.cast(pa.timestamp("ns")).cast(arrow_type)


def _clock(seconds: int, nanoseconds: int) -> str:
    whole = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    if not nanoseconds:
        return whole
    digits = 3 if nanoseconds % 10**6 == 0 else 6 if nanoseconds % 10**3 == 0 else 9
    return f"{whole}.{nanoseconds // 10 ** (9 - digits):0{digits}d}"


def _date(days: int) -> str:
    """Return the proleptic Gregorian date, also for years that Python's calendar lacks.

    Source: Howard Hinnant, chrono-Compatible Low-Level Date Algorithms, civil_from_days.
    """
    era, day = divmod(days + _DAYS_TO_1970, _DAYS_OF_ERA)
    year = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    day_of_year = day - (365 * year + year // 4 - year // 100)
    month = (5 * day_of_year + 2) // 153
    day_of_month = day_of_year - (153 * month + 2) // 5 + 1
    month = month + 3 if month < 10 else month - 9
    return f"{year + era * _YEARS_OF_ERA + (month <= 2):04d}-{month:02d}-{day_of_month:02d}"


# --- Single values ---


def value_shown(value: pa.Scalar) -> str:
    """Format a value for an error, also if Python has no such value: its dates and times end with the year 9999."""
    try:
        found = value.as_py()
        return str(found) if isinstance(found, date | time | timedelta | Decimal) else shown(found)
    except (OverflowError, ValueError):
        pass
    try:
        return shown(pc.cast(value, pa.string()).as_py())
    except pa.ArrowException:
        # A type contains the name of a time zone, which may have any length.
        return f"a value beyond what {str(value.type)[:MAX_SHOWN_VALUE]} can be shown as"


# --- Half floats ---

# Half floats have 11 binary digits, and none smaller than 2**-24.
DIGITS, MIN_EXPONENT = 11, -14


def halves_of_texts(texts: pa.Array) -> pa.Array:
    """Parse half floats: infinite beyond the range, nulls stay null.

    Raises `pa.ArrowInvalid` for a text that is no number.
    """
    doubles = texts.cast(pa.float64())
    values = doubles.to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    # A double midway between two half floats may be a rounded text, whose digits decide the side.
    for row in np.flatnonzero(_in_the_middle(values)).tolist():
        digits, value = Decimal(texts[row].as_py()), Decimal(values[row])
        if digits != value:
            halves[row] = _next_to(halves[row], values[row], above=digits > value)
    return pa.array(halves, mask=doubles.is_null().to_numpy(zero_copy_only=False))


def _in_the_middle(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return whether a value needs exactly one binary digit more than a half float has."""
    finite = np.where(np.abs(values) < 2.0**16, values, 0.0)
    exponents = np.maximum(np.frexp(finite)[1] - 1, MIN_EXPONENT)
    units = np.ldexp(finite, DIGITS - exponents)
    middle: NDArray[np.bool_] = np.abs(units) % 2 == 1
    return middle


def _next_to(half: np.float16, value: float, *, above: bool) -> np.float16:
    """Return the half float above or below `value`. `half` is one of the two."""
    if (float(half) > value) == above:
        return half
    return np.float16(np.nextafter(half, np.float16(np.inf if above else -np.inf)))
