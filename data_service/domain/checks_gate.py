"""Quality checks of a whole version: the last gate before it is published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from data_service.domain.checks import CHECK_FAILED, Check, CheckResult, ClassBalance, Drift, RowCount
from data_service.domain.drift import compare
from data_service.domain.statistics import ColumnStatistics, SplitStatistics
from data_service.domain.statistics.result import camel_case
from shared.errors import FailedPrecondition

Splits = Mapping[str, SplitStatistics]


def gate(checks: Sequence[Check], splits: Splits, parent_report: Mapping[str, Any] | None) -> dict[int, CheckResult]:
    """Judges the checks of the whole version, by their index; checks of rows are not among them.

    `splits`: the whole splits' statistics; `parent_report`: the first parent's QualityReport as proto JSON. Raises
    `FailedPrecondition` that lists all that fail.
    """
    judged = {index: _judge(check, splits, parent_report) for index, check in enumerate(checks) if not check.is_of_rows}
    failed = [index for index, result in judged.items() if result.violations]
    if not failed:
        return judged
    first = checks[failed[0]]
    raise FailedPrecondition(
        "; ".join(f"checks[{index}]: {_sentence(judged[index])}" for index in failed),
        reason=CHECK_FAILED,
        metadata={
            "check_index": ",".join(map(str, failed)),
            "kind": first.condition.kind,
            "column": first.column,
        },
    )


def _judge(check: Check, splits: Splits, parent_report: Mapping[str, Any] | None) -> CheckResult:
    match check.condition:
        case RowCount():
            passes, observed = _row_count(check.condition, splits)
        case ClassBalance():
            passes, observed = _class_balance(check.condition, _counts(check.column, splits))
        case Drift():
            passes, observed = _drift(check.condition, check.column, splits, parent_report)
        case _:
            raise TypeError(f"{check.condition.kind} is a check of rows")
    return CheckResult(check=check, violations=0 if passes else 1, observed=observed)


def _row_count(condition: RowCount, splits: Splits) -> tuple[bool, str]:
    if condition.split:
        rows = splits[condition.split].row_count if condition.split in splits else 0
    else:
        rows = sum(one.row_count for one in splits.values())
    return rows >= condition.min and (not condition.max or rows <= condition.max), f"{rows:,} rows"


def _class_balance(condition: ClassBalance, counts: Mapping[Any, int] | None) -> tuple[bool, str]:
    if counts is None:
        return False, "more than 1,000 different values"
    if not counts:
        return False, "no values"
    total = sum(counts.values())
    rarest = min(counts, key=lambda value: (counts[value], value))
    commonest = min(counts, key=lambda value: (-counts[value], value))
    least, most = counts[rarest] / total, counts[commonest] / total
    observed = f"rarest share {least:.3g} (class {rarest}), largest {most:.3g} (class {commonest})"
    return least >= condition.min_share and (not condition.max_share or most <= condition.max_share), observed


def _drift(condition: Drift, column: str, splits: Splits, parent_report: Mapping[str, Any] | None) -> tuple[bool, str]:
    if parent_report is None:
        return False, "the parent has no report to compare with"
    records = [one for one in camel_case(parent_report).get("columns", ()) if one.get("column") == column]
    if not records:
        return False, "the parent has no such column"
    new = [found for one in splits.values() for found in one.result() if found.column == column]
    found = compare([ColumnStatistics.from_json(record) for record in records], new, _counts(column, splits))
    missing = f", {found.missing}" if found.missing else ""
    if found.psi is None:
        return False, f"not comparable: no values, or too many different ones{missing}"
    return found.psi <= condition.max_population_stability_index, f"psi {found.psi:.2g}{missing}"


def _counts(column: str, splits: Splits) -> dict[Any, int] | None:
    """Over all splits."""
    total: dict[Any, int] = {}
    for one in splits.values():
        counts = one.value_counts(column)
        if counts is None:
            return None
        for value, count in counts.items():
            total[value] = total.get(value, 0) + count
    return total


def _sentence(result: CheckResult) -> str:
    match result.check.condition:
        case RowCount(split, least, most):
            wanted = f"{split or 'the version'} needs {least:,} rows" + (f" to {most:,}" if most else " or more")
        case ClassBalance(least_share, most_share):
            upper = f" and at most {most_share:g}" if most_share else ""
            wanted = f"each value of {result.check.column} needs a share of at least {least_share:g}{upper}"
        case Drift(most_psi):
            wanted = f"{result.check.column} may drift from its parent by a psi of {most_psi:g} at most"
        case _:
            raise TypeError(f"{result.check.condition.kind} is a check of rows")
    return f"{wanted}; found {result.observed}"
