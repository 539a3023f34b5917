"""Tells the other front processes of this service, several times a second, what they must know of this one; at once,
what it begins to take out of Serve."""

from __future__ import annotations

import asyncio
import logging
import os
import time

from inference_service.batching.models import Models
from inference_service.domain.applications import application_name
from inference_service.domain.deployment import Deployment
from inference_service.domain.recent import Counts
from inference_service.domain.roll_out import RollOutState
from inference_service.fronts.siblings import LOOK_EVERY_S, Siblings, Told
from inference_service.open_inference.summed_statistics import SummedStatistics
from inference_service.reconciling.reconciler import Reconciler

logger = logging.getLogger(__name__)

STATISTICS_EVERY_S = 1.0


class SiblingReports:
    """Lives on the event loop of `models`. `ready` is set once this process answers."""

    def __init__(
        self,
        siblings: Siblings,
        reconciler: Reconciler,
        models: Models,
        statistics: SummedStatistics,
        ready: asyncio.Event,
    ) -> None:
        self._siblings = siblings
        self._ready = ready
        self._reconciler = reconciler
        self._models = models
        self._statistics = statistics
        self._statistics_at = -STATISTICS_EVERY_S
        self._listens = False
        self._is_mute = False
        self._news: dict[int, tuple[int, list[str], list[str]]] = {}
        reconciler.on_going(self._exchange)

    async def run(self) -> None:
        """Until cancelled; returns at once where there are no others. What they have written or loaded is seen soon."""
        while self._siblings.are_there:
            self._exchange()
            await asyncio.sleep(LOOK_EVERY_S)

    async def turn_to_listen(self) -> None:
        """Returns when this process may open the port, and tells the others that it does."""
        while not self._siblings.may_listen(self._ready.is_set(), self._reconciler.holds()):  # noqa: ASYNC110 - files tell nobody
            await asyncio.sleep(LOOK_EVERY_S)
        self._listens = True
        self._exchange()

    def _exchange(self) -> None:
        """A folder that is full or cannot be written or read must not end what is served: it is tried again."""
        self._siblings.beat()
        try:
            self._tell()
            before, self._news = self._news, self._siblings.news()
            if time.monotonic() - self._statistics_at >= STATISTICS_EVERY_S:
                self._statistics.leave()
                self._statistics_at = time.monotonic()
        except OSError as error:
            if not self._is_mute:
                logger.error("the front processes do not hear of each other: %s; see to the folder's disk", error)
            self._is_mute = True
            return
        self._is_mute = False
        if self._news != before:
            self._reconciler.nudge()

    def _tell(self) -> None:
        counts = {name: one for deployment in self._models.deployments() for name, one in self._counts(deployment)}
        self._siblings.tell(
            Told(
                pid=os.getpid(),
                listens=self._listens,
                ready=self._ready.is_set(),
                holds=self._reconciler.holds(),
                going=self._reconciler.going(),
                written=self._models.written,
                counts=counts,
            )
        )

    def _counts(self, deployment: Deployment) -> list[tuple[str, Counts]]:
        """Of the versions that limits compare, as long as they do."""
        roll_out = deployment.roll_out
        if roll_out is None or roll_out.state is not RollOutState.SHIFTING:
            return []
        return [
            (
                application_name(deployment, version),
                self._models.statistics(deployment, version).recent.counts(time.time(), roll_out.plan.limits.window_s),
            )
            for version in deployment.versions
            if version.number in (roll_out.version, roll_out.main)
        ]
