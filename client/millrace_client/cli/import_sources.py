"""The options that name an import's sources, and say how CSV files are written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from millrace.data.v1 import data_service_pb2
from millrace_client import specs

Function = TypeVar("Function", bound=Callable[..., Any])
MakeSource = Callable[[str, str], data_service_pb2.ImportSource]

# Option, its builder, what follows SPLIT=, and its help.
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
    """The options that `sources_of` reads."""
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
    """Takes the sources' options out of `values`."""
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
    """What was given of it."""
    delimiter, columns = values.pop("csv_delimiter"), values.pop("csv_columns")
    given = {
        # No shell makes it easy to write one.
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
