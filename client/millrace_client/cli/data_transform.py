"""`millrace data transform` and `millrace data predict`: versions made from versions.

The split options say how rows are divided into splits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from millrace.data.v1 import data_service_pb2, resources_pb2
from millrace_client import specs
from millrace_client.calls import Operation
from millrace_client.cli.command import (
    CommandFailed,
    PlainCommand,
    address_options,
    connected,
    console,
    full_name,
    json_option,
    print_json,
)
from millrace_client.cli.step_options import OF_VERSIONS, OrderedCommand, step_options, steps_of
from millrace_client.cli.versions import (
    AS_LONG_AS_IT_TAKES_S,
    check_options,
    checks_of,
    print_prediction,
    print_version,
    waiting,
)
from millrace_client.connection import Millrace

# --- Split rules ---

Function = TypeVar("Function", bound=Callable[..., Any])

RULES = ("--split", "--split-hash", "--split-ratio", "--split-column", "--split-time")
OPTIONS = (
    click.option(
        "--split",
        default="",
        metavar="SPLIT=WEIGHT,…",
        help="Split at random, e.g. train=0.8,test=0.2: --split-ratio with its shares in one.",
    ),
    click.option("--split-hash", default="", metavar="COLUMN,…", help="Split by a stable hash of these columns."),
    click.option("--split-ratio", is_flag=True, help="Split at random."),
    click.option("--split-column", default="", metavar="COLUMN", help="Split by a column of split names."),
    click.option("--split-time", default="", metavar="COLUMN", help="Split by a column of dates or timestamps."),
    click.option("--share", "shares", multiple=True, metavar="SPLIT=WEIGHT", help="Of a split by hash or at random."),
    click.option("--seed", default=0, help="Of a split by hash or at random."),
    click.option(
        "--before",
        multiple=True,
        metavar="SPLIT=TIME",
        help="Of a split by time, in order: its rows lie before, e.g. train=2024-01-31 or train=2024-01-31T12:00:00Z.",
    ),
    click.option("--rest", default="", metavar="SPLIT", help="Of a split by time: has the rows of later times."),
)


def split_options(function: Function) -> Function:
    """Add the options that `split_rule` reads."""
    for option in reversed(OPTIONS):
        function = option(function)
    return function


def split_rule(values: dict[str, Any]) -> data_service_pb2.SplitRule | None:
    """Remove the split options from `values` and return their rule, or None."""
    in_one, by_hash, at_random, by_column, by_time = (values.pop(name[2:].replace("-", "_")) for name in RULES)
    shares, seed, before, rest = (values.pop(name) for name in ("shares", "seed", "before", "rest"))
    if sum((bool(in_one), bool(by_hash), at_random, bool(by_column), bool(by_time))) > 1:
        raise click.UsageError(f"use one of {', '.join(RULES)}")
    if in_one and shares:
        raise click.UsageError("--split has its shares itself; leave --share out, or use --split-ratio")
    weights = _weights(in_one.split(","), "--split") if in_one else _weights(shares, "--share")
    at_random = at_random or bool(in_one)
    if bool(weights) != bool(by_hash or at_random):
        raise click.UsageError("--split-hash and --split-ratio need --share SPLIT=WEIGHT, e.g. --share train=0.9")
    if not bool(by_time) == bool(before) == bool(rest):
        raise click.UsageError(
            "--split-time needs --before SPLIT=TIME and --rest SPLIT, e.g. --before train=2024-01-31 --rest test"
        )
    if by_hash:
        return specs.hash_split(by_hash.split(","), weights, seed=seed)
    if at_random:
        return specs.ratio_split(weights, seed=seed)
    if by_time:
        return specs.time_split(by_time, _periods(before), rest)
    return specs.column_split(by_column) if by_column else None


def _weights(texts: Sequence[str], option: str) -> dict[str, float]:
    weights: dict[str, float] = {}
    for text in texts:
        split, _, weight = text.partition("=")
        if split in weights:
            raise click.BadParameter(f"{split!r} has a share already; name each split once", param_hint=option)
        try:
            weights[split] = float(weight)
        except ValueError:
            raise click.BadParameter(f"{text!r}: use SPLIT=WEIGHT, e.g. train=0.9", param_hint=option) from None
    return weights


def _periods(texts: Sequence[str]) -> dict[str, datetime]:
    periods: dict[str, datetime] = {}
    for text in texts:
        split, _, time = text.partition("=")
        try:
            before = datetime.fromisoformat(time)
        except ValueError:
            raise click.BadParameter(
                f"{text!r}: use SPLIT=TIME, e.g. train=2024-01-31", param_hint="--before"
            ) from None
        if split in periods:
            raise click.BadParameter(f"{split} has a time already; name each split once", param_hint="--before")
        # A time without a zone is UTC, as in the column.
        periods[split] = before if before.tzinfo else before.replace(tzinfo=UTC)
    return periods


# --- Transform ---

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

        def show_progress(now: Operation[Version]) -> None:
            metadata: Metadata = now.metadata
            doing = "learning" if metadata.phase == Metadata.PHASE_FITTING else "writing"
            again = f" (attempt {metadata.attempt})" if metadata.attempt > 1 else ""
            rows = f"{metadata.rows_done:,} of {metadata.rows_total:,} rows, {metadata.rows_per_second:,.0f} rows/s"
            line.update(f"{doing} … {rows}{again}")

        return operation.wait(AS_LONG_AS_IT_TAKES_S, on_progress=show_progress)


# --- Predict ---

PredictMetadata = data_service_pb2.PredictVersionMetadata


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
    help="Column to add: prediction, prediction_label, score, probabilities, logits; of a predictor one of its "
    "outputs. Default: all but logits.",
)
@click.option("--predictor", default="", metavar="MODULE:CLASS", help="Of a program's checkpoint: what predicts.")
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
    predictor: str,
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
        name, sha256 = _named(millrace, checkpoint) if checkpoint else "", ""
        if deployment:
            name, sha256, served_by = _served(millrace, deployment)
            predictor = predictor or served_by
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
            predictor=predictor,
        )
        with waiting(operation):
            version = operation.wait(AS_LONG_AS_IT_TAKES_S) if as_json else _wait_for_predictions(operation)
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


def _served(millrace: Millrace, deployment: str) -> tuple[str, str, str]:
    """Return the checkpoint that a deployment's version serves, its digest, and a program's predictor.

    Without a version number, the version with most traffic is chosen.
    """
    name, _, number = deployment.partition("@")
    found = millrace.deployments.get_deployment(full_name("deployments", name))
    versions = [version for version in found.versions if number in ("", version.number)]
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
    return chosen.lineage.checkpoint, chosen.lineage.checkpoint_sha256, found.spec.predictor


def _wait_for_predictions(operation: Operation[Version]) -> Version:
    with console().status("predicting …") as line:

        def show_progress(now: Operation[Version]) -> None:
            metadata: PredictMetadata = now.metadata
            if metadata.waiting_for:
                line.update(f"waiting for {metadata.waiting_for}")
                return
            doing = "checking" if metadata.phase == PredictMetadata.PHASE_CHECKING else "predicting"
            again = f" (attempt {metadata.attempt})" if metadata.attempt > 1 else ""
            rows = f"{metadata.rows_done:,} of {metadata.rows_total:,} rows, {metadata.rows_per_second:,.0f} rows/s"
            line.update(f"{doing} … {rows}{again}")

        return operation.wait(AS_LONG_AS_IT_TAKES_S, on_progress=show_progress)
