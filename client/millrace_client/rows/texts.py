"""Numbers out of texts, as `millrace data import` reads them from a CSV."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace_client.rows.typed import EXACT_BELOW

# Beside the empty field: what stands for null in a CSV, in quotes, too.
NULL_VALUES = ("NA", "N/A", "null", "NULL", "NaN", "nan")

_Reader = Callable[[pa.Array], pa.Array]


def numbers_of_texts(texts: pa.Array, dtype: np.dtype[Any]) -> pa.Array:
    """Numbers that may still be too large for `dtype`, or have a fraction; nulls stay null.

    Days since 1970 of an ISO 8601 date where `dtype` is int32, and microseconds of a time without a zone where it is
    int64: as such the models' columns of dates and times are sent. Raises `ValueError` where a text is none of these.
    """
    readers = _readers(dtype)
    for read in readers[:-1]:
        try:
            return read(texts)
        except pa.ArrowInvalid:
            continue
    return readers[-1](texts)


def _readers(dtype: np.dtype[Any]) -> list[_Reader]:
    """What a text may be, the likelier first."""
    if dtype.kind == "b":
        return [lambda texts: texts.cast(pa.bool_())]
    if dtype.kind == "f":
        # There is no cast from text to half floats; by way of single ones some would be rounded twice.
        return [lambda texts: _floats(texts, pa.float32() if dtype.itemsize == 4 else pa.float64())]
    readers: list[_Reader] = [
        lambda texts: texts.cast(pa.from_numpy_dtype(dtype)),
        # pandas writes whole numbers with nulls among them as 3.0.
        _whole_floats,
    ]
    if dtype == np.int32:
        readers.append(lambda texts: texts.cast(pa.date32()).view(pa.int32()))
    if dtype == np.int64:
        readers.append(lambda texts: texts.cast(pa.timestamp("us")).view(pa.int64()))
    return readers


def _whole_floats(texts: pa.Array) -> pa.Array:
    values = _floats(texts, pa.float64())
    if pc.any(pc.greater_equal(pc.abs(values), EXACT_BELOW)).as_py():
        raise pa.ArrowInvalid("a whole number has more digits than a double holds")
    return values


def _floats(texts: pa.Array, target: pa.DataType) -> pa.Array:
    values = texts.cast(target)
    infinite = pc.is_inf(values)
    if pc.any(infinite).as_py():
        said = pc.match_substring_regex(texts.filter(infinite), "^[+-]?inf(inity)?$", ignore_case=True)
        if not pc.all(said).as_py():
            raise pa.ArrowInvalid(f"a number is beyond the range of {target}")
    large = texts.filter(pc.greater_equal(pc.abs(values), EXACT_BELOW))
    for text in large.filter(pc.match_substring_regex(large, "^[+-]?[0-9]+$")).to_pylist():
        if int(float(text)) != int(Decimal(text)):  # int() itself refuses thousands of digits, be they leading zeros
            raise pa.ArrowInvalid("a whole number has more digits than a double holds")
    return values
