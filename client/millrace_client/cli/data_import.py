"""`millrace data import`: the command, its source options and its CSV options."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import click

from millrace.data.v1 import data_service_pb2, resources_pb2
from millrace_client import specs
from millrace_client.cli.command import (
    PlainCommand,
    address_options,
    connected,
    console,
    full_name,
    json_option,
    print_json,
)
from millrace_client.cli.versions import AS_LONG_AS_IT_TAKES_S, check_options, checks_of, print_version, waiting
from millrace_client.operations import Operation

# --- Sources ---

Function = TypeVar("Function", bound=Callable[..., Any])
MakeSource = Callable[[str, str], data_service_pb2.ImportSource]

# Option, builder, metavar after SPLIT=, help.
FORMATS: tuple[tuple[str, MakeSource, str, str], ...] = (
    ("parquet", specs.parquet_source, "FILES", "Parquet files."),
    ("arrow", specs.arrow_source, "FILES", "Arrow IPC streams or files."),
    (
        "csv",
        specs.csv_source,
        "FILES",
        "CSV files; the first line has the names of the columns, unless --csv-columns does.",
    ),
    ("json-lines", specs.json_lines_source, "FILES", "Files of one JSON object a line."),
    ("images", specs.image_folder_source, "FOLDER", "A folder with a folder of images for each class."),
    ("tar", specs.image_tar_source, "FILES", "Tars of such a folder."),
)
CSV_OPTIONS = (
    click.option(
        "--csv-delimiter", default="", metavar="CHARACTER", help="Between values, or `tab`. Default: a comma."
    ),
    click.option(
        "--csv-columns", default="", metavar="NAME,…", help="The columns of CSV files without a line of names."
    ),
    click.option(
        "--csv-null",
        multiple=True,
        metavar="TEXT",
        help="Stands for a null. Default: NA, null, NaN, …. May be repeated.",
    ),
    click.option("--csv-encoding", default="", help="utf-16, latin-1 or windows-1252. Default: utf-8."),
)


def source_options(function: Function) -> Function:
    """Add the options that `sources_of` reads."""
    for option in reversed(CSV_OPTIONS):
        function = option(function)
    for name, _, metavar, text in reversed(FORMATS):
        function = click.option(
            f"--{name}", multiple=True, metavar=f"SPLIT={metavar}", help=f"{text} May be repeated."
        )(function)
    return click.option(
        "--idx", multiple=True, metavar="SPLIT=IMAGES,LABELS", help="A pair of IDX files. May be repeated."
    )(function)


def sources_of(values: dict[str, Any]) -> list[data_service_pb2.ImportSource]:
    """Remove the source options from `values` and return the sources."""
    found = [_idx(text) for text in values.pop("idx")]
    csv_form = _csv_form(values)
    if csv_form and not values["csv"]:
        raise click.UsageError("--csv-delimiter, --csv-columns, --csv-null and --csv-encoding need --csv")
    for name, make, metavar, _ in FORMATS:
        if name == "csv":
            make = functools.partial(specs.csv_source, **csv_form)
        for text in values.pop(name.replace("-", "_")):
            split, files = pair(text, f"--{name}", f"SPLIT={metavar}")
            found.append(make(split, files))
    return found


def pair(text: str, option: str, form: str) -> tuple[str, str]:
    left, _, right = text.partition("=")
    if not (left and right):
        raise click.BadParameter(f"{text!r}: use {form}", param_hint=option)
    return left, right


def _csv_form(values: dict[str, Any]) -> dict[str, Any]:
    """Return the CSV options that were given."""
    delimiter, columns = values.pop("csv_delimiter"), values.pop("csv_columns")
    given = {
        # Most shells make a tab character hard to write.
        "delimiter": "\t" if delimiter in ("tab", "\\t") else delimiter,
        "column_names": columns.split(",") if columns else [],
        "null_values": values.pop("csv_null"),
        "encoding": values.pop("csv_encoding"),
    }
    return {name: value for name, value in given.items() if value}


def _idx(text: str) -> data_service_pb2.ImportSource:
    split, files = pair(text, "--idx", "SPLIT=IMAGES,LABELS")
    images, _, labels = files.partition(",")
    if not (images and labels):
        raise click.BadParameter(f"{text!r}: use SPLIT=IMAGES,LABELS", param_hint="--idx")
    return specs.idx_source(split, images, labels)


# --- Data import ---

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
    """Wait for an import, and show the number of rows read."""
    with console().status("importing …") as line:

        def show_progress(now: Operation[Version]) -> None:
            again = f" (attempt {now.metadata.attempt})" if now.metadata.attempt > 1 else ""
            aside = f", {now.metadata.rows_quarantined:,} left out" if now.metadata.rows_quarantined else ""
            line.update(f"importing … {now.metadata.rows_read:,} rows{aside}{again}")

        return operation.wait(AS_LONG_AS_IT_TAKES_S, on_progress=show_progress)


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
