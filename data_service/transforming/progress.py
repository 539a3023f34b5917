"""How far a transform or a prediction is, told at most twice a second."""

from __future__ import annotations

import time

from shared.jobs import AttemptContext

INTERVAL_S = 0.5


class Progress:
    """`phase`: FITTING or WRITING; of a prediction CHECKING or PREDICTING. Passes of one phase add up."""

    def __init__(self, context: AttemptContext) -> None:
        self._context = context
        self._phase = ""
        self._rows_done = self._rows_total = 0
        self._began_at = self._told_at = 0.0

    def begin(self, phase: str, rows: int) -> None:
        """A pass over so many rows begins."""
        if phase != self._phase:
            self._phase = phase
            self._rows_done = self._rows_total = 0
            self._began_at = time.monotonic()
        self._rows_total += rows
        self.tell()

    def add(self, rows: int) -> None:
        self._rows_done += rows
        if time.monotonic() - self._told_at > INTERVAL_S:
            self.tell()

    def tell(self) -> None:
        self._told_at = time.monotonic()
        self._context.report(
            phase=self._phase,
            rows_done=self._rows_done,
            rows_total=self._rows_total,
            rows_per_second=self._rows_done / max(self._told_at - self._began_at, 1e-3),
        )
