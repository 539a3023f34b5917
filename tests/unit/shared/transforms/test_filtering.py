"""Filters: a small language, refused by name where it is not that, and nothing of Python's behind it."""

from __future__ import annotations

import pickle
import threading
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidArgument
from shared.transforms import Pipeline, RowError, ScalarType, Schema, TensorType
from shared.transforms.steps.filtering import MAX_CHARACTERS, Expression, ExpressionError
from tests.unit.shared.transforms.samples import pipeline

ROWS = {
    "age": pa.array([1.5, 20.0, None, 65.0, float("nan")]),
    "visits": pa.array([3, -4, 7, None, 0]),
    "city": pa.array(["Ulm", "bern", None, "Årau", ""]),
    "member": pa.array([True, False, None, True, False]),
    "seen": pa.array([datetime(2019, 3, day, 4) for day in (1, 2, 3, 4, 5)], pa.timestamp("ms")),
    "born": pa.array([0, 365, None, 10_000, 1], pa.date32()),
    "zoned": pa.array([0, 1, None, 3, 4], pa.timestamp("s", "UTC")),
    "blob": pa.array([b"ab", b"", None, b"xyz", b"q"]),
    "a b": pa.array([1, 2, 3, 4, 5], pa.uint8()),
    "huge": pa.array([2**62, 1, 2, 3, 2**63 - 1]),
    "vast": pa.array([2**64 - 1, 2**53 + 1, None, 0, 2**63], pa.uint64()),
    "near": pa.array([2**53, 2**53 + 1, -(2**63), 2**63 - 1, None], pa.int64()),
    "wide": pa.array([2.0**53, float("inf"), -(2.0**63), 2.0**63, float("nan")]),
    "price": pa.array(["1.10", "2.50", None, "3.00", "0.00"]).cast(pa.decimal128(5, 2)),
}
SCHEMA: Schema = {name: ScalarType(column.type) for name, column in ROWS.items()}


def kept(expression: str) -> list[int]:
    """The indices of the rows that stay."""
    built = pipeline({"filter": {"expression": expression}})
    built.output(SCHEMA)
    made = built({**ROWS, "index": pa.array(range(5))})
    indices: list[int] = made["index"].to_pylist()
    return indices


