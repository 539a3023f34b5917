"""Versions on the command line: quality checks, waiting, the output of `millrace data show`, and `data
transform|predict`.

A check is `--check range:price=0:100`. The server continues to make a version even if the command stops waiting. The
split options of `transform` say how rows are divided into splits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from millrace.data.v1 import data_service_pb2, resources_pb2
from millrace_client import checks, specs
from millrace_client.calls import Operation
from millrace_client.cli.command import (
    INTERRUPTED,
    CommandFailed,
    PlainCommand,
    address_options,
    connected,
    console,
    cut,
    full_name,
    json_option,
    new_table,
    print_json,
    size_text,
    state_text,
    verbatim,
)
from millrace_client.cli.spec_options import OF_VERSIONS, OrderedCommand, step_options, steps_of
from millrace_client.connection import Millrace
from millrace_client.report import Column, Part, Profile, block_bars, profile_of, type_text
from millrace_client.steps import Value

if TYPE_CHECKING:
    from rich.text import Text


# --- What is shown of a version ---

MAX_REASONS, MAX_EXAMPLES, MAX_SHOWN_VALUES = 10, 2, 4
MAX_CELL = 48
# The width in characters from which all figures of a column fit.
WIDE = 120
NARROW_CELL, NARROW_NAME = 20, 15
# The space between two columns of a table.
_GUTTER = 3


def print_version(version: resources_pb2.DatasetVersion) -> None:
    """Print a version's header, columns and splits, and whether rows were left out."""
    _print_header(version)
    columns = new_table("column", "type")
    for column in version.columns:
        columns.add_row(verbatim(column.name), verbatim(type_text(column)))
    console().print(columns)
    _print_splits(version)
    if version.quarantined_row_count:
        console().print(
            f"{_left_out(version.quarantined_row_count)}: millrace data quarantine {version.name}", soft_wrap=True
        )


def print_prediction(version: resources_pb2.DatasetVersion) -> None:
    """Print the checkpoint of a version's predictions."""
    made = version.prediction
    by = f"[cyan]{made.checkpoint}[/]  sha256:{made.checkpoint_sha256}"
    console().print(f"  [dim]predicted by[/] {by}", soft_wrap=True)


def print_preview(preview: data_service_pb2.PreviewVersionResponse) -> None:
    """Print everything known about a version."""
    profile = profile_of(preview)
    _print_header(profile.version)
    _print_origin(profile)
    _print_columns(profile)
    _print_splits(profile.version)
    _print_checks(profile)
    _print_quarantine(profile)
    _print_rows(profile)


def _print_header(version: resources_pb2.DatasetVersion) -> None:
    state = state_text(resources_pb2.DatasetVersion.State.Name(version.state))
    console().print(f"[bold]{version.name}[/]  {state}  {version.row_count:,} rows  {size_text(version.size_bytes)}")


def _print_origin(profile: Profile) -> None:
    for parent in profile.version.parents:
        console().print(f"  [dim]from[/] [cyan]{parent.version}[/]", soft_wrap=True)
    if profile.version.HasField("prediction"):
        print_prediction(profile.version)
    for index, step in enumerate(profile.steps):
        console().print("  [dim]then[/]" if index else "  [dim]by[/]  ", verbatim(step), soft_wrap=True)


def _print_columns(profile: Profile) -> None:
    if not any(column.parts for column in profile.columns):
        table = new_table("column", "type")
        for column in profile.columns:
            table.add_row(verbatim(column.name), verbatim(column.type_text))
        console().print(table)
        return
    has_space = console().width >= WIDE
    several = len(profile.version.splits) > 1
    numbers = ("nulls", "min", "mean ± deviation", "max", "distinct") if has_space else ("nulls", "mean", "distinct")
    headers = ["column", *(["split"] if several else []), *numbers, "values"]
    table = new_table(*headers, numbers=numbers)
    for one in table.columns:
        one.no_wrap = True
    for column in profile.columns:
        table.add_row(*(_cell(column, header) for header in headers))
    console().print(table)


