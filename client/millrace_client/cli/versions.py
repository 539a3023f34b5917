"""Versions on the command line: quality checks as options, waiting, and the output of `millrace data show`.

A check is `--check range:price=0:100`. The server continues to make a version even if the command stops waiting.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from millrace.data.v1 import data_service_pb2, resources_pb2
from millrace_client import checks
from millrace_client.calls import Operation
from millrace_client.cli.command import (
    INTERRUPTED,
    CommandFailed,
    console,
    cut,
    new_table,
    size_text,
    state_text,
    verbatim,
)
from millrace_client.report.profile import Column, Part, Profile, block_bars, profile_of, type_text
from millrace_client.steps import Value

if TYPE_CHECKING:
    from rich.text import Text


# --- What is shown of a version ---

MAX_REASONS, MAX_EXAMPLES, MAX_SHOWN_VALUES = 10, 2, 4
MAX_CELL = 48
# The width in characters from which all figures of a column fit.
WIDE = 120
NARROW_CELL, NARROW_NAME = 20, 15
# The space between two columns of a table.
_GUTTER = 3


def print_version(version: resources_pb2.DatasetVersion) -> None:
    """Print a version's header, columns and splits, and whether rows were left out."""
    _print_header(version)
    columns = new_table("column", "type")
    for column in version.columns:
        columns.add_row(verbatim(column.name), verbatim(type_text(column)))
    console().print(columns)
    _print_splits(version)
    if version.quarantined_row_count:
        console().print(
            f"{_left_out(version.quarantined_row_count)}: millrace data quarantine {version.name}", soft_wrap=True
        )


def print_prediction(version: resources_pb2.DatasetVersion) -> None:
    """Print the checkpoint of a version's predictions."""
    made = version.prediction
    by = f"[cyan]{made.checkpoint}[/]  sha256:{made.checkpoint_sha256}"
    console().print(f"  [dim]predicted by[/] {by}", soft_wrap=True)


def print_preview(preview: data_service_pb2.PreviewVersionResponse) -> None:
    """Print everything known about a version."""
    profile = profile_of(preview)
    _print_header(profile.version)
    _print_origin(profile)
    _print_columns(profile)
    _print_splits(profile.version)
    _print_checks(profile)
    _print_quarantine(profile)
    _print_rows(profile)


def _print_header(version: resources_pb2.DatasetVersion) -> None:
    state = state_text(resources_pb2.DatasetVersion.State.Name(version.state))
    console().print(f"[bold]{version.name}[/]  {state}  {version.row_count:,} rows  {size_text(version.size_bytes)}")


def _print_origin(profile: Profile) -> None:
    for parent in profile.version.parents:
        console().print(f"  [dim]from[/] [cyan]{parent.version}[/]", soft_wrap=True)
    if profile.version.HasField("prediction"):
        print_prediction(profile.version)
    for index, step in enumerate(profile.steps):
        console().print("  [dim]then[/]" if index else "  [dim]by[/]  ", verbatim(step), soft_wrap=True)


def _print_columns(profile: Profile) -> None:
    if not any(column.parts for column in profile.columns):
        table = new_table("column", "type")
        for column in profile.columns:
            table.add_row(verbatim(column.name), verbatim(column.type_text))
        console().print(table)
        return
    has_space = console().width >= WIDE
    several = len(profile.version.splits) > 1
    numbers = ("nulls", "min", "mean ± deviation", "max", "distinct") if has_space else ("nulls", "mean", "distinct")
    headers = ["column", *(["split"] if several else []), *numbers, "values"]
    table = new_table(*headers, numbers=numbers)
    for one in table.columns:
        one.no_wrap = True
    for column in profile.columns:
        table.add_row(*(_cell(column, header) for header in headers))
    console().print(table)


def _cell(column: Column, header: str) -> Text:
    """Return a cell with a line per split; the first cell of a row has the column's name and type instead."""
    from rich.text import Text

    if header == "column":
        most = MAX_CELL if console().width >= WIDE else NARROW_NAME
        return Text("\n").join([verbatim(cut(column.name, most)), verbatim(cut(column.type_text, most), "dim")])
    if header == "values":
        return Text("\n").join(_values(column, part) for part in column.parts)
    return Text("\n").join(verbatim(_fact(part, header)) for part in column.parts)


def _fact(part: Part, header: str) -> str:
    if header == "nulls" and part.nan_count and console().width >= WIDE:
        return f"{part.null_text} + {part.nan_count:,} NaN"
    facts = {"nulls": part.null_text, "min": part.least, "mean ± deviation": part.middle, "max": part.most}
    facts["mean"] = part.middle.partition(" ± ")[0]
    return {**facts, "split": part.split, "distinct": part.distinct}[header]


