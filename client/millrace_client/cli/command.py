"""Output, options and error handling that all commands share.

Commands print rich text for people and JSON for programs. They end with plain errors and documented exit codes, never
with a traceback.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from millrace_client import errors
from millrace_client.connection import Millrace, connect
from millrace_client.stack.supervisor import AlreadyRunning, StartFailed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


# --- How a command ends ---

FAILED, USAGE, NOT_FOUND, REFUSED, UNAVAILABLE, INTERRUPTED = 1, 2, 3, 4, 5, 130

CODES: dict[type[errors.MillraceError], int] = {
    errors.NotFound: NOT_FOUND,
    errors.InvalidArgument: REFUSED,
    errors.AlreadyExists: REFUSED,
    errors.Aborted: REFUSED,
    errors.FailedPrecondition: REFUSED,
    errors.OutOfRange: REFUSED,
    errors.PermissionDenied: REFUSED,
    errors.Unauthenticated: REFUSED,
    errors.Unavailable: UNAVAILABLE,
    errors.ResourceExhausted: UNAVAILABLE,
    errors.DeadlineExceeded: UNAVAILABLE,
}


class CommandFailed(Exception):
    """A command ran correctly but its outcome is bad, e.g. the job that it watched failed."""

    def __init__(self, message: str, *, remedy: str = "", code: int = FAILED) -> None:
        super().__init__(message)
        self.remedy = remedy
        self.code = code


class PlainCommand(click.Command):
    """Prints errors as `error: …` on standard error.

    With `--json` the error is also a document on standard output.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except errors.MillraceError as error:
            lines, code, document = _error_lines(error), CODES.get(type(error), FAILED), error.as_dict()
        except (CommandFailed, StartFailed, AlreadyRunning) as error:
            remedy = getattr(error, "remedy", "")
            lines = [str(error), *([f"remedy: {remedy}"] if remedy else [])]
            code = getattr(error, "code", FAILED)
            document = {"status": "FAILED", "message": str(error), "remedy": remedy}
        except KeyboardInterrupt:
            lines, code, document = ["interrupted"], INTERRUPTED, {"status": "INTERRUPTED"}
        except BrokenPipeError:
            # The reader of the output, e.g. `head`, has closed it.
            os._exit(0)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if os.environ.get("MILLRACE_DEBUG"):
                traceback.print_exc()
            lines, status = _unexpected(error)
            code, document = FAILED, {"status": status, "message": lines[0]}
        if ctx.params.get("as_json"):
            print_json({"error": document})
        _print_error(lines)
        return ctx.exit(code)


def _unexpected(error: Exception) -> tuple[list[str], str]:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        # The error concerns a file that the user named, so it is not a fault of Millrace.
        return [f"{error.filename}: {error.strerror}"], "FAILED"
    return [f"{type(error).__name__}: {error}", "remedy: MILLRACE_DEBUG=1 shows where it comes from"], "UNEXPECTED"


def _error_lines(error: errors.MillraceError) -> list[str]:
    """Return the lines of an error: message, refused fields, remedy and request id.

    Fields and remedies that the message already names are left out.
    """
    lines = [error.message]
    unreported = [violation for violation in error.field_violations if violation.description not in error.message]
    lines += [f"{one.field}: {one.description}" for one in unreported]
    if error.remedy and error.remedy not in error.message:
        lines.append(f"remedy: {error.remedy}")
    if error.request_id and not isinstance(error, errors.Unavailable):
        lines.append(f"request id: {error.request_id}")
    return lines


def _print_error(lines: Sequence[str]) -> None:
    first, *rest = lines
    click.echo(f"error: {first}", err=True)
    for line in rest:
        click.echo(f"  {line}", err=True)


# --- Output ---


@cache
def console() -> Console:
    """Return standard output. It is wide if it is no terminal, so that files are not truncated."""
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=160)


@contextmanager
def silent(silent: bool) -> Iterator[None]:
    """Suppress text for people while JSON is requested."""
    console().quiet = silent
    try:
        yield
    finally:
        console().quiet = False


def print_json(document: Any) -> None:
    """Print one JSON document on one line.

    Messages use protobuf's JSON mapping with the protos' field names.
    """
    click.echo(json.dumps(document, default=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return MessageToDict(value, preserving_proto_field_name=True)
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def new_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Make a table without a frame. The columns in `numbers` are right-aligned."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left")
    return table


def size_text(size_bytes: int) -> str:
    """Format a size, e.g. `5.2 MB`."""
    size, unit = float(size_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def duration_text(seconds: float) -> str:
    """Format a duration, e.g. `48 s`, `2 min 05 s`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def state_text(state: str) -> str:
    """Return a state's name without its prefix, coloured by its meaning."""
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
    """Return the text unchanged, so that brackets are no markup; control characters become spaces."""
    from rich.text import Text

    return Text("".join(one if one.isprintable() else " " for one in text), style=style)


# --- Options ---

# Long enough for a service that restarts. A command without a running stack still fails soon.
RECONNECT_FOR_S = 5.0

Function = TypeVar("Function", bound=Callable[..., Any])


# The range of a protobuf Duration, in either direction.
MAX_DURATION_S = 315_576_000_000


class DurationType(click.types.FloatParamType):
    """A number of seconds that fits a protobuf Duration."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not abs(number) <= MAX_DURATION_S:
            self.fail(f"{value!r}: use a finite number, up to {MAX_DURATION_S}", param, ctx)
        return number


def json_option(function: Function) -> Function:
    """Add `--json`, passed on as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")(function)


def address_options(function: Function) -> Function:
    """Add the three addresses, passed on as `data_address`, `train_address`, `inference_address`."""
    for service in ("inference", "train", "data"):
        function = click.option(
            f"--{service}-address",
            metavar="HOST:PORT",
            help=f"Where the {service} service answers.",
        )(function)
    return function


def connected(values: dict[str, Any]) -> Millrace:
    """Make a client for the addresses that `address_options` put into a command's arguments."""
    return connect(
        data=values["data_address"],
        train=values["train_address"],
        inference=values["inference_address"],
        reconnect_for_s=RECONNECT_FOR_S,
    )


def was_given(option: str) -> bool:
    """Return whether the running command was called with this option."""
    return click.get_current_context().get_parameter_source(option) is not ParameterSource.DEFAULT


def full_name(collection: str, name: str) -> str:
    """Return `datasets/digits` for `digits` and for `datasets/digits`."""
    return name if name.startswith(f"{collection}/") else f"{collection}/{name}"
