"""The conditions on single rows, a column at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from data_service.domain.checks import Condition, NotNull, OneOf, Pattern, Range
from data_service.domain.checks_unique import Mask


def violating(condition: Condition, column: pa.ChunkedArray) -> Mask:
    """True in the rows whose value does not pass. Raises `TypeError` for conditions on more than one row."""
    match condition:
        case NotNull():
            return _mask(column.is_null())
        case Range():
            return _out_of_range(condition, column)
        case OneOf():
            return _mask(column.is_valid()) & ~_mask(pc.is_in(column, value_set=_value_set(condition, column.type)))
        case Pattern():
            passes = pc.match_substring_regex(column, pattern=condition.anchored)
            return ~_mask(passes.fill_null(True))
    raise TypeError(f"{condition.kind} does not look at single rows")


def _out_of_range(condition: Range, column: pa.ChunkedArray) -> Mask:
    least, most = condition.min, condition.max
    low: float
    high: float
    if kinds.is_integer(column.type):
        # Whole limits: compared as floats, integers from 2**53 on would be taken for their neighbours.
        limits = np.iinfo(column.type.to_pandas_dtype())
        low = limits.min if least is None else math.ceil(least)
        high = limits.max if most is None else math.floor(most)
        if low > limits.max or high < limits.min:
            return _mask(column.is_valid())
        low, high = max(low, int(limits.min)), min(high, int(limits.max))
        numbers, kind = column, column.type
    else:
        low, high = -math.inf if least is None else least, math.inf if most is None else most
        numbers, kind = column.cast(pa.float64()), pa.float64()
    passes = pc.and_(pc.greater_equal(numbers, pa.scalar(low, kind)), pc.less_equal(numbers, pa.scalar(high, kind)))
    return ~_mask(passes.fill_null(True))


def _value_set(condition: OneOf, arrow_type: pa.DataType) -> pa.Array:
    values: Any = condition.values
    if kinds.is_integer(arrow_type):  # a value that the column cannot have is in no row
        limits = np.iinfo(arrow_type.to_pandas_dtype())
        values = [value for value in values if limits.min <= value <= limits.max]
    return pa.array(values, arrow_type)


def _mask(values: pa.ChunkedArray) -> Mask:
    found: Mask = values.to_numpy().astype(np.bool_)
    return found
