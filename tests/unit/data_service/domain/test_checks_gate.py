from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data_service.domain.bad_rows import BadRowLog, BadRowPolicy, build_report
from data_service.domain.checks import Check, CheckResult, ClassBalance, Drift, NotNull, RowCount, gate
from data_service.domain.statistics import SplitStatistics
from shared.errors import FailedPrecondition


def splits(**tables: Any) -> dict[str, SplitStatistics]:
    found = {}
    for split, values in tables.items():
        table = pa.table({"x": values})
        found[split] = SplitStatistics(table.schema)
        found[split].update(table, 0)
    return found


def report(parts: dict[str, SplitStatistics]) -> dict[str, Any]:
    return {"columns": [one.to_json() for split, part in parts.items() for one in part.result(split)]}


def judged(check: Check, parts: dict[str, SplitStatistics], parent: Any = None) -> CheckResult:
    """The result, whether it passes or not."""
    try:
        return gate([check], parts, parent)[0]
    except FailedPrecondition as error:
        return CheckResult(check=check, violations=1, observed=error.message)


def psi(parent: Any, new: Any) -> float:
    result = judged(Check("x", Drift(1e9)), splits(train=new), report(splits(train=parent)))
    assert result.violations == 0, result.observed
    return float(result.observed.removeprefix("psi "))


def test_row_counts_of_one_split_and_of_all() -> None:
    parts = splits(train=[1, 2, 3], test=[4])
    assert judged(Check("", RowCount("train", 3, 3)), parts).violations == 0
    assert judged(Check("", RowCount("", 4, 4)), parts).observed == "4 rows"
    assert judged(Check("", RowCount("test", 2, 0)), parts).violations == 1
    assert judged(Check("", RowCount("gone", 1, 0)), parts).violations == 1


def test_class_balance_is_of_all_splits_together() -> None:
    parts = splits(train=["a", "a", "b", None], test=["a"])
    result = judged(Check("x", ClassBalance(0.25, 0.75)), parts)
    assert (result.violations, result.observed) == (0, "rarest share 0.25 (class b), largest 0.75 (class a)")
    assert judged(Check("x", ClassBalance(0.26, 0)), parts).violations == 1
    assert judged(Check("x", ClassBalance(0, 0.74)), parts).violations == 1
    assert "no values" in judged(Check("x", ClassBalance(0.1, 0)), splits(train=pa.array([], pa.int8()))).observed
    assert "more than 1,000" in judged(Check("x", ClassBalance(0.1, 0)), splits(train=range(1001))).observed


@pytest.mark.parametrize("count", [500, 30_000])
def test_numbers_that_do_not_move_have_no_drift_and_those_that_do_have_some(count: int) -> None:
    rng = np.random.default_rng(5)
    values = rng.normal(size=count)
    assert psi(values, values) == 0
    assert psi(values, rng.normal(size=count)) < 0.1
    assert 0.1 < psi(values, rng.normal(0.5, size=count)) < 0.5
    assert psi(values, rng.normal(3, size=count)) > 1


def test_labels_drift_by_their_exact_counts() -> None:
    labels = np.arange(10).repeat(50)
    assert psi(labels, labels.repeat(2)) == 0
    assert psi(labels, labels[labels < 5]) > 1
    assert psi(np.ones(5), np.ones(9)) == 0


def test_texts_and_booleans_drift_over_their_values() -> None:
    assert psi(["a", "b"] * 9, ["b", "a"] * 4) == 0
    assert psi(["a", "b"] * 9, ["a", "c"] * 9) > 1
    assert psi([True, False], [True, True, False, False]) == 0
    half, most = 0.5, 0.9
    wanted = (most - half) * np.log(most / half) + (0.1 - half) * np.log(0.1 / half)
    assert psi([True, False], [True] * 9 + [False]) == pytest.approx(wanted, rel=0.01)


