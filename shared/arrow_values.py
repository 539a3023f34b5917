"""Single values of Arrow arrays, as people read them."""

from __future__ import annotations

from datetime import date, time, timedelta
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc

from shared.errors import MAX_SHOWN_VALUE, shown


def value_shown(value: pa.Scalar) -> str:
    """As an error shows it, also where Python has no such value: its dates and times end with the year 9999."""
    try:
        found = value.as_py()
        return str(found) if isinstance(found, date | time | timedelta | Decimal) else shown(found)
    except (OverflowError, ValueError):
        pass
    try:
        return shown(pc.cast(value, pa.string()).as_py())
    except pa.ArrowException:
        # A type has the name of a time zone, which may be of any length.
        return f"a value beyond what {str(value.type)[:MAX_SHOWN_VALUE]} can be shown as"
