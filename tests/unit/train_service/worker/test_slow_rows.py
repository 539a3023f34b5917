"""A rank whose rows are slow to come holds up all the others, who wait for it in their sums."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from shared.jobs import JobRecord, Jobs
from shared.jobs.transitions import begin_attempt
from shared.settings import StoreSettings
from shared.storage import open_store
from tests.unit.train_service.in_ranks import in_ranks
from tests.unit.train_service.learners import SPEC, commit_table
from train_service.learning.ranks import Ranks
from train_service.loading.loader import Batch, Loader
from train_service.records.event_log import TRAIN_KIND, EventKind, EventLog
from train_service.records.metrics_log import metrics_page
from train_service.worker import loop
from train_service.worker.loop import LoopConfig, PendingReport, Run, StepReport

JOB = "trainingJobs/a"
SLOW_RANK, SLOW_S = 1, 0.1


def test_a_wait_for_the_rows_of_any_rank_is_reported(tmp_path: Path) -> None:
    settings = StoreSettings(url=(tmp_path / "store").as_uri())
    store = open_store(settings)
    commit_table(store)
    now = time.time()
    Jobs(store, TRAIN_KIND).create(JOB, JobRecord(uid="a", name=JOB, spec={}, create_time=now, update_time=now))
    Jobs(store, TRAIN_KIND).transition(JOB, lambda job: begin_attempt(job, now), attempt=1)
    (tmp_path / "ranks").mkdir()

    in_ranks(2, run_with_a_slow_rank, tmp_path / "ranks", settings)

    points, _ = metrics_page(store, JOB, 0, 1000, "")
    assert points
    assert [point.values["data_wait_s"] for point in points] == pytest.approx([SLOW_S] * len(points))
    reported = [event.payload for event in EventLog(store, JOB).after(0) if event.kind is EventKind.PROGRESS]
    assert [payload["data_wait_share"] for payload in reported] == pytest.approx([1.0] * len(reported))
    assert len(reported) > 1


def run_with_a_slow_rank(ranks: Ranks, settings: StoreSettings) -> None:
    """By a clock on which only the slow rank's rows take time: that rank waits for them, the other one for its sums."""
    passed_s = 0.0
    promptly, result = Loader.batches, PendingReport.result
    waited_for: list[PendingReport] = []

    def slowly(loader: Loader, first_step: int) -> Iterator[Batch]:
        nonlocal passed_s
        for batch in promptly(loader, first_step):
            passed_s += SLOW_S
            yield batch

    def wait(report: PendingReport) -> StepReport:
        nonlocal passed_s
        if report not in waited_for:
            waited_for.append(report)
            passed_s += SLOW_S
        return result(report)

    spec = replace(SPEC, validation_split="", num_workers=ranks.world_size)
    config = LoopConfig(store=settings, job_name=JOB, attempt=1, spec=spec)
    slow = mock.patch.object(Loader, "batches", slowly)
    waiting = mock.patch.object(PendingReport, "result", wait)
    with (
        mock.patch.object(loop, "time", SimpleNamespace(monotonic=lambda: passed_s)),
        slow if ranks.rank == SLOW_RANK else waiting,
    ):
        Run(config, ranks).run()
