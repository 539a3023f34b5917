"""`millrace data transform`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from google.protobuf import json_format

from millrace.common.v1 import transform_pb2
from millrace.data.v1 import data_service_pb2, resources_pb2
from millrace_client import specs
from millrace_client.cli.exits import PlainCommand
from millrace_client.cli.options import address_options, connected, full_name, json_option
from millrace_client.cli.output import console, print_json
from millrace_client.cli.show import print_version
from millrace_client.operations import Operation

Version = resources_pb2.DatasetVersion
Metadata = data_service_pb2.TransformVersionMetadata


@click.command(cls=PlainCommand)
@click.argument("source")
@click.option(
    "--steps",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='JSON of a Transform: {"steps": [{"column": "age", "standardize": {}}, …]}.',
)
@click.option("--dataset", default="", help="Where the new version goes. Default: the dataset of SOURCE.")
@click.option("--split-hash", default="", metavar="COLUMN,…", help="Split by a stable hash of these columns.")
@click.option("--split-ratio", is_flag=True, help="Split at random.")
@click.option("--split-column", default="", metavar="COLUMN", help="Split by a column of split names.")
@click.option("--share", "shares", multiple=True, metavar="SPLIT=WEIGHT", help="Of a split by hash or at random.")
@click.option("--seed", default=0, help="Of a split by hash or at random.")
@click.option("--fit-split", default="", help="Where steps learn. Default: train.")
@click.option("--version", "version_id", default="", help="Default: the next free v1, v2, …")
@address_options
@json_option
def transform(
    source: str,
    steps: Path | None,
    dataset: str,
    split_hash: str,
    split_ratio: bool,
    split_column: str,
    shares: tuple[str, ...],
    seed: int,
    fit_split: str,
    version_id: str,
    as_json: bool,
    **values: Any,
) -> None:
    """Make a new version out of SOURCE (datasets/d/versions/v): new splits, other columns, or both."""
    pipeline = _steps(steps) if steps else []
    rule = _rule(split_hash, split_ratio, split_column, shares, seed)
    if not pipeline and rule is None:
        raise click.UsageError("say what to do: --steps FILE.json, --split-hash, --split-ratio or --split-column")
    with connected(values) as millrace:
        operation = millrace.data.transform_version(
            source,
            pipeline,
            dataset=full_name("datasets", dataset) if dataset else "",
            version_id=version_id,
            splits=rule,
            fit_split=fit_split,
        )
        version = operation.wait() if as_json else _wait(operation)
    if as_json:
        print_json(version)
    else:
        print_version(version)


def _wait(operation: Operation[Version]) -> Version:
    with console().status("transforming …") as line:

        def tell(now: Operation[Version]) -> None:
            metadata: Metadata = now.metadata
            doing = "learning" if metadata.phase == Metadata.PHASE_FITTING else "writing"
            again = f" (attempt {metadata.attempt})" if metadata.attempt > 1 else ""
            rows = f"{metadata.rows_done:,} of {metadata.rows_total:,} rows, {metadata.rows_per_second:,.0f} rows/s"
            line.update(f"{doing} … {rows}{again}")

        return operation.wait(on_progress=tell)


def _steps(file: Path) -> Sequence[transform_pb2.TransformStep]:
    try:
        return json_format.Parse(file.read_bytes(), transform_pb2.Transform()).steps
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{file} is no Transform: {error}", param_hint="--steps") from None


def _rule(
    split_hash: str, split_ratio: bool, split_column: str, shares: Sequence[str], seed: int
) -> data_service_pb2.SplitRule | None:
    if sum((bool(split_hash), split_ratio, bool(split_column))) > 1:
        raise click.UsageError("use one of --split-hash, --split-ratio and --split-column")
    weights = dict(_share(text) for text in shares)
    if bool(weights) != bool(split_hash or split_ratio):
        raise click.UsageError("--split-hash and --split-ratio need --share SPLIT=WEIGHT, e.g. --share train=0.9")
    if split_hash:
        return specs.hash_split(split_hash.split(","), weights, seed=seed)
    if split_ratio:
        return specs.ratio_split(weights, seed=seed)
    return specs.column_split(split_column) if split_column else None


def _share(text: str) -> tuple[str, float]:
    split, _, weight = text.partition("=")
    try:
        return split, float(weight)
    except ValueError:
        raise click.BadParameter(f"{text!r}: use SPLIT=WEIGHT, e.g. train=0.9", param_hint="--share") from None
