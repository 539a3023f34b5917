"""Takes roll-outs from step to step, back when a limit is passed, and versions that have retired out of the logs.

It decides by what this process itself has seen since it began; where a roll-out stands is in the log, so whichever
process comes next goes on from there. Several may drive one roll-out: of those that take the same step, one does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from inference_service.domain.deployment import Deployment, ModelVersion, State
from inference_service.domain.recent import Seen, passed_limit
from inference_service.domain.roll_out import RollOut, RollOutState
from inference_service.domain.rolling import with_next_step, with_retired_gone, with_traffic_back
from inference_service.models import Models
from inference_service.registry import Deployments, Step
from inference_service.settings import InferenceSettings
from shared.errors import DeadlineExceeded, FailedPrecondition, MillraceError

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.2


class RollOuts:
    """Lives on the event loop of `models`. `changed` is told each deployment whose log was written."""

    def __init__(
        self,
        deployments: Deployments,
        models: Models,
        settings: InferenceSettings,
        changed: Callable[[Deployment], None],
    ) -> None:
        self._deployments = deployments
        self._models = models
        self._settings = settings
        self._changed = changed
        # Since when this process watches the step that a roll-out is at: by uid, the step and a monotonic time.
        self._watched: dict[str, tuple[int, float]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            for deployment in self._models.deployments():
                if deployment.state is State.READY:
                    try:
                        await self.look(deployment)
                    except MillraceError as error:  # the store; everything stays as it is until it answers
                        logger.warning("%s: %s; trying again", deployment.name, error.message)
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self, deployment: Deployment) -> None:
        """One look at a READY deployment, and what follows from it."""
        for version in deployment.versions:
            if version.retired_at is not None and time.time() - version.retired_at > self._settings.retired_for_s:
                await self._let_go(deployment, version)
        roll_out = deployment.roll_out
        if roll_out is None or not roll_out.under_way:
            return
        if roll_out.state is RollOutState.LOADING:
            waited_s = time.time() - roll_out.create_time
            if waited_s > self._settings.roll_out_loads_within_s:
                late = DeadlineExceeded(
                    f"version {roll_out.version} of {deployment.name} was not loaded within "
                    f"{self._settings.roll_out_loads_within_s:.0f} s; see that Ray has CPUs for it beside the old one",
                    reason="ROLL_OUT_NOT_LOADED",
                )
                await self._back(deployment, roll_out, late)
            return
        passed = self._passed_limit(deployment, roll_out)
        if passed:
            error = FailedPrecondition(
                f"version {roll_out.version} of {deployment.name}: {passed}",
                reason="ROLL_OUT_LIMIT",
                metadata={"resource": deployment.name, "model_version": roll_out.version},
            )
            await self._back(deployment, roll_out, error)
        elif self._watched_s(deployment, roll_out) >= roll_out.present.interval_s:
            await self._write(
                deployment, lambda before: with_next_step(before, roll_out.uid, roll_out.step, time.time())
            )

    def _passed_limit(self, deployment: Deployment, roll_out: RollOut) -> str:
        old = max(roll_out.before, key=lambda number: roll_out.before[number])
        limits = roll_out.plan.limits
        return passed_limit(
            limits,
            self._seen(deployment, roll_out.version, limits.window_s),
            self._seen(deployment, old, limits.window_s),
        )

    def _seen(self, deployment: Deployment, number: str, window_s: float) -> Seen:
        for version in deployment.versions:
            if version.number == number:
                return self._models.statistics(deployment, version).recent.seen(time.time(), window_s)
        return Seen(0, 0, 0.0)

    def _watched_s(self, deployment: Deployment, roll_out: RollOut) -> float:
        """How long this process has watched the present step; it does so while the new version answers."""
        version = next((one for one in deployment.versions if one.number == roll_out.version), None)
        if version is None or not self._models.answers(deployment, version):
            self._watched.pop(roll_out.uid, None)
            return -1.0
        step, since_s = self._watched.get(roll_out.uid, (-1, 0.0))
        if step != roll_out.step:
            since_s = time.monotonic()
            self._watched[roll_out.uid] = (roll_out.step, since_s)
        return time.monotonic() - since_s

    async def _back(self, deployment: Deployment, roll_out: RollOut, error: MillraceError) -> None:
        logger.error("%s is rolled back: %s", deployment.name, error.message)
        await self._write(deployment, lambda before: with_traffic_back(before, roll_out.uid, error, time.time()))

    async def _let_go(self, deployment: Deployment, version: ModelVersion) -> None:
        # The marks first: once no log names the version, nobody would come back for them.
        await asyncio.to_thread(self._deployments.release, deployment, [version])
        await self._write(deployment, lambda before: with_retired_gone(before, version.number, time.time()))

    async def _write(self, deployment: Deployment, step: Step) -> None:
        newest = await asyncio.to_thread(self._deployments.transition, deployment.name, deployment.uid, step)
        if newest is None:
            return
        roll_out = newest.roll_out
        if roll_out is not None and not roll_out.under_way:
            self._watched.pop(roll_out.uid, None)
        self._changed(newest)
