"""Tells the replicas of versions that scale what this process has for them to do, every few seconds.

They hand it on to Ray Serve's controller, which decides: so several front processes add up, and none decides alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid

from inference_service.batching.models import Models
from inference_service.domain.applications import application_name
from inference_service.domain.deployment import LIVE
from inference_service.reconciling.ray_serve import ServeApplications

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 2.0


class LoadReports:
    """Lives on the event loop of `models`."""

    def __init__(self, applications: ServeApplications, models: Models) -> None:
        self._applications = applications
        self._models = models
        self._front = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._under_way: set[str] = set()

    async def run(self) -> None:
        """Until cancelled. Replicas that do not answer delay nobody else's report."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for name in set(self._scaled()) - self._under_way:
                    self._under_way.add(name)
                    tasks.create_task(self._report(name))
                await asyncio.sleep(REPORT_EVERY_S)

    def _scaled(self) -> list[str]:
        return [
            application_name(deployment, version)
            for deployment in self._models.deployments()
            if deployment.state in LIVE and deployment.spec.autoscaling is not None
            for version in deployment.versions
        ]

    async def _report(self, name: str) -> None:
        try:
            batcher = self._models.find_batcher(name)
            if batcher is not None:
                await self._applications.tell_load(name, self._front, batcher.load())
        except Exception as error:  # Ray's half a dozen kinds; the next report is as good
            logger.warning("the replicas of %s do not hear what there is for them to do: %r", name, error)
        finally:
            self._under_way.discard(name)
