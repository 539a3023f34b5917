"""The specs of a transform of a version, and of a prediction over one.

Each is checked as a whole: all problems are reported at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from data_service.domain.import_spec import BadRows, bad_rows_problems
from data_service.domain.splits import (
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
from shared.dataset_version.manifest import MAX_COLUMNS, name_problem, repeated
from shared.durable import fields_of
from shared.errors import MillraceError, invalid_fields
from shared.names import SPLIT, SPLIT_REMEDY, parse

# --- Transforms ---

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
    """Raise `InvalidArgument` naming every field that is invalid regardless of the source."""
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
    """Yield the problems of a list that must name each column once."""
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


# --- Predictions ---

DEFAULT_BATCH_SIZE = 64
MAX_BATCH_SIZE = 65_536
MAX_WORKERS = 1024
MAX_CPUS = 1024
MAX_PREFIX = 63
MAX_PREDICTOR = 200
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The workers of a prediction.

    `most` 0: as many as fit the cluster. `cpus` is also the number of the model's threads. The model runs on a GPU if
    `gpus` is above 0.
    """

    most: int = 0
    batch_size: int = DEFAULT_BATCH_SIZE
    cpus: int = 1
    gpus: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CheckpointRef:
    """A reference to a checkpoint.

    `folder` is the store's key prefix of its files, `sha256` the digest of its manifest; both are empty until it is
    found.
    """

    name: str
    folder: str = ""
    sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class PredictSpec:
    """The spec of a prediction.

    `split` and `columns` empty: all; `outputs` empty: all but the logits. `source_sha256` is the digest of the source's
    manifest at the request; `bad_rows` are those that a step cannot process. `predictor` is only for a program's
    checkpoint: `module:name` of the class in its bundle that predicts; empty: `Predictor` of the program's module.
    """

    source: str
    checkpoint: CheckpointRef
    source_sha256: str = ""
    split: str = ""
    columns: Sequence[str] = ()
    outputs: Sequence[str] = ()
    column_prefix: str = ""
    bad_rows: BadRows = field(default_factory=BadRows)
    workers: Workers = field(default_factory=Workers)
    predictor: str = ""

    def as_record(self) -> dict[str, Any]:
        return {**asdict(self), "columns": list(self.columns), "outputs": list(self.outputs)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> PredictSpec:
        parts = {"checkpoint": CheckpointRef, "bad_rows": BadRows, "workers": Workers}
        read = {name: part(**fields_of(part, record[name])) for name, part in parts.items()}
        return cls(**{**fields_of(cls, record), **read})


def check_prediction(spec: PredictSpec) -> None:
    """Raise `InvalidArgument` naming every field that is invalid regardless of the resources it names."""
    problems = list(_prediction_problems(spec))
    if problems:
        raise invalid_fields(problems)


def _prediction_problems(spec: PredictSpec) -> Iterator[Problem]:
    try:
        parse("source", spec.source, SOURCE_PATTERN)
    except MillraceError:
        yield "source", spec.source, f"use a name of the form {SOURCE_PATTERN}"
    if not spec.checkpoint.name:
        yield "checkpoint", "", "name a checkpoint, or a job for its best one"
    if spec.checkpoint.sha256 and not _SHA256.fullmatch(spec.checkpoint.sha256):
        yield "checkpoint_sha256", spec.checkpoint.sha256, "use the SHA-256 of its manifest in hex, or leave it out"
    for field_, names in (("columns", spec.columns), ("outputs", spec.outputs)):
        yield from repeated_problems(field_, names)
    if len(spec.column_prefix) > MAX_PREFIX:
        yield "column_prefix", spec.column_prefix, f"use at most {MAX_PREFIX} characters"
    elif problem := name_problem(f"{spec.column_prefix}prediction"):
        yield "column_prefix", spec.column_prefix, problem
    module, _, name = spec.predictor.partition(":")
    is_entry = all(part.isidentifier() for part in (*module.split("."), *name.split(".")))
    if spec.predictor and (not is_entry or len(spec.predictor) > MAX_PREDICTOR):
        yield "predictor", spec.predictor[:MAX_PREDICTOR], "use module:name of a class, e.g. serve:Predictor"
    yield from bad_rows_problems(spec.bad_rows)
    yield from _worker_problems(spec.workers)


def _worker_problems(workers: Workers) -> Iterator[Problem]:
    if not 0 <= workers.most <= MAX_WORKERS:
        yield "workers.max_workers", workers.most, f"use 1 to {MAX_WORKERS:,}, or 0 for as many as there is room for"
    if not 1 <= workers.batch_size <= MAX_BATCH_SIZE:
        yield "workers.batch_size", workers.batch_size, f"use 1 to {MAX_BATCH_SIZE:,} rows"
    if not 1 <= workers.cpus <= MAX_CPUS:
        yield "workers.cpus", workers.cpus, f"use 1 to {MAX_CPUS:,}"
    # More than one GPU would be reserved, but not used.
    if not 0 <= workers.gpus <= 1:
        yield "workers.gpus", workers.gpus, "use 0, part of a GPU, or 1"