def test_drift_is_of_all_splits_together() -> None:
    check = Check("x", Drift(0.01))
    parent = report(splits(train=[1.5, 2.5], test=[3.5, 4.5]))
    assert judged(check, splits(all=[4.5, 3.5, 2.5, 1.5]), parent).violations == 0


def with_nulls(share: float, rows: int = 1000) -> pa.Array:
    """The same numbers, but for this share of nulls."""
    nulls = round(share * rows)
    return pa.array([None] * nulls + [float(index % 10) for index in range(rows - nulls)], pa.float64())


@pytest.mark.parametrize(("before", "now"), [(0.0, 0.95), (0.95, 0.0), (0.1, 0.5)])
@pytest.mark.parametrize("as_text", [False, True], ids=["numbers", "texts"])
def test_a_column_that_loses_or_gains_its_values_drifts_and_both_shares_are_named(
    before: float, now: float, as_text: bool
) -> None:
    parent, new = (with_nulls(share).cast(pa.string() if as_text else pa.float64()) for share in (before, now))
    result = judged(Check("x", Drift(0.25)), splits(train=new), report(splits(train=parent)))
    assert result.violations == 1
    assert f"nulls {100 * before:g} % before, {100 * now:g} % now" in result.observed
    assert "x may drift" in result.observed


def test_values_without_drift_and_few_new_nulls_pass() -> None:
    result = judged(Check("x", Drift(0.1)), splits(train=with_nulls(0.01)), report(splits(train=with_nulls(0.0))))
    assert (result.violations, result.observed) == (0, "psi 0.046, nulls 0 % before, 1 % now")
    same = judged(Check("x", Drift(1e-6)), splits(train=with_nulls(0.5)), report(splits(train=with_nulls(0.5))))
    assert same.violations == 0


def test_the_values_of_a_column_of_many_nulls_drift_as_if_there_were_none() -> None:
    before, now = pa.array([None] * 950 + [1.0] * 50), pa.array([None] * 950 + [2.0] * 50)
    assert judged(Check("x", Drift(1.0)), splits(train=now), report(splits(train=before))).violations == 1


def test_nan_drifts_as_nulls_do() -> None:
    now = [float("nan")] * 50 + [1.0] * 50
    result = judged(Check("x", Drift(0.25)), splits(train=now), report(splits(train=[1.0] * 100)))
    assert result.violations == 1
    assert "NaN 0 % before, 50 % now" in result.observed


def repeated(counts: Iterable[int], first: str = "t") -> list[str]:
    """The text of number i as often as the i-th count says."""
    return [f"{first}{index:04}" for index, count in enumerate(counts) for _ in range(count)]


