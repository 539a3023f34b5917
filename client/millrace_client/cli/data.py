"""`millrace data upload|import|list|show|verify|quarantine|cancel|delete`, and the group of all commands on data."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import click

from millrace.data.v1 import data_service_pb2, resources_pb2
from millrace_client import specs
from millrace_client.calls import Operation
from millrace_client.cli.command import (
    REFUSED,
    CommandFailed,
    PlainCommand,
    address_options,
    connected,
    console,
    full_name,
    json_option,
    new_table,
    print_json,
    silent,
    size_text,
    state_text,
)
from millrace_client.cli.versions import (
    AS_LONG_AS_IT_TAKES_S,
    check_options,
    checks_of,
    predict,
    print_preview,
    print_version,
    transform,
    waiting,
)
from millrace_client.uploads import UploadInterrupted

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
            if now.metadata.waiting_for:
                line.update(f"waiting for {now.metadata.waiting_for}")
                return
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


# --- Upload ---


@click.command(cls=PlainCommand)
@click.argument("dataset")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--id", "upload_id", default="", help="Default: one that the server chooses.")
@click.option("--resume", default="", metavar="UPLOAD", help="Go on with this upload of the same file.")
@click.option("--presigned", is_flag=True, help="Straight into the store, which must be S3: for bulk.")
@address_options
@json_option
def upload(
    dataset: str, file: Path, upload_id: str, resume: str, presigned: bool, as_json: bool, **values: Any
) -> None:
    """Send FILE to the server, into DATASET, which is made where it does not exist.

    `millrace data import DATASET --csv train=UPLOAD` then reads it, any number of times within 7 days.
    """
    name = full_name("datasets", dataset)
    with connected(values) as millrace, console().status(f"sending {file.name} …") as line:

        def show_progress(durable_bytes: int, total_bytes: int | None) -> None:
            of = f" of {size_text(total_bytes)}" if total_bytes is not None else ""
            line.update(f"sending {file.name} … {size_text(durable_bytes)}{of}")

        try:
            if resume:
                sent = millrace.data.resume_upload(resume, file, on_progress=show_progress)
            else:
                millrace.data.create_dataset(name.removeprefix("datasets/"), exist_ok=True)
                send = millrace.data.upload_presigned if presigned else millrace.data.upload
                sent = send(name, file, upload_id=upload_id, on_progress=show_progress)
        except UploadInterrupted as interrupted:
            raise CommandFailed(
                f"interrupted; {interrupted.name} stays open for 24 hours",
                remedy=f"millrace data upload {dataset} {file} --resume {interrupted.name}",
                code=130,
            ) from None
    if as_json:
        print_json(sent)
    else:
        console().print(f"{sent.name}  {size_text(sent.size_bytes)}  sha256 {sent.sha256}", soft_wrap=True)


# --- Verify, quarantine, cancel, delete ---


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


# --- List and show ---


@click.group()
def data() -> None:
    """Import, transform, predict on, list, show, verify, cancel and delete datasets and their versions."""


data.add_command(import_)
data.add_command(upload)
data.add_command(transform)
data.add_command(predict)
data.add_command(verify)
data.add_command(quarantine)
data.add_command(cancel)
data.add_command(delete)


@data.command("list", cls=PlainCommand)
@click.argument("dataset", required=False)
@address_options
@json_option
def list_(dataset: str | None, as_json: bool, **values: Any) -> None:
    """List datasets, or the versions of DATASET."""
    with connected(values) as millrace:
        if dataset:
            versions = list(millrace.data.list_versions(full_name("datasets", dataset)))
            document: dict[str, Any] = {"versions": versions}
            table = new_table("version", "state", "rows", "size", "splits", numbers=("rows", "size"))
            for version in versions:
                state = resources_pb2.DatasetVersion.State.Name(version.state)
                splits = ", ".join(f"{split.name} {split.row_count:,}" for split in version.splits)
                table.add_row(
                    version.name, state_text(state), f"{version.row_count:,}", size_text(version.size_bytes), splits
                )
        else:
            datasets = list(millrace.data.list_datasets())
            document = {"datasets": datasets}
            table = new_table("dataset", "created", "description")
            for dataset_one in datasets:
                created = f"{dataset_one.create_time.ToDatetime():%Y-%m-%d %H:%M}"
                table.add_row(dataset_one.name, created, dataset_one.display_name or dataset_one.description)
    if as_json:
        print_json(document)
    elif table.row_count:
        console().print(table)
    else:
        console().print("None yet.")


@data.command(cls=PlainCommand)
@click.argument("version")
@click.option("--rows", default=3, help="Rows of each split, at most 100.", show_default=True)
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write the report as one HTML page.")
@click.option(
    "--contact-sheet", type=click.Path(dir_okay=False, path_type=Path), help="Save the images of those rows as a PNG."
)
@address_options
@json_option
def show(version: str, rows: int, html: Path | None, contact_sheet: Path | None, as_json: bool, **values: Any) -> None:
    """Show what VERSION (datasets/d/versions/v) is made of: statistics, checks, splits and the first rows."""
    with connected(values) as millrace:
        preview = millrace.data.preview_version(version, rows_per_split=rows)
    if as_json:
        from millrace_client.report import rows_of

        print_json({"version": preview.version, "rows": rows_of(preview), "report": preview.report})
    else:
        print_preview(preview)
    with silent(as_json):
        if html is not None:
            from millrace_client.report.pages import page

            html.write_text(page(preview), encoding="utf-8")
            console().print(f"Wrote {html}", soft_wrap=True)
        if contact_sheet is not None and preview.contact_sheet_png:
            contact_sheet.write_bytes(preview.contact_sheet_png)
            console().print(f"Saved {contact_sheet}", soft_wrap=True)
        elif contact_sheet is not None:
            console().print("No column of it is an image: no contact sheet.")
