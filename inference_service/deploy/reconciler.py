"""Makes Ray Serve run what the resource logs say, on start-up and every few seconds: loads versions, removes them, and
marks what they come from as used.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from inference_service.deploy.capacity import Cluster
from inference_service.deploy.deployments import Deployments
from inference_service.domain.batch_policy import BatchTimes, Limits
from inference_service.domain.deployment import (
    LIVE,
    Deployment,
    ModelVersion,
    State,
    application_name,
    uid_of,
    with_removal,
)
from inference_service.domain.rollout_transitions import with_version_failed, with_version_loaded
from inference_service.peers import Peers
from inference_service.serve.batcher import BATCHES_PER_REPLICA, Batcher
from inference_service.serve.models import Models, find_version
from inference_service.serve.ray_serve import Application, ServeApplications, ServeUnresponsive, answered, call_serve
from inference_service.serve.replica import Loaded, ReplicaSpec
from inference_service.settings import InferenceSettings
from shared.errors import STORE_OUTAGES, DataLoss, FailedPrecondition, MillraceError

logger = logging.getLogger(__name__)


# --- Reconciler ---
# Makes Ray Serve run what the resource logs say, on start-up and every few seconds.
#
# So a restarted service finds its replicas, a new Ray head gets all deployments back, and an application that no log
# names goes; while a log cannot be read, those that it may name stay. Of several front processes the first does so; the
# others take over what there is, and let go of what goes.
#
# What the logs say is also kept in Ray, for as long as the replicas themselves are: a process that starts while the
# store does not answer serves what runs by that, and changes nothing.


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
        peers: Peers,
    ) -> None:
        self._deployments = deployments
        self._applications = applications
        self._models = models
        self._cluster = cluster
        self._settings = settings
        self._peers = peers
        self._loading = ModelLoader(deployments, applications, models, cluster, settings, peers)
        self._unloader = ModelUnloader(deployments, applications, models, settings, peers, self.wake)
        self._reference_keeper = ReferenceKeeper(deployments)
        self._changed = asyncio.Event()
        # The deployments whose logs could not be read the last time.
        self._unreadable: set[str] = set()
        # Whether this process has read the logs at least once, and what of them Ray keeps by now.
        self._has_read = False
        self._kept: list[Deployment] = []

    def holds(self) -> list[str]:
        """The applications that this process may still send a batch to."""
        return [*self._models.attached(), *self._unloader.draining]

    def going(self) -> list[str]:
        """The applications that this process is taking out of Serve, and that no other may send a batch to."""
        return list(self._unloader.going)

    def on_going(self, tell: Callable[[], None]) -> None:
        """Has `tell` called whenever there is one more that is `going`."""
        self._unloader.on_going = tell

    def wake(self) -> None:
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
                if self._peers.is_leader:
                    await self._reference_keeper.mark(self._models.deployments())
            # The store, which does not answer or is full: Ray, which was asked before, has nothing to do with it, and
            # what is served goes on being served.
            except MillraceError as error:
                logger.warning("%s; trying again", error.message)
                well_at = time.monotonic()
            except ServeUnresponsive as error:
                logger.warning("Ray Serve does not answer: %s", str(error).partition("\\n")[0])
                if time.monotonic() - well_at > self._settings.ray_unresponsive_after_s:
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
        going = self._peers.going()
        for name in going.intersection(wanted, self._models.attached()):
            self._unloader.retire(name)
        for name, (deployment, version) in wanted.items():
            if name in going or name in self._unloader.under_way:  # it was unloaded, and is wanted again
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
        if not self._peers.is_leader or deployments == self._kept:
            return
        try:
            await call_serve(lambda: self._applications.keep(_to_json(deployments)))
            self._kept = deployments
        except ServeUnresponsive as error:
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
        self._report_unreadable(unreadable)
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

    def _report_unreadable(self, unreadable: Mapping[str, DataLoss]) -> None:
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
                self._unloader.remove(deployment)
                going.update(application_name(deployment, version) for version in deployment.versions)
        unnamed = unwanted - going
        if unreadable:  # whose applications may be among them
            known = {one.uid for one in deployments if one.name not in unreadable}
            unnamed = {name for name in unnamed if uid_of(name) in known}
        for name in unnamed:
            self._unloader.retire(name)

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._settings.reconcile_every_s):
                await self._changed.wait()
        except TimeoutError:
            return


def _to_json(deployments: list[Deployment]) -> bytes:
    return json.dumps([one.as_record() for one in deployments]).encode()


# --- Loading ---
# Loads versions: asks Ray Serve for their replicas, and has requests come to them once these say that they answer.


# A version that was READY before and does not start now is tried again so often.
RETRY_DELAY_S = 15.0


@dataclass(eq=False)
class ModelLoader:
    """Lives on the event loop of `models`. Of several front processes only the first asks Serve for applications and
    writes the logs; the others attach to what there is."""

    deployments: Deployments
    applications: ServeApplications
    models: Models
    cluster: Cluster
    settings: InferenceSettings
    peers: Peers
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
        if not self.peers.is_leader:
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
        if name in self.peers.going():  # meanwhile: it waits for those that hold it, and would not see this one
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
        return self.peers.is_leader and self.peers.all_hold(name, self.settings.drain_unresponsive_after_s)

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
        if not self.peers.is_leader:
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
        self._not_before[name] = time.monotonic() + RETRY_DELAY_S
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


# --- Removing ---
# Takes versions out of Ray Serve once what is in flight is answered, and ends the logs of deployments that go.


class ModelUnloader:
    """Lives on the event loop of `models`. `wake` is called when something is gone, `on_going` when an application
    begins to go. Of several front processes only the first takes away; the others let go."""

    def __init__(
        self,
        deployments: Deployments,
        applications: ServeApplications,
        models: Models,
        settings: InferenceSettings,
        peers: Peers,
        wake: Callable[[], None],
    ) -> None:
        self._deployments = deployments
        self._applications = applications
        self._models = models
        self._unresponsive_after_s = settings.drain_unresponsive_after_s
        self._peers = peers
        self._wake = wake
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
            if self._peers.is_leader:
                logger.info("deleting application %s, which no log wants", name)
            self._tasks[name] = asyncio.create_task(self._retire(name))

    async def _retire(self, name: str) -> None:
        try:
            await self._take_out(name)
        except Exception as error:
            logger.warning("application %s is not gone yet: %s", name, error)
        finally:
            del self._tasks[name]
        self._wake()

    async def _remove(self, deployment: Deployment) -> None:
        """Answers what is in flight, then takes all its versions out of Serve and ends its log."""
        try:
            for version in deployment.versions:
                name = application_name(deployment, version)
                if name in self._tasks:  # it was unloaded, and has not answered all that it has
                    await asyncio.wait({self._tasks[name]})
                await self._take_out(name)
            if not self._peers.is_leader:
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
            self._wake()
        except Exception as error:
            logger.warning("%s is not gone yet: %s", deployment.name, error)
        finally:
            del self._tasks[deployment.uid]

    async def _take_out(self, name: str) -> None:
        """Answers what is in flight, then takes the application out of Serve."""
        if not self._peers.is_leader:
            await self._drain(name)
            self._applications.forget(name)
            return
        self._going.add(name)
        try:
            # At once: who has not heard of it may take the application over, and so counts as holding it.
            self.on_going()
            reported_s = time.time()
            await self._drain(name)
            await self._peers.let_go(name, reported_s, self._unresponsive_after_s)
            await call_serve(self._applications.delete, name)
        finally:
            self._going.discard(name)

    async def _drain(self, name: str) -> None:
        self._draining.add(name)
        try:
            batcher = self._models.detach(name)
            if batcher is not None:
                await batcher.drain(self._unresponsive_after_s)
        finally:
            self._draining.discard(name)


# --- Marking ---
# Marks what the versions that are served come from as used, so that nobody deletes it meanwhile.


class ReferenceKeeper:
    """Remembers what this process has marked: the store is asked once for each version."""

    def __init__(self, deployments: Deployments) -> None:
        self._deployments = deployments
        # The applications whose checkpoints, and whose dataset versions, are marked.
        self._kept: set[str] = set()
        self._marked: set[str] = set()

    async def mark(self, deployments: Iterable[Deployment]) -> None:
        """Raises what the store raises where it does not answer or is full."""
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
