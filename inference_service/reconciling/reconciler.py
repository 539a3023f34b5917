"""Makes Ray Serve run what the resource logs say, on start-up and every few seconds.

So a restarted service finds its replicas, a new Ray head gets all deployments back, and an application that no log
names goes; while a log cannot be read, those that it may name stay. Of several front processes the first does so; the
others take over what there is, and let go of what goes.

What the logs say is also kept in Ray, for as long as the replicas themselves are: a process that starts while the store
does not answer serves what runs by that, and changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping

from inference_service.batching.models import Models
from inference_service.deployments.cluster import Cluster
from inference_service.deployments.registry import Deployments
from inference_service.domain.applications import application_name, uid_of
from inference_service.domain.deployment import LIVE, Deployment, ModelVersion, State
from inference_service.fronts.siblings import Siblings
from inference_service.reconciling.loading import Loading
from inference_service.reconciling.marking import Marking
from inference_service.reconciling.ray_serve import Application, ServeApplications
from inference_service.reconciling.removing import Removing
from inference_service.reconciling.serve_calls import ServeSilent, call_serve
from inference_service.settings import InferenceSettings
from shared.errors import STORE_OUTAGES, DataLoss, MillraceError

logger = logging.getLogger(__name__)


class RayLost(Exception):
    """Ray has not answered for too long. Ray's own client cannot be trusted to recover: the process must start anew."""


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
        self._loading = Loading(deployments, applications, models, cluster, settings, siblings)
        self._removing = Removing(deployments, applications, models, settings, siblings, self.nudge)
        self._marking = Marking(deployments)
        self._changed = asyncio.Event()
        # The deployments whose logs could not be read the last time.
        self._unreadable: set[str] = set()
        # Whether this process has read the logs at least once, and what of them Ray keeps by now.
        self._has_read = False
        self._kept: list[Deployment] = []

    def holds(self) -> list[str]:
        """The applications that this process may still send a batch to."""
        return [*self._models.attached(), *self._removing.draining]

    def going(self) -> list[str]:
        """The applications that this process is taking out of Serve, and that no other may send a batch to."""
        return list(self._removing.going)

    def on_going(self, tell: Callable[[], None]) -> None:
        """Has `tell` called whenever there is one more that is `going`."""
        self._removing.on_going = tell

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
                # Last: what is served is served whether or not it can be marked. Whoever wished for a version has
                # marked its checkpoint already.
                if self._siblings.leads:
                    await self._marking.mark(self._models.deployments())
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
        running = await call_serve(self._applications.statuses)
        self._cluster.note(await call_serve(self._applications.nodes))
        self._models.scaled({name: one.replicas for name, one in running.items()})
        unreadable = await self._read_logs()
        if unreadable is None:
            await self._attach_kept(running)
            return
        # What was written since they were read may name more.
        deployments = self._models.deployments()
        wanted = {
            application_name(deployment, version): (deployment, version)
            for deployment in deployments
            if deployment.state in LIVE
            for version in deployment.versions
        }
        self._take_away(running.keys() - wanted.keys(), deployments, unreadable)
        self._loading.forget_all_but(wanted)
        going = self._siblings.going()
        for name in going.intersection(wanted, self._models.attached()):
            self._removing.retire(name)
        for name, (deployment, version) in wanted.items():
            if name in going or name in self._removing.under_way:  # it was unloaded, and is wanted again
                continue
            await self._step(name, deployment, version, running.get(name))
        await self._keep(deployments)

    async def _step(
        self, name: str, deployment: Deployment, version: ModelVersion, application: Application | None
    ) -> None:
        try:
            await self._loading.step(name, deployment, version, application)
        except Exception as error:  # one that cannot be helped now must not hold up the others
            logger.warning("%s: %r; trying again", deployment.name, error)

    async def _attach_kept(self, running: Mapping[str, Application]) -> None:
        """Sends requests to what runs of the deployments that Ray kept; nothing is started or taken away by that."""
        for deployment in self._models.deployments():
            for version in deployment.versions if deployment.state in LIVE else ():
                name = application_name(deployment, version)
                if version.signature is not None and name in running and self._models.find_batcher(name) is None:
                    await self._step(name, deployment, version, running[name])

    async def _keep(self, deployments: list[Deployment]) -> None:
        """Has Ray keep what the logs say, where that is new."""
        if not self._siblings.leads or deployments == self._kept:
            return
        try:
            await call_serve(lambda: self._applications.keep(_to_json(deployments)))
            self._kept = deployments
        except ServeSilent as error:
            logger.warning("Ray does not keep what is deployed, for starts without the store: %s", error)

    async def _read_logs(self) -> Collection[str] | None:
        """Has `models` take over what they say. Returns the deployments whose logs cannot be read; None where the store
        has answered this process never yet, and `models` has what Ray kept.

        Raises what the store raises, then only where Ray kept nothing.
        """
        self._models.begin_reading()
        try:
            read, unreadable = await asyncio.to_thread(self._deployments.all)
        except STORE_OUTAGES as outage:
            if self._has_read or not await self._take_over_kept(outage):
                raise
            return None
        self._has_read = True
        self._tell_of_unreadable(unreadable)
        # One that can no longer be read is served as it was when it could.
        self._models.replace([*read, *(one for one in self._models.deployments() if one.name in unreadable)])
        return unreadable

    async def _take_over_kept(self, outage: MillraceError) -> bool:
        """Has `models` take over what Ray kept. Returns whether it kept anything."""
        data = await call_serve(self._applications.kept)
        if data is None:
            return False
        try:
            kept = [Deployment.from_record(record) for record in json.loads(data)]
        except (ValueError, TypeError, KeyError) as error:  # another release wrote it
            logger.warning("what Ray keeps of the deployments cannot be read: %r", error)
            return False
        logger.warning("%s; serving the %d deployments that Ray keeps", outage.message, len(kept))
        self._models.replace(kept)
        return True

    def _tell_of_unreadable(self, unreadable: Mapping[str, DataLoss]) -> None:
        for name in unreadable.keys() - self._unreadable:
            logger.error("%s; until then no application is deleted that may be its own", unreadable[name].message)
        for name in self._unreadable - unreadable.keys():
            logger.info("the log of %s can be read again, or has gone", name)
        self._unreadable = set(unreadable)

    def _take_away(self, unwanted: set[str], deployments: list[Deployment], unreadable: Collection[str]) -> None:
        """Begins to take the deployments away that are to be deleted, and of `unwanted` applications those that no log
        names."""
        going: set[str] = set()
        for deployment in deployments:
            if deployment.state is State.DELETING:
                self._removing.remove(deployment)
                going.update(application_name(deployment, version) for version in deployment.versions)
        unnamed = unwanted - going
        if unreadable:  # whose applications may be among them
            known = {one.uid for one in deployments if one.name not in unreadable}
            unnamed = {name for name in unnamed if uid_of(name) in known}
        for name in unnamed:
            self._removing.retire(name)

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._settings.reconcile_every_s):
                await self._changed.wait()
        except TimeoutError:
            return


def _to_json(deployments: list[Deployment]) -> bytes:
    return json.dumps([one.as_record() for one in deployments]).encode()
