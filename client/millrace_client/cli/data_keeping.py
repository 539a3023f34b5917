"""`millrace data verify|quarantine|cancel|delete`."""

from __future__ import annotations

import json
from typing import Any

import click

from millrace.data.v1 import data_service_pb2, resources_pb2
from millrace_client.cli.exits import REFUSED, CommandFailed, PlainCommand
from millrace_client.cli.options import address_options, connected, full_name, json_option
from millrace_client.cli.output import console, print_json, size_text


@click.command(cls=PlainCommand)
@click.argument("version")
@address_options
@json_option
def verify(version: str, as_json: bool, **values: Any) -> None:
    """Read every stored byte of VERSION (datasets/d/versions/v) again; exit code 1 where one is not as it was."""
    damages: list[data_service_pb2.Damage] = []
    last = data_service_pb2.VerifyVersionResponse()
    with connected(values) as millrace, console().status("reading …") as line:
        for last in millrace.data.verify_version(version):
            damages += last.damages
            line.update(f"reading … {last.files_checked} of {last.files_total} files, {size_text(last.bytes_checked)}")
    if as_json:
        del last.damages[:]
        print_json({"checked": last, "damages": damages})
    for damage in damages if not as_json else ():
        console().print(f"{damage.path}: {damage.description}", soft_wrap=True)
    if damages and not as_json:
        raise CommandFailed(f"{version} is damaged", remedy="import it again, or restore the files from a backup")
    if damages:
        click.get_current_context().exit(1)
    if not as_json:
        checked = f"{last.files_checked} files, {size_text(last.bytes_checked)}, {last.rows_checked:,} rows"
        console().print(f"{version} is as it was committed: {checked}.", soft_wrap=True)


@click.command(cls=PlainCommand)
@click.argument("version")
@address_options
def quarantine(version: str, **values: Any) -> None:
    """Print the rows that were left out of VERSION (datasets/d/versions/v), one JSON object a line."""
    with connected(values) as millrace:
        for row in millrace.data.read_quarantine(version):
            click.echo(json.dumps(row, ensure_ascii=False))


@click.command(cls=PlainCommand)
@click.argument("version")
@address_options
@json_option
def cancel(version: str, as_json: bool, **values: Any) -> None:
    """End what is making VERSION (datasets/d/versions/v); nothing of it stays but its name, until it is deleted."""
    with connected(values) as millrace:
        found = millrace.data.get_version(version)
        if found.state != resources_pb2.DatasetVersion.STATE_CREATING:
            state = resources_pb2.DatasetVersion.State.Name(found.state).removeprefix("STATE_").lower()
            raise CommandFailed(f"{version} is not being made: it is {state}", code=REFUSED)
        millrace.data.cancel_version(found)
    if as_json:
        print_json({"cancelling": version})
    else:
        console().print(f"Cancelling {version}.", soft_wrap=True)


@click.command(cls=PlainCommand)
@click.argument("name")
@click.option("--etag", default="", help="Delete only what still has this etag.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@address_options
@json_option
def delete(name: str, etag: str, yes: bool, as_json: bool, **values: Any) -> None:
    """Delete a version (datasets/d/versions/v), or a dataset without versions (d, or datasets/d)."""
    is_version = "/versions/" in name
    full = name if is_version else full_name("datasets", name)
    if not (yes or as_json):
        click.confirm(f"Delete {full}? It cannot be brought back", abort=True)
    with connected(values) as millrace:
        if is_version:
            millrace.data.delete_version(full, etag=etag)
        else:
            millrace.data.delete_dataset(full, etag=etag)
    if as_json:
        print_json({"deleted": full})
    else:
        console().print(f"Deleted {full}.", soft_wrap=True)
