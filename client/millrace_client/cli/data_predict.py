"""`millrace data predict`."""

from __future__ import annotations

from typing import Any

import click

from millrace.data.v1 import data_service_pb2, resources_pb2
from millrace_client import specs
from millrace_client.cli.exits import CommandFailed, PlainCommand
from millrace_client.cli.options import address_options, connected, full_name, json_option
from millrace_client.cli.output import console, print_json
from millrace_client.cli.show import print_prediction, print_version
from millrace_client.cli.version_waiting import AS_LONG_AS_IT_TAKES_S, waiting
from millrace_client.connection import Millrace
from millrace_client.operations import Operation

Version = resources_pb2.DatasetVersion
Metadata = data_service_pb2.PredictVersionMetadata


@click.command(cls=PlainCommand)
@click.argument("source")
@click.option(
    "--checkpoint", default="", metavar="NAME", help="trainingJobs/j/checkpoints/c, or a job or sweep for its best one."
)
@click.option("--deployment", default="", metavar="NAME[@VERSION]", help="Instead: what it serves.")
@click.option("--to", "dataset", default="", metavar="DATASET", help="Default: the dataset of SOURCE.")
@click.option("--split", default="", help="Default: all.")
@click.option("--column", "columns", multiple=True, help="Of SOURCE, goes along; again for more. Default: all.")
@click.option(
    "--output",
    "outputs",
    multiple=True,
    help="Column to add: prediction, prediction_label, score, probabilities, logits. Default: all but logits.",
)
@click.option("--prefix", default="", help="Before the name of each column that is added.")
@click.option("--quarantine", is_flag=True, help="Leave out the rows that cannot be preprocessed, and keep them aside.")
@click.option("--max-quarantined", default=0, help="With --quarantine: at most so many. Default: any number.")
@click.option("--batch-size", default=0, help="Rows in one call of the model. Default: 64.")
@click.option("--workers", default=0, help="At most. Default: as many as there is room for.")
@click.option("--cpus", default=0, help="Of each worker. Default: 1.")
@click.option("--gpus", default=0.0, help="Of each worker: parts of one, or 1. Default: 0, it runs on the CPU.")
@click.option("--version", "version_id", default="", help="Default: the next free v1, v2, …")
@address_options
@json_option
def predict(
    source: str,
    checkpoint: str,
    deployment: str,
    dataset: str,
    split: str,
    columns: tuple[str, ...],
    outputs: tuple[str, ...],
    prefix: str,
    quarantine: bool,
    max_quarantined: int,
    batch_size: int,
    workers: int,
    cpus: int,
    gpus: float,
    version_id: str,
    as_json: bool,
    **values: Any,
) -> None:
    """Make a new version of the rows of SOURCE (datasets/d/versions/v) and what a model says of them."""
    if bool(checkpoint) == bool(deployment):
        raise click.UsageError("name the model: --checkpoint or --deployment")
    if max_quarantined and not quarantine:
        raise click.UsageError("--max-quarantined needs --quarantine")
    with connected(values) as millrace:
        name, sha256 = _served(millrace, deployment) if deployment else (_named(millrace, checkpoint), "")
        operation = millrace.data.predict_version(
            source,
            name,
            checkpoint_sha256=sha256,
            dataset=full_name("datasets", dataset) if dataset else "",
            version_id=version_id,
            split=split,
            columns=columns,
            outputs=outputs,
            column_prefix=prefix,
            bad_rows=specs.quarantine(max_rows=max_quarantined) if quarantine else None,
            max_workers=workers,
            batch_size=batch_size,
            cpus=cpus,
            gpus=gpus,
        )
        with waiting(operation):
            version = operation.wait(AS_LONG_AS_IT_TAKES_S) if as_json else _wait(operation)
    if as_json:
        print_json(version)
        return
    print_version(version)
    print_prediction(version)


def _named(millrace: Millrace, checkpoint: str) -> str:
    if not checkpoint.startswith("sweeps/"):
        return full_name("trainingJobs", checkpoint)
    best = millrace.train.get_sweep(checkpoint).best_checkpoint
    if not best:
        raise CommandFailed(f"{checkpoint} has no checkpoint yet", remedy="wait for the first validation of a trial")
    return best


def _served(millrace: Millrace, deployment: str) -> tuple[str, str]:
    """The checkpoint that a version of a deployment serves, and its digest; by itself that with most traffic."""
    name, _, number = deployment.partition("@")
    found = millrace.deployments.get_deployment(full_name("deployments", name))
    versions = [one for one in found.versions if number in ("", one.number)]
    if not versions:
        there = ", ".join(one.number for one in found.versions) or "none yet"
        raise CommandFailed(f"{found.name} has no version {number}", remedy=f"its versions are {there}")
    most = max(one.weight for one in versions)
    chosen, *others = [one for one in versions if one.weight == most]
    if others:
        numbers = ", ".join(one.number for one in (chosen, *others))
        raise CommandFailed(
            f"the versions {numbers} of {found.name} get equally much traffic",
            remedy=f"name one: {name}@{chosen.number}",
        )
    return chosen.lineage.checkpoint, chosen.lineage.checkpoint_sha256


def _wait(operation: Operation[Version]) -> Version:
    with console().status("predicting …") as line:

        def tell(now: Operation[Version]) -> None:
            metadata: Metadata = now.metadata
            if metadata.waiting_for:
                line.update(f"waiting for {metadata.waiting_for}")
                return
            doing = "checking" if metadata.phase == Metadata.PHASE_CHECKING else "predicting"
            again = f" (attempt {metadata.attempt})" if metadata.attempt > 1 else ""
            rows = f"{metadata.rows_done:,} of {metadata.rows_total:,} rows, {metadata.rows_per_second:,.0f} rows/s"
            line.update(f"{doing} … {rows}{again}")

        return operation.wait(AS_LONG_AS_IT_TAKES_S, on_progress=tell)
