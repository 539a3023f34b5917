"""A transform's request is refused with all that is wrong with it, each by its path."""

from __future__ import annotations

import json

import pytest

from data_service.domain.splits import ColumnSplit, HashSplit, Period, RatioSplit, Share, SplitRule, TimeSplit
from data_service.domain.transform_spec import TransformSpec, UnsetSplit, check
from shared.errors import InvalidArgument
from tests.support.cpu_time import cpu_at_most

SOURCE = "datasets/d/versions/v1"
STEPS = {"steps": [{"column": "x", "standardize": {}}]}
GOOD = [Share(split="train", weight=8), Share(split="test", weight=2)]
RULES: list[SplitRule | None] = [
    HashSplit(key_columns=["user"], shares=GOOD, seed=2**64 - 1),
    ColumnSplit(column="fold"),
    TimeSplit(column="at", periods=[Period(split="old", before_ns=5), Period(split="new", before_ns=None)]),
    RatioSplit(shares=GOOD, seed=0),
    None,
]


def refused(spec: TransformSpec) -> list[str]:
    with pytest.raises(InvalidArgument) as caught:
        check(spec)
    return [path for path, _ in caught.value.fields]


@pytest.mark.parametrize("rule", [*RULES, UnsetSplit()])
def test_a_spec_comes_back_from_its_record(rule: SplitRule | UnsetSplit | None) -> None:
    spec = TransformSpec(
        source=SOURCE,
        transform=STEPS,
        splits=rule,
        fit_split="fit",
        checks=[{"rowCount": {"min": 1}}],
        source_sha256="ab",
    )
    assert TransformSpec.from_record(json.loads(json.dumps(spec.as_record()))) == spec


@pytest.mark.parametrize("rule", RULES)
def test_a_good_spec_passes(rule: SplitRule | UnsetSplit | None) -> None:
    check(TransformSpec(source=SOURCE, transform=STEPS, splits=rule))


def test_a_split_rule_needs_no_step() -> None:
    check(TransformSpec(source=SOURCE, transform={}, splits=RULES[0]))
    assert refused(TransformSpec(source=SOURCE, transform={})) == ["transform"]


def test_all_that_is_wrong_is_reported_at_once() -> None:
    rule = HashSplit(
        key_columns=["user", "user"],
        shares=[
            Share(split="train", weight=0),
            Share(split="train", weight=float("nan")),
            Share(split="No Split", weight=float("inf")),
        ],
        seed=0,
    )
    assert refused(TransformSpec(source="v1", transform={}, splits=rule, fit_split="-", checks=[{}] * 101)) == [
        "source",
        "fit_split",
        "checks",
        "splits.hash.key_columns[1]",
        "splits.hash.shares[1].split",
        "splits.hash.shares[2].split",
        "splits.hash.shares[0].weight",
        "splits.hash.shares[1].weight",
        "splits.hash.shares[2].weight",
    ]


@pytest.mark.parametrize(
    ("rule", "paths"),
    [
        (UnsetSplit(), ["splits"]),
        (HashSplit(key_columns=[], shares=GOOD, seed=0), ["splits.hash.key_columns"]),
        (HashSplit(key_columns=["n"], shares=GOOD[:1], seed=0), ["splits.hash.shares"]),
        (RatioSplit(shares=[], seed=0), ["splits.ratio.shares"]),
        (ColumnSplit(column=""), ["splits.column.column"]),
        (
            TimeSplit(column="", periods=[Period(split="a", before_ns=None), Period(split="b", before_ns=1)]),
            ["splits.time.column", "splits.time.periods[0].before", "splits.time.periods[1].before"],
        ),
        (
            TimeSplit(
                column="at",
                periods=[
                    Period(split="a", before_ns=5),
                    Period(split="b", before_ns=5),
                    Period(split="c", before_ns=None),
                ],
            ),
            ["splits.time.periods[1].before"],
        ),
    ],
)
def test_a_rule_is_refused_by_its_fields(rule: SplitRule | UnsetSplit | None, paths: list[str]) -> None:
    assert refused(TransformSpec(source=SOURCE, transform=STEPS, splits=rule)) == paths


@pytest.mark.parametrize(
    ("rule", "path"),
    [
        (HashSplit(key_columns=[""] * 200_000, shares=GOOD, seed=0), "splits.hash.key_columns"),
        (RatioSplit(shares=[Share(split="a", weight=0)] * 100_000, seed=0), "splits.ratio.shares"),
        (TimeSplit(column="at", periods=[Period(split="a", before_ns=5)] * 100_000), "splits.time.periods"),
    ],
    ids=["keys", "shares", "periods"],
)
@pytest.mark.timed
def test_a_rule_of_very_many_parts_is_refused_by_their_number_and_soon(rule: SplitRule, path: str) -> None:
    with cpu_at_most(0.5):
        assert refused(TransformSpec(source=SOURCE, transform=STEPS, splits=rule)) == [path]
