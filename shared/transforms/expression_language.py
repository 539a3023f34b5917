"""What the language of `filter` knows of Python's expressions, and what each word of it does with values."""

from __future__ import annotations

import ast
from collections.abc import Callable
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from shared.errors import shown
from shared.transforms.expression_values import (
    add,
    constant,
    divide,
    is_nan,
    kind_of,
    modulo,
    multiply,
    subtract,
)
from shared.transforms.number_order import Datum

# Of the tree: `a and b and c` and `a < b < c` are one level, `a + b + c` are two.
MAX_DEPTH = 64

COMPARISONS: dict[type[ast.cmpop], Callable[[Datum, Datum], Datum]] = {
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
}
ARITHMETIC: dict[type[ast.operator], Callable[[Datum, Datum], Datum]] = {
    ast.Add: add,
    ast.Sub: subtract,
    ast.Mult: multiply,
    ast.Div: divide,
    ast.Mod: modulo,
}
# What each function takes, and what it does with it.
FUNCTIONS: dict[str, tuple[tuple[str, ...], Callable[[Datum], Datum]]] = {
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


def named_columns(node: ast.expr, depth: int) -> list[str]:
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
            timestamp(moment)
            return []
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            return named_columns(argument, depth - 1)
        case ast.Call(func=ast.Name(id=name)):
            known = ", ".join(("col", "timestamp", *FUNCTIONS))
            raise ExpressionError(f"{text_of(node)}: functions are {known}, each of one value; {name}() is not so")
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Not(), operand=operand):
            return named_columns(operand, depth - 1)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in ARITHMETIC:
            return named_columns(left, depth - 1) + named_columns(right, depth - 1)
        case ast.BoolOp(values=values):
            return [name for value in values for name in named_columns(value, depth - 1)]
        case ast.Compare(left=left, ops=operators, comparators=rights):
            names = named_columns(left, depth - 1)
            for comparison, right in zip(operators, rights, strict=True):
                names += _check_comparison(node, comparison, right, depth - 1)
            return names
        case ast.BinOp() | ast.UnaryOp():
            raise ExpressionError(f"{text_of(node)}: the operators are + - * / % and, or and not")
    raise ExpressionError(f"{text_of(node)}: {type(node).__name__} has no place in a filter")


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
            if any(named_columns(element, depth) for element in elements):
                raise ExpressionError(f"{text_of(node)}: a list holds values, not columns")
            return []
        case ((ast.Is() | ast.IsNot()), _):
            raise ExpressionError(f"{text_of(node)}: `is` goes with None alone; use == or !=")
        case ((ast.In() | ast.NotIn()), _):
            raise ExpressionError(f"{text_of(node)}: `in` goes with a list of values, such as [1, 2]")
    return named_columns(right, depth)


def timestamp(text: str) -> pa.Scalar:
    """A moment as the language writes it, with a time zone or without. Raises `ExpressionError`."""
    try:
        moment = datetime.fromisoformat(text)
        return pa.scalar(moment, pa.timestamp("us", None if moment.tzinfo is None else "UTC"))
    except (ValueError, OverflowError, pa.ArrowException):
        raise ExpressionError(f"timestamp({shown(text)}): write it as 2019-03-01T00:00:00") from None


def text_of(node: ast.expr) -> str:
    """As an error shows it."""
    try:
        return shown(ast.unparse(node))
    except RecursionError:  # what is below a node that has no place was not measured
        return "the expression"
