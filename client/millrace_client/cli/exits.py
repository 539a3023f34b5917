"""How a command ends: plain errors and documented exit codes, never a traceback."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from typing import Any

import click

from millrace_client import errors
from millrace_client.cli.output import print_json
from millrace_client.stack.supervisor import AlreadyRunning, StartFailed

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
    """A command did its part and the outcome is bad, e.g. the job that it watched failed."""

    def __init__(self, message: str, *, remedy: str = "", code: int = FAILED) -> None:
        super().__init__(message)
        self.remedy = remedy
        self.code = code


class PlainCommand(click.Command):
    """Prints what goes wrong as `error: …` on standard error; with `--json` also as a document on standard output."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except errors.MillraceError as error:
            lines, code, document = _told(error), CODES.get(type(error), FAILED), error.as_dict()
        except (CommandFailed, StartFailed, AlreadyRunning) as error:
            remedy = getattr(error, "remedy", "")
            lines = [str(error), *([f"remedy: {remedy}"] if remedy else [])]
            code = getattr(error, "code", FAILED)
            document = {"status": "FAILED", "message": str(error), "remedy": remedy}
        except KeyboardInterrupt:
            lines, code, document = ["interrupted"], INTERRUPTED, {"status": "INTERRUPTED"}
        except BrokenPipeError:
            # The reader of our output, e.g. `head`, has had enough.
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
        # Of a file that the command names: what is wrong is there, and not in our code.
        return [f"{error.filename}: {error.strerror}"], "FAILED"
    return [f"{type(error).__name__}: {error}", "remedy: MILLRACE_DEBUG=1 shows where it comes from"], "UNEXPECTED"


def _told(error: errors.MillraceError) -> list[str]:
    """The message, each refused field that it does not name already, the remedy, and what finds it in a log."""
    lines = [error.message]
    untold = [one for one in error.field_violations if one.description not in error.message]
    lines += [f"{one.field}: {one.description}" for one in untold]
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
