"""What commands print: rich text for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import click
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


@cache
def console() -> Console:
    """Standard output. Wide where it is no terminal, so that nothing is cut for a file."""
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=160)


@contextmanager
def silent(silent: bool) -> Iterator[None]:
    """Holds back what is meant for people while JSON is asked for."""
    console().quiet = silent
    try:
        yield
    finally:
        console().quiet = False


def print_json(document: Any) -> None:
    """One JSON document on one line; messages in protobuf's own JSON mapping, with the protos' field names."""
    click.echo(json.dumps(document, default=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return MessageToDict(value, preserving_proto_field_name=True)
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def new_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """A table without a frame; the columns in `numbers` are set flush right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left")
    return table


def size_text(size_bytes: int) -> str:
    """E.g. `5.2 MB`."""
    size, unit = float(size_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def duration_text(seconds: float) -> str:
    """E.g. `48 s`, `2 min 05 s`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def state_text(state: str) -> str:
    """A state's name without its prefix, coloured by what it means."""
    word = state.removeprefix("STATE_")
    colour = {
        "ACTIVE": "green",
        "READY": "green",
        "SERVING": "green",
        "SUCCEEDED": "green",
        "FAILED": "red",
        "UNREACHABLE": "red",
        "NOT_SERVING": "yellow",
        "CANCELLED": "yellow",
    }.get(word, "cyan")
    return f"[{colour}]{word.lower().replace('_', ' ')}[/]"


def cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def verbatim(text: str, style: str = "") -> Text:
    """As it stands: brackets in data are no markup, and control characters do not reach the terminal."""
    from rich.text import Text

    return Text("".join(one if one.isprintable() else " " for one in text), style=style)
