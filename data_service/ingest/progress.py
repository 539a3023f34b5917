"""How far an import is, for those who wait for it."""

from __future__ import annotations

import time

from shared.jobs import AttemptContext

REPORT_INTERVAL_S = 0.5


class Progress:
    """Tells how many rows were read and left out, at most twice a second."""

    def __init__(self, context: AttemptContext) -> None:
        self._context = context
        self._rows = self._quarantined = 0
        self._reported_at = 0.0

    def add(self, rows: int, quarantined: int) -> None:
        """`rows` more; `quarantined` in all."""
        self._rows += rows
        self._quarantined = quarantined
        if time.monotonic() - self._reported_at > REPORT_INTERVAL_S:
            self.report()

    def report(self) -> None:
        self._context.report(rows_read=self._rows, rows_quarantined=self._quarantined)
        self._reported_at = time.monotonic()