def _values(column: Column, part: Part) -> Text:
    """Return the histogram, or the frequent values if they are more informative."""
    if part.histogram and not column.has_names:
        return verbatim(block_bars(part.histogram), "cyan")
    if not part.values or part.values[0].row_count == 1:
        return verbatim("–")
    text = ", ".join(f"{cut(value.text, 16)} {value.share}" for value in part.values[:MAX_SHOWN_VALUES])
    space = MAX_CELL if console().width >= WIDE else NARROW_CELL
    return verbatim(cut(text + (", …" if len(part.values) > MAX_SHOWN_VALUES else ""), space), "cyan")


def _print_splits(version: resources_pb2.DatasetVersion) -> None:
    splits = new_table("split", "rows", "row ids", numbers=("rows",))
    for split in version.splits:
        last = split.first_row_id + split.row_count - 1
        ids = f"{split.first_row_id}–{last}" if split.row_count else "none"
        splits.add_row(split.name, f"{split.row_count:,}", ids)
    console().print(splits)


def _print_checks(profile: Profile) -> None:
    if not profile.checks:
        return
    table = new_table("", "check", "found", "left out", numbers=("left out",))
    for check in profile.checks:
        left_out = f"[yellow]{check.quarantined:,}[/]" if check.quarantined else "0"
        table.add_row(
            "[green]✓[/]" if check.passed else "[yellow]✗[/]", verbatim(check.text), verbatim(check.observed), left_out
        )
    console().print(table)


def _print_quarantine(profile: Profile) -> None:
    if not profile.quarantined_row_count:
        return
    console().print(_left_out(profile.quarantined_row_count))
    for reason in profile.quarantine[:MAX_REASONS]:
        console().print(f"  {reason.row_count:>7,} ", verbatim(reason.reason), soft_wrap=True)
        for example in reason.examples[:MAX_EXAMPLES]:
            where = f"{example.source.rpartition('/')[2]}, {example.place}: {cut(example.excerpt, 2 * MAX_CELL)}"
            console().print("          ", verbatim(where, "dim"), soft_wrap=True)
    more = len(profile.quarantine) - MAX_REASONS
    if more > 0:
        console().print(f"          [dim]and {more} more reasons: see --html or --json[/]")
    console().print()


def _left_out(rows: int) -> str:
    return f"[yellow]{rows:,} {'row' if rows == 1 else 'rows'} left out[/]"


def _print_rows(profile: Profile) -> None:
    """Print the first rows with as many columns as fit, because wrapped rows are hard to read."""
    if not profile.rows:
        return
    from rich.markup import escape

    names = list(profile.rows[0])
    shown: list[str] = []
    space = console().width
    for name in names:
        space -= min(MAX_CELL, max(len(text) for text in (name, *(row[name] for row in profile.rows)))) + _GUTTER
        if space < 0 and shown:
            break
        shown.append(name)
    table = new_table(*(escape(verbatim(name).plain) for name in shown))
    for column in table.columns:
        column.no_wrap = True
    for row in profile.rows:
        texts = [cut(row[name], MAX_CELL) for name in shown]
        table.add_row(*(verbatim(text, "dim" if text == "null" else "") for text in texts))
    console().print(table)
    if len(shown) < len(names):
        missing = ", ".join(names[len(shown) :])
        console().print("[dim]not shown for want of room:[/]", verbatim(missing, "dim"), "[dim](see --html, --json)[/]")


# --- Waiting for a version ---

AS_LONG_AS_IT_TAKES_S = math.inf


@contextmanager
def waiting(operation: Operation[resources_pb2.DatasetVersion]) -> Iterator[None]:
    """Raise `CommandFailed` if the user interrupts the waiting."""
    try:
        yield
    except KeyboardInterrupt:
        version = operation.metadata.version
        going_on = f"interrupted, but the server goes on making {version}"
        listed = f"millrace data list {version.split('/')[1]} shows when it is done"
        remedy = f"{listed}; millrace data cancel {version} ends it"
        raise CommandFailed(going_on, remedy=remedy, code=INTERRUPTED) from None


# --- Quality checks ---

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
# These checks concern all rows together, and leave none out.
OF_ALL_ROWS = ("row_count", "class_balance", "drift")
CHECK, QUARANTINE = "--check", "--quarantine-check"


def check_options(function: Function) -> Function:
    """Add the options that `checks_of` reads."""
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
    """Remove the checks' options from `values` and return the checks."""
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
    """Parse an integer, true, false or a quoted text as JSON; otherwise return the text itself."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | str) else text