@pytest.mark.parametrize(
    ("expression", "rows"),
    [
        ("age > 2", [1, 3]),
        ("age >= 1.5 and visits == 3", [0]),
        ("not age > 2", [0, 4]),
        ("age is None", [2]),
        ("age is not None", [0, 1, 3, 4]),
        ("is_nan(age)", [4]),
        ("1 < visits <= 7", [0, 2]),
        ("visits in [3, 7, 1.5]", [0, 2]),
        ("visits not in [3, 7]", [1, 4]),
        ("visits in []", []),
        ("visits not in []", [0, 1, 2, 4]),
        ("visits % 3 == 2", [1]),  # the sign of the divisor, as in Python
        ("visits / 2 == 1.5", [0]),
        ("visits / 0 > 1", [0, 2]),  # infinite
        ("-visits == 4 or +visits == 3", [0, 1]),
        ("abs(visits) == 4", [1]),
        ("visits + 1 == 4 or visits - 1 == -1 or visits * 2 == -8", [0, 1, 4]),
        ("city == 'Ulm'", [0]),
        ("lower(city) == 'ulm' or upper(city) == 'BERN'", [0, 1]),
        ("length(city) == 4", [1, 3]),
        ("length(blob) > 1", [0, 3]),
        ("member", [0, 3]),
        ("not member", [1, 4]),
        ("member or visits == 7", [0, 2, 3]),
        ("member == True", [0, 3]),
        ("True", [0, 1, 2, 3, 4]),
        ("False or member", [0, 3]),
        ("year(seen) == 2019 and month(seen) == 3 and day(seen) > 3 and hour(seen) == 4", [3, 4]),
        ('seen >= timestamp("2019-03-04T04:00:00")', [3, 4]),
        ('born < timestamp("1971-01-01T00:00:00")', [0, 4]),
        ("year(born) == 1971", [1]),
        ('zoned > timestamp("1970-01-01T01:00:02+01:00")', [3, 4]),
        ('col("a b") > 3', [3, 4]),
        ("huge == 9223372036854775807", [4]),
        ("huge < 2.5", [1, 2]),
        ("price > 1.1", [1, 3]),
        ("vast is None", [2]),
        ("vast is not None", [0, 1, 3, 4]),
        ("vast == 18446744073709551615", [0]),
        ("vast > 9223372036854775807", [0, 4]),
        ("vast > -1", [0, 1, 3, 4]),
        ("vast in [18446744073709551615, 0, -1]", [0, 3]),
        ("vast >= 18446744073709551616.0", []),
        ("vast == 9223372036854775808.0", [4]),
        ("vast == 9007199254740992.0", []),
        ("vast < 0.5", [3]),
        ("vast != -0.5", [0, 1, 3, 4]),
        ("vast == near", [1]),
        ("vast > near", [0]),
        ("vast < near", [3]),
        ("vast % 10 == 5", [0]),
        ("abs(vast) == 18446744073709551615", [0]),
        ("near == 9007199254740992.0", [0]),
        ("near > 9007199254740992.0", [1, 3]),
        ("near < 9007199254740994.0", [0, 1, 2]),
        ("near > 4503599627370495.5", [0, 1, 3]),
        ("wide > 9007199254740991", [0, 1, 3]),
        ("wide == 9007199254740993", []),
        ("near == wide", [0, 2]),
        ("near < wide", [1, 3]),
        ("near >= wide", [0, 2]),
        ("near != wide", [1, 3]),
        ("near != wide or near is None", [1, 3, 4]),
        ("visits != age / 0", [0, 1, 4]),
        ("'b' > 'a'", [0, 1, 2, 3, 4]),
        ("(age > 2) == member", [3, 4]),
        ("\n  (age\n > 2) ", [1, 3]),
    ],
)
def test_a_filter_keeps_the_rows_for_which_its_condition_is_true(expression: str, rows: list[int]) -> None:
    assert kept(expression) == rows


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("age >", "cannot be read"),
        ("age > 2; import os", "cannot be read"),
        ("a" * (MAX_CHARACTERS + 1), "at most 4096"),
        ("__import__('os').system('true')", "Call has no place"),
        ("open('x') == 1", "functions are col, timestamp, abs"),
        ("eval('1')", "functions are"),
        ("abs(age, visits) > 1", "functions are"),
        ("abs(x=age) > 1", "functions are"),
        ("col(age) > 1", "functions are"),
        ("age.real > 1", "Attribute has no place"),
        ("age[0] > 1", "Subscript has no place"),
        ("(lambda: True)()", "Call has no place"),
        ("[x for x in [1]] == 1", "ListComp has no place"),
        ("f'{age}' == 'x'", "JoinedStr has no place"),
        ("(age := 3) > 1", "NamedExpr has no place"),
        ("age if member else visits", "IfExp has no place"),
        ("age ** 99 > 1", "the operators are"),
        ("age // 2 > 1", "the operators are"),
        ("(age > 1) & member", "the operators are .* and, or and not"),
        ("visits & 1 == 1", "the operators are"),
        ("~visits == 1", "the operators are"),
        ("visits in (1, 2)", "a list of values"),
        ("visits in [age]", "not columns"),
        ("visits is 3", "goes with None alone"),
        ("visits == None", "use `is None`"),
        ("visits > 1 is None", "goes with None alone"),
        ("visits == 1j", "use numbers"),
        ("visits == b'x'", "use numbers"),
        ("visits == ...", "use numbers"),
        ("visits == 18446744073709551616", "beyond what a column can hold"),
        ("city == '\\ud800'", "beyond what a column can hold"),
        ("timestamp('yesterday') > seen", "write it as 2019-03-01T00:00:00"),
        ("not " * 80 + "member", "levels deep"),
        ("-" * 4000 + "1 > 0", "levels deep|cannot be read"),
        ("(" * 4000, "cannot be read"),
        ("age" + " + 1" * 500 + " > 0", "levels deep"),
        ("\0", "cannot be read"),
    ],
)
def test_an_expression_outside_the_language_is_refused_before_any_column_is_known(expression: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why) as refused:
        pipeline({"filter": {"expression": expression}})

    assert refused.value.fields[0][0] == "transform.steps[0].filter.expression"


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("nothing > 1", "no column 'nothing'"),
        ("image > 1", "reads scalars alone"),
        ("age > 'old'", "compares number with text"),
        ("city in ['Ulm', 3]", "compares text with number"),
        ("age", "is number for each row"),
        ("age + city > 1", "needs number, not text"),
        ("city + city == 'x'", "needs number, not text"),
        ("not age", "needs boolean, not number"),
        ("age and member", "needs boolean, not number"),
        ("lower(age) == 'x'", "needs text, not number"),
        ("year(city) == 1", "needs moment, not text"),
        ("is_nan(city)", "needs number, not text"),
        ('zoned > timestamp("2019-03-01T00:00:00")', "time zone"),
        ('seen > timestamp("2019-03-01T00:00:00Z")', "time zone"),
        ("blob == 'x'", "compares bytes with text"),
        ("1 % 0 == 1 and member", "divide by zero"),
    ],
)
def test_types_that_do_not_fit_are_found_before_any_row_is_read(expression: str, why: str) -> None:
    built = pipeline({"filter": {"expression": expression}})

    with pytest.raises(InvalidArgument, match=why) as refused:
        built.output({**SCHEMA, "image": TensorType("uint8", (2, 2))})

    assert refused.value.fields[0][0] == "transform.steps[0].filter.expression"


