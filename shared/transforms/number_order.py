"""The order of numbers of different types, without rounding either of them.

As float64, integers from 2**53 on would be taken for their neighbours, and int64 has half of uint64 alone.
"""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

# An array, or one value for all rows.
Datum = Any

_BELOW, _SAME, _ABOVE, _NEITHER = (pa.scalar(one) for one in (-1.0, 0.0, 1.0, math.nan))
_NULL = pa.scalar(None, pa.float64())
_EXACT_IN_DOUBLE = 2**53
_RANGES = {pa.int64(): (-(2.0**63), 2.0**63), pa.uint64(): (0.0, 2.0**64)}


def comparable(left: Datum, right: Datum) -> tuple[Datum, Datum]:
    """Two of one type whose comparison is that of `left` and `right`, as IEEE 754 has it, where null makes null.

    `left` and `right` are of int64, uint64 or float64, and not of one type.
    """
    if _is_small(left) or _is_small(right):
        # The other is exact as a double, or rounded to what is still beyond all small ones.
        return pc.cast(left, pa.float64(), safe=False), pc.cast(right, pa.float64(), safe=False)
    return _order(left, right), _SAME


def _is_small(number: Datum) -> bool:
    return isinstance(number, pa.Scalar) and number.is_valid and abs(number.as_py()) < _EXACT_IN_DOUBLE


def _order(left: Datum, right: Datum) -> Datum:
    """-1, 0 or 1 as `left` is below, at or above `right`; NaN where one of them is, null where one of them is null."""
    if kinds.is_floating(left.type):
        return pc.negate(_with_floats(right, left))
    if kinds.is_floating(right.type):
        return _with_floats(left, right)
    return _with_signed(left, right) if kinds.is_uint64(left.type) else pc.negate(_with_signed(right, left))


def _with_floats(integers: Datum, floats: Datum) -> Datum:
    """By the floats' whole parts as integers, where the integers' type has them."""
    low, high = _RANGES[integers.type]
    floor = pc.floor(floats)
    inside = pc.and_(pc.greater_equal(floor, low), pc.less(floor, high))
    whole = pc.cast(pc.if_else(inside, floor, _SAME), integers.type, safe=False)  # as a safe one refuses all from 2**53
    at_whole = pc.if_else(pc.equal(floats, floor), _SAME, _BELOW)
    near = pc.if_else(pc.less(integers, whole), _BELOW, pc.if_else(pc.greater(integers, whole), _ABOVE, at_whole))
    far = pc.if_else(pc.is_nan(floats), _NEITHER, pc.if_else(pc.less(floats, low), _ABOVE, _BELOW))
    return pc.if_else(pc.is_valid(integers), pc.if_else(inside, near, far), _NULL)


def _with_signed(unsigned: Datum, signed: Datum) -> Datum:
    negative = pc.less(signed, 0)
    there = pc.cast(pc.if_else(negative, pa.scalar(0), signed), pa.uint64())
    order = pc.if_else(pc.less(unsigned, there), _BELOW, pc.if_else(pc.greater(unsigned, there), _ABOVE, _SAME))
    return pc.if_else(pc.is_valid(unsigned), pc.if_else(negative, _ABOVE, order), _NULL)
