"""How far the values of a column moved between two versions: the population stability index.

PSI = Σ (a - e) ln(a / e) over bins, where e is the parent's share of a bin and a the new version's. Source: Siddiqi,
Credit Risk Scorecards, 2006; customary limits are 0.1 and 0.25.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from data_service.domain.statistics.result import ColumnStatistics, NumberStatistics

DECILES = np.arange(1, 10) / 10
# An empty bin counts as this share; its logarithm would be infinite.
LEAST_SHARE = 1e-4

Counts = Mapping[Any, int]


def population_stability_index(
    parent: Sequence[ColumnStatistics], new: Sequence[ColumnStatistics], new_counts: Counts | None
) -> float | None:
    """Of one column; one statistics for each split, `new_counts` over all of them where they are known.

    Numbers are compared over the parent's deciles, everything else over the parent's frequent values, with one bin for
    all others. None where one of the two has no values, or the parent too many different ones.
    """
    if not (_present(parent) and _present(new)):
        return None
    parent_counts = _complete_counts(parent)
    if all(one.numbers is None or _has_booleans(one) for one in parent):
        return None if parent_counts is None or new_counts is None else _over_values(parent_counts, new_counts)
    if parent_counts is not None and new_counts is not None:
        expected, found = _Steps(parent_counts), _Steps(new_counts)
        return _over_deciles(expected.edges(), expected.reached, found.reached)
    # Both from what a report tells, so that equal values give 0.
    line, other = _Line(parent), _Line(new)
    return _over_deciles(line.edges(), line.reached, other.reached)


class _Steps:
    """The distribution of values whose counts are all known."""

    def __init__(self, counts: Counts) -> None:
        numbers = sorted((float(value), count) for value, count in counts.items())
        self._values = np.array([value for value, _ in numbers])
        self._shares = np.cumsum([count for _, count in numbers]) / sum(counts.values())

    def reached(self, edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The share of values at or below each edge."""
        places = np.searchsorted(self._values, edges, side="right")
        return np.concatenate([[0.0], self._shares])[places]

    def edges(self) -> npt.NDArray[np.float64]:
        return np.unique(self._values[np.searchsorted(self._shares, DECILES - 1e-12)])


class _Line:
    """The distribution that quantiles and histograms of the splits draw, straight between the points they give."""

    def __init__(self, splits: Sequence[ColumnStatistics]) -> None:
        self._parts = [(one.row_count - one.null_count, _points(one.numbers)) for one in splits if one.numbers]

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


def _over_values(expected: Counts, found: Counts) -> float:
    """The last bin has the values that the parent does not have."""
    totals = sum(expected.values()), sum(found.values())
    expected_shares = [count / totals[0] for count in expected.values()] + [0.0]
    known = [found.get(value, 0) for value in expected]
    found_shares = [count / totals[1] for count in [*known, totals[1] - sum(known)]]
    return _psi(expected_shares, found_shares)


def _psi(expected: Sequence[float], found: Sequence[float]) -> float:
    total = 0.0
    for e, a in zip(expected, found, strict=True):
        if e or a:
            e, a = max(e, LEAST_SHARE), max(a, LEAST_SHARE)
            total += (a - e) * math.log(a / e)
    return total


def _present(splits: Sequence[ColumnStatistics]) -> int:
    return sum(one.row_count - one.null_count - one.nan_count for one in splits)


def _has_booleans(one: ColumnStatistics) -> bool:
    return bool(one.values) and all(isinstance(value, bool) for value, _ in one.values)


def _complete_counts(splits: Sequence[ColumnStatistics]) -> dict[Any, int] | None:
    """Over all splits, where their reports have every value; of texts, too, where the rare ones are missing."""
    counts: dict[Any, int] = {}
    for one in splits:
        for value, count in one.values:
            counts[value] = counts.get(value, 0) + count
    there = _present(splits)
    if sum(counts.values()) == there:
        return counts
    is_text = bool(counts) and all(isinstance(value, str) for value in counts)
    return counts if is_text else None
