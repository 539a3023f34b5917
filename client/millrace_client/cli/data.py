"""`millrace data import|list|show`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from millrace.data.v1 import data_service_pb2, resources_pb2
from millrace_client.cli.exits import PlainCommand
from millrace_client.cli.options import address_options, connected, full_name, json_option
from millrace_client.cli.output import console, new_table, print_json, silent, size_text, state_text
from millrace_client.cli.show import print_preview, print_version
from millrace_client.operations import Operation
from millrace_client.specs import hold_out, idx_source, parquet_source


@click.group()
def data() -> None:
    """Import, list and show datasets."""


@data.command("import", cls=PlainCommand)
@click.argument("dataset")
@click.option("--idx", multiple=True, metavar="SPLIT=IMAGES,LABELS", help="A pair of IDX files; may be given again.")
@click.option("--parquet", multiple=True, metavar="SPLIT=FILE", help="A Parquet file; may be given again.")
@click.option(
    "--hold-out", "hold_outs", multiple=True, metavar="FROM:TO=FRACTION", help="Cut a random share off a split."
)
@click.option("--seed", default=0, help="Of the random shares.")
@click.option("--version", "version_id", default="", help="Default: the next free v1, v2, …")
@address_options
@json_option
def import_(
    dataset: str,
    idx: tuple[str, ...],
    parquet: tuple[str, ...],
    hold_outs: tuple[str, ...],
    seed: int,
    version_id: str,
    as_json: bool,
    **values: Any,
) -> None:
    """Import files into a new version of DATASET, which is made where it does not exist.

    Files are paths or URIs (file:///…, s3://…) that the server can read.
    """
    sources = [_idx(text) for text in idx] + [_parquet(text) for text in parquet]
    if not sources:
        raise click.UsageError("name at least one source: --idx SPLIT=IMAGES,LABELS or --parquet SPLIT=FILE")
    held_out = [_hold_out(text, seed) for text in hold_outs]
    name = full_name("datasets", dataset)
    with connected(values) as millrace:
        millrace.data.create_dataset(name.removeprefix("datasets/"), exist_ok=True)
        operation = millrace.data.import_version(name, sources, hold_outs=held_out, version_id=version_id)
        version = operation.wait() if as_json else wait_with_rows(operation)
    if as_json:
        print_json(version)
    else:
        print_version(version)


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
            for one in versions:
                state = resources_pb2.DatasetVersion.State.Name(one.state)
                splits = ", ".join(f"{split.name} {split.row_count:,}" for split in one.splits)
                table.add_row(one.name, state_text(state), f"{one.row_count:,}", size_text(one.size_bytes), splits)
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
def show(
    version: str, rows: int, html: Path | None, contact_sheet: Path | None, as_json: bool, **values: Any
) -> None:
    """Show what VERSION (datasets/d/versions/v) is made of: statistics, checks, splits and the first rows."""
    with connected(values) as millrace:
        preview = millrace.data.preview_version(version, rows_per_split=rows)
    if as_json:
        from millrace_client.report.profile import rows_of

        print_json({"version": preview.version, "rows": rows_of(preview), "report": preview.report})
    else:
        print_preview(preview)
    with silent(as_json):
        if html is not None:
            from millrace_client.report.page import page

            html.write_text(page(preview), encoding="utf-8")
            console().print(f"Wrote {html}", soft_wrap=True)
        if contact_sheet is not None and preview.contact_sheet_png:
            contact_sheet.write_bytes(preview.contact_sheet_png)
            console().print(f"Saved {contact_sheet}", soft_wrap=True)
        elif contact_sheet is not None:
            console().print("No column of it is an image: no contact sheet.")


def wait_with_rows(operation: Operation[resources_pb2.DatasetVersion]) -> resources_pb2.DatasetVersion:
    """Waits for an import with a line that counts the rows read."""
    with console().status("importing …") as line:

        def tell(now: Operation[resources_pb2.DatasetVersion]) -> None:
            again = f" (attempt {now.metadata.attempt})" if now.metadata.attempt > 1 else ""
            line.update(f"importing … {now.metadata.rows_read:,} rows{again}")

        return operation.wait(on_progress=tell)


def _idx(text: str) -> data_service_pb2.ImportSource:
    split, _, files = text.partition("=")
    images, _, labels = files.partition(",")
    if not (split and images and labels):
        raise click.BadParameter(f"{text!r}: use SPLIT=IMAGES,LABELS", param_hint="--idx")
    return idx_source(split, images, labels)


def _parquet(text: str) -> data_service_pb2.ImportSource:
    split, _, file = text.partition("=")
    if not (split and file):
        raise click.BadParameter(f"{text!r}: use SPLIT=FILE", param_hint="--parquet")
    return parquet_source(split, file)


def _hold_out(text: str, seed: int) -> data_service_pb2.HoldOut:
    splits, _, fraction = text.partition("=")
    from_split, _, to_split = splits.partition(":")
    try:
        if not (from_split and to_split):
            raise ValueError("both splits need a name")
        return hold_out(from_split, to_split, float(fraction), seed=seed)
    except ValueError:
        raise click.BadParameter(
            f"{text!r}: use FROM:TO=FRACTION, e.g. train:validation=0.1", param_hint="--hold-out"
        ) from None
