"""The values of a `filter`'s expressions, and arithmetic with them.

Values are numbers (integers become int64, save those of uint64; floats and decimals float64), text, bytes, booleans and
moments (dates are their midnights). Arithmetic is that of int64, in which what is beyond it is an error, or of float64;
only `uint64 % positive integer` takes all of uint64. Null makes null.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from shared.transforms.number_order import Datum

_MOST_SIGNED = 2**63 - 1


def kind_of(datum: Datum) -> str:
    """`number`, `text`, `boolean`, `moment` or `bytes`; of what is none of these, Arrow's name of its type."""
    given = datum.type
    for kind, checks in (
        ("number", (kinds.is_integer, kinds.is_floating)),
        ("text", (kinds.is_string, kinds.is_large_string)),
        ("boolean", (kinds.is_boolean,)),
        ("moment", (kinds.is_timestamp,)),
        ("bytes", (kinds.is_binary, kinds.is_large_binary, kinds.is_fixed_size_binary)),
    ):
        if any(check(given) for check in checks):
            return kind
    return str(given)


def plain(datum: Datum) -> Datum:
    """Of the few types that the language knows."""
    given = datum.type
    if kinds.is_integer(given) and not kinds.is_uint64(given):
        return pc.cast(datum, pa.int64())
    if kinds.is_floating(given) or kinds.is_decimal(given):
        return pc.cast(datum, pa.float64())
    return pc.cast(datum, pa.timestamp("s")) if kinds.is_date(given) else datum


def constant(value: Any) -> pa.Scalar:
    """Raises `OverflowError` for integers beyond uint64, and what Arrow raises."""
    return pa.scalar(value, pa.uint64() if isinstance(value, int) and value > _MOST_SIGNED else None)


def add(left: Datum, right: Datum) -> Datum:
    return pc.add_checked(*_of_one_type(left, right))


def subtract(left: Datum, right: Datum) -> Datum:
    return pc.subtract_checked(*_of_one_type(left, right))


def multiply(left: Datum, right: Datum) -> Datum:
    return pc.multiply_checked(*_of_one_type(left, right))


def divide(left: Datum, right: Datum) -> Datum:
    return pc.divide(_double(left), _double(right))


def modulo(left: Datum, right: Datum) -> Datum:
    if kinds.is_uint64(left.type) and _is_positive(right):
        return _signed(pc.modulo_checked(left, pc.cast(right, pa.uint64())))
    return pc.modulo_checked(*_of_one_type(left, right))


def negate(number: Datum) -> Datum:
    return pc.negate_checked(_signed(number))


def is_nan(number: Datum) -> Datum:
    return pc.is_nan(_double(number))


def _of_one_type(left: Datum, right: Datum) -> tuple[Datum, Datum]:
    if pa.float64() in (left.type, right.type):
        return _double(left), _double(right)
    return _signed(left), _signed(right)


def _is_positive(number: Datum) -> bool:
    """For all rows, by being one integer."""
    return isinstance(number, pa.Scalar) and kinds.is_int64(number.type) and number.is_valid and number.as_py() > 0


def _signed(number: Datum) -> Datum:
    """Raises `pa.ArrowInvalid` for integers beyond int64."""
    return pc.cast(number, pa.int64()) if kinds.is_uint64(number.type) else number


def _double(number: Datum) -> Datum:
    # Integers beyond 53 bits are rounded, as Python's own division does.
    return pc.cast(number, pa.float64(), safe=False)
