"""A TransformVersionRequest as a domain value, and a ReadVersionRequest."""

from __future__ import annotations

from google.protobuf import json_format

from data_service.domain import split_rules
from data_service.domain.split_rules import Share, SplitRule
from data_service.domain.transform_spec import DEFAULT_FIT_SPLIT, TransformSpec, UnsetSplit
from data_service.reading import Selection
from millrace.data.v1 import data_service_pb2

NANOS = 1_000_000_000


def transform_spec_from(request: data_service_pb2.TransformVersionRequest) -> TransformSpec:
    return TransformSpec(
        source=request.source,
        transform=json_format.MessageToDict(request.transform),
        splits=_rule(request.splits) if request.HasField("splits") else None,
        fit_split=request.fit_split or DEFAULT_FIT_SPLIT,
        checks=[json_format.MessageToDict(check) for check in request.checks],
    )


def selection_from(request: data_service_pb2.ReadVersionRequest) -> Selection:
    return Selection(split=request.split, columns=list(request.columns), offset=request.offset, limit=request.limit)


def _rule(rule: data_service_pb2.SplitRule) -> SplitRule | UnsetSplit:
    match rule.WhichOneof("rule"):
        case "hash":
            return split_rules.HashSplit(
                key_columns=list(rule.hash.key_columns), shares=_shares(rule.hash.shares), seed=rule.hash.seed
            )
        case "column":
            return split_rules.ColumnSplit(column=rule.column.column)
        case "time":
            return split_rules.TimeSplit(
                column=rule.time.column,
                periods=[
                    split_rules.Period(split=period.split, before_ns=_nanoseconds(period))
                    for period in rule.time.periods
                ],
            )
        case "ratio":
            return split_rules.RatioSplit(shares=_shares(rule.ratio.shares), seed=rule.ratio.seed)
    return UnsetSplit()


def _shares(shares: object) -> list[Share]:
    return [Share(split=share.split, weight=share.weight) for share in shares]  # type: ignore[attr-defined]


def _nanoseconds(period: data_service_pb2.Period) -> int | None:
    return period.before.seconds * NANOS + period.before.nanos if period.HasField("before") else None
