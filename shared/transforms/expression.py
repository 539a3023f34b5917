"""The language of `filter`: a small part of Python's expressions, parsed by `ast` and worked out by pyarrow.compute.

Nothing is ever evaluated as Python: each kind of node is either known here or refused. Numbers of different types
compare exactly. Nulls make null, save where SQL knows better (`and`, `or`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from shared.errors import first_line
from shared.transforms.expression_language import (
    ARITHMETIC,
    COMPARISONS,
    FUNCTIONS,
    MAX_DEPTH,
    ExpressionError,
    named_columns,
    text_of,
    timestamp,
)
from shared.transforms.expression_values import constant, kind_of, negate, plain
from shared.transforms.number_order import Datum, comparable

MAX_CHARACTERS = 4096


class Expression:
    """Parsed and ready; equal texts are equal. Raises `ExpressionError`."""

    def __init__(self, text: str) -> None:
        if not text.strip():
            raise ExpressionError("is empty; say which rows to keep")
        if len(text) > MAX_CHARACTERS:
            raise ExpressionError(f"has {len(text)} characters; use at most {MAX_CHARACTERS}")
        self.text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            raise ExpressionError(f"cannot be read at character {error.offset}: {error.msg}") from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise ExpressionError(f"cannot be read: {first_line(error)}") from None
        self.columns = tuple(dict.fromkeys(named_columns(self._tree, MAX_DEPTH)))

    def __call__(self, columns: Mapping[str, Datum]) -> Datum:
        """True, false or null for each row: a boolean array, or one boolean for all. `columns` are arrays of scalars.

        Raises `ExpressionError` where types do not fit, and `pa.ArrowInvalid` where a row's values do not.
        """
        made = _value(self._tree, columns)
        if kind_of(made) != "boolean":
            raise ExpressionError(f"is {kind_of(made)} for each row; compare it with something")
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expression) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Expression, (self.text,))


def _value(node: ast.expr, columns: Mapping[str, Datum]) -> Datum:
    match node:
        case ast.Name(id=name):
            return plain(columns[name])
        case ast.Constant(value=value):
            return constant(value)
        case ast.Call(func=ast.Name(id="col"), args=[ast.Constant(value=str() as name)]):
            return plain(columns[name])
        case ast.Call(func=ast.Name(id="timestamp"), args=[ast.Constant(value=str() as moment)]):
            return timestamp(moment)
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            takes, function = FUNCTIONS[name]
            return plain(function(_of_kind(node, _value(argument, columns), *takes)))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return pc.invert(_of_kind(node, _value(operand, columns), "boolean"))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return negate(_of_kind(node, _value(operand, columns), "number"))
        case ast.UnaryOp(operand=operand):
            return _of_kind(node, _value(operand, columns), "number")
        case ast.BinOp(left=left, op=operator, right=right):
            first, second = (_of_kind(node, _value(one, columns), "number") for one in (left, right))
            return ARITHMETIC[type(operator)](first, second)
        case ast.BoolOp(op=operator, values=values):
            joined = pc.and_kleene if isinstance(operator, ast.And) else pc.or_kleene
            return reduce(joined, [_of_kind(node, _value(value, columns), "boolean") for value in values])
        case ast.Compare(left=left, ops=operators, comparators=rights):
            return _comparison(node, _value(left, columns), operators, rights, columns)
    raise AssertionError(f"{type(node).__name__} passed the check")


def _comparison(
    node: ast.Compare,
    left: Datum,
    operators: list[ast.cmpop],
    rights: list[ast.expr],
    columns: Mapping[str, Datum],
) -> Datum:
    results = []
    for operator, right in zip(operators, rights, strict=True):
        if isinstance(operator, ast.Is | ast.IsNot):
            results.append(pc.is_null(left) if isinstance(operator, ast.Is) else pc.is_valid(left))
        elif isinstance(operator, ast.In | ast.NotIn):
            assert isinstance(right, ast.List)
            hits = [_compared(node, pc.equal, left, _value(element, columns)) for element in right.elts]
            # Null is in no list, nor out of it.
            found = reduce(pc.or_kleene, hits, pc.and_kleene(pc.is_null(left), pa.scalar(None, pa.bool_())))
            results.append(found if isinstance(operator, ast.In) else pc.invert(found))
        else:
            against = _value(right, columns)
            results.append(_compared(node, COMPARISONS[type(operator)], left, against))
            left = against
    return reduce(pc.and_kleene, results)


def _compared(node: ast.expr, compare: Callable[[Datum, Datum], Datum], left: Datum, right: Datum) -> Datum:
    if kind_of(left) != kind_of(right):
        raise ExpressionError(
            f"{text_of(node)}: compares {kind_of(left)} with {kind_of(right)}; use values of one kind"
        )
    if kind_of(left) == "number" and left.type != right.type:
        left, right = comparable(left, right)
    if kind_of(left) == "moment" and (left.type.tz is None) != (right.type.tz is None):
        remedy = 'write a timestamp with its offset, as "2019-03-01T00:00:00Z", where the column has a time zone'
        raise ExpressionError(f"{text_of(node)}: compares a moment of a time zone with one of none; {remedy}")
    try:
        return compare(left, right)
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError):
        raise ExpressionError(f"{text_of(node)}: {kind_of(left)} has no such comparison") from None


def _of_kind(node: ast.expr, datum: Datum, *wanted: str) -> Datum:
    if kind_of(datum) not in wanted:
        raise ExpressionError(f"{text_of(node)}: needs {' or '.join(wanted)}, not {kind_of(datum)}")
    return datum
