"""JSON objects as rows: what kinds of values a column has, and values as the column's type.

Scalars have the type that holds all of them: bool, int64, double, string; null fits each. Where scalars are of kinds
that do not go together, such as a number and a text, the column is of strings, and what is no text is kept as its JSON.
A column that has more lists than scalars is one of tensors, of the length that most lists have (of equally frequent
ones, the shortest). No whole number is rounded: one beyond int64, or one that a double would change beside doubles,
makes its column one of strings, which keep its digits; a list with such a number fits no column.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import orjson
import pyarrow as pa

from data_service.domain.text_values import EXACT_IN_DOUBLE

MAX_LENGTHS = 10_000
MAX_LIST = 4 * 1024 * 1024
_INT64 = range(-(2**63), 2**63)


class InferredColumn:
    """The kinds of values of one column, seen one after the other."""

    def __init__(self) -> None:
        self._scalars: Counter[type] = Counter()
        # Whole numbers: any beyond int64, and any that a double would change.
        self._beyond_int64 = self._beyond_double = False
        self._lengths: Counter[int] = Counter()
        self._doubles_in_lists: set[int] = set()

    def update(self, values: Sequence[Any]) -> None:
        """Takes parsed JSON values. Those that fit no column, such as objects, have no say."""
        kinds = Counter(map(type, values))
        if kinds[int]:
            wholes = [value for value in values if type(value) is int]
            self._beyond_int64 |= min(wholes) not in _INT64 or max(wholes) not in _INT64
            self._beyond_double |= not all_in_double(wholes)
        self._scalars += Counter({kind: kinds[kind] for kind in (bool, int, float, str)})
        if kinds[list]:
            self._update_lists([value for value in values if type(value) is list])

    def _update_lists(self, lists: Sequence[list[Any]]) -> None:
        for values in lists:
            kind = numbers_kind(values)
            if kind is not None and len(self._lengths) < MAX_LENGTHS:
                self._lengths[len(values)] += 1
                if kind is float:
                    self._doubles_in_lists.add(len(values))

    @property
    def type(self) -> pa.DataType:
        """String where nothing but nulls was seen."""
        if self._lengths.total() > self._scalars.total():
            length = min(self._lengths, key=lambda one: (-self._lengths[one], one))
            value_type = pa.float64() if length in self._doubles_in_lists else pa.int64()
            return pa.fixed_shape_tensor(value_type, [length])
        kinds = set(self._scalars)
        if kinds == {bool}:
            return pa.bool_()
        if self._beyond_int64 or not kinds or not kinds <= {int, float}:
            return pa.string()
        if kinds == {int}:
            return pa.int64()
        return pa.string() if self._beyond_double else pa.float64()


def all_in_double(numbers: Sequence[int | float]) -> bool:
    """Whether a double has each of the numbers exactly; there must be one, and none beyond the range of doubles."""
    if min(numbers) >= -EXACT_IN_DOUBLE and max(numbers) <= EXACT_IN_DOUBLE:
        return True
    return all(float(one) == one for one in numbers)  # Python compares a whole number with a float exactly


def numbers_kind(values: list[Any]) -> type | None:
    """int or float for a list of numbers, the kind that has all of them exactly; None for another, or an empty one."""
    kinds = set(map(type, values))
    if not kinds or not kinds <= {int, float} or len(values) > MAX_LIST:
        return None
    if kinds == {float}:
        return float
    wholes = values if kinds == {int} else [value for value in values if type(value) is int]
    if min(wholes) not in _INT64 or max(wholes) not in _INT64:
        return None
    if kinds == {int}:
        return int
    return float if all_in_double(wholes) else None


def as_text(value: Any) -> str | None:
    """A scalar as text: null stays null, what is no text is JSON."""
    if value is None or isinstance(value, str):
        return value
    # orjson writes no whole number of more than 64 bits.
    return str(value) if type(value) is int else orjson.dumps(value).decode()