def in_splits(kind: str, distinct: int) -> dict[str, list[str]]:
    """A report lists 100 texts of a split: in two, they are the same or others."""
    rising = range(1, distinct + 1)
    match kind:
        case "one":
            return {"train": repeated([5] * distinct)}
        case "one of many shares":
            return {"train": repeated(rising)}
        case "two alike":
            return {"train": repeated([4] * distinct), "test": repeated([2] * distinct)}
        case "two with other lists":
            return {"train": repeated(rising), "test": repeated(reversed(rising))}
        case _:
            return {"train": repeated([5] * (distinct // 2)), "test": repeated([5] * (distinct - distinct // 2), "u")}


SPLITS = ["one", "one of many shares", "two alike", "two with other lists", "two with no text in common"]


@pytest.mark.parametrize("kind", SPLITS)
@pytest.mark.parametrize("distinct", [100, 101, 150, 900])
def test_the_same_texts_do_not_drift_however_many_a_report_leaves_out(kind: str, distinct: int) -> None:
    parts = in_splits(kind, distinct)
    together = {"all": [text for texts in parts.values() for text in texts] * 3}
    for new in (parts, together):
        result = judged(Check("x", Drift(1e-6)), splits(**new), report(splits(**parts)))
        assert result.violations == 0, result.observed


@pytest.mark.parametrize("kind", SPLITS)
@pytest.mark.parametrize("distinct", [100, 101, 150, 900])
def test_other_texts_drift_however_many_a_report_leaves_out(kind: str, distinct: int) -> None:
    parts = in_splits(kind, distinct)
    texts = [text for texts in parts.values() for text in texts]
    half = set(sorted(set(texts))[: distinct // 2])
    others = {
        "all are new": [f"new {text}" for text in texts],
        "one is nearly all": texts + ["new"] * 9 * len(texts),
        "half are gone": [text for text in texts if text in half],
    }
    for what, new in others.items():
        result = judged(Check("x", Drift(0.2)), splits(train=new), report(splits(**parts)))
        assert result.violations == 1, f"{what}: {result.observed}"


@pytest.mark.parametrize("distinct", [100, 101, 900])
def test_the_same_decimals_and_dates_do_not_drift_however_many_a_report_leaves_out(distinct: int) -> None:
    for values in (
        pa.array([*range(distinct)] * 5).cast(pa.decimal128(19, 0)),
        pa.array([*range(distinct)] * 5, pa.date32()),
    ):
        assert psi(values, values) == 0


def test_texts_drawn_again_drift_little() -> None:
    rng = np.random.default_rng(5)
    shares = 1 / np.arange(1, 301)
    drawn = [[f"t{one}" for one in rng.choice(300, 30_000, p=shares / shares.sum())] for _ in range(2)]
    assert 0 < psi(*drawn) < 0.05


def test_a_split_whose_texts_are_too_long_to_list_cannot_be_compared() -> None:
    parts = splits(train=["x" * 201] * 9, test=["a", "b"])
    assert "not comparable" in judged(Check("x", Drift(0.1)), parts, report(parts)).observed


@pytest.mark.parametrize(
    ("new", "parent"),
    [
        ([1.0], None),
        ([1.0], {"columns": []}),
        (pa.array([None], pa.float64()), report(splits(train=[1.0]))),
        ([str(one) for one in range(1001)], report(splits(train=[str(one) for one in range(1001)]))),
    ],
    ids=["no report", "no column", "no values", "too many texts"],
)
def test_a_check_without_a_comparable_value_fails_and_says_why(new: Any, parent: Any) -> None:
    assert judged(Check("x", Drift(0.1)), splits(train=new), parent).violations == 1


def test_all_failed_checks_are_listed() -> None:
    checks = [Check("", RowCount("", 1, 0)), Check("", RowCount("", 9, 0)), Check("x", ClassBalance(0.9, 0))]
    with pytest.raises(FailedPrecondition) as caught:
        gate(checks, splits(train=["a", "b"]), None)
    assert caught.value.message == (
        "checks[1]: the version needs 9 rows or more; found 2 rows; "
        "checks[2]: each value of x needs a share of at least 0.9; "
        "found rarest share 0.5 (class a), largest 0.5 (class a)"
    )
    assert caught.value.metadata["check_index"] == "1,2"


def test_the_report_is_the_protos_json(tmp_path: Any) -> None:
    from google.protobuf.json_format import ParseDict

    from millrace.data.v1 import quality_pb2

    parts = splits(train=[1.0, float("nan"), None], test=[float("inf")])
    checks = [Check("x", NotNull(), quarantines=True), Check("", RowCount("", 1, 0))]
    results = {**gate(checks, parts, None), 0: CheckResult(check=checks[0], violations=1, quarantined=1)}
    with BadRowLog(tmp_path / "quarantine.jsonl", BadRowPolicy()) as log:
        log.leave_out("file:///a.csv", "line 3", "x is null", "{}")
        message = ParseDict(build_report(parts, results, log), quality_pb2.QualityReport())
    assert [one.split for one in message.columns] == ["train", "test"]
    assert [one.check.WhichOneof("check") for one in message.checks] == ["not_null", "row_count"]
    assert (message.quarantined_row_count, message.quarantine[0].examples[0].place) == (1, "line 3")
