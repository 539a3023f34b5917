"""Loads versions: asks Ray Serve for their replicas, and has requests come to them once these say that they answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace

from inference_service.batching.batcher import BATCHES_PER_REPLICA, Batcher
from inference_service.batching.models import Models
from inference_service.deployments.cluster import Cluster
from inference_service.deployments.registry import Deployments
from inference_service.domain.batch_times import BatchTimes
from inference_service.domain.batching import Limits
from inference_service.domain.deployment import Deployment, ModelVersion
from inference_service.domain.rolling import with_version_failed, with_version_loaded
from inference_service.domain.routing import find_version
from inference_service.fronts.siblings import Siblings
from inference_service.reconciling.ray_serve import Application, ServeApplications
from inference_service.reconciling.serve_calls import answered, call_serve
from inference_service.replica.replica import Loaded, ReplicaSpec
from inference_service.settings import InferenceSettings
from shared.errors import DataLoss, FailedPrecondition, MillraceError

logger = logging.getLogger(__name__)

# A version that was READY before and does not start now is tried again so often.
AGAIN_AFTER_S = 15.0


@dataclass(eq=False)
class Loading:
    """Lives on the event loop of `models`. Of several front processes only the first asks Serve for applications and
    writes the logs; the others attach to what there is."""

    deployments: Deployments
    applications: ServeApplications
    models: Models
    cluster: Cluster
    settings: InferenceSettings
    siblings: Siblings
    # What the replicas of those that requests are sent to have said of themselves.
    _loaded: dict[str, Loaded] = field(default_factory=dict, init=False)
    _not_before: dict[str, float] = field(default_factory=dict, init=False)

    def forget_all_but(self, wanted: Container[str]) -> None:
        """What the replicas of applications said that are not `wanted` any more."""
        self._loaded = {name: loaded for name, loaded in self._loaded.items() if name in wanted}

    async def step(
        self, name: str, deployment: Deployment, version: ModelVersion, application: Application | None
    ) -> None:
        """One step towards a loaded version. Its `application` is as Serve says, None where there is none."""
        if application is None:
            await self._start(name, deployment, version)
        elif application.running or _may_still_answer(version, application):
            attached = self.models.find_batcher(name) is not None
            if not attached:
                attached = await self._attach(name, deployment, version, application)
            if attached and version.signature is None and self._may_say_loaded(name):
                await self._say_loaded(name, deployment, version)
        elif application.failed:
            why = application.message.strip().splitlines()[-1:] or ["Ray Serve gives no reason"]
            failure = FailedPrecondition(f"the model does not start: {why[0]}", reason="MODEL_DOES_NOT_START")
            await self._fail(name, deployment, version, failure)

    async def _start(self, name: str, deployment: Deployment, version: ModelVersion) -> None:
        if version.retired_at is not None or time.monotonic() < self._not_before.get(name, 0.0):
            return
        self.models.detach(name)
        if not self.siblings.leads:
            return
        logger.info("%s: starting version %s as %s", deployment.name, version.number, name)
        spec = ReplicaSpec(
            store=self.settings.service.store,
            folder=version.folder,
            manifest_sha256=version.checkpoint_sha256,
            threads=deployment.spec.threads_per_replica,
            max_batch_size=deployment.spec.max_batch_size,
            tracing=self.settings.tracing,
            allow_non_finite=deployment.spec.allow_non_finite,
            own_code=self.settings.own_code.is_trusted,
            predictor=deployment.spec.predictor,
        )
        self._warn_if_it_never_fits(deployment)
        scale = deployment.spec.scale(self._replicas_of_the_main(deployment))
        await call_serve(self.applications.deploy, name, spec, scale)

    def _warn_if_it_never_fits(self, deployment: Deployment) -> None:
        """It was let in when the cluster was not known yet, or was another; nodes may come that hold it."""
        try:
            self.cluster.check_fits(deployment.spec)
        except FailedPrecondition as error:
            logger.warning("%s waits for a node: %s", deployment.name, error.message)

    def _replicas_of_the_main(self, deployment: Deployment) -> int:
        """Those of the version with the most traffic: another that is to take it over begins with as many."""
        main = find_version(deployment, "")
        return (self.models.replicas(deployment, main) or 0) if main is not None else 0

    async def _attach(self, name: str, deployment: Deployment, version: ModelVersion, application: Application) -> bool:
        """False where its replicas say that they never will answer, or another process is taking them away."""
        replicas = application.replicas
        # Before it gets any traffic, all of them; where it was loaded before, any that there is does.
        wanted = max(replicas, deployment.spec.num_replicas) if version.signature is None else 1
        try:
            model, loaded = await answered(self.applications.describe(name, wanted))
        except (DataLoss, FailedPrecondition) as error:
            await self._fail(name, deployment, version, error)
            return False
        if name in self.siblings.going():  # meanwhile: it waits for those that hold it, and would not see this one
            return False
        spec = deployment.spec
        limits = Limits(
            max_rows=spec.max_batch_size,
            max_delay_s=spec.max_batch_delay_s,
            max_queued_rows=spec.max_queued_rows,
            max_in_flight=BATCHES_PER_REPLICA * max(replicas, 1),
        )
        statistics = self.models.statistics(deployment, version)
        self.models.attach(name, Batcher(model, limits, BatchTimes(loaded.batch_s), statistics))
        self._loaded[name] = loaded
        return True

    def _may_say_loaded(self, name: str) -> bool:
        """From then on requests come, to any of the fronts."""
        return self.siblings.leads and self.siblings.all_hold(name, self.settings.drain_silent_after_s)

    async def _say_loaded(self, name: str, deployment: Deployment, version: ModelVersion) -> None:
        newest = await asyncio.to_thread(
            self.deployments.transition, deployment.name, deployment.uid, _loaded(version, self._loaded[name])
        )
        if newest is not None:
            self.models.put(newest)
            logger.info("%s: version %s is loaded", deployment.name, version.number)

    async def _fail(self, name: str, deployment: Deployment, version: ModelVersion, error: MillraceError) -> None:
        """Fails a new deployment, or ends a roll-out, for good. A version that was loaded before is tried again.

        Serve itself has given up by then: an application of which no replica ever started never gets another.
        """
        if not self.siblings.leads:
            self._close_batcher(name)
            self.applications.forget(name)
            return
        logger.error("%s: version %s: %s", deployment.name, version.number, error.message)
        newest = await asyncio.to_thread(
            self.deployments.transition,
            deployment.name,
            deployment.uid,
            lambda before: with_version_failed(before, version.number, error, time.time()),
        )
        if newest is not None:
            self.models.put(newest)
        self._not_before[name] = time.monotonic() + AGAIN_AFTER_S
        self._close_batcher(name)
        await call_serve(self.applications.delete, name)

    def _close_batcher(self, name: str) -> None:
        batcher = self.models.detach(name)
        if batcher is not None:
            batcher.close("its replicas are gone")


def _may_still_answer(version: ModelVersion, application: Application) -> bool:
    """Serve calls an application unhealthy from a replica's death until all have been placed again: for ever where
    there is no room. A version that was loaded before is answered by those that are left, unless these go, too."""
    goes = application.failed or application.deleting
    return version.signature is not None and application.replicas > 0 and not goes


def _loaded(version: ModelVersion, loaded: Loaded) -> Callable[[Deployment], Deployment | None]:
    known = replace(version, signature=loaded.signature, dataset_version=loaded.dataset_version)
    return lambda before: with_version_loaded(before, known, time.time())
