"""What drives a rollout, over models that tests say of what they answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from inference_service.deploy.deployments import Deployments
from inference_service.deploy.rollout_driver import Rollouts
from inference_service.domain.batch_policy import BatchTimes, Limits
from inference_service.domain.deployment import Deployment, application_name
from inference_service.domain.rollout import (
    RolloutState,
)
from inference_service.domain.statistics import Statistics
from inference_service.frontend_processes import Peers
from inference_service.serve.batcher import Batcher
from inference_service.serve.models import LOST_AFTER_S, Models
from inference_service.settings import InferenceSettings
from shared.settings import ServiceSettings, StoreSettings
from shared.storage import ObjectStore
from tests.support.inference_server import Classifier


class Driven:
    """A driver of rollouts over models that answer; `poll()` is one look of its."""

    def __init__(self, store: ObjectStore, peers: Peers | None = None) -> None:
        self.store = store
        self.peers = peers or Peers()
        self.deployments = Deployments(store)
        self.models = Models()
        service = ServiceSettings(listen="", store=StoreSettings(url="file:///nowhere"))
        self.settings = InferenceSettings(service=service, retired_for_s=0.0)
        self.lost_after_s = LOST_AFTER_S
        self.restart()

    def restart(self) -> None:
        """A new process: it has seen nothing, and reads the log."""
        self.models = Models(self.lost_after_s)
        self.models.replace(self.deployments.all()[0])
        self._driver = Rollouts(self.store, self.deployments, self.models, self.settings, self.models.put, self.peers)

    @property
    def now(self) -> Deployment:
        (found,) = self.models.deployments()
        return found

    @property
    def state(self) -> RolloutState:
        assert self.now.rollout is not None
        return self.now.rollout.state

    def answer(self, number: str, model: Any = None, max_queued_rows: int = 100) -> None:
        """Replicas of this version are there."""
        version = next(one for one in self.now.versions if one.number == number)
        limits = Limits(max_rows=8, max_delay_s=0.0, max_queued_rows=max_queued_rows, max_in_flight=1)
        name = application_name(self.now, version)
        self.models.attach(name, Batcher(model or Classifier(), limits, BatchTimes(), Statistics()))

    def run_now(self, **replicas: int) -> None:
        """Serve says that so many of version `v1`, `v2`, … run."""
        versions = {f"v{one.number}": application_name(self.now, one) for one in self.now.versions}
        self.models.scaled({versions[number]: count for number, count in replicas.items()})

    def seen(self, number: str, requests: int, *, total_s: float = 0.01, status: str = "") -> None:
        """So many requests have just been answered, or have failed."""
        version = next(one for one in self.now.versions if one.number == number)
        recent = self.models.statistics(self.now, version).recent
        for _ in range(requests):
            if status:
                recent.failed(time.time(), status, total_s)
            else:
                recent.answered(time.time(), total_s)

    async def poll(self) -> None:
        await self._driver.poll(self.now)


def driving(driven: Driven, scenario: Callable[[Driven], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(240):
            await scenario(driven)

    asyncio.run(main())
