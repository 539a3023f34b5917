"""Which rows of an import's sources are kept: those that their source can give and that no quality check leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from data_service.domain.bad_rows import BadRowLog, BadRowPolicy, excerpt
from data_service.domain.checks import Check
from data_service.domain.checks_rows import CheckCounts, KeepFirst, RowChecks


class Screen:
    """One pass over all rows, in their order. It is the sink of the sources' bad rows."""

    def __init__(self, checks: Sequence[Check], schema: pa.Schema, policy: BadRowPolicy, quarantine: Path) -> None:
        self._checks = RowChecks(checks, schema)
        self._keep_first = KeepFirst(self._checks)
        self._rows_seen = 0
        self.counts = CheckCounts(checks)
        self.bad_rows = BadRowLog(quarantine, policy)
        self.add = self.bad_rows.add

    def kept(self, table: pa.Table, source: str) -> pa.Table:
        """The rows of the next table that are kept. Raises `FailedPrecondition` for one that a failing check does not
        let pass."""
        if self._checks.are_none:
            return table
        first = self._rows_seen
        self._rows_seen += table.num_rows
        verdict = self._keep_first.apply(table, first)
        self.counts.add(verdict)
        self.counts.refuse(lambda ordinal: f"row {ordinal} of all sources")
        for row, reason in verdict.quarantined():
            self.bad_rows.leave_out(source, f"row {first + row} of all sources", reason, excerpt(table, row))
        return table if verdict.keep.all() else table.filter(pa.array(verdict.keep))
