"""What a frontend reports to the replicas of versions that scale."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from inference_service import frontend_tasks
from inference_service.deploy.deployments import DeploymentManager
from inference_service.domain.batch_policy import BatchTimes, Limits, Load
from inference_service.domain.deployment import Autoscaling, application_name
from inference_service.domain.statistics import Statistics
from inference_service.frontend_tasks import LoadReporter
from inference_service.serve.batcher import Batcher
from inference_service.serve.models import Models
from tests.support.inference_server import Classifier, until
from tests.unit.inference_service.wishes import creation


def test_replicas_that_do_not_answer_delay_no_others_report(
    manager: DeploymentManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontend_tasks, "REPORT_EVERY_S", 0.01)
    spec = replace(creation().spec, autoscaling=Autoscaling(min_replicas=1, max_replicas=2, rows_per_replica=8))
    made = [manager.create(creation(name, spec=spec)) for name in ("silent", "well")]
    unresponsive, well = (application_name(one, one.versions[0]) for one in made)
    reported: list[str] = []
    answered = asyncio.Event()

    class Applications:
        async def report_load(self, name: str, _: str, __: Load) -> None:
            reported.append(name)
            if name == unresponsive:
                await answered.wait()

    async def scenario() -> None:
        models = Models()
        models.replace(made)
        for name in (unresponsive, well):
            limits = Limits(max_rows=8, max_delay_s=0.0, max_queued_rows=100, max_in_flight=1)
            models.attach(name, Batcher(Classifier(), limits, BatchTimes(), Statistics()))
        applications: Any = Applications()
        running = asyncio.create_task(LoadReporter(applications, models).run())
        await until(lambda: reported.count(well) > 5, "the one that is well gets reports again and again")
        assert reported.count(unresponsive) == 1
        running.cancel()  # which waits for nobody
        await asyncio.wait([running], timeout=240.0)
        assert running.cancelled()

    asyncio.run(scenario())
