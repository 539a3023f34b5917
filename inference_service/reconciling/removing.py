"""Takes versions out of Ray Serve once what is in flight is answered, and ends the logs of deployments that go."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from inference_service.batching.models import Models
from inference_service.deployments.registry import Deployments
from inference_service.domain.applications import application_name
from inference_service.domain.deployment import Deployment, with_removal
from inference_service.fronts.siblings import Siblings
from inference_service.reconciling.ray_serve import ServeApplications
from inference_service.reconciling.serve_calls import call_serve
from inference_service.settings import InferenceSettings

logger = logging.getLogger(__name__)


class Removing:
    """Lives on the event loop of `models`. `nudge` is called when something is gone, `on_going` when an application
    begins to go. Of several front processes only the first takes away; the others let go."""

    def __init__(
        self,
        deployments: Deployments,
        applications: ServeApplications,
        models: Models,
        settings: InferenceSettings,
        siblings: Siblings,
        nudge: Callable[[], None],
    ) -> None:
        self._deployments = deployments
        self._applications = applications
        self._models = models
        self._silent_after_s = settings.drain_silent_after_s
        self._siblings = siblings
        self._nudge = nudge
        self.on_going: Callable[[], None] = lambda: None
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by uid, and applications that no log names by theirs
        self._draining: set[str] = set()
        self._going: set[str] = set()

    @property
    def draining(self) -> Collection[str]:
        """The applications whose last batches are still to be sent or answered."""
        return self._draining

    @property
    def going(self) -> Collection[str]:
        """The applications that this process, where it is the first, is taking out of Serve: none of them can be taken
        over again before it is gone."""
        return self._going

    @property
    def under_way(self) -> Collection[str]:
        """The uids of the deployments that are going, and the applications that do by themselves."""
        return self._tasks.keys()

    def remove(self, deployment: Deployment) -> None:
        """Begins to, unless that is under way."""
        if deployment.uid not in self._tasks:
            self._tasks[deployment.uid] = asyncio.create_task(self._remove(deployment))

    def retire(self, name: str) -> None:
        """Begins to take an application out of Serve that no log wants, or, where another process does so, to let go of
        it; unless that is under way."""
        if name not in self._tasks:
            if self._siblings.leads:
                logger.info("deleting application %s, which no log wants", name)
            self._tasks[name] = asyncio.create_task(self._retire(name))

    async def _retire(self, name: str) -> None:
        try:
            await self._take_out(name)
        except Exception as error:
            logger.warning("application %s is not gone yet: %s", name, error)
        finally:
            del self._tasks[name]
        self._nudge()

    async def _remove(self, deployment: Deployment) -> None:
        """Answers what is in flight, then takes all its versions out of Serve and ends its log."""
        try:
            for version in deployment.versions:
                name = application_name(deployment, version)
                if name in self._tasks:  # it was unloaded, and has not answered all that it has
                    await asyncio.wait({self._tasks[name]})
                await self._take_out(name)
            if not self._siblings.leads:
                return
            # Before its log ends, or nobody would come back to do it.
            await asyncio.to_thread(self._deployments.release, deployment, deployment.versions)
            gone = await asyncio.to_thread(
                self._deployments.transition,
                deployment.name,
                deployment.uid,
                lambda before: with_removal(before, time.time()),
            )
            if gone is not None:
                self._models.put(gone)
            logger.info("%s is gone", deployment.name)
            self._nudge()
        except Exception as error:
            logger.warning("%s is not gone yet: %s", deployment.name, error)
        finally:
            del self._tasks[deployment.uid]

    async def _take_out(self, name: str) -> None:
        """Answers what is in flight, then takes the application out of Serve."""
        if not self._siblings.leads:
            await self._drain(name)
            self._applications.forget(name)
            return
        self._going.add(name)
        try:
            # At once: who has not heard of it may take the application over, and so counts as holding it.
            self.on_going()
            told_s = time.time()
            await self._drain(name)
            await self._siblings.let_go(name, told_s, self._silent_after_s)
            await call_serve(self._applications.delete, name)
        finally:
            self._going.discard(name)

    async def _drain(self, name: str) -> None:
        self._draining.add(name)
        try:
            batcher = self._models.detach(name)
            if batcher is not None:
                await batcher.drain(self._silent_after_s)
        finally:
            self._draining.discard(name)
