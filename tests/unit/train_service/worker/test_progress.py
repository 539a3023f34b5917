"""From the sums of each step to the progress that people watch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shared.storage import ObjectStore
from train_service.records.event_log import EventLog, Reporter
from train_service.records.metrics_log import MetricsLog, decode
from train_service.worker.loop import ProgressMeter, StepReport, StepTaken

JOB = "trainingJobs/a"


def taken(step: int, stall_s: float = 0.0) -> StepTaken:
    return StepTaken(step, (step - 1) // 5, 0.1, stall_s, {})


def report(sums: list[float], wait_s: float = 0.0) -> StepReport:
    return StepReport(sums, 0.0, 0, wait_s)


def describe(sums: Sequence[float]) -> dict[str, float]:
    loss, rows, right = sums
    return {"loss": loss / rows, "accuracy": right / rows, "f1": math.nan}


def test_the_last_report_is_of_the_last_step_and_means_are_over_rows(store: ObjectStore) -> None:
    with Reporter(store, JOB, 1) as reporter:
        meter = ProgressMeter(reporter, None, describe, total_steps=10)
        for step in range(8, 11):
            meter.done(taken(step))
        for step in range(7, 10):
            meter.add(report([2.0 * step, 4.0, 1.0]))

    (event,) = EventLog(store, JOB).after(0)
    assert (event.payload["step"], event.payload["epoch"], event.payload["seconds_left"]) == (10, 1, 0)
    assert event.payload["loss"] == 2.0 * (7 + 8 + 9) / 12
    assert event.payload["accuracy"] == 3 / 12
    assert event.payload["metrics"] == {}, "what is not finite is no number for people"


def test_time_spent_waiting_is_reported_as_a_share(store: ObjectStore) -> None:
    with Reporter(store, JOB, 1) as reporter:
        meter = ProgressMeter(reporter, None, describe, total_steps=1)
        meter.done(taken(1))
        meter.add(report([1.0, 4.0, 1.0], wait_s=1000.0))

    (event,) = EventLog(store, JOB).after(0)
    assert (event.payload["data_wait_share"], event.payload["checkpoint_stall_share"]) == (1.0, 0.0)


def test_every_step_has_a_point_of_its_own(store: ObjectStore) -> None:
    with Reporter(store, JOB, 1) as reporter, MetricsLog(store, JOB, 1, 0) as log:
        meter = ProgressMeter(reporter, log, describe, total_steps=3)
        for step in range(1, 4):
            meter.done(taken(step, stall_s=0.5))
            meter.add(report([2.0 * step, 4.0, 1.0]))

    points = [point for info in store.list(f"{JOB}/metrics") for point in decode(store.get(info.key), 1)]
    assert [(point.step, point.values["loss"], point.values["checkpoint_stall_s"]) for point in points] == [
        (1, 0.5, 0.5),
        (2, 1.0, 0.5),
        (3, 1.5, 0.5),
    ]
    assert all("f1" not in point.values for point in points)
