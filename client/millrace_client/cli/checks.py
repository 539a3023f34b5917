"""Quality checks as options: `--check range:price=0:100`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

from millrace_client import checks
from millrace_client.steps import Value

Function = TypeVar("Function", bound=Callable[..., Any])

FORMS = (
    "not_null:COLUMN",
    "unique:COLUMN",
    "range:COLUMN=LOW:HIGH",
    "one_of:COLUMN=A,B,…",
    "pattern:COLUMN=REGEX",
    "row_count:[SPLIT=]LOW:HIGH",
    "class_balance:COLUMN=LOW:HIGH",
    "drift:COLUMN=MOST",
)
# They look at the rows as a whole, and leave none out.
OF_ALL_ROWS = ("row_count", "class_balance", "drift")
CHECK, QUARANTINE = "--check", "--quarantine-check"


def check_options(function: Function) -> Function:
    """The options that `checks_of` reads."""
    forms = "; ".join(FORMS)
    aside = click.option(
        QUARANTINE,
        multiple=True,
        metavar="CHECK",
        help="As --check, but rows that do not pass are left out and kept aside. May be repeated.",
    )
    ends = click.option(
        CHECK,
        multiple=True,
        metavar="CHECK",
        help=f"Publish no version that does not pass. CHECK is {forms}. LOW or HIGH may be left out. May be repeated.",
    )
    return ends(aside(function))


def checks_of(values: dict[str, Any]) -> list[checks.Check]:
    """Takes the checks' options out of `values`."""
    ending = [_check(text, CHECK) for text in values.pop("check")]
    return ending + [_check(text, QUARANTINE) for text in values.pop("quarantine_check")]


def _check(text: str, option: str) -> checks.Check:
    kind, _, rest = text.partition(":")
    column, equals, given = rest.partition("=")
    aside = option == QUARANTINE
    try:
        if aside and kind in OF_ALL_ROWS:
            raise ValueError(f"{kind} is of all rows together, and leaves none out; use {CHECK}")
        if kind == "row_count":
            least, most = _ends(given if equals else rest, int)
            return checks.row_count(split=column if equals else "", least=least or 0, most=most or 0)
        if not column or (bool(given) == (kind in ("not_null", "unique"))):
            raise ValueError(f"use {'; '.join(FORMS)}")
        match kind:
            case "not_null":
                return checks.not_null(column, quarantine=aside)
            case "unique":
                return checks.unique(column, quarantine=aside)
            case "range":
                lower, upper = _ends(given, float)
                return checks.in_range(column, least=lower, most=upper, quarantine=aside)
            case "one_of":
                return checks.one_of(column, [_value(one) for one in given.split(",")], quarantine=aside)
            case "pattern":
                return checks.matches(column, given, quarantine=aside)
            case "class_balance":
                rarest, most_frequent = _ends(given, float)
                return checks.class_balance(column, min_share=rarest or 0, max_share=most_frequent or 0)
            case "drift":
                return checks.drift(column, _number(given))
        raise ValueError(f"use {'; '.join(FORMS)}")
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: {error}", param_hint=option) from None


Number = TypeVar("Number", int, float)


def _ends(text: str, number: Callable[[str], Number]) -> tuple[Number | None, Number | None]:
    low, colon, high = text.partition(":")
    if not colon or not (low or high):
        raise ValueError("use LOW:HIGH, of which one may be left out")
    try:
        return number(low) if low else None, number(high) if high else None
    except ValueError:
        wanted = "whole numbers" if number is int else "numbers"
        raise ValueError(f"LOW and HIGH are {wanted}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("MOST is a number") from None


def _value(text: str) -> Value:
    """A whole number, true or false as JSON has them, a text in quotes, else the text itself."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | str) else text
