"""From the sums of each step to its metrics, and to the progress that people watch."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from train_service.records.metrics_log import MetricsLog
from train_service.records.reporting import REPORT_INTERVAL_S, EventKind, Reporter
from train_service.worker.step_report import StepReport

# Sums over steps, as `Learner.step` gives them, → the values of their metrics by name.
Describe = Callable[[Sequence[float]], dict[str, float]]


@dataclass(frozen=True)
class StepTaken:
    """One step of this rank. `step` is the number done, over all epochs."""

    step: int
    epoch: int
    learning_rate: float
    # Seconds that rank 0, which copies checkpoints, made all ranks wait.
    checkpoint_stall_s: float
    # Other values to keep of it, by name.
    others: dict[str, float]
    # Of the run so far, by the loss scaler; None where there is none.
    skipped_steps: int | None = None


class ProgressMeter:
    """Keeps the metrics of every step and reports about once a second. On other ranks than 0 it does nothing."""

    def __init__(self, reporter: Reporter | None, log: MetricsLog | None, describe: Describe, total_steps: int) -> None:
        self._reporter = reporter
        self._log = log
        self._describe = describe
        self._total_steps = total_steps
        # Computed, their reports still under way; and how long each took.
        self._taken: deque[tuple[StepTaken, float]] = deque()
        self._sums: list[float] = []
        self._data_wait_s = self._checkpoint_stall_s = 0.0
        self._steps = 0
        self._started = self._reported = self._done = time.monotonic()

    def done(self, taken: StepTaken) -> None:
        """Notes that a step was computed; its report comes with a later `add`, in the same order."""
        seconds, self._done = time.monotonic() - self._done, time.monotonic()
        if self._reporter:
            self._taken.append((taken, seconds))

    def add(self, report: StepReport) -> None:
        """Takes the report of the oldest step whose own has not come; nothing where all have."""
        if not self._reporter or not self._taken:
            return
        taken, seconds = self._taken.popleft()
        now = time.monotonic()
        self._keep(taken, report, seconds)
        self._sums = [one + new for one, new in zip(self._sums or [0.0] * len(report.sums), report.sums, strict=True)]
        self._data_wait_s += report.data_wait_s
        self._checkpoint_stall_s += taken.checkpoint_stall_s
        self._steps += 1
        if now - self._reported >= REPORT_INTERVAL_S or taken.step == self._total_steps:
            self._tell(self._reporter, taken, now)

    def _keep(self, taken: StepTaken, report: StepReport, seconds: float) -> None:
        if self._log is not None:
            values = {
                **self._describe(report.sums),
                "learning_rate": taken.learning_rate,
                "rows_per_second": report.sums[1] / max(seconds, 1e-9),
                "data_wait_s": report.data_wait_s,
                "checkpoint_stall_s": taken.checkpoint_stall_s,
                **({} if taken.skipped_steps is None else {"skipped_steps": float(taken.skipped_steps)}),
                **taken.others,
            }
            self._log.add(taken.step, taken.epoch, {name: one for name, one in values.items() if math.isfinite(one)})

    def _tell(self, reporter: Reporter, taken: StepTaken, now: float) -> None:
        seconds = max(now - self._reported, 1e-9)
        values = self._describe(self._sums)
        others = {name: one for name, one in values.items() if name not in ("loss", "accuracy") and math.isfinite(one)}
        reporter.tell(
            EventKind.PROGRESS,
            step=taken.step,
            total_steps=self._total_steps,
            epoch=taken.epoch,
            loss=values["loss"],
            accuracy=values.get("accuracy", 0.0),
            rows_per_second=self._sums[1] / seconds,
            seconds_left=(now - self._started) / self._steps * (self._total_steps - taken.step),
            data_wait_share=min(1.0, self._data_wait_s / seconds),
            checkpoint_stall_share=min(1.0, self._checkpoint_stall_s / seconds),
            metrics=others,
            skipped_steps=taken.skipped_steps or 0,
        )
        self._sums = []
        self._data_wait_s = self._checkpoint_stall_s = 0.0
        self._reported = now
