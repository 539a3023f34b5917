"""What the fault tests strike, and how often: a table at a session's end, whichever of its processes ran them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.scheduling import FAULT

PROPERTY = "blow"
HEADINGS = ("service", "blow", "stage", "store", "blows", "tests", "failed")


@dataclass(frozen=True)
class Faults:
    """Keeps a test's blows among its properties, which travel with its report from process to process."""

    record_property: Callable[[str, object], None]

    def add(self, kind: str, stage: str, store: str, count: int = 1) -> None:
        """`kind`: what was done to whom; `stage`: what was under way; `store`: the kind that all of it was kept in."""
        self.record_property(PROPERTY, [kind, stage, store, count])


@dataclass
class _Tally:
    faults: int = 0
    tests: set[str] = field(default_factory=set)


def fault_table(reports: Iterable[Any]) -> list[str]:
    """Lines, of all reports of a session; none where no test struck anything."""
    failed: set[str] = set()
    tallies: dict[tuple[str, str, str, str], _Tally] = defaultdict(_Tally)
    for report in reports:
        if getattr(report, "failed", False):
            failed.add(report.nodeid)
        # The last report of a test has the properties that its fixtures set, too.
        if getattr(report, "when", "") == "teardown":
            for kind, stage, store, count in _faults(report):
                tally = tallies[_service(report.nodeid), kind, stage, store]
                tally.faults += count
                tally.tests.add(report.nodeid)
    rows = [
        (*key, str(tally.faults), str(len(tally.tests)), str(len(tally.tests & failed)))
        for key, tally in sorted(tallies.items())
    ]
    if not rows:
        return []
    total = sum(tally.faults for tally in tallies.values())
    tests = set().union(*(tally.tests for tally in tallies.values()))
    rows.append(("all", "", "", "", str(total), str(len(tests)), str(len(tests & failed))))
    widths = [max(len(row[index]) for row in (HEADINGS, *rows)) for index in range(len(HEADINGS))]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (HEADINGS, *rows)]


def _faults(report: Any) -> Iterator[tuple[str, str, str, int]]:
    for name, value in report.user_properties:
        if name == PROPERTY:
            kind, stage, store, count = value
            yield kind, stage, store, count


def _service(nodeid: str) -> str:
    """`data` of tests/fault/test_data_poison.py::…"""
    return nodeid.partition("::")[0].removeprefix(f"{FAULT}/test_").partition("_")[0]
