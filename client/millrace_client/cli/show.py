"""What `millrace data show` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.data.v1 import data_service_pb2, resources_pb2
from millrace_client.cli.output import console, cut, new_table, size_text, state_text, verbatim
from millrace_client.report.bars import block_bars
from millrace_client.report.profile import Column, Part, Profile, profile_of, type_text

if TYPE_CHECKING:
    from rich.text import Text

MAX_REASONS, MAX_EXAMPLES, MAX_SHOWN_VALUES = 10, 2, 4
MAX_CELL = 48
# Characters from which all figures of a column find room.
WIDE = 120
NARROW_CELL, NARROW_NAME = 20, 15
# What a table puts between two columns.
_GUTTER = 3


def print_version(version: resources_pb2.DatasetVersion) -> None:
    """Its header, columns and splits, and whether rows were left out."""
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
    """Which checkpoint its predictions are from."""
    made = version.prediction
    by = f"[cyan]{made.checkpoint}[/]  sha256:{made.checkpoint_sha256}"
    console().print(f"  [dim]predicted by[/] {by}", soft_wrap=True)


def print_preview(preview: data_service_pb2.PreviewVersionResponse) -> None:
    """All that is known of a version."""
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
    has_room = console().width >= WIDE
    several = len(profile.version.splits) > 1
    numbers = ("nulls", "min", "mean ± deviation", "max", "distinct") if has_room else ("nulls", "mean", "distinct")
    headers = ["column", *(["split"] if several else []), *numbers, "values"]
    table = new_table(*headers, numbers=numbers)
    for one in table.columns:
        one.no_wrap = True
    for column in profile.columns:
        table.add_row(*(_cell(column, header) for header in headers))
    console().print(table)


def _cell(column: Column, header: str) -> Text:
    """A line for each split; the first cell of a row has the column's name and type instead."""
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
    """The histogram, or the frequent values where they say more."""
    if part.histogram and not column.has_names:
        return verbatim(block_bars(part.histogram), "cyan")
    if not part.values or part.values[0].row_count == 1:
        return verbatim("–")
    text = ", ".join(f"{cut(value.text, 16)} {value.share}" for value in part.values[:MAX_SHOWN_VALUES])
    room = MAX_CELL if console().width >= WIDE else NARROW_CELL
    return verbatim(cut(text + (", …" if len(part.values) > MAX_SHOWN_VALUES else ""), room), "cyan")


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
    """As many columns as find room: rows that wrap are hard to read."""
    if not profile.rows:
        return
    from rich.markup import escape

    names = list(profile.rows[0])
    shown: list[str] = []
    room = console().width
    for name in names:
        room -= min(MAX_CELL, max(len(text) for text in (name, *(row[name] for row in profile.rows)))) + _GUTTER
        if room < 0 and shown:
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
