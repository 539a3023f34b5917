"""The reconciler: makes Ray Serve run the versions in the resource logs.

On start-up and every few seconds it loads versions, removes them, and marks the checkpoints and datasets that they use.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from inference_service.deploy.deployments import Cluster, Deployments
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
from inference_service.frontend_processes import Peers
from inference_service.serve.batcher import BATCHES_PER_REPLICA, Batcher
from inference_service.serve.models import Models, find_version
from inference_service.serve.ray_serve import Application, ServeApplications, ServeUnresponsive, answered, call_serve
from inference_service.serve.replica import Loaded, ReplicaSpec
from inference_service.settings import InferenceSettings
from shared.errors import STORE_OUTAGES, DataLoss, FailedPrecondition, MillraceError

logger = logging.getLogger(__name__)


# --- Reconciler ---
# A restarted service finds its replicas again, a new Ray head gets all deployments back, and an application that no log
# names is deleted. While a log cannot be read, the applications that it may name stay. Of several frontend processes
# only the leader changes Serve; the others attach to what runs, and detach from what is removed.
#
# Ray also keeps a copy of the logs' state, for as long as it keeps the replicas. A process that starts while the store
# does not answer serves by that copy, and changes nothing.


class RayLost(Exception):
    """Ray has not answered for too long.

    Ray's client cannot be trusted to recover: the process must restart.
    """


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
        # The deployments whose logs could not be read in the last pass.
        self._unreadable: set[str] = set()
        # Whether this process has read the logs at least once, and the deployments that Ray keeps a copy of.
        self._has_read = False
        self._kept: list[Deployment] = []

    def holds(self) -> list[str]:
        """Return the applications that this process may still send a batch to."""
        return [*self._models.attached(), *self._unloader.draining]

    def going(self) -> list[str]:
        """Return the applications that this process is removing from Serve.

        No other process may send them a batch.
        """
        return list(self._unloader.going)

    def on_going(self, callback: Callable[[], None]) -> None:
        """Set the callback for each application that starts to be removed."""
        self._unloader.on_going = callback

    def wake(self) -> None:
        """Start a pass at once, because something has changed."""
        self._changed.set()

    async def run(self, on_first: Callable[[], Awaitable[None]]) -> None:
        """Reconcile for ever; call `on_first` after the first pass.

        Raises `RayLost`.
        """
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
                # Last, because serving does not depend on the marks. The request that added a version has already
                # marked its checkpoint.
                if self._peers.is_leader:
                    await self._reference_keeper.mark(self._models.deployments())
            # The store does not answer or is full. Ray answered before that, and serving continues.
            except MillraceError as error:
                logger.warning("%s; trying again", error.message)
                well_at = time.monotonic()
            except ServeUnresponsive as error:
                logger.warning("Ray Serve does not answer: %s", str(error).partition("\\n")[0])
                if time.monotonic() - well_at > self._settings.ray_unresponsive_after_s:
                    raise RayLost(f"Ray Serve has not answered for long: {error}") from error
            # A bug in this service: a restarted process would have it, too.
            except Exception:
                logger.exception("unexpected while reconciling; trying again")
                well_at = time.monotonic()
            await self._pause()

    async def reconcile(self) -> None:
        """Compare the logs with Serve once and take the steps that follow."""
        # Serve first: every application was in a log before it ran, so a log read later names it unless it is to be
        # removed.
        running = await call_serve(self._applications.statuses)
        self._cluster.note(await call_serve(self._applications.nodes))
        self._models.scaled({name: one.replicas for name, one in running.items()})
        unreadable = await self._read_logs()
        if unreadable is None:
            await self._attach_kept(running)
            return
        # Includes deployments that were written since the logs were read.
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
        except Exception as error:  # one failing deployment must not hold up the others
            logger.warning("%s: %r; trying again", deployment.name, error)

    async def _attach_kept(self, running: Mapping[str, Application]) -> None:
        """Attach to running applications of the deployments that Ray kept.

        Nothing is started or removed by that copy.
        """
        for deployment in self._models.deployments():
            for version in deployment.versions if deployment.state in LIVE else ():
                name = application_name(deployment, version)
                if version.signature is not None and name in running and self._models.find_batcher(name) is None:
                    await self._step(name, deployment, version, running[name])

    async def _keep(self, deployments: list[Deployment]) -> None:
        """Store the deployments in Ray, if they changed."""
        if not self._peers.is_leader or deployments == self._kept:
            return
        try:
            await call_serve(lambda: self._applications.keep(_to_json(deployments)))
            self._kept = deployments
        except ServeUnresponsive as error:
            logger.warning("Ray does not keep what is deployed, for starts without the store: %s", error)

    async def _read_logs(self) -> Collection[str] | None:
        """Read the logs into `models`.

        Return the deployments whose logs cannot be read. Return None if the store has never answered this process,
        and `models` has the copy that Ray kept.

        Raises the store's errors; before the first answer, only if Ray kept no copy.
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
        # A deployment whose log can no longer be read is served in its last known state.
        self._models.replace(
            [*read, *(deployment for deployment in self._models.deployments() if deployment.name in unreadable)]
        )
        return unreadable

    async def _take_over_kept(self, outage: MillraceError) -> bool:
        """Load the copy that Ray kept into `models`; return whether there was one."""
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
        """Start to remove deleted deployments, and the `unwanted` applications that no log names."""
        going: set[str] = set()
        for deployment in deployments:
            if deployment.state is State.DELETING:
                self._unloader.remove(deployment)
                going.update(application_name(deployment, version) for version in deployment.versions)
        unnamed = unwanted - going
        # Logs that cannot be read, or were not read yet, may name some of these applications.
        if unreadable or not self._deployments.has_read_all:
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
    return json.dumps([deployment.as_record() for deployment in deployments]).encode()


