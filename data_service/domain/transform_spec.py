"""The spec of a transform, checked as a whole: all problems are reported at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from data_service.domain.split_rules import (
    MAX_SPLITS,
    ColumnSplit,
    HashSplit,
    Period,
    Problem,
    RatioSplit,
    Share,
    SplitRule,
    TimeSplit,
)
from shared.dataset_version.manifest import MAX_COLUMNS, repeated
from shared.durable import fields_of
from shared.errors import MillraceError, invalid_fields
from shared.names import SPLIT, SPLIT_REMEDY, parse

MAX_CHECKS = 100
DEFAULT_FIT_SPLIT = "train"
SOURCE_PATTERN = "datasets/{d}/versions/{v}"


@dataclass(frozen=True, kw_only=True)
class UnsetSplit:
    """A split rule with no choice set; `check` refuses it."""


@dataclass(frozen=True, kw_only=True)
class TransformSpec:
    """The spec of a transform.

    `transform` is a `millrace.common.v1.Transform` and each of `checks` a `QualityCheck`, both as proto JSON.
    `source_sha256` is the digest of the source's manifest at the request; empty: not checked.
    """

    source: str
    transform: dict[str, Any]
    splits: SplitRule | UnsetSplit | None = None
    fit_split: str = DEFAULT_FIT_SPLIT
    checks: Sequence[dict[str, Any]] = ()
    source_sha256: str = ""

    @property
    def rule(self) -> SplitRule | None:
        assert not isinstance(self.splits, UnsetSplit), "the spec was not checked"
        return self.splits

    def as_record(self) -> dict[str, Any]:
        splits = None
        if isinstance(self.splits, UnsetSplit):
            splits = {"kind": "unset"}
        elif self.splits is not None:
            splits = {"kind": _KINDS[type(self.splits)], **asdict(self.splits)}
        return {
            "source": self.source,
            "source_sha256": self.source_sha256,
            "transform": self.transform,
            "splits": splits,
            "fit_split": self.fit_split,
            "checks": list(self.checks),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> TransformSpec:
        return cls(
            source=record["source"],
            source_sha256=record["source_sha256"],
            transform=record["transform"],
            splits=_rule_from(record["splits"]),
            fit_split=record["fit_split"],
            checks=record["checks"],
        )


_KINDS = {HashSplit: "hash", ColumnSplit: "column", TimeSplit: "time", RatioSplit: "ratio"}


def check(spec: TransformSpec) -> None:
    """Raises `InvalidArgument` naming every field that is invalid regardless of the source."""
    problems = list(_problems(spec))
    if problems:
        raise invalid_fields(problems)


def _problems(spec: TransformSpec) -> Iterator[Problem]:
    try:
        parse("source", spec.source, SOURCE_PATTERN)
    except MillraceError:
        yield "source", spec.source, f"use a name of the form {SOURCE_PATTERN}"
    if not spec.transform.get("steps") and spec.splits is None:
        yield "transform", "", "set at least one step, or splits"
    if not SPLIT.fullmatch(spec.fit_split):
        yield "fit_split", spec.fit_split, SPLIT_REMEDY
    if len(spec.checks) > MAX_CHECKS:
        yield "checks", len(spec.checks), f"set at most {MAX_CHECKS}"
    match spec.splits:
        case UnsetSplit():
            yield "splits", "", "set hash, column, time or ratio"
        case HashSplit(key_columns=columns, shares=shares):
            if not columns:
                yield "splits.hash.key_columns", "", "name at least one column"
            yield from repeated_problems("splits.hash.key_columns", columns)
            yield from _share_problems("splits.hash.shares", shares)
        case ColumnSplit(column=""):
            yield "splits.column.column", "", "name a column of strings"
        case TimeSplit(column=column, periods=periods):
            if not column:
                yield "splits.time.column", "", "name a column of dates or timestamps"
            yield from _period_problems("splits.time.periods", periods)
        case RatioSplit(shares=shares):
            yield from _share_problems("splits.ratio.shares", shares)


def repeated_problems(field: str, columns: Sequence[str]) -> Iterator[Problem]:
    """Yields the problems of a list that must name each column once."""
    if len(columns) > MAX_COLUMNS:
        yield field, len(columns), f"name at most {MAX_COLUMNS}"
        return
    for index in repeated(columns):
        yield f"{field}[{index}]", columns[index], "name each column once"


def _share_problems(field: str, shares: Sequence[Share]) -> Iterator[Problem]:
    yield from _split_problems(field, [share.split for share in shares])
    if len(shares) > MAX_SPLITS:
        return
    for index, share in enumerate(shares):
        if not (math.isfinite(share.weight) and share.weight > 0):
            yield f"{field}[{index}].weight", share.weight, "use a finite number above 0"


def _period_problems(field: str, periods: Sequence[Period]) -> Iterator[Problem]:
    yield from _split_problems(field, [period.split for period in periods])
    if len(periods) > MAX_SPLITS:
        return
    latest: int | None = None
    for index, period in enumerate(periods):
        path = f"{field}[{index}].before"
        last = index == len(periods) - 1
        if last and period.before_ns is not None:
            yield path, period.before_ns, "leave it out in the last period, which takes the rest"
        elif not last and period.before_ns is None:
            yield path, "", "set it in all periods but the last"
        elif period.before_ns is not None:
            if latest is not None and period.before_ns <= latest:
                yield path, period.before_ns, "make it later than that of the period before"
            latest = period.before_ns


def _split_problems(field: str, splits: Sequence[str]) -> Iterator[Problem]:
    if not 2 <= len(splits) <= MAX_SPLITS:
        yield field, len(splits), f"name 2 to {MAX_SPLITS}"
    if len(splits) > MAX_SPLITS:
        return
    for index, split in enumerate(splits):
        if not SPLIT.fullmatch(split):
            yield f"{field}[{index}].split", split, SPLIT_REMEDY
        elif split in splits[:index]:
            yield f"{field}[{index}].split", split, "name each split once"


def _rule_from(record: Mapping[str, Any] | None) -> SplitRule | UnsetSplit | None:
    if record is None:
        return None
    match record["kind"]:
        case "hash":
            return HashSplit(
                key_columns=record["key_columns"],
                shares=[Share(**fields_of(Share, share)) for share in record["shares"]],
                seed=record["seed"],
            )
        case "column":
            return ColumnSplit(column=record["column"])
        case "time":
            return TimeSplit(
                column=record["column"], periods=[Period(**fields_of(Period, period)) for period in record["periods"]]
            )
        case "ratio":
            return RatioSplit(
                shares=[Share(**fields_of(Share, share)) for share in record["shares"]], seed=record["seed"]
            )
    return UnsetSplit()
