"""JSON objects as rows: what kinds of values a column has, and values as the column's type.

Scalars have the type that holds all of them: bool, int64, double, string; null fits each. Where scalars are of kinds
that do not go together, such as a number and a text, the column is of strings, and what is no text is kept as its JSON.
A whole number beyond int64 counts as a double, as JSON's numbers are. A column that has more lists than scalars is one
of tensors, of the length that most lists have (of equally frequent ones, the shortest).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import orjson
import pyarrow as pa

MAX_LENGTHS = 10_000
MAX_LIST = 4 * 1024 * 1024
_INT64 = range(-(2**63), 2**63)


class InferredColumn:
    """The kinds of values of one column, seen one after the other."""

    def __init__(self) -> None:
        self._scalars: Counter[type] = Counter()
        self._lengths: Counter[int] = Counter()
        self._doubles_in_lists: set[int] = set()

    def update(self, values: Sequence[Any]) -> None:
        """Takes parsed JSON values. Those that fit no column, such as objects, have no say."""
        kinds = Counter(map(type, values))
        if kinds[int]:
            beyond = sum(type(value) is int and value not in _INT64 for value in values)
            kinds[int] -= beyond
            kinds[float] += beyond
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
        if kinds == {int}:
            return pa.int64()
        return pa.float64() if kinds and kinds <= {int, float} else pa.string()


def numbers_kind(values: list[Any]) -> type | None:
    """int or float for a list of numbers; None for another, or an empty one."""
    kinds = set(map(type, values))
    if not kinds or not kinds <= {int, float} or len(values) > MAX_LIST:
        return None
    if kinds == {int} and min(values) in _INT64 and max(values) in _INT64:
        return int
    return float


def as_text(value: Any) -> str | None:
    """A scalar as text: null stays null, what is no text is JSON."""
    if value is None or isinstance(value, str):
        return value
    return orjson.dumps(value).decode()