def _cell(column: Column, header: str) -> Text:
    """Return a cell with a line per split; the first cell of a row has the column's name and type instead."""
    from rich.text import Text

    if header == "column":
        most = MAX_CELL if console().width >= WIDE else NARROW_NAME
        return Text("\n").join([verbatim(cut(column.name, most)), verbatim(cut(column.type_text, most), "dim")])
    if header == "values":
        return Text("\n").join(_values(column, part) for part in column.parts)
    return Text("\n").join(verbatim(_fact(part, header)) for part in column.parts)


def _fact(part: Part, header: str) -> str:
    if header == "nulls" and part.nan_count and console().width >= WIDE:
        return f"{part.null_text} + {part.nan_count:,} NaN"
    facts = {"nulls": part.null_text, "min": part.least, "mean ± deviation": part.middle, "max": part.most}
    facts["mean"] = part.middle.partition(" ± ")[0]
    return {**facts, "split": part.split, "distinct": part.distinct}[header]


def _values(column: Column, part: Part) -> Text:
    """Return the histogram, or the frequent values if they are more informative."""
    if part.histogram and not column.has_names:
        return verbatim(block_bars(part.histogram), "cyan")
    if not part.values or part.values[0].row_count == 1:
        return verbatim("–")
    text = ", ".join(f"{cut(value.text, 16)} {value.share}" for value in part.values[:MAX_SHOWN_VALUES])
    space = MAX_CELL if console().width >= WIDE else NARROW_CELL
    return verbatim(cut(text + (", …" if len(part.values) > MAX_SHOWN_VALUES else ""), space), "cyan")


def _print_splits(version: resources_pb2.DatasetVersion) -> None:
    splits = new_table("split", "rows", "row ids", numbers=("rows",))
    for split in version.splits:
        last = split.first_row_id + split.row_count - 1
        ids = f"{split.first_row_id}–{last}" if split.row_count else "none"
        splits.add_row(split.name, f"{split.row_count:,}", ids)
    console().print(splits)


def _print_checks(profile: Profile) -> None:
    if not profile.checks:
        return
    table = new_table("", "check", "found", "left out", numbers=("left out",))
    for check in profile.checks:
        left_out = f"[yellow]{check.quarantined:,}[/]" if check.quarantined else "0"
        table.add_row(
            "[green]✓[/]" if check.passed else "[yellow]✗[/]", verbatim(check.text), verbatim(check.observed), left_out
        )
    console().print(table)


def _print_quarantine(profile: Profile) -> None:
    if not profile.quarantined_row_count:
        return
    console().print(_left_out(profile.quarantined_row_count))
    for reason in profile.quarantine[:MAX_REASONS]:
        console().print(f"  {reason.row_count:>7,} ", verbatim(reason.reason), soft_wrap=True)
        for example in reason.examples[:MAX_EXAMPLES]:
            where = f"{example.source.rpartition('/')[2]}, {example.place}: {cut(example.excerpt, 2 * MAX_CELL)}"
            console().print("          ", verbatim(where, "dim"), soft_wrap=True)
    more = len(profile.quarantine) - MAX_REASONS
    if more > 0:
        console().print(f"          [dim]and {more} more reasons: see --html or --json[/]")
    console().print()


def _left_out(rows: int) -> str:
    return f"[yellow]{rows:,} {'row' if rows == 1 else 'rows'} left out[/]"


def _print_rows(profile: Profile) -> None:
    """Print the first rows with as many columns as fit, because wrapped rows are hard to read."""
    if not profile.rows:
        return
    from rich.markup import escape

    names = list(profile.rows[0])
    shown: list[str] = []
    space = console().width
    for name in names:
        space -= min(MAX_CELL, max(len(text) for text in (name, *(row[name] for row in profile.rows)))) + _GUTTER
        if space < 0 and shown:
            break
        shown.append(name)
    table = new_table(*(escape(verbatim(name).plain) for name in shown))
    for column in table.columns:
        column.no_wrap = True
    for row in profile.rows:
        texts = [cut(row[name], MAX_CELL) for name in shown]
        table.add_row(*(verbatim(text, "dim" if text == "null" else "") for text in texts))
    console().print(table)
    if len(shown) < len(names):
        missing = ", ".join(names[len(shown) :])
        console().print("[dim]not shown for want of room:[/]", verbatim(missing, "dim"), "[dim](see --html, --json)[/]")


# --- Waiting for a version ---

AS_LONG_AS_IT_TAKES_S = math.inf


