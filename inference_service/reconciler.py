"""Makes Ray Serve run what the resource logs say, on start-up and every few seconds.

So a restarted service finds its replicas, a new Ray head gets all deployments back, and an application that no log
names goes; while a log cannot be read, those that it may name stay. Of several front processes the first does so; the
others take over what there is, and let go of what goes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from inference_service.batcher import BATCHES_PER_REPLICA, Batcher
from inference_service.cluster import Cluster
from inference_service.domain.batch_times import BatchTimes
from inference_service.domain.batching import Limits
from inference_service.domain.deployment import (
    LIVE,
    Deployment,
    ModelVersion,
    State,
    with_removal,
)
from inference_service.domain.rolling import with_version_failed, with_version_loaded
from inference_service.domain.routing import find_version
from inference_service.models import Models, application_name
from inference_service.ray_serve import Application, ServeApplications
from inference_service.registry import Deployments
from inference_service.replica import Loaded, ReplicaSpec
from inference_service.settings import InferenceSettings
from inference_service.siblings import Siblings
from shared.errors import STORE_OUTAGES, DataLoss, FailedPrecondition, MillraceError

logger = logging.getLogger(__name__)

# Longer than any healthy answer of Serve's controller; deploying waits for it to have taken note.
SERVE_WITHIN_S = 30.0
# A version that was READY before and does not start now is tried again so often.
AGAIN_AFTER_S = 15.0

T = TypeVar("T")


class RayLost(Exception):
    """Ray has not answered for too long. Ray's own client cannot be trusted to recover: the process must start anew."""


class ServeSilent(Exception):
    """Ray Serve did not answer this time, or answered with an error of its own."""


