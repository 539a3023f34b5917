"""The step `filter`, and the language of its expressions.

The language is a small part of Python's expressions. `ast` parses it and pyarrow.compute evaluates it. Nothing is ever
evaluated as Python: each kind of node is either known here or refused. A null operand gives null, except where SQL's
logic decides (`and`, `or`).

Values are numbers (integers become int64, except those of uint64; floats and decimals become float64), text, bytes,
booleans and moments (a date is its midnight). Arithmetic is that of int64, in which overflow is an error, or of
float64. Only `uint64 % positive integer` takes all of uint64.

Numbers of different types compare exactly, without rounding either of them. As float64, integers from 2**53 on would be
confused with their neighbours, and int64 covers only half of uint64.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache, reduce
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
from numpy.typing import NDArray

from millrace.common.v1 import transform_pb2
from shared.errors import first_line, shown
from shared.transforms.batch import (
    Batch,
    Names,
    RowProblem,
    ScalarType,
    Schema,
    Step,
    StepError,
    StepKeys,
    first_failing_row,
    row_count,
    take_rows,
)

# --- The step ---


@dataclass(frozen=True)
class Filter(Step):
    """Keeps the rows for which the expression is true."""

    op: ClassVar[str] = "filter"
    drops_rows: ClassVar[bool] = True
    expression: Expression

    @classmethod
    def from_message(cls, message: transform_pb2.Filter, column: str) -> Self:
        try:
            return cls(Expression(message.expression))
        except ExpressionError as error:
            raise StepError(str(error), "filter.expression") from None

    def to_proto(self) -> transform_pb2.TransformStep:
        return transform_pb2.TransformStep(filter=transform_pb2.Filter(expression=self.expression.text))

    @property
    def reads(self) -> tuple[str, ...]:
        return self.expression.columns

    def output(self, schema: Schema) -> Schema:
        columns = {}
        for name in self.reads:
            if name not in schema:
                raise StepError(f"there is no column {name!r}; there are {', '.join(schema)}", "filter.expression")
            one = schema[name]
            if not isinstance(one, ScalarType):
                raise StepError(f"{name!r} is {one}; a filter reads scalars alone", "filter.expression")
            columns[name] = pa.array([], one.arrow_type)
        try:
            self.expression(columns)
        except (ExpressionError, pa.ArrowException) as error:
            raise StepError(first_line(error), "filter.expression") from None
        return dict(schema)

    def apply(self, batch: Batch, keys: StepKeys | None) -> Batch:
        return take_rows(batch, self.keeps(batch))

    def keeps(self, batch: Batch) -> NDArray[np.bool_]:
        """Return which rows stay, (B). Raises `RowProblem` for a row whose values do not fit, e.g. by overflow."""
        rows = row_count(batch)
        columns = {name: batch[name] for name in self.reads}
        try:
            kept = self.expression(columns)
        except pa.ArrowException as error:
            row = first_failing_row(rows, lambda start, end: self._works(columns, start, end))
            raise RowProblem(row, f"{self.expression.text!r} does not work out: {first_line(error)}") from None
        if isinstance(kept, pa.Scalar):
            return np.full(rows, bool(kept.as_py()))
        mask: NDArray[np.bool_] = kept.fill_null(False).to_numpy(zero_copy_only=False)
        return mask

    def _works(self, columns: Batch, start: int, end: int) -> bool:
        try:
            self.expression({name: column[start:end] for name, column in columns.items()})
        except pa.ArrowException:
            return False
        return True

    def sources(self, needed: Names, schema: Schema) -> Names:
        return needed | frozenset(self.reads)

    def narrowed(self, needed: Names, schema: Schema) -> Step | None:
        return self


# --- Order of numbers ---

# An array, or one value for all rows.
Datum = Any

_EXACT_IN_DOUBLE = 2**53
_RANGES = {pa.int64(): (-(2.0**63), 2.0**63), pa.uint64(): (0.0, 2.0**64)}


def comparable(left: Datum, right: Datum) -> tuple[Datum, Datum]:
    """Return two values of one type that compare as `left` and `right` do, by IEEE 754; null gives null.

    `left` and `right` are of int64, uint64 or float64, and of different types.
    """
    if _is_small(left) or _is_small(right):
        # The other is exact as a double, or is rounded to a value that still lies beyond all small ones.
        return pc.cast(left, pa.float64(), safe=False), pc.cast(right, pa.float64(), safe=False)
    return _order(left, right), pa.scalar(0.0)


@cache
def _orders() -> tuple[Datum, ...]:
    """Return what `_order` gives: below, at, above, NaN and null.

    They are made at the first call. With its first value pyarrow imports pandas, which takes a fifth as long as all
    that a training worker imports.
    """
    return (*(pa.scalar(one) for one in (-1.0, 0.0, 1.0, math.nan)), pa.scalar(None, pa.float64()))


def _is_small(number: Datum) -> bool:
    return isinstance(number, pa.Scalar) and number.is_valid and abs(number.as_py()) < _EXACT_IN_DOUBLE


def _order(left: Datum, right: Datum) -> Datum:
    """Return -1, 0 or 1 as `left` is below, at or above `right`; NaN if one is NaN, null if one is null."""
    if kinds.is_floating(left.type):
        return pc.negate(_with_floats(right, left))
    if kinds.is_floating(right.type):
        return _with_floats(left, right)
    return _with_signed(left, right) if kinds.is_uint64(left.type) else pc.negate(_with_signed(right, left))


def _with_floats(integers: Datum, floats: Datum) -> Datum:
    """Compare by the floats' whole parts as integers, if the integers' type holds them."""
    below, same, above, neither, null = _orders()
    low, high = _RANGES[integers.type]
    floor = pc.floor(floats)
    inside = pc.and_(pc.greater_equal(floor, low), pc.less(floor, high))
    whole = pc.cast(
        pc.if_else(inside, floor, same), integers.type, safe=False
    )  # a safe cast would refuse all values from 2**53 on
    at_whole = pc.if_else(pc.equal(floats, floor), same, below)
    near = pc.if_else(pc.less(integers, whole), below, pc.if_else(pc.greater(integers, whole), above, at_whole))
    far = pc.if_else(pc.is_nan(floats), neither, pc.if_else(pc.less(floats, low), above, below))
    return pc.if_else(pc.is_valid(integers), pc.if_else(inside, near, far), null)


def _with_signed(unsigned: Datum, signed: Datum) -> Datum:
    below, same, above, _, null = _orders()
    negative = pc.less(signed, 0)
    there = pc.cast(pc.if_else(negative, pa.scalar(0), signed), pa.uint64())
    order = pc.if_else(pc.less(unsigned, there), below, pc.if_else(pc.greater(unsigned, there), above, same))
    return pc.if_else(pc.is_valid(unsigned), pc.if_else(negative, above, order), null)


# --- Values ---

_MAX_SIGNED = 2**63 - 1


def kind_of(datum: Datum) -> str:
    """Return `number`, `text`, `boolean`, `moment` or `bytes`; for any other type, Arrow's name."""
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
    """Convert to one of the few types that the language knows."""
    given = datum.type
    if kinds.is_integer(given) and not kinds.is_uint64(given):
        return pc.cast(datum, pa.int64())
    if kinds.is_floating(given) or kinds.is_decimal(given):
        return pc.cast(datum, pa.float64())
    return pc.cast(datum, pa.timestamp("s")) if kinds.is_date(given) else datum


