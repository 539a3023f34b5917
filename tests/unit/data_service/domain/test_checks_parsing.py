from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from google.protobuf.json_format import MessageToDict, ParseDict

from data_service.domain.checks import (
    Check,
    ClassBalance,
    Drift,
    NotNull,
    OneOf,
    Pattern,
    Range,
    RowCount,
    Unique,
    fits,
    parse_checks,
)
from millrace.data.v1 import quality_pb2
from shared.dataset_version.manifest import tensor_field
from shared.errors import InvalidArgument

SCHEMA = pa.schema(
    [
        ("age", pa.int64()),
        ("name", pa.string()),
        ("ok", pa.bool_()),
        ("price", pa.decimal128(10, 2)),
        ("file", pa.binary()),
        ("day", pa.date32()),
        tensor_field("image", pa.uint8(), (2, 2)),
    ]
)
ALL: list[dict[str, Any]] = [
    {"column": "age", "not_null": {}},
    {"column": "age", "action": "ACTION_QUARANTINE", "unique": {}},
    {"column": "age", "range": {"min": 0, "max": 120.5}},
    {"column": "name", "one_of": {"values": [{"text": "a"}, {"text": "b"}]}},
    {"column": "name", "pattern": {"regex": "a|b+"}},
    {"row_count": {"split": "train", "min": 5}},
    {"column": "name", "class_balance": {"min_share": 0.1}},
    {"column": "age", "drift": {"max_population_stability_index": 0.2}},
]


def test_checks_survive_the_protos_json_in_either_spelling() -> None:
    checks = parse_checks(ALL)
    assert checks[2] == Check("age", Range(0, 120.5))
    assert checks[3] == Check("name", OneOf(("a", "b")))
    assert checks[5] == Check("", RowCount("train", 5, 0))
    messages = [ParseDict(check.to_json(), quality_pb2.QualityCheck()) for check in checks]
    for keep_names in (True, False):
        assert parse_checks([MessageToDict(one, preserving_proto_field_name=keep_names) for one in messages]) == checks


def test_all_malformed_fields_are_named_at_once() -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_checks(
            [
                {"column": "x", "range": {}},
                {"column": "x", "range": {"min": 3, "max": 1}},
                {"column": "x", "range": {"min": "NaN"}},
                {"column": "x"},
                {"not_null": {}},
                {"column": "x", "one_of": {"values": []}},
                {"column": "x", "one_of": {"values": [{"text": "a"}, {}]}},
                {"column": "x", "pattern": {"regex": "a)|(b"}},
                {"column": "x", "pattern": {"regex": r"(?=look)"}},
                {"column": "x", "pattern": {"regex": "a" * 1025}},
                {"column": "x", "row_count": {"min": 1}},
                {"row_count": {}},
                {"row_count": {"min": 5, "max": 4}},
                {"action": "ACTION_QUARANTINE", "row_count": {"min": 1}},
                {"column": "x", "class_balance": {"max_share": 1.5}},
                {"column": "x", "drift": {}},
            ]
        )
    assert [field for field, _ in caught.value.fields] == [
        "checks[0].range",
        "checks[1].range.max",
        "checks[2].range.min",
        "checks[3]",
        "checks[4].column",
        "checks[5].one_of.values",
        "checks[6].one_of.values[1]",
        "checks[7].pattern.regex",
        "checks[8].pattern.regex",
        "checks[9].pattern.regex",
        "checks[10].column",
        "checks[11].row_count",
        "checks[12].row_count.max",
        "checks[13].action",
        "checks[14].class_balance.max_share",
        "checks[15].drift.max_population_stability_index",
    ]


def test_at_most_100_checks() -> None:
    assert len(parse_checks([{"column": "x", "unique": {}}] * 100)) == 100
    with pytest.raises(InvalidArgument, match="at most 100"):
        parse_checks([{"column": "x", "unique": {}}] * 101)


@pytest.mark.parametrize(
    "check",
    [
        Check("gone", NotNull()),
        Check("name", Range(0, 1)),
        Check("image", Range(0, 1)),
        Check("age", Pattern("a")),
        Check("age", OneOf(("a",))),
        Check("age", OneOf((True,))),
        Check("price", OneOf((1,))),
        Check("file", ClassBalance(0.1, 0)),
        Check("day", Drift(0.1)),
        Check("image", Drift(0.1)),
        Check("", RowCount("test", 1, 0)),
    ],
    ids=lambda check: f"{check.condition.kind} of {check.column}",
)
def test_checks_that_do_not_fit_the_columns_are_refused(check: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        fits([Check("age", Unique()), check], SCHEMA, has_parent=True, splits=["train"])
    assert [field.startswith("checks[1]") for field, _ in caught.value.fields] == [True]


def test_drift_needs_a_parent() -> None:
    fits(parse_checks(ALL), SCHEMA, has_parent=True, splits=["train"])
    with pytest.raises(InvalidArgument, match="needs a parent"):
        fits(parse_checks(ALL), SCHEMA, has_parent=False)
