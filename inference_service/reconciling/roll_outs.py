"""Takes roll-outs from step to step, back when a limit is passed, and versions that have retired out of the logs.

It decides by what this process and its siblings have seen since they began; where a roll-out stands is in the log, so
whichever process comes next goes on from there. Several may drive one roll-out: of those that take the same step, one
does; of the front processes of one service only the first tries.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from inference_service.batching.models import Models
from inference_service.deployments.registry import Deployments, Step
from inference_service.domain.applications import application_name
from inference_service.domain.comparing import falls_short
from inference_service.domain.deployment import Deployment, ModelVersion, State
from inference_service.domain.recent import Seen, passed_limit
from inference_service.domain.roll_out import RollOut, RollOutState
from inference_service.domain.rolling import (
    with_compared,
    with_next_step,
    with_retired_gone,
    with_traffic_back,
    with_unlike,
)
from inference_service.domain.routing import find_version
from inference_service.fronts.siblings import Siblings
from inference_service.reconciling.held_comparison import compared
from inference_service.reconciling.watching import PREPARING, SILENT, Watching
from inference_service.settings import InferenceSettings
from shared.errors import DeadlineExceeded, FailedPrecondition, MillraceError, ResourceExhausted, Unavailable
from shared.storage import ObjectStore
from shared.telemetry import hidden

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.2


class RollOuts:
    """Lives on the event loop of `models`. `changed` is told each deployment whose log was written."""

    def __init__(
        self,
        store: ObjectStore,
        deployments: Deployments,
        models: Models,
        settings: InferenceSettings,
        changed: Callable[[Deployment], None],
        siblings: Siblings,
    ) -> None:
        self._store = store
        self._deployments = deployments
        self._models = models
        self._settings = settings
        self._changed = changed
        self._siblings = siblings
        self._watching = Watching()
        self._comparing: dict[str, asyncio.Task[None]] = {}  # by uid

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            for deployment in self._models.deployments():
                if deployment.state is State.READY:
                    try:
                        await self.look(deployment)
                    except Exception as error:  # one that cannot be helped now must not hold up the others
                        logger.warning("%s: %r; trying again", deployment.name, error)
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self, deployment: Deployment) -> None:
        """One look at a READY deployment, and what follows from it."""
        due_s = time.time() - self._settings.retired_for_s
        going = [one for one in deployment.versions if one.retired_at is not None and one.retired_at < due_s]
        if going:
            await self._let_go(deployment, going)
        roll_out = deployment.roll_out
        if roll_out is None:
            return
        if not roll_out.under_way:
            self._watching.forget(roll_out.uid)
            return
        if roll_out.state is not RollOutState.SHIFTING:
            await self._prepare(deployment, roll_out)
            return
        within_s = self._settings.roll_out_loads_within_s
        answers = self._answers(deployment, roll_out)
        # One look in one situation: silence ends a step's time, and an answer the silence.
        lasts_s = self._watching.lasts_s(roll_out.uid, roll_out.step if answers else SILENT)
        passed = self._passed_limit(deployment, roll_out)
        if passed:
            error = FailedPrecondition(
                f"version {roll_out.version} of {deployment.name}: {passed}",
                reason="ROLL_OUT_LIMIT",
                metadata={"resource": deployment.name, "model_version": roll_out.version},
            )
            await self._back(deployment, roll_out, error)
        elif not answers:
            if lasts_s >= within_s:
                await self._back(deployment, roll_out, _late(deployment, roll_out, within_s))
        elif lasts_s >= roll_out.present.interval_s and self._has_replicas(deployment, roll_out):
            await self._write(
                deployment, lambda before: with_next_step(before, roll_out.uid, roll_out.step, time.time())
            )

    async def _prepare(self, deployment: Deployment, roll_out: RollOut) -> None:
        """Before any traffic moves: gives up what takes too long, and compares what is to be compared."""
        within_s = self._settings.roll_out_loads_within_s
        if self._watching.lasts_s(roll_out.uid, PREPARING) >= within_s:
            await self._back(deployment, roll_out, _late(deployment, roll_out, within_s))
        elif (
            roll_out.state is RollOutState.COMPARING
            and roll_out.uid not in self._comparing
            and all(self._models.answers(deployment, version) for version in _compared_versions(deployment, roll_out))
        ):
            task = asyncio.create_task(self._compare(deployment, roll_out))
            self._comparing[roll_out.uid] = task
            task.add_done_callback(lambda _: self._comparing.pop(roll_out.uid))

    async def _compare(self, deployment: Deployment, roll_out: RollOut) -> None:
        wanted = roll_out.plan.comparison
        assert wanted is not None
        try:
            seen = await compared(
                self._store, self._models, deployment, _compared_versions(deployment, roll_out), wanted
            )
        except (Unavailable, ResourceExhausted, DeadlineExceeded) as error:
            logger.warning("%s is not compared yet: %s; trying again", deployment.name, error.message)
            return
        except MillraceError as error:
            await self._back(deployment, roll_out, error)
            return
        except Exception as unexpected:
            await self._back(deployment, roll_out, hidden(unexpected, logger, f"{deployment.name} is not compared"))
            return
        short = falls_short(wanted, seen)
        if short:
            unlike = FailedPrecondition(
                f"version {roll_out.version} of {deployment.name}: {short}",
                reason="ROLL_OUT_UNLIKE",
                metadata={"resource": deployment.name, "model_version": roll_out.version},
            )
            await self._write(deployment, lambda before: with_unlike(before, roll_out.uid, seen, unlike, time.time()))
        else:
            await self._write(deployment, lambda before: with_compared(before, roll_out.uid, seen, time.time()))

    def _passed_limit(self, deployment: Deployment, roll_out: RollOut) -> str:
        limits = roll_out.plan.limits
        return passed_limit(
            limits,
            self._seen(deployment, roll_out.version, limits.window_s),
            self._seen(deployment, roll_out.main, limits.window_s),
        )

    def _seen(self, deployment: Deployment, number: str, window_s: float) -> Seen:
        for version in deployment.versions:
            if version.number == number:
                own = self._models.statistics(deployment, version).recent.counts(time.time(), window_s)
                return sum(self._siblings.counts(application_name(deployment, version)), own).seen()
        return Seen(0, 0, 0.0)

    def _answers(self, deployment: Deployment, roll_out: RollOut) -> bool:
        """Whether the new version does, be it that it has had no replica for a moment."""
        version = find_version(deployment, roll_out.version)
        return version is not None and self._models.answers(deployment, version)

    def _has_replicas(self, deployment: Deployment, roll_out: RollOut) -> bool:
        """Whether the new version has any at this moment: without, no step is taken, which may be the last one."""
        version = find_version(deployment, roll_out.version)
        return version is not None and self._models.replicas(deployment, version) != 0

    async def _back(self, deployment: Deployment, roll_out: RollOut, error: MillraceError) -> None:
        logger.error("%s is rolled back: %s", deployment.name, error.message)
        await self._write(deployment, lambda before: with_traffic_back(before, roll_out.uid, error, time.time()))

    async def _let_go(self, deployment: Deployment, going: Sequence[ModelVersion]) -> None:
        """All that are due at once: of two with the same checkpoint, each would keep the other's mark."""
        # The marks first: once no log names the versions, nobody would come back for them.
        await asyncio.to_thread(self._deployments.release, deployment, going)
        # One that was wished for meanwhile may be of the same checkpoint or dataset version, and has lost its mark. Any
        # that is wished for after this look is marked after it.
        newest = await asyncio.to_thread(self._deployments.find, deployment.name)
        if newest is not None and newest.uid == deployment.uid and newest.state is State.READY:
            await asyncio.to_thread(self._deployments.keep_checkpoints, newest, _sharing(newest, going, "checkpoint"))
            await asyncio.to_thread(self._deployments.mark_datasets, newest, _sharing(newest, going, "dataset_version"))
        numbers = [version.number for version in going]
        await self._write(deployment, lambda before: with_retired_gone(before, numbers, time.time()))

    async def _write(self, deployment: Deployment, step: Step) -> None:
        newest = await asyncio.to_thread(self._deployments.transition, deployment.name, deployment.uid, step)
        if newest is not None:
            self._changed(newest)