def constant(value: Any) -> pa.Scalar:
    """Make a scalar. Raises `OverflowError` for integers beyond uint64, and what Arrow raises."""
    return pa.scalar(value, pa.uint64() if isinstance(value, int) and value > _MAX_SIGNED else None)


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
    """Return whether the value is one positive integer for all rows."""
    return isinstance(number, pa.Scalar) and kinds.is_int64(number.type) and number.is_valid and number.as_py() > 0


def _signed(number: Datum) -> Datum:
    """Convert to int64. Raises `pa.ArrowInvalid` for integers beyond it."""
    return pc.cast(number, pa.int64()) if kinds.is_uint64(number.type) else number


def _double(number: Datum) -> Datum:
    # Integers beyond 53 bits are rounded, as in Python's own division.
    return pc.cast(number, pa.float64(), safe=False)


# --- Words of the language ---

# The depth of the tree: `a and b and c` and `a < b < c` are one level, `a + b + c` are two.
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
# The kinds of argument that each function takes, and its implementation.
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
    """The expression is invalid, or does not fit its columns. The text says where and why."""


def named_columns(node: ast.expr, depth: int) -> list[str]:
    """Return the columns that the tree names.

    Raises `ExpressionError` for what is not part of the language.
    """
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
    """Parse a moment with or without a time zone. Raises `ExpressionError`."""
    try:
        moment = datetime.fromisoformat(text)
        return pa.scalar(moment, pa.timestamp("us", None if moment.tzinfo is None else "UTC"))
    except (ValueError, OverflowError, pa.ArrowException):
        raise ExpressionError(f"timestamp({shown(text)}): write it as 2019-03-01T00:00:00") from None


def text_of(node: ast.expr) -> str:
    """Format a node for an error."""
    try:
        return shown(ast.unparse(node))
    except RecursionError:  # the depth below a misplaced node was not checked
        return "the expression"


# --- Expressions ---

MAX_CHARACTERS = 4096


class Expression:
    """A parsed expression. Equal texts are equal. Raises `ExpressionError`."""

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
        """Evaluate to true, false or null for each row: a boolean array, or one boolean for all.

        `columns` are arrays of scalars. Raises `ExpressionError` if types do not fit, and `pa.ArrowInvalid` if a row's
        values do not.
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
            # Whether null is in a list is unknown, so the result is null.
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
