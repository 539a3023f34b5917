"""Quality checks of a whole version, the last gate before its publication; includes drift from another version."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from data_service.domain.checks import CHECK_FAILED, Check, CheckResult, ClassBalance, Drift, RowCount
from data_service.domain.statistics import SplitStatistics
from data_service.domain.statistics.result import ColumnStatistics, NumberStatistics, camel_case
from shared.errors import FailedPrecondition

# --- The gate ---

Splits = Mapping[str, SplitStatistics]


def gate(checks: Sequence[Check], splits: Splits, parent_report: Mapping[str, Any] | None) -> dict[int, CheckResult]:
    """Evaluates the checks of the whole version, by their index; row checks are not included.

    `splits` are the statistics of the whole splits; `parent_report` is the first parent's QualityReport as proto JSON.
    Raises `FailedPrecondition` listing all failed checks.
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
        rows = sum(split.row_count for split in splits.values())
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
    new = [found for split in splits.values() for found in split.result() if found.column == column]
    found = compare([ColumnStatistics.from_json(record) for record in records], new, _counts(column, splits))
    missing = f", {found.missing}" if found.missing else ""
    if found.psi is None:
        return False, f"not comparable: no values, or too many different ones{missing}"
    return found.psi <= condition.max_population_stability_index, f"psi {found.psi:.2g}{missing}"


def _counts(column: str, splits: Splits) -> dict[Any, int] | None:
    """Returns the counts over all splits; None if a split's are unknown."""
    total: dict[Any, int] = {}
    for split in splits.values():
        counts = split.value_counts(column)
        if counts is None:
            return None
        for value, count in counts.items():
            total[value] = total.get(value, 0) + count
    return total


def _sentence(result: CheckResult) -> str:
    match result.check.condition:
        case RowCount(split, least, most):
            wanted = f"{split or 'the version'} needs {least:,} rows" + (f" to {most:,}" if most else " or more")
        case ClassBalance(min_share, max_share):
            upper = f" and at most {max_share:g}" if max_share else ""
            wanted = f"each value of {result.check.column} needs a share of at least {min_share:g}{upper}"
        case Drift(max_psi):
            wanted = f"{result.check.column} may drift from its parent by a psi of {max_psi:g} at most"
        case _:
            raise TypeError(f"{result.check.condition.kind} is a check of rows")
    return f"{wanted}; found {result.observed}"


# --- Drift ---
# The drift of a column's values between two versions: the population stability index.
#
# PSI = Σ (a - e) ln(a / e) over bins, where e is the parent's share of a bin and a the new version's. Source: Siddiqi,
# Credit Risk Scorecards, 2006; customary limits are 0.1 and 0.25.
#
# A column's index is that of its values plus that of the three bins value, null and NaN. If nulls were another bin of
# the values, drift of the values would be hidden in a column with few of them.

DECILES = np.arange(1, 10) / 10
# The share assumed for an empty bin, whose logarithm would be infinite.
MIN_SHARE = 1e-4

Counts = Mapping[Any, int]


@dataclass(frozen=True)
class Comparison:
    """The drift of one column.

    `psi` is None if one of the two has no values, or too many distinct ones. Shares are of all rows, 0 to 1: the
    parent's, then the new version's.
    """

    psi: float | None
    null_shares: tuple[float, float]
    nan_shares: tuple[float, float]

    @property
    def missing(self) -> str:
        """The shares of rows without a value, for people: `nulls 0 % before, 95 % now`.

        Empty if all rows have a value.
        """
        shares = (("nulls", self.null_shares), ("NaN", self.nan_shares))
        return "; ".join(
            f"{name} {100 * before:.3g} % before, {100 * now:.3g} % now"
            for name, (before, now) in shares
            if before or now
        )


def compare(
    parent: Sequence[ColumnStatistics], new: Sequence[ColumnStatistics], new_counts: Counts | None
) -> Comparison:
    """Compares one column.

    Each sequence has one statistics for each split; `new_counts` covers all splits, if known.
    """
    null_shares = (_share(parent, "null_count"), _share(new, "null_count"))
    nan_shares = (_share(parent, "nan_count"), _share(new, "nan_count"))
    values = population_stability_index(parent, new, new_counts)
    if values is None:
        return Comparison(None, null_shares, nan_shares)
    expected, found = ([1 - nulls - nan, nulls, nan] for nulls, nan in zip(null_shares, nan_shares, strict=True))
    return Comparison(values + _psi(expected, found), null_shares, nan_shares)


def _share(splits: Sequence[ColumnStatistics], count: str) -> float:
    rows = sum(split.row_count for split in splits)
    return sum(getattr(one, count) for one in splits) / rows if rows else 0.0


def population_stability_index(
    parent: Sequence[ColumnStatistics], new: Sequence[ColumnStatistics], new_counts: Counts | None
) -> float | None:
    """Returns the index of the values that are neither null nor NaN.

    Numbers are compared over the parent's deciles, other values over the parent's frequent values, with bins for the
    rest. None if one of the two has no values, or too many distinct ones.
    """
    if not (_present(parent) and _present(new)):
        return None
    if all(one.numbers is None or _has_booleans(one) for one in parent):
        listed = _Listed.from_statistics(parent)
        return None if listed is None or new_counts is None else _over_values(listed, new_counts)
    parent_counts = _complete_counts(parent)
    if parent_counts is not None and new_counts is not None:
        expected, found = _Steps(parent_counts), _Steps(new_counts)
        return _over_deciles(expected.edges(), expected.reached, found.reached)
    # Both from the data of reports, so that equal values give 0.
    line, other = _Line(parent), _Line(new)
    return _over_deciles(line.edges(), line.reached, other.reached)


