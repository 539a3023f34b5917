"""Texts as half floats: each the nearest to its digits, which neither Arrow nor two roundings in a row make."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

# Half floats have 11 binary digits, and none smaller than 2**-24.
DIGITS, LEAST_EXPONENT = 11, -14


def halves_of_texts(texts: pa.Array) -> pa.Array:
    """Infinite beyond the range, nulls staying null. Raises `pa.ArrowInvalid` for a text that is no number."""
    doubles = texts.cast(pa.float64())
    values = doubles.to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    # A double in the middle of two half floats may be the text's, rounded: its digits tell to which side.
    for row in np.flatnonzero(_in_the_middle(values)).tolist():
        digits, value = Decimal(texts[row].as_py()), Decimal(values[row])
        if digits != value:
            halves[row] = _next_to(halves[row], values[row], above=digits > value)
    return pa.array(halves, mask=doubles.is_null().to_numpy(zero_copy_only=False))


def _in_the_middle(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether it takes one binary digit more than a half float has, and that digit is 1."""
    finite = np.where(np.abs(values) < 2.0**16, values, 0.0)
    exponents = np.maximum(np.frexp(finite)[1] - 1, LEAST_EXPONENT)
    units = np.ldexp(finite, DIGITS - exponents)
    middle: NDArray[np.bool_] = np.abs(units) % 2 == 1
    return middle


def _next_to(half: np.float16, value: float, *, above: bool) -> np.float16:
    """The half float above or below `value`, of which `half` is one."""
    if (float(half) > value) == above:
        return half
    return np.float16(np.nextafter(half, np.float16(np.inf if above else -np.inf)))
