"""`millrace code push|list|show|delete`: bundles of code, which training jobs run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from millrace.train.v1 import code_bundle_pb2, resources_pb2
from millrace_client.cli.command import (
    CommandFailed,
    PlainCommand,
    address_options,
    connected,
    console,
    full_name,
    json_option,
    new_table,
    print_json,
    size_text,
    verbatim,
)
from millrace_client.cli.train_specs import own_entry
from millrace_client.connection import Millrace

COLLECTION = "codeBundles"
MAX_SHOWN_MODULES = 5


@click.group()
def code() -> None:
    """Push, list, show and delete bundles of your own code."""


@code.command(cls=PlainCommand)
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@address_options
@json_option
def push(source: Path, as_json: bool, **values: Any) -> None:
    """Pack SOURCE (a folder, a wheel or a .py file) and store it under its digest.

    .git, __pycache__, virtual environments and what a .millraceignore in the folder names stay out.
    """
    with connected(values) as millrace:
        bundle = push_source(millrace, source)
    if as_json:
        print_json(bundle)
    else:
        console().print(f"[bold]{bundle.name}[/]", soft_wrap=True)
        console().print(f"  {bundle.file_count:,} files, {size_text(bundle.size_bytes)}")


@code.command("list", cls=PlainCommand)
@address_options
@json_option
def list_(as_json: bool, **values: Any) -> None:
    """List the bundles that are stored."""
    with connected(values) as millrace:
        bundles = list(millrace.train.list_code_bundles())
    if as_json:
        print_json({"code_bundles": bundles})
    elif not bundles:
        console().print("None yet.")
    else:
        table = new_table("bundle", "files", "size", "pushed", "modules", numbers=("files", "size"))
        for bundle in bundles:
            table.add_row(
                bundle.name,
                f"{bundle.file_count:,}",
                size_text(bundle.size_bytes),
                f"{bundle.create_time.ToDatetime():%Y-%m-%d %H:%M}",
                verbatim(_modules(bundle)),
            )
        console().print(table)


@code.command(cls=PlainCommand)
@click.argument("bundle")
@address_options
@json_option
def show(bundle: str, as_json: bool, **values: Any) -> None:
    """Show BUNDLE (codeBundles/… or its digest): its modules and what it requires."""
    with connected(values) as millrace:
        found = millrace.train.get_code_bundle(full_name(COLLECTION, bundle))
    if as_json:
        print_json(found)
        return
    console().print(f"[bold]{found.name}[/]", soft_wrap=True)
    console().print(f"  {found.file_count:,} files, {size_text(found.unpacked_size_bytes)}")
    for title, texts in (("module", found.modules), ("requires", found.requirements)):
        for text in texts:
            console().print(f"  [dim]{title}[/] ", verbatim(text), sep="", soft_wrap=True)


@code.command(cls=PlainCommand)
@click.argument("bundle")
@click.option("--yes", is_flag=True, help="Do not ask.")
@address_options
@json_option
def delete(bundle: str, yes: bool, as_json: bool, **values: Any) -> None:
    """Delete BUNDLE, which no training job names any more."""
    name = full_name(COLLECTION, bundle)
    if not (yes or as_json):
        click.confirm(f"Delete {name}?", abort=True)
    with connected(values) as millrace:
        millrace.train.delete_code_bundle(name)
    if as_json:
        print_json({"deleted": name})
    else:
        console().print(f"[bold]{name}[/] is deleted.", soft_wrap=True)


def push_source(millrace: Millrace, source: Path) -> code_bundle_pb2.CodeBundle:
    """Push a folder, wheel or file. An unusable source fails the command."""
    from millrace_client.code_bundles import NotABundle

    try:
        return millrace.train.push_code(source)
    except NotABundle as error:
        raise CommandFailed(f"{source}: {error}") from None


def set_own_code(millrace: Millrace, spec: resources_pb2.TrainingSpec, model: str, *, dry_run: bool = False) -> None:
    """Push the code of the user's own model, and name it in the specification.

    A dry run only computes the bundle's name.
    """
    from millrace_client.code_bundles import NotABundle, bundle_name

    own = own_entry(model)
    if own is None:
        return
    source, _ = own
    try:
        spec.model.code_bundle = bundle_name(source) if dry_run else push_source(millrace, source).name
    except NotABundle as error:
        raise CommandFailed(f"{source}: {error}") from None


def _modules(bundle: code_bundle_pb2.CodeBundle) -> str:
    more = len(bundle.modules) - MAX_SHOWN_MODULES
    return ", ".join(bundle.modules[:MAX_SHOWN_MODULES]) + (f" and {more} more" if more > 0 else "")
