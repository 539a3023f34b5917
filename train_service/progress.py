"""From the sums of each step to the progress that people watch."""

from __future__ import annotations

import time

from train_service.events import EventKind
from train_service.loader import Batch
from train_service.reporting import REPORT_INTERVAL_S, Reporter


class ProgressMeter:
    """Adds up steps and reports about once a second. Only rank 0 has a reporter; all ranks read the stop reason."""

    def __init__(self, reporter: Reporter | None, total_steps: int, steps_per_epoch: int) -> None:
        self._reporter = reporter
        self._total_steps = total_steps
        self._steps_per_epoch = steps_per_epoch
        self._loss = self._right = self._rows = 0.0
        self._steps_done = 0
        self._steps_before = 0
        self._started = self._reported = time.monotonic()

    def done(self, batch: Batch) -> None:
        """Notes that `batch` was computed; its sums come with a later `add`."""
        if self._steps_done == 0:
            self._steps_before = batch.step
        self._steps_done = batch.step + 1

    def add(self, sums: list[float]) -> int:
        """Takes the summed loss, right answers, rows and stop reason of one step, over all ranks. Returns the last."""
        loss, right, rows, stop_reason = sums
        self._loss += loss
        self._right += right
        self._rows += rows
        now = time.monotonic()
        if self._reporter and (now - self._reported >= REPORT_INTERVAL_S or self._steps_done == self._total_steps):
            self._tell(self._reporter, now)
        return int(stop_reason)

    def _tell(self, reporter: Reporter, now: float) -> None:
        seconds_per_step = (now - self._started) / max(1, self._steps_done - self._steps_before)
        reporter.tell(
            EventKind.PROGRESS,
            step=self._steps_done,
            total_steps=self._total_steps,
            epoch=max(0, self._steps_done - 1) // self._steps_per_epoch,
            loss=self._loss / self._rows,
            accuracy=self._right / self._rows,
            rows_per_second=self._rows / max(now - self._reported, 1e-9),
            seconds_left=seconds_per_step * (self._total_steps - self._steps_done),
        )
        self._loss = self._right = self._rows = 0.0
        self._reported = now