@pytest.mark.parametrize(
    ("expression", "row"),
    [
        ("huge * 2 > 0", 0),
        ("visits % (visits - 7) == 0", 2),
        ("huge + 1 > 0", 4),
        ("vast + 1 > 0", 0),
        ("-vast < 0", 0),
    ],
)
def test_a_row_that_does_not_work_out_is_named(expression: str, row: int) -> None:
    with pytest.raises(RowError) as refused:
        pipeline({"filter": {"expression": expression}})(ROWS)

    assert refused.value.row == row
    assert refused.value.path == "transform.steps[0]"


def test_a_row_named_after_a_filter_is_the_row_that_was_given() -> None:
    built = pipeline(
        {"filter": {"expression": "visits is not None and visits != -4"}},
        {"filter": {"expression": "visits != 3"}},
        {"column": "city", "cast": {"arrowType": "int64"}},
    )

    with pytest.raises(RowError) as refused:
        built({"visits": ROWS["visits"], "city": pa.array(["1", "x", "2", "x", "bad"])})

    assert refused.value.row == 4


TOKENS = ["age", "visits", "city", "member", "1", "2.5", "'x'", "None", "True", "(", ")", "[", "]", ",", "not", "and"]
TOKENS += ["or", "in", "is", "<", ">=", "==", "!=", "+", "-", "*", "/", "%", "abs", "lower", "year", "col", "lambda"]
TOKENS += ["**", ".", ":", "=", "if", "else", "for", "await", "yield", "@", "~", "\\", "#", "\n", "\x00", "f'{1}'"]


@given(st.lists(st.sampled_from(TOKENS), max_size=40).map(" ".join) | st.text(max_size=60))
def test_any_text_is_either_a_filter_or_refused(text: str) -> None:
    try:
        expression = Expression(text)
    except ExpressionError:
        return
    empty = {name: pa.array([], one.type) for name, one in ROWS.items()}
    if not set(expression.columns) <= set(empty):
        return
    try:
        made = expression(empty)
    except (ExpressionError, pa.ArrowException):
        return
    assert pa.types.is_boolean(made.type)


def test_nesting_does_not_exhaust_the_stack_of_a_thread() -> None:
    refused: list[Any] = []

    def parse() -> None:
        for text in (
            "-" * 4090 + "1",
            "not " * 1000 + "a",
            "(" * 2000 + "1" + ")" * 2000,
            "[" * 4000,
            "a." * 2000 + "b",
        ):
            try:
                Expression(text)
            except ExpressionError as error:
                refused.append(error)

    thread = threading.Thread(target=parse)
    thread.start()
    thread.join()

    assert len(refused) == 5


NUMBERS = st.lists(st.one_of(st.none(), st.integers(-9, 9)), min_size=1, max_size=8)


@given(left=NUMBERS, constant=st.integers(-3, 3), other=st.integers(1, 4))
def test_numbers_work_out_as_in_python(left: list[int | None], constant: int, other: int) -> None:
    expression = f"x * {constant} - x % {other} < x / {other} and not x == {constant} or abs(x) in [{other}, 5]"

    made = pipeline({"filter": {"expression": expression}})({"x": pa.array(left, pa.int64()), "y": pa.array(left)})

    def wanted(x: int) -> bool:
        return (x * constant - x % other < x / other and x != constant) or abs(x) in [other, 5]

    assert made["y"].to_pylist() == [x for x in left if x is not None and wanted(x)]


EDGES = [0, 1, -1, 2**53, 2**53 + 1, 2**62, 2**63 - 1, 2**63 - 513, 2**63, 2**64 - 1, -(2**53) - 1, -(2**63)]
FLOATS = st.floats(allow_nan=True) | st.sampled_from(EDGES).map(float) | st.sampled_from([0.5, -0.5, 2.0**64])


@given(data=st.data(), unsigned=st.booleans(), operator=st.sampled_from(["==", "!=", "<", "<=", ">", ">="]))
def test_whole_numbers_compare_with_floats_exactly(data: st.DataObject, unsigned: bool, operator: str) -> None:
    least, most = (0, 2**64 - 1) if unsigned else (-(2**63), 2**63 - 1)
    number = data.draw(st.integers(least, most) | st.sampled_from([one for one in EDGES if least <= one <= most]))
    other = data.draw(FLOATS | st.just(number).map(float))
    kind = pa.uint64() if unsigned else pa.int64()
    rows = {"i": pa.array([number], kind), "f": pa.array([other])}
    truth = {
        "==": number == other,
        "!=": number != other,
        "<": number < other,
        "<=": number <= other,
        ">": number > other,
        ">=": number >= other,
    }[operator]

    made = pipeline({"filter": {"expression": f"i {operator} f"}})(rows)

    assert len(made["i"]) == truth


def test_a_filter_survives_pickling_and_leaves_tensors_their_rows() -> None:
    built: Pipeline = pickle.loads(pickle.dumps(pipeline({"filter": {"expression": "x > 1"}})))

    made = built({"x": pa.array([1, 2, 3]), "image": np.arange(12).reshape(3, 2, 2)})

    assert made["image"].tolist() == np.arange(12).reshape(3, 2, 2)[1:].tolist()
    assert built.drops_rows
