"""`millrace data import`."""

from __future__ import annotations

from typing import Any, Literal

import click

from millrace.data.v1 import data_service_pb2, resources_pb2
from millrace_client import specs
from millrace_client.cli.checks import check_options, checks_of
from millrace_client.cli.exits import PlainCommand
from millrace_client.cli.import_sources import pair, source_options, sources_of
from millrace_client.cli.options import address_options, connected, full_name, json_option
from millrace_client.cli.output import console, print_json
from millrace_client.cli.show import print_version
from millrace_client.cli.version_waiting import AS_LONG_AS_IT_TAKES_S, waiting
from millrace_client.operations import Operation

Version = resources_pb2.DatasetVersion


@click.command("import", cls=PlainCommand)
@click.argument("dataset")
@source_options
@click.option(
    "--hold-out", "hold_outs", multiple=True, metavar="FROM:TO=FRACTION", help="Cut a random share off a split."
)
@click.option("--seed", default=0, help="Of the random shares.")
@click.option("--type", "types", multiple=True, metavar="COLUMN=TYPE", help="An Arrow type that a column shall have.")
@click.option("--nan-as-null", is_flag=True, help="NaN in columns of floats is a missing value, and becomes null.")
@click.option("--quarantine", is_flag=True, help="Leave bad rows out and keep them aside; else the first one ends it.")
@click.option("--max-quarantined", default=0, help="With --quarantine: at most so many. Default: any number.")
@click.option(
    "--partitioning",
    type=click.Choice(["hive", "none"]),
    default="hive",
    show_default=True,
    help="Whether folders NAME=VALUE below the folder that FILES names are columns.",
)
@check_options
@click.option("--append-to", metavar="VERSION", help="Follow this version, with its rows first.")
@click.option("--replace", "replaced", metavar="VERSION", help="Follow this version, and keep nothing of it.")
@click.option("--version", "version_id", default="", help="Default: the next free v1, v2, …")
@address_options
@json_option
def import_(
    dataset: str,
    hold_outs: tuple[str, ...],
    seed: int,
    types: tuple[str, ...],
    nan_as_null: bool,
    quarantine: bool,
    max_quarantined: int,
    partitioning: Literal["hive", "none"],
    append_to: str | None,
    replaced: str | None,
    version_id: str,
    as_json: bool,
    **values: Any,
) -> None:
    """Import files into a new version of DATASET, which is made where it does not exist.

    FILES are paths or URIs (file:///…, s3://…) that the server can read, with `*`, `?` and `**` (in quotes) or a `/` at
    the end for several, or an upload's name.
    """
    sources, checks = sources_of(values), checks_of(values)
    if not sources:
        raise click.UsageError("name at least one source, e.g. --csv train=FILES or --images train=FOLDER")
    if max_quarantined and not quarantine:
        raise click.UsageError("--max-quarantined needs --quarantine")
    held_out = [_hold_out(text, seed) for text in hold_outs]
    column_types = dict(pair(text, "--type", "COLUMN=TYPE") for text in types)
    base = _base(append_to, replaced)
    name = full_name("datasets", dataset)
    with connected(values) as millrace:
        millrace.data.create_dataset(name.removeprefix("datasets/"), exist_ok=True)
        operation = millrace.data.import_version(
            name,
            sources,
            hold_outs=held_out,
            version_id=version_id,
            column_types=column_types,
            bad_rows=specs.quarantine(max_rows=max_quarantined) if quarantine else None,
            checks=checks,
            base=base,
            partitioning=partitioning,
            nan_as_null=nan_as_null,
        )
        with waiting(operation):
            version = operation.wait(AS_LONG_AS_IT_TAKES_S) if as_json else wait_with_rows(operation)
    if as_json:
        print_json(version)
    else:
        print_version(version)


def wait_with_rows(operation: Operation[Version]) -> Version:
    """Waits for an import with a line that counts the rows read."""
    with console().status("importing …") as line:

        def tell(now: Operation[Version]) -> None:
            again = f" (attempt {now.metadata.attempt})" if now.metadata.attempt > 1 else ""
            aside = f", {now.metadata.rows_quarantined:,} left out" if now.metadata.rows_quarantined else ""
            line.update(f"importing … {now.metadata.rows_read:,} rows{aside}{again}")

        return operation.wait(AS_LONG_AS_IT_TAKES_S, on_progress=tell)


def _base(append_to: str | None, replaced: str | None) -> data_service_pb2.Base | None:
    if append_to and replaced:
        raise click.UsageError("use --append-to or --replace, not both")
    if append_to:
        return specs.append_to(append_to)
    return specs.replacing(replaced) if replaced else None


def _hold_out(text: str, seed: int) -> data_service_pb2.HoldOut:
    splits, _, fraction = text.partition("=")
    from_split, _, to_split = splits.partition(":")
    try:
        if not (from_split and to_split):
            raise ValueError("both splits need a name")
        return specs.hold_out(from_split, to_split, float(fraction), seed=seed)
    except ValueError:
        raise click.BadParameter(
            f"{text!r}: use FROM:TO=FRACTION, e.g. train:validation=0.1", param_hint="--hold-out"
        ) from None
