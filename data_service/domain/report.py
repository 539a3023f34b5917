"""The quality report of a version: statistics, checks, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data_service.domain.bad_rows import BadRowLog, BadRowPart, BadRowPolicy, excerpt
from data_service.domain.checks import CheckResult
from data_service.domain.statistics import SplitStatistics

__all__ = ["BadRowLog", "BadRowPart", "BadRowPolicy", "build_report", "excerpt"]


def build_report(
    splits: Mapping[str, SplitStatistics], results: Mapping[int, CheckResult], bad_rows: BadRowLog
) -> dict[str, Any]:
    """A QualityReport in the shape of its proto JSON.

    `splits` in the order of the version; `results` by the index of the check: those of rows and those of the gate.
    """
    return {
        "columns": [one.to_json() for split, statistics in splits.items() for one in statistics.result(split)],
        "checks": [results[index].to_json() for index in sorted(results)],
        "quarantine": bad_rows.to_json(),
        "quarantinedRowCount": bad_rows.row_count,
    }
