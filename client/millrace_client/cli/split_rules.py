"""The options that say how rows are divided into splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from millrace.data.v1 import data_service_pb2
from millrace_client import specs

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
    """The options that `split_rule` reads."""
    for option in reversed(OPTIONS):
        function = option(function)
    return function


def split_rule(values: dict[str, Any]) -> data_service_pb2.SplitRule | None:
    """Takes the splits' options out of `values`; None where no rule is among them."""
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
        # Without a zone it is UTC, as the column's own times are.
        periods[split] = before if before.tzinfo else before.replace(tzinfo=UTC)
    return periods