class _Steps:
    """The distribution of values whose counts are all known."""

    def __init__(self, counts: Counts) -> None:
        numbers = sorted((float(value), count) for value, count in counts.items())
        self._values = np.array([value for value, _ in numbers])
        self._shares = np.cumsum([count for _, count in numbers]) / sum(counts.values())

    def reached(self, edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the share of values at or below each edge."""
        places = np.searchsorted(self._values, edges, side="right")
        return np.concatenate([[0.0], self._shares])[places]

    def edges(self) -> npt.NDArray[np.float64]:
        return np.unique(self._values[np.searchsorted(self._shares, DECILES - 1e-12)])


class _Line:
    """The distribution from quantiles and histograms of the splits, interpolated linearly."""

    def __init__(self, splits: Sequence[ColumnStatistics]) -> None:
        self._parts = [(_present([split]), _points(split.numbers)) for split in splits if split.numbers]

    def reached(self, edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        shares = [np.interp(edges, values, reached, left=0.0) * rows for rows, (values, reached) in self._parts]
        total: npt.NDArray[np.float64] = np.sum(shares, axis=0) / sum(rows for rows, _ in self._parts)
        return total

    def edges(self) -> npt.NDArray[np.float64]:
        knots = np.unique(np.concatenate([values for _, (values, _) in self._parts]))
        reached = np.maximum.accumulate(self.reached(knots))
        steps = np.concatenate([[True], np.diff(reached) > 0])
        return np.unique(np.interp(DECILES, reached[steps], knots[steps]))


def _points(numbers: NumberStatistics) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    percents = np.array([0, 1, 5, 25, 50, 75, 95, 99, 100]) / 100
    values = np.array([numbers.min, *numbers.quantiles, numbers.max])
    if len(numbers.histogram) > 1:
        ends = np.linspace(numbers.min, numbers.max, len(numbers.histogram) + 1)[1:-1]
        bars = np.cumsum(numbers.histogram)[:-1] / sum(numbers.histogram)
        values, percents = np.concatenate([values, ends]), np.concatenate([percents, bars])
    order = np.lexsort((percents, values))
    values, percents = values[order], np.maximum.accumulate(percents[order])
    last_of_equals = np.concatenate([values[1:] != values[:-1], [True]])
    return values[last_of_equals], percents[last_of_equals]


def _over_deciles(edges: npt.NDArray[np.float64], expected: Any, found: Any) -> float:
    shares = [np.diff(np.concatenate([[0.0], reached(edges), [1.0]])) for reached in (expected, found)]
    return _psi(shares[0].tolist(), shares[1].tolist())


@dataclass(frozen=True)
class _Listed:
    """The counts of values, as far as reports that list each split's frequent values determine them.

    A value that no split lists occurs at most `unlisted` times, since in each split it is no more frequent than those
    listed.
    """

    total: int
    least: Mapping[Any, int]
    most: Mapping[Any, int]
    unlisted: int

    @classmethod
    def from_statistics(cls, splits: Sequence[ColumnStatistics]) -> _Listed | None:
        """Returns the counts; None if a split has values but lists none."""
        least: Counter[Any] = Counter()
        known: Counter[Any] = Counter()  # the part of `unlisted` from splits that list the value
        total = unlisted = 0
        for split in splits:
            if not (there := _present([split])):
                continue
            if not split.values:
                return None
            counts = dict(split.values)
            rarest = min(*counts.values(), there - sum(counts.values()))
            least.update(counts)
            known.update(dict.fromkeys(counts, rarest))
            total, unlisted = total + there, unlisted + rarest
        most = {value: count + unlisted - known[value] for value, count in least.items()}
        return cls(total, least, most, unlisted)


def _over_values(parent: _Listed, found: Counts) -> float:
    """Compares over values; an uncertain count of the parent is taken closest to the found one.

    So equal values give 0, even if the reports omit some. The last two bins have the values that the parent does not
    list: those that are now more frequent than they can have been, and the others.
    """
    total = sum(found.values())
    shares = [found.get(value, 0) / total for value in parent.least]
    expected = [
        min(max(share, parent.least[value] / parent.total), parent.most[value] / parent.total)
        for value, share in zip(parent.least, shares, strict=True)
    ]
    limit = parent.unlisted / parent.total
    risen = [count / total for value, count in found.items() if value not in parent.least and count / total > limit]
    rest = max(0.0, 1 - math.fsum(expected))
    expected_risen = min(rest, limit * len(risen))
    others = max(0.0, 1 - math.fsum(shares) - math.fsum(risen))
    return _psi([*expected, expected_risen, rest - expected_risen], [*shares, math.fsum(risen), others])


def _psi(expected: Sequence[float], found: Sequence[float]) -> float:
    total = 0.0
    for e, a in zip(expected, found, strict=True):
        if e or a:
            e, a = max(e, MIN_SHARE), max(a, MIN_SHARE)
            total += (a - e) * math.log(a / e)
    return total


def _present(splits: Sequence[ColumnStatistics]) -> int:
    return sum(split.row_count - split.null_count - split.nan_count for split in splits)


def _has_booleans(column_statistics: ColumnStatistics) -> bool:
    return bool(column_statistics.values) and all(isinstance(value, bool) for value, _ in column_statistics.values)


def _complete_counts(splits: Sequence[ColumnStatistics]) -> dict[Any, int] | None:
    """Returns the counts over all splits, if their reports have every value."""
    counts: dict[Any, int] = {}
    for split in splits:
        for value, count in split.values:
            counts[value] = counts.get(value, 0) + count
    return counts if sum(counts.values()) == _present(splits) else None