class Reconciler:
    def __init__(
        self,
        deployments: Deployments,
        applications: ServeApplications,
        models: Models,
        cluster: Cluster,
        settings: InferenceSettings,
        siblings: Siblings,
    ) -> None:
        self._deployments = deployments
        self._applications = applications
        self._models = models
        self._cluster = cluster
        self._settings = settings
        self._siblings = siblings
        self._changed = asyncio.Event()
        self._removing: dict[str, asyncio.Task[None]] = {}  # by uid, and applications that no log names by theirs
        self._draining: set[str] = set()
        # What the replicas of those that requests are sent to have said of themselves.
        self._loaded: dict[str, Loaded] = {}
        self._not_before: dict[str, float] = {}
        # The applications whose checkpoints, and whose dataset versions, this process has marked as used.
        self._kept: set[str] = set()
        self._marked: set[str] = set()
        # The deployments whose logs could not be read the last time.
        self._unreadable: set[str] = set()

    def holds(self) -> list[str]:
        """The applications that this process may still send a batch to."""
        return [*self._models.attached(), *self._draining]

    def nudge(self) -> None:
        """Something changed: look now."""
        self._changed.set()

    async def run(self, on_first: Callable[[], Awaitable[None]]) -> None:
        """Reconciles for ever; calls `on_first` after the first time. Raises `RayLost`."""
        well_at = time.monotonic()
        first = True
        while True:
            self._changed.clear()
            try:
                await self.reconcile()
                well_at = time.monotonic()
                if first:
                    await on_first()
                    first = False
            # The store, which does not answer or is full: Ray, which was asked before, has nothing to do with it, and
            # what is served goes on being served.
            except MillraceError as error:
                logger.warning("%s; trying again", error.message)
                well_at = time.monotonic()
            except ServeSilent as error:
                logger.warning("Ray Serve does not answer: %s", str(error).partition("\\n")[0])
                if time.monotonic() - well_at > self._settings.ray_silent_after_s:
                    raise RayLost(f"Ray Serve has not answered for long: {error}") from error
            # A fault of ours: a new process would have it, too.
            except Exception:
                logger.exception("unexpected while reconciling; trying again")
                well_at = time.monotonic()
            await self._pause()

    async def reconcile(self) -> None:
        """One comparison of the logs with Serve, and the steps that follow from it."""
        # Serve first: what it runs was in a log before, so a log read later names it unless it is to go.
        running = await self._serve(self._applications.statuses)
        self._cluster.note(await self._serve(self._applications.nodes))
        self._models.scaled({name: one.replicas for name, one in running.items()})
        self._models.begin_reading()
        read, unreadable = await asyncio.to_thread(self._deployments.all)
        self._tell_of_unreadable(unreadable)
        # One that can no longer be read is served as it was when it could.
        self._models.replace([*read, *(one for one in self._models.deployments() if one.name in unreadable)])
        # What was written since they were read may name more.
        deployments = self._models.deployments()
        wanted = {
            application_name(deployment, version): (deployment, version)
            for deployment in deployments
            if deployment.state in LIVE
            for version in deployment.versions
        }
        for deployment in deployments:
            if deployment.state is State.DELETING and deployment.uid not in self._removing:
                self._removing[deployment.uid] = asyncio.create_task(self._remove(deployment))
        going = {
            application_name(deployment, version)
            for deployment in deployments
            if deployment.state is State.DELETING
            for version in deployment.versions
        }
        unwanted = running.keys() - wanted.keys() - going - self._removing.keys()
        if unreadable:  # whose applications may be among them
            known = {one.uid for one in deployments if one.name not in unreadable}
            unwanted = {name for name in unwanted if _uid_of(name) in known}
        for name in unwanted:
            if self._siblings.leads:
                logger.info("deleting application %s, which no log wants", name)
            self._removing[name] = asyncio.create_task(self._retire(name))
        if self._siblings.leads:
            await self._mark_used(deployments)
        self._loaded = {name: loaded for name, loaded in self._loaded.items() if name in wanted}
        for name, (deployment, version) in wanted.items():
            if name in self._removing:  # it was unloaded, and is wanted again
                continue
            try:
                await self._keep(name, deployment, version, running.get(name))
            except Exception as error:  # one that cannot be helped now must not hold up the others
                logger.warning("%s: %r; trying again", deployment.name, error)

    def _tell_of_unreadable(self, unreadable: Mapping[str, DataLoss]) -> None:
        for name in unreadable.keys() - self._unreadable:
            logger.error("%s; until then no application is deleted that may be its own", unreadable[name].message)
        for name in self._unreadable - unreadable.keys():
            logger.info("the log of %s can be read again, or has gone", name)
        self._unreadable = set(unreadable)

    async def _mark_used(self, deployments: list[Deployment]) -> None:
        there = [
            (application_name(deployment, version), deployment, version)
            for deployment in deployments
            if deployment.state in LIVE
            for version in deployment.versions
            if version.retired_at is None
        ]
        for name, deployment, version in there:
            try:
                if name not in self._kept:
                    await asyncio.to_thread(self._deployments.keep_checkpoints, deployment, [version])
                    self._kept.add(name)
                if version.signature is not None and name not in self._marked:
                    await asyncio.to_thread(self._deployments.mark_datasets, deployment, [version])
                    self._marked.add(name)
            except STORE_OUTAGES:
                raise
            except Exception as error:  # a log of its job that cannot be read must not hold up the others
                logger.warning("%s: what it uses is not marked: %r; trying again", deployment.name, error)
        names = {name for name, *_ in there}
        self._kept &= names
        self._marked &= names

    async def _keep(
        self, name: str, deployment: Deployment, version: ModelVersion, application: Application | None
    ) -> None:
        """One step towards a loaded version."""
        if application is None:
            if version.retired_at is not None or time.monotonic() < self._not_before.get(name, 0.0):
                return
            self._models.detach(name)
            if not self._siblings.leads:
                return
            logger.info("%s: starting version %s as %s", deployment.name, version.number, name)
            spec = ReplicaSpec(
                store=self._settings.service.store,
                folder=version.folder,
                manifest_sha256=version.checkpoint_sha256,
                threads=deployment.spec.threads_per_replica,
                max_batch_size=deployment.spec.max_batch_size,
                tracing=self._settings.tracing,
            )
            self._warn_if_it_never_fits(deployment)
            scale = deployment.spec.scale(self._replicas_of_the_main(deployment))
            await self._serve(self._applications.deploy, name, spec, scale)
        elif application.running or _may_still_answer(version, application):
            if not self._models.has_batcher(name) and not await self._attach(name, deployment, version, application):
                return
            if version.signature is None and self._may_say_loaded(name):
                await self._say_loaded(name, deployment, version)
        elif application.failed:
            why = application.message.strip().splitlines()[-1:] or ["Ray Serve gives no reason"]
            failure = FailedPrecondition(f"the model does not start: {why[0]}", reason="MODEL_DOES_NOT_START")
            await self._fail(name, deployment, version, failure)

    def _warn_if_it_never_fits(self, deployment: Deployment) -> None:
        """It was let in when the cluster was not known yet, or was another; nodes may come that hold it."""
        try:
            self._cluster.check_fits(deployment.spec)
        except FailedPrecondition as error:
            logger.warning("%s waits for a node: %s", deployment.name, error.message)

    def _replicas_of_the_main(self, deployment: Deployment) -> int:
        """Those of the version with the most traffic: another that is to take it over begins with as many."""
        main = find_version(deployment, "")
        return (self._models.replicas(deployment, main) or 0) if main is not None else 0

    async def _attach(self, name: str, deployment: Deployment, version: ModelVersion, application: Application) -> bool:
        """False where its replicas say that they never will answer."""
        replicas = application.replicas
        # Before it gets any traffic, all of them; where it was loaded before, any that there is does.
        wanted = max(replicas, deployment.spec.num_replicas) if version.signature is None else 1
        try:
            model, loaded = await _answered(self._applications.describe(name, wanted))
        except (DataLoss, FailedPrecondition) as error:
            await self._fail(name, deployment, version, error)
            return False
        spec = deployment.spec
        limits = Limits(
            max_rows=spec.max_batch_size,
            max_delay_s=spec.max_batch_delay_s,
            max_queued_rows=spec.max_queued_rows,
            max_in_flight=BATCHES_PER_REPLICA * max(replicas, 1),
        )
        statistics = self._models.statistics(deployment, version)
        self._models.attach(name, Batcher(model, limits, BatchTimes(loaded.batch_s), statistics))
        self._loaded[name] = loaded
        return True

    async def _say_loaded(self, name: str, deployment: Deployment, version: ModelVersion) -> None:
        newest = await asyncio.to_thread(
            self._deployments.transition, deployment.name, deployment.uid, _loaded(version, self._loaded[name])
        )
        if newest is not None:
            self._models.put(newest)
            logger.info("%s: version %s is loaded", deployment.name, version.number)

    def _may_say_loaded(self, name: str) -> bool:
        """From then on requests come, to any of the fronts."""
        return self._siblings.leads and self._siblings.all_hold(name, self._settings.drain_silent_after_s)

    async def _fail(self, name: str, deployment: Deployment, version: ModelVersion, error: MillraceError) -> None:
        """Fails a new deployment, or ends a roll-out, for good. A version that was loaded before is tried again.

        Serve itself has given up by then: an application of which no replica ever started never gets another.
        """
        if not self._siblings.leads:
            batcher = self._models.detach(name)
            if batcher is not None:
                batcher.close("its replicas are gone")
            self._applications.forget(name)
            return
        logger.error("%s: version %s: %s", deployment.name, version.number, error.message)
        newest = await asyncio.to_thread(
            self._deployments.transition,
            deployment.name,
            deployment.uid,
            lambda before: with_version_failed(before, version.number, error, time.time()),
        )
        if newest is not None:
            self._models.put(newest)
        self._not_before[name] = time.monotonic() + AGAIN_AFTER_S
        batcher = self._models.detach(name)
        if batcher is not None:
            batcher.close("its replicas are gone")
        await self._serve(self._applications.delete, name)

    async def _retire(self, name: str) -> None:
        """Takes a version out of Serve that no log names any more."""
        try:
            await self._take_out(name)
        except Exception as error:
            logger.warning("application %s is not gone yet: %s", name, error)
        finally:
            del self._removing[name]
        self.nudge()

    async def _take_out(self, name: str) -> None:
        """Answers what is in flight, then takes the application out of Serve."""
        self._draining.add(name)
        try:
            batcher = self._models.detach(name)
            if batcher is not None:
                await batcher.drain(self._settings.drain_silent_after_s)
        finally:
            self._draining.discard(name)
        if self._siblings.leads:
            await self._siblings.let_go(name, self._settings.drain_silent_after_s)
            await self._serve(self._applications.delete, name)
        else:
            self._applications.forget(name)

    async def _remove(self, deployment: Deployment) -> None:
        """Answers what is in flight, then takes all its versions out of Serve and ends its log."""
        try:
            for version in deployment.versions:
                await self._take_out(application_name(deployment, version))
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
            self.nudge()
        except Exception as error:
            logger.warning("%s is not gone yet: %s", deployment.name, error)
        finally:
            del self._removing[deployment.uid]

    async def _serve(self, call: Callable[..., T], *arguments: object) -> T:
        """A blocking call of Serve, in a thread."""
        return await _answered(asyncio.to_thread(call, *arguments))

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._settings.reconcile_every_s):
                await self._changed.wait()
        except TimeoutError:
            return


async def _answered(call: Awaitable[T]) -> T:
    """What Serve answers; raises `ServeSilent` rather than wait for a Ray that is gone, for whatever Ray raises, and a
    `MillraceError` as it is: replicas raise them, too."""
    try:
        async with asyncio.timeout(SERVE_WITHIN_S):
            return await call
    except MillraceError:
        raise
    except Exception as error:
        raise ServeSilent(repr(error)) from error


def _uid_of(application: str) -> str:
    """Of its deployment: the inverse of `application_name`."""
    return application.rpartition("-v")[0]


def _may_still_answer(version: ModelVersion, application: Application) -> bool:
    """Serve calls an application unhealthy from a replica's death until all have been placed again: for ever where
    there is no room. A version that was loaded before is answered by those that are left."""
    return version.signature is not None and application.replicas > 0 and not application.failed


def _loaded(version: ModelVersion, loaded: Loaded) -> Callable[[Deployment], Deployment | None]:
    known = replace(version, signature=loaded.signature, dataset_version=loaded.dataset_version)
    return lambda before: with_version_loaded(before, known, time.time())