# --- Loading ---
# Loads versions: deploys their replicas on Ray Serve, and attaches requests once the replicas answer.


# The delay before a version that was READY before, and does not start now, is tried again.
RETRY_DELAY_S = 15.0


@dataclass(eq=False)
class ModelLoader:
    """Loads versions step by step.

    Lives on the event loop of `models`. Of several frontend processes only the leader deploys applications and writes
    the logs; the others attach to what runs.
    """

    deployments: Deployments
    applications: ServeApplications
    models: Models
    cluster: Cluster
    settings: InferenceSettings
    peers: Peers
    # The descriptions that the replicas of attached applications returned.
    _loaded: dict[str, Loaded] = field(default_factory=dict, init=False)
    _not_before: dict[str, float] = field(default_factory=dict, init=False)

    def forget_all_but(self, wanted: Container[str]) -> None:
        """Forget the descriptions of applications that are not `wanted` any more."""
        self._loaded = {name: loaded for name, loaded in self._loaded.items() if name in wanted}

    async def step(
        self, name: str, deployment: Deployment, version: ModelVersion, application: Application | None
    ) -> None:
        """Take one step towards a loaded version.

        `application` is Serve's state of it, None if it does not exist.
        """
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
        """Log a warning if no node of the cluster can hold the deployment.

        It was accepted when the cluster was unknown or different; a suitable node may still join.
        """
        try:
            self.cluster.check_fits(deployment.spec)
        except FailedPrecondition as error:
            logger.warning("%s waits for a node: %s", deployment.name, error.message)

    def _replicas_of_the_main(self, deployment: Deployment) -> int:
        """Return the replica count of the version with the most traffic.

        A version that is to replace it starts with as many replicas.
        """
        main = find_version(deployment, "")
        return (self.models.replicas(deployment, main) or 0) if main is not None else 0

    async def _attach(self, name: str, deployment: Deployment, version: ModelVersion, application: Application) -> bool:
        """Attach a batcher to the application.

        Return False if its replicas can never answer, or if another process is removing it.
        """
        replicas = application.replicas
        # Before the version gets any traffic, all replicas must answer. If it was loaded before, one is enough.
        wanted = max(replicas, deployment.spec.num_replicas) if version.signature is None else 1
        try:
            model, loaded = await answered(self.applications.open_model(name, wanted))
        except (DataLoss, FailedPrecondition) as error:
            await self._fail(name, deployment, version, error)
            return False
        if name in self.peers.going():  # the remover waits only for known holders
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
        """Return whether the version can be declared loaded.

        After that, requests for it come to any of the frontends.
        """
        return self.peers.is_leader and self.peers.all_hold(name, self.settings.drain_unresponsive_after_s)

    async def _say_loaded(self, name: str, deployment: Deployment, version: ModelVersion) -> None:
        newest = await asyncio.to_thread(
            self.deployments.transition, deployment.name, deployment.uid, _loaded(version, self._loaded[name])
        )
        if newest is not None:
            self.models.put(newest)
            logger.info("%s: version %s is loaded", deployment.name, version.number)

    async def _fail(self, name: str, deployment: Deployment, version: ModelVersion, error: MillraceError) -> None:
        """Fail a new deployment, or end a rollout, for good.

        A version that was loaded before is tried again.

        Serve has given up by then: it never restarts an application of which no replica ever started.
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
    """Return whether an unhealthy application can still answer.

    Serve calls an application unhealthy from a replica's death until all replicas have been placed again: for ever if
    no node has capacity. A version that was loaded before is served by its remaining replicas, unless the application
    is being removed.
    """
    goes = application.failed or application.deleting
    return version.signature is not None and application.replicas > 0 and not goes


def _loaded(version: ModelVersion, loaded: Loaded) -> Callable[[Deployment], Deployment | None]:
    known = replace(version, signature=loaded.signature, dataset_version=loaded.dataset_version)
    return lambda before: with_version_loaded(before, known, time.time())


# --- Removing ---
# Removes versions from Ray Serve once the requests in flight are answered, and ends the logs of deleted deployments.


class ModelUnloader:
    """Removes applications and deployments.

    Lives on the event loop of `models`. `wake` is called when a removal is complete, `on_going` when one begins. Of
    several frontend processes only the leader removes applications; the others detach from them.
    """

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
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by deployment uid, or by the name of a single application
        self._draining: set[str] = set()
        self._going: set[str] = set()

    @property
    def draining(self) -> Collection[str]:
        """Return the applications with batches still to be sent or answered."""
        return self._draining

    @property
    def going(self) -> Collection[str]:
        """Return the applications that this process, as the leader, is removing from Serve.

        None of them can be attached again before its removal is complete.
        """
        return self._going

    @property
    def under_way(self) -> Collection[str]:
        """Return the uids of deployments, and the names of single applications, with a removal in progress."""
        return self._tasks.keys()

    def remove(self, deployment: Deployment) -> None:
        """Start to remove a deployment, unless that is in progress."""
        if deployment.uid not in self._tasks:
            self._tasks[deployment.uid] = asyncio.create_task(self._remove(deployment))

    def retire(self, name: str) -> None:
        """Start to remove an application that no log wants, unless that is in progress.

        If another process removes it, this one only detaches from it.
        """
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
        """Drain all versions of a deployment, remove them from Serve, and end its log."""
        try:
            for version in deployment.versions:
                name = application_name(deployment, version)
                if name in self._tasks:  # it was unloaded, and is still draining
                    await asyncio.wait({self._tasks[name]})
                await self._take_out(name)
            if not self._peers.is_leader:
                return
            # Before the log ends: afterwards no process would release these marks.
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
        """Drain the application, then remove it from Serve."""
        if not self._peers.is_leader:
            await self._drain(name)
            self._applications.forget(name)
            return
        self._going.add(name)
        try:
            # Announced at once: a process that has not heard of it may attach to the application, and so counts as
            # holding it.
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
# Marks the checkpoints and dataset versions of served models as used, so that they cannot be deleted meanwhile.


class ReferenceKeeper:
    """Marks what served versions use.

    Remembers its marks, so the store is called once for each version.
    """

    def __init__(self, deployments: Deployments) -> None:
        self._deployments = deployments
        # The applications whose checkpoints (`_kept`) and whose dataset versions (`_marked`) are marked.
        self._kept: set[str] = set()
        self._marked: set[str] = set()

    async def mark(self, deployments: Iterable[Deployment]) -> None:
        """Mark the checkpoints and datasets of all live versions.

        Raises the store's errors if it does not answer or is full.
        """
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
            except Exception as error:  # an unreadable job log must not hold up the others
                logger.warning("%s: what it uses is not marked: %r; trying again", deployment.name, error)
        names = {name for name, *_ in there}
        self._kept &= names
        self._marked &= names
