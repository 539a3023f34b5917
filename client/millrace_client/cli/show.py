"""What `millrace data show` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.data.v1 import data_service_pb2, resources_pb2
from millrace_client.cli.output import console, new_table, size_text, state_text
from millrace_client.report.bars import block_bars
from millrace_client.report.profile import Column, Part, Profile, profile_of, type_text

if TYPE_CHECKING:
    from rich.text import Text

MAX_REASONS, MAX_EXAMPLES, MAX_SHOWN_VALUES = 10, 2, 4
MAX_CELL = 40


def print_version(version: resources_pb2.DatasetVersion) -> None:
    """Its header, columns and splits."""
    _print_header(version)
    columns = new_table("column", "type")
    for column in version.columns:
        columns.add_row(_plain(column.name), _plain(type_text(column)))
    console().print(columns)
    _print_splits(version)


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
    for index, step in enumerate(profile.steps):
        console().print("  [dim]then[/]" if index else "  [dim]by[/]  ", _plain(step), soft_wrap=True)


def _print_columns(profile: Profile) -> None:
    if not any(column.parts for column in profile.columns):
        table = new_table("column", "type")
        for column in profile.columns:
            table.add_row(_plain(column.name), _plain(column.type_text))
        console().print(table)
        return
    several = len(profile.version.splits) > 1
    numbers = ("nulls", "min", "mean ± deviation", "max", "distinct")
    table = new_table("column", "type", *(["split"] if several else []), *numbers, "values", numbers=numbers)
    for name in ("column", "values"):
        next(one for one in table.columns if one.header == name).no_wrap = True
    for column in profile.columns:
        for index, part in enumerate(column.parts):
            first = "" if index else column.name
            kind = "" if index else column.type_text
            row = [first, kind, *([part.split] if several else [])]
            facts = [_nulls(part), part.least, part.middle, part.most, part.distinct]
            table.add_row(*(_plain(text) for text in (*row, *facts)), _values(column, part))
    console().print(table)


def _nulls(part: Part) -> str:
    return f"{part.null_text} + {part.nan_count:,} NaN" if part.nan_count else part.null_text


def _values(column: Column, part: Part) -> Text:
    """The histogram, or the frequent values where there is none."""
    from rich.text import Text

    if part.histogram:
        return Text(block_bars(part.histogram), style="cyan")
    shown = [f"{value.text[:16]} {value.share_text}" for value in part.values[:MAX_SHOWN_VALUES]]
    more = ", …" if len(part.values) > MAX_SHOWN_VALUES else ""
    return Text(", ".join(shown) + more, style="cyan" if column.parts else "")


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
        table.add_row("[green]✓[/]" if check.passed else "[yellow]✗[/]", _plain(check.text), _plain(check.observed), left_out)
    console().print(table)


def _print_quarantine(profile: Profile) -> None:
    if not profile.quarantined_row_count:
        return
    console().print(f"[yellow]{profile.quarantined_row_count:,} rows left out[/]")
    for reason in profile.quarantine[:MAX_REASONS]:
        console().print(f"  {reason.row_count:>7,} ", _plain(reason.reason), soft_wrap=True)
        for example in reason.examples[:MAX_EXAMPLES]:
            excerpt = example.excerpt if len(example.excerpt) <= 2 * MAX_CELL else example.excerpt[: 2 * MAX_CELL] + "…"
            where = f"{example.source.rpartition('/')[2]}, {example.place}: {excerpt}"
            console().print("          ", _plain(where, "dim"), soft_wrap=True)
    more = len(profile.quarantine) - MAX_REASONS
    if more > 0:
        console().print(f"          [dim]and {more} more reasons: see --html or --json[/]")
    console().print()


def _print_rows(profile: Profile) -> None:
    if not profile.rows:
        return
    table = new_table(*profile.rows[0])
    for row in profile.rows:
        texts = [text if len(text) <= MAX_CELL else text[: MAX_CELL - 1] + "…" for text in row.values()]
        table.add_row(*(_plain(text, "dim" if text == "null" else "") for text in texts))
    console().print(table)


def _plain(text: str, style: str = "") -> Text:
    """As it stands: brackets in data are no markup, and control characters do not reach the terminal."""
    from rich.text import Text

    return Text("".join(one if one.isprintable() else " " for one in text), style=style)