def _late(deployment: Deployment, roll_out: RollOut, within_s: float) -> DeadlineExceeded:
    how = "without replicas" if roll_out.state is RollOutState.SHIFTING else f"still {roll_out.state}"
    remedy, reason = "see that Ray has CPUs for it beside the old one", "ROLL_OUT_NOT_LOADED"
    if roll_out.state is RollOutState.COMPARING:
        remedy = "both must answer the held rows while no request waits: give it more replicas, or compare fewer rows"
        reason = "ROLL_OUT_NOT_COMPARED"
    return DeadlineExceeded(
        f"version {roll_out.version} of {deployment.name} is {how} after {within_s:.0f} s; {remedy}", reason=reason
    )


def _sharing(newest: Deployment, going: Sequence[ModelVersion], field: str) -> list[ModelVersion]:
    """The versions that stay, be it that they were rolled back to meanwhile, and have the same checkpoint, or dataset
    version, as one of those that were to go."""
    numbers, shared = {version.number for version in going}, {getattr(version, field) for version in going}
    stay = [one for one in newest.versions if one.number not in numbers or one.retired_at is None]
    return [one for one in stay if getattr(one, field) in shared]


def _compared_versions(deployment: Deployment, roll_out: RollOut) -> tuple[ModelVersion, ModelVersion]:
    """The old one and the new one."""
    by_number = {version.number: version for version in deployment.versions}
    return by_number[roll_out.main], by_number[roll_out.version]
