"""`millrace data list|show`, and the group that the other commands on data belong to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from millrace.data.v1 import resources_pb2
from millrace_client.cli.data_import import import_
from millrace_client.cli.data_keeping import cancel, delete, quarantine, verify
from millrace_client.cli.data_predict import predict
from millrace_client.cli.data_transform import transform
from millrace_client.cli.data_upload import upload
from millrace_client.cli.exits import PlainCommand
from millrace_client.cli.options import address_options, connected, full_name, json_option
from millrace_client.cli.output import console, new_table, print_json, silent, size_text, state_text
from millrace_client.cli.show import print_preview


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
def show(version: str, rows: int, html: Path | None, contact_sheet: Path | None, as_json: bool, **values: Any) -> None:
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
