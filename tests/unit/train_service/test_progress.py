"""From the sums of each step to the progress that people watch."""

from __future__ import annotations

import numpy as np

from shared.storage import ObjectStore
from train_service.events import EventLog
from train_service.loader import Batch
from train_service.progress import ProgressMeter
from train_service.reporting import STALE, Reporter

NOTHING = np.zeros(0, np.int64)


def batch(step: int) -> Batch:
    return Batch(step, step // 5, NOTHING, NOTHING, NOTHING, step_rows=4)


def test_the_last_report_is_of_the_last_step_and_means_are_over_rows(store: ObjectStore) -> None:
    with Reporter(store, "trainingJobs/a", 1) as reporter:
        meter = ProgressMeter(reporter, total_steps=10, steps_per_epoch=5)
        for step in range(7, 10):
            meter.done(batch(step))
            meter.add([2.0 * step, 1.0, 4.0, 0.0])

    (event,) = EventLog(store, "trainingJobs/a").after(0)
    assert (event.payload["step"], event.payload["epoch"], event.payload["seconds_left"]) == (10, 1, 0)
    assert event.payload["loss"] == 2.0 * (7 + 8 + 9) / 12
    assert event.payload["accuracy"] == 3 / 12


def test_every_rank_learns_the_stop_reason_though_only_one_reports() -> None:
    meter = ProgressMeter(None, total_steps=10, steps_per_epoch=5)
    meter.done(batch(0))

    assert meter.add([1.0, 1.0, 4.0, float(STALE)]) == STALE
