"""`millrace data transform`."""

from __future__ import annotations

from typing import Any

import click

from millrace.data.v1 import data_service_pb2, resources_pb2
from millrace_client.cli.checks import check_options, checks_of
from millrace_client.cli.options import address_options, connected, full_name, json_option
from millrace_client.cli.output import console, print_json
from millrace_client.cli.show import print_version
from millrace_client.cli.split_rules import RULES, split_options, split_rule
from millrace_client.cli.step_options import OF_VERSIONS, OrderedCommand, step_options, steps_of
from millrace_client.cli.version_waiting import AS_LONG_AS_IT_TAKES_S, waiting
from millrace_client.operations import Operation

Version = resources_pb2.DatasetVersion
Metadata = data_service_pb2.TransformVersionMetadata


@click.command(cls=OrderedCommand)
@click.argument("source")
@step_options(OF_VERSIONS)
@click.option("--dataset", default="", help="Where the new version goes. Default: the dataset of SOURCE.")
@split_options
@click.option("--fit-split", default="", help="Where steps learn. Default: train.")
@check_options
@click.option("--version", "version_id", default="", help="Default: the next free v1, v2, …")
@address_options
@json_option
def transform(
    source: str,
    dataset: str,
    fit_split: str,
    version_id: str,
    as_json: bool,
    **values: Any,
) -> None:
    """Make a new version out of SOURCE (datasets/d/versions/v): new splits, other columns, or both.

    The order of the options is that of the steps, and steps of a file come where --steps stands. What steps learn they
    learn on the training split.

    \b
    millrace data transform datasets/titanic/versions/v1 --drop name --filter 'fare < 500' \\
      --fill-nulls age=median --standardize age,fare --one-hot sex,class \\
      --concat features=age,fare,sex,class --split train=0.8,test=0.2
    """
    pipeline = steps_of(values, OF_VERSIONS)
    rule, checks = split_rule(values), checks_of(values)
    if not pipeline and rule is None:
        splits = f"{', '.join(RULES[:-1])} or {RULES[-1]}"
        raise click.UsageError(f"say what to do: a step, e.g. --standardize COLUMN, --steps FILE.json, {splits}")
    with connected(values) as millrace:
        operation = millrace.data.transform_version(
            source,
            pipeline,
            dataset=full_name("datasets", dataset) if dataset else "",
            version_id=version_id,
            splits=rule,
            fit_split=fit_split,
            checks=checks,
        )
        with waiting(operation):
            version = operation.wait(AS_LONG_AS_IT_TAKES_S) if as_json else _wait(operation)
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

        return operation.wait(AS_LONG_AS_IT_TAKES_S, on_progress=tell)