@contextmanager
def waiting(operation: Operation[resources_pb2.DatasetVersion]) -> Iterator[None]:
    """Raise `CommandFailed` if the user interrupts the waiting."""
    try:
        yield
    except KeyboardInterrupt:
        version = operation.metadata.version
        going_on = f"interrupted, but the server goes on making {version}"
        listed = f"millrace data list {version.split('/')[1]} shows when it is done"
        remedy = f"{listed}; millrace data cancel {version} ends it"
        raise CommandFailed(going_on, remedy=remedy, code=INTERRUPTED) from None


# --- Quality checks ---

Function = TypeVar("Function", bound=Callable[..., Any])

FORMS = (
    "not_null:COLUMN",
    "unique:COLUMN",
    "range:COLUMN=LOW:HIGH",
    "one_of:COLUMN=A,B,…",
    "pattern:COLUMN=REGEX",
    "row_count:[SPLIT=]LOW:HIGH",
    "class_balance:COLUMN=LOW:HIGH",
    "drift:COLUMN=MOST",
)
# These checks concern all rows together, and leave none out.
OF_ALL_ROWS = ("row_count", "class_balance", "drift")
CHECK, QUARANTINE = "--check", "--quarantine-check"


def check_options(function: Function) -> Function:
    """Add the options that `checks_of` reads."""
    forms = "; ".join(FORMS)
    aside = click.option(
        QUARANTINE,
        multiple=True,
        metavar="CHECK",
        help="As --check, but rows that do not pass are left out and kept aside. May be repeated.",
    )
    ends = click.option(
        CHECK,
        multiple=True,
        metavar="CHECK",
        help=f"Publish no version that does not pass. CHECK is {forms}. LOW or HIGH may be left out. May be repeated.",
    )
    return ends(aside(function))


def checks_of(values: dict[str, Any]) -> list[checks.Check]:
    """Remove the checks' options from `values` and return the checks."""
    ending = [_check(text, CHECK) for text in values.pop("check")]
    return ending + [_check(text, QUARANTINE) for text in values.pop("quarantine_check")]


def _check(text: str, option: str) -> checks.Check:
    kind, _, rest = text.partition(":")
    column, equals, given = rest.partition("=")
    aside = option == QUARANTINE
    try:
        if aside and kind in OF_ALL_ROWS:
            raise ValueError(f"{kind} is of all rows together, and leaves none out; use {CHECK}")
        if kind == "row_count":
            least, most = _ends(given if equals else rest, int)
            return checks.row_count(split=column if equals else "", least=least or 0, most=most or 0)
        if not column or (bool(given) == (kind in ("not_null", "unique"))):
            raise ValueError(f"use {'; '.join(FORMS)}")
        match kind:
            case "not_null":
                return checks.not_null(column, quarantine=aside)
            case "unique":
                return checks.unique(column, quarantine=aside)
            case "range":
                lower, upper = _ends(given, float)
                return checks.in_range(column, least=lower, most=upper, quarantine=aside)
            case "one_of":
                return checks.one_of(column, [_value(one) for one in given.split(",")], quarantine=aside)
            case "pattern":
                return checks.matches(column, given, quarantine=aside)
            case "class_balance":
                rarest, most_frequent = _ends(given, float)
                return checks.class_balance(column, min_share=rarest or 0, max_share=most_frequent or 0)
            case "drift":
                return checks.drift(column, _number(given))
        raise ValueError(f"use {'; '.join(FORMS)}")
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: {error}", param_hint=option) from None


Number = TypeVar("Number", int, float)


def _ends(text: str, number: Callable[[str], Number]) -> tuple[Number | None, Number | None]:
    low, colon, high = text.partition(":")
    if not colon or not (low or high):
        raise ValueError("use LOW:HIGH, of which one may be left out")
    try:
        return number(low) if low else None, number(high) if high else None
    except ValueError:
        wanted = "whole numbers" if number is int else "numbers"
        raise ValueError(f"LOW and HIGH are {wanted}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("MOST is a number") from None


def _value(text: str) -> Value:
    """Parse an integer, true, false or a quoted text as JSON; otherwise return the text itself."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | str) else text


# --- Split rules ---


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
            if metadata.waiting_for:
                line.update(f"waiting for {metadata.waiting_for}")
                return
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
