"""The language of `filter`: a small part of Python's expressions, parsed by `ast` and worked out by pyarrow.compute.

Nothing is ever evaluated as Python: each kind of node is either known here or refused. Numbers of different types
compare exactly. Nulls make null, save where SQL knows better (`and`, `or`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from shared.errors import first_line, shown
from shared.transforms.expression_values import (
    add,
    constant,
    divide,
    is_nan,
    kind_of,
    modulo,
    multiply,
    negate,
    plain,
    subtract,
)
from shared.transforms.number_order import Datum, comparable

MAX_CHARACTERS = 4096
# Of the tree: `a and b and c` and `a < b < c` are one level, `a + b + c` are two.
MAX_DEPTH = 64

_COMPARISONS: dict[type[ast.cmpop], Callable[[Datum, Datum], Datum]] = {
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Datum, Datum], Datum]] = {
    ast.Add: add,
    ast.Sub: subtract,
    ast.Mult: multiply,
    ast.Div: divide,
    ast.Mod: modulo,
}
# What each function takes, and what it does with it.
_FUNCTIONS: dict[str, tuple[tuple[str, ...], Callable[[Datum], Datum]]] = {
    "abs": (("number",), pc.abs_checked),
    "length": (("text", "bytes"), lambda one: (pc.utf8_length if kind_of(one) == "text" else pc.binary_length)(one)),
    "lower": (("text",), pc.utf8_lower),
    "upper": (("text",), pc.utf8_upper),
    "is_nan": (("number",), is_nan),
    "year": (("moment",), pc.year),
    "month": (("moment",), pc.month),
    "day": (("moment",), pc.day),
    "hour": (("moment",), pc.hour),
}


class ExpressionError(ValueError):
    """The expression makes no sense, or does not fit its columns; the text says where and why."""


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
        self.columns = tuple(dict.fromkeys(_check(self._tree, MAX_DEPTH)))

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


def _check(node: ast.expr, depth: int) -> list[str]:
    """The columns that the tree names. Raises `ExpressionError` for what is not part of the language."""
    if depth == 0:
        raise ExpressionError(f"is nested more than {MAX_DEPTH} levels deep; split it into several filters")
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Constant(value=value):
            return _check_constant(value)
        case ast.Call(func=ast.Name(id="col"), args=[ast.Constant(value=str() as name)], keywords=[]):
            return [name]
        case ast.Call(func=ast.Name(id="timestamp"), args=[ast.Constant(value=str() as moment)], keywords=[]):
            _timestamp(moment)
            return []
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            return _check(argument, depth - 1)
        case ast.Call(func=ast.Name(id=name)):
            known = ", ".join(("col", "timestamp", *_FUNCTIONS))
            raise ExpressionError(f"{_text(node)}: functions are {known}, each of one value; {name}() is not so")
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Not(), operand=operand):
            return _check(operand, depth - 1)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _ARITHMETIC:
            return _check(left, depth - 1) + _check(right, depth - 1)
        case ast.BoolOp(values=values):
            return [name for value in values for name in _check(value, depth - 1)]
        case ast.Compare(left=left, ops=operators, comparators=rights):
            names = _check(left, depth - 1)
            for comparison, right in zip(operators, rights, strict=True):
                names += _check_comparison(node, comparison, right, depth - 1)
            return names
    raise ExpressionError(f"{_text(node)}: {type(node).__name__} has no place in a filter")


def _check_constant(value: object) -> list[str]:
    if value is None:
        raise ExpressionError("None: use `is None` or `is not None`")
    if not isinstance(value, bool | int | float | str):
        raise ExpressionError(f"{shown(value)}: use numbers, 'texts', True or False")
    try:
        constant(value)
    except (OverflowError, UnicodeError, pa.ArrowException):
        raise ExpressionError(f"{shown(value)} is beyond what a column can hold") from None
    return []


def _check_comparison(node: ast.Compare, operator: ast.cmpop, right: ast.expr, depth: int) -> list[str]:
    match operator, right:
        case ((ast.Is() | ast.IsNot()), ast.Constant(value=None)) if len(node.ops) == 1:
            return []
        case ((ast.In() | ast.NotIn()), ast.List(elts=elements)) if len(node.ops) == 1:
            if any(_check(element, depth) for element in elements):
                raise ExpressionError(f"{_text(node)}: a list holds values, not columns")
            return []
        case ((ast.Is() | ast.IsNot()), _):
            raise ExpressionError(f"{_text(node)}: `is` goes with None alone; use == or !=")
        case ((ast.In() | ast.NotIn()), _):
            raise ExpressionError(f"{_text(node)}: `in` goes with a list of values, such as [1, 2]")
    return _check(right, depth)


def _value(node: ast.expr, columns: Mapping[str, Datum]) -> Datum:
    match node:
        case ast.Name(id=name):
            return plain(columns[name])
        case ast.Constant(value=value):
            return constant(value)
        case ast.Call(func=ast.Name(id="col"), args=[ast.Constant(value=str() as name)]):
            return plain(columns[name])
        case ast.Call(func=ast.Name(id="timestamp"), args=[ast.Constant(value=str() as moment)]):
            return _timestamp(moment)
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            takes, function = _FUNCTIONS[name]
            return plain(function(_of_kind(node, _value(argument, columns), *takes)))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return pc.invert(_of_kind(node, _value(operand, columns), "boolean"))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return negate(_of_kind(node, _value(operand, columns), "number"))
        case ast.UnaryOp(operand=operand):
            return _of_kind(node, _value(operand, columns), "number")
        case ast.BinOp(left=left, op=operator, right=right):
            first, second = (_of_kind(node, _value(one, columns), "number") for one in (left, right))
            return _ARITHMETIC[type(operator)](first, second)
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
            results.append(_compared(node, _COMPARISONS[type(operator)], left, against))
            left = against
    return reduce(pc.and_kleene, results)


def _compared(node: ast.expr, compare: Callable[[Datum, Datum], Datum], left: Datum, right: Datum) -> Datum:
    if kind_of(left) != kind_of(right):
        raise ExpressionError(f"{_text(node)}: compares {kind_of(left)} with {kind_of(right)}; use values of one kind")
    if kind_of(left) == "number" and left.type != right.type:
        left, right = comparable(left, right)
    if kind_of(left) == "moment" and (left.type.tz is None) != (right.type.tz is None):
        remedy = 'write a timestamp with its offset, as "2019-03-01T00:00:00Z", where the column has a time zone'
        raise ExpressionError(f"{_text(node)}: compares a moment of a time zone with one of none; {remedy}")
    try:
        return compare(left, right)
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError):
        raise ExpressionError(f"{_text(node)}: {kind_of(left)} has no such comparison") from None


def _of_kind(node: ast.expr, datum: Datum, *wanted: str) -> Datum:
    if kind_of(datum) not in wanted:
        raise ExpressionError(f"{_text(node)}: needs {' or '.join(wanted)}, not {kind_of(datum)}")
    return datum


def _timestamp(text: str) -> pa.Scalar:
    try:
        moment = datetime.fromisoformat(text)
        return pa.scalar(moment, pa.timestamp("us", None if moment.tzinfo is None else "UTC"))
    except (ValueError, OverflowError, pa.ArrowException):
        raise ExpressionError(f"timestamp({shown(text)}): write it as 2019-03-01T00:00:00") from None


def _text(node: ast.expr) -> str:
    try:
        return shown(ast.unparse(node))
    except RecursionError:  # what is below a node that has no place was not measured
        return "the expression"
