"""The parts of one frontend process besides its server.

They check the store, keep the connection to Ray, report this process's state to its peers and its load to the
replicas, and export the models' statistics to Prometheus over HTTP: the same numbers as ModelStatistics.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from inference_service.deploy.reconciler import RayLost, Reconciler
from inference_service.domain.deployment import LIVE, Deployment, application_name
from inference_service.domain.rollout import RolloutState
from inference_service.domain.statistics import OK, Counts, Histogram, Statistics
from inference_service.frontend_processes import POLL_INTERVAL_S, Peers, PeerState
from inference_service.serve.models import Listed, Models
from inference_service.serve.ray_serve import ServeApplications, to_serve_thread
from inference_service.serve.repository import SummedStatistics
from inference_service.settings import InferenceSettings
from shared.errors import STORE_OUTAGES
from shared.grpc_server import Health
from shared.settings import SettingsError, StoreSettings
from shared.storage import open_store, probe
from shared.storage.object_store import ensure_bucket

# --- Ray ---

logger = logging.getLogger(__name__)


# The connection of this process to Ray: waits for Ray, joins it, and ends the process when Ray is lost.
#
# Why not reconnect: Ray's client library holds the old cluster in threads and globals of C++ and Python, and aborts the
# process about a minute after the head's death. Serve's handles belong to the old controller, too. A new process has
# none of that state, starts in seconds, and reads from the logs what to serve; the supervisor starts it. Until Ray is
# reached, Get and List answer from the store and health is NOT_SERVING.

EXIT_RAY_LOST = 75  # EX_TEMPFAIL of sysexits.h
RAY_POLL_INTERVAL_S = 0.5
CONNECT_TIMEOUT_S = 60.0
# Separate threads, since asyncio's own connections resolve host names in the event loop's default threads. All of those
# may be waiting for the store, and Ray would then seem to be lost.
WATCHING = ThreadPoolExecutor(4, thread_name_prefix="watching-ray")


class RayConnection:
    """Keeps the connection to Ray.

    `exit_status` is the process's, once `run` has ended. `ready` is set after the first reconciliation.
    """

    def __init__(
        self,
        settings: InferenceSettings,
        applications: ServeApplications,
        reconciler: Reconciler,
        models: Models,
        health: Health,
        stop: asyncio.Event,
    ) -> None:
        self._address = settings.service.ray_address
        self._gone_after_s = settings.ray_gone_after_s
        self._applications = applications
        self._reconciler = reconciler
        self._models = models
        self._health = health
        self._stop = stop
        self.exit_status = 0
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Run until cancelled.

        When Ray is lost, sets `exit_status` and stops the server.
        """
        try:
            await self._join()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch())
                tasks.create_task(self._reconciler.run(self._serving))
        except* RayLost as lost:
            logger.error("Ray at %s is lost (%s); ending, to be started again", self._address, lost.exceptions[0])
            await self._health.set(False)
            self._models.close("Ray is lost; the service is starting again")
            self.exit_status = EXIT_RAY_LOST
            self._stop.set()

    async def _join(self) -> None:
        # Ray's own client gives up after a while, and may abort the process.
        while True:
            if await _listens(self._address):
                break
            await asyncio.sleep(RAY_POLL_INTERVAL_S)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await to_serve_thread(self._applications.connect, self._address)
        except Exception as error:  # Ray's client raises half a dozen types here
            raise RayLost(f"joining failed: {error!r}") from error
        # Ray's library has replaced our signal handlers by its own, which print a stack as if SIGTERM were a crash.
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        logger.info("joined Ray at %s", self._address)

    async def _watch(self) -> None:
        """Raise `RayLost` after the head's port has been closed for a while.

        Ray's client would only hang.
        """
        seen_at = time.monotonic()
        while time.monotonic() - seen_at < self._gone_after_s:
            if await _listens(self._address):
                seen_at = time.monotonic()
            await asyncio.sleep(RAY_POLL_INTERVAL_S)
        raise RayLost(f"nothing listens there for {self._gone_after_s:.0f} s")

    async def _serving(self) -> None:
        await self._health.set(True)
        self.ready.set()


async def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")

    def connect() -> None:
        socket.create_connection((host, int(port)), RAY_POLL_INTERVAL_S).close()

    try:
        async with asyncio.timeout(RAY_POLL_INTERVAL_S):
            await asyncio.get_running_loop().run_in_executor(WATCHING, connect)
    except (OSError, TimeoutError):
        return False
    return True


# --- Reports to peers ---
# Reports this process's state to the other frontend processes of this service several times a second, and at once when
# it begins to remove an application from Serve.

STATISTICS_EVERY_S = 1.0


class PeerReports:
    """Exchanges state with the peers.

    Lives on the event loop of `models`. `ready` is set once this process answers.
    """

    def __init__(
        self,
        peers: Peers,
        reconciler: Reconciler,
        models: Models,
        statistics: SummedStatistics,
        ready: asyncio.Event,
    ) -> None:
        self._peers = peers
        self._ready = ready
        self._reconciler = reconciler
        self._models = models
        self._statistics = statistics
        self._statistics_at = -STATISTICS_EVERY_S
        self._listens = False
        self._cannot_touch = False
        self._news: dict[int, tuple[int, list[str], list[str]]] = {}
        reconciler.on_going(self._exchange)

    async def run(self) -> None:
        """Exchange state until cancelled; return at once without peers.

        The deployments that peers have changed or loaded are noticed soon.
        """
        while self._peers.are_there:
            self._exchange()
            await asyncio.sleep(POLL_INTERVAL_S)

    async def turn_to_listen(self) -> None:
        """Wait until this process may open the port, and report to the peers that it does."""
        while not self._peers.may_listen(self._ready.is_set(), self._reconciler.holds()):  # noqa: ASYNC110 - a file sends no event
            await asyncio.sleep(POLL_INTERVAL_S)
        self._listens = True
        self._exchange()

    def _exchange(self) -> None:
        """Write this process's state and read that of the peers.

        A folder that is full or not accessible must not stop the service: the next exchange tries again.
        """
        self._peers.heartbeat()
        try:
            self._publish()
            before, self._news = self._news, self._peers.news()
            if time.monotonic() - self._statistics_at >= STATISTICS_EVERY_S:
                self._statistics.leave()
                self._statistics_at = time.monotonic()
        except OSError as error:
            if not self._cannot_touch:
                logger.error("the frontend processes do not hear of each other: %s; see to the folder's disk", error)
            self._cannot_touch = True
            return
        self._cannot_touch = False
        if self._news != before:
            self._reconciler.wake()

    def _publish(self) -> None:
        counts = {name: one for deployment in self._models.deployments() for name, one in self._counts(deployment)}
        self._peers.publish(
            PeerState(
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
        """Return the request counts of versions that a rollout's limits compare."""
        rollout = deployment.rollout
        if rollout is None or rollout.state is not RolloutState.SHIFTING:
            return []
        return [
            (
                application_name(deployment, version),
                self._models.statistics(deployment, version).recent.counts(time.time(), rollout.plan.limits.window_s),
            )
            for version in deployment.versions
            if version.number in (rollout.version, rollout.main)
        ]


# --- Reports to replicas ---
# Reports this process's load to the replicas of versions with autoscaling, every few seconds.
#
# The replicas pass it on to Ray Serve's controller, which decides on the total of all frontend processes.

REPORT_EVERY_S = 2.0


class LoadReporter:
    """Reports the load to replicas.

    Lives on the event loop of `models`.
    """

    def __init__(self, applications: ServeApplications, models: Models) -> None:
        self._applications = applications
        self._models = models
        self._frontend = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._under_way: set[str] = set()

    async def run(self) -> None:
        """Report until cancelled.

        Replicas that do not answer delay no other report.
        """
        async with asyncio.TaskGroup() as tasks:
            while True:
                for name in set(self._scaled()) - self._under_way:
                    self._under_way.add(name)
                    tasks.create_task(self._report(name))
                await asyncio.sleep(REPORT_EVERY_S)

    def _scaled(self) -> list[str]:
        return [
            application_name(deployment, version)
            for deployment in self._models.deployments()
            if deployment.state in LIVE and deployment.spec.autoscaling is not None
            for version in deployment.versions
        ]

    async def _report(self, name: str) -> None:
        try:
            batcher = self._models.find_batcher(name)
            if batcher is not None:
                await self._applications.report_load(name, self._frontend, batcher.load())
        except Exception as error:  # Ray raises half a dozen types; the next report replaces this one
            logger.warning("the replicas of %s do not hear what there is for them to do: %r", name, error)
        finally:
            self._under_way.discard(name)


# --- Check of the store ---
# Checks that the store can be used, before the service starts, and until it has answered once.
#
# A store that can never be used (no bucket, refused credentials, no put-if-absent) is an error of the settings, and the
# process ends. A full or unresponsive store is an outage: running replicas need no store, so the service starts without
# it, and serves the deployments that it knows.


# Longer than a healthy store takes. The client of an unresponsive store gives up only after half a minute.
CHECKED_TIMEOUT_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


class StoreCheck:
    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self.passed = False

    def begin(self) -> None:
        """Check once, for at most `CHECKED_TIMEOUT_S` seconds; raise `StoreRefused`."""
        # A separate thread that is not joined: an unresponsive store may take longer than the timeout.
        thread = ThreadPoolExecutor(1, thread_name_prefix="store-check")
        try:
            thread.submit(self._check).result(CHECKED_TIMEOUT_S)
            self.passed = True
        except TimeoutError:
            self._warn(f"{self._settings.url} has not answered within {CHECKED_TIMEOUT_S:.0f} s")
        except STORE_OUTAGES as error:
            self._warn(error.message)
        finally:
            thread.shutdown(wait=False)

    async def finish(self) -> None:
        """Check with growing pauses until the store has answered; raise `StoreRefused`."""
        pause_s = FIRST_PAUSE_S
        while not self.passed:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            try:
                await asyncio.to_thread(self._check)
            except STORE_OUTAGES as error:
                logger.debug("%s; checking again in %.0f s", error.message, pause_s)
                continue
            self.passed = True
            logger.info("%s answers and takes what is written", self._settings.url)

    def _check(self) -> None:
        ensure_bucket(self._settings)
        probe(open_store(self._settings))

    def _warn(self, why: str) -> None:
        logger.warning(
            "%s; starting all the same: what runs is served as far as it is known, and nothing can be changed until "
            "the store answers and has room",
            why,
        )


# --- Large buffers ---
# Returns the memory of large buffers to the system when they are freed.

_M_MMAP_THRESHOLD = -3  # of malloc.h
LARGE_BYTES = 64 * 1024


def give_back_large_buffers() -> None:
    """Give each large buffer pages of its own, which are unmapped when it is freed.

    gRPC reads a message that is over the limit before it refuses it, into buffers that many threads allocate and free.
    glibc keeps such memory: a server that was sent 65 MiB now and then held 300 MiB more after minutes. Without glibc
    this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


# --- Metrics ---

PORT_REFUSED = (errno.EADDRINUSE, errno.EACCES)
PREFIX = "millrace_inference"
LABELS = ("model", "version")
DURATIONS: dict[str, tuple[str, Callable[[Statistics], Histogram]]] = {
    "request_seconds": ("answered requests, in all", lambda one: one.requests.get(OK) or Histogram()),
    "queue_seconds": ("answered requests, without the computing", lambda one: one.queue),
    "compute_input_seconds": ("answered requests: preprocessing", lambda one: one.computing.input),
    "compute_infer_seconds": ("answered requests: the model", lambda one: one.computing.infer),
    "compute_output_seconds": ("answered requests: making the answer", lambda one: one.computing.output),
    "batch_seconds": ("batches, to a replica and back", lambda one: one.batch_round_trip),
    "batch_rows": ("rows in a batch", lambda one: one.batch_rows),
}


class ModelCollector(Collector):
    """Collects the present numbers on each scrape, from any thread.

    It keeps no counters of its own.
    """

    def __init__(self, models: Models) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        listed = list(self._models.listed())
        requests = CounterMetricFamily(f"{PREFIX}_requests", "requests by how they ended", labels=(*LABELS, "status"))
        # Requests without a version: no such model, or it is not READY.
        for status, histogram in list(self._models.unchosen.requests.items()):
            requests.add_metric(("", "", status), histogram.count)
        for one in listed:
            for status, histogram in list(one.statistics.requests.items()):
                requests.add_metric((*_labels(one), status), histogram.count)
        yield requests
        shadowed = CounterMetricFamily(
            f"{PREFIX}_shadow_requests",
            "copies for a shadow by how they ended; SHED: left out",
            labels=(*LABELS, "status"),
        )
        for one in listed:
            for status, count in list(one.statistics.shadowed.items()):
                shadowed.add_metric((*_labels(one), status), count)
        yield shadowed
        non_finite = CounterMetricFamily(
            f"{PREFIX}_non_finite_rows", "rows answered with a NaN or an infinity", labels=LABELS
        )
        for one in listed:
            non_finite.add_metric(_labels(one), one.statistics.non_finite_rows)
        yield non_finite
        for name, (text, histogram_of) in DURATIONS.items():
            family = HistogramMetricFamily(f"{PREFIX}_{name}", text, labels=LABELS)
            for one in listed:
                _add(family, _labels(one), histogram_of(one.statistics))
            yield family
        rows = GaugeMetricFamily(f"{PREFIX}_queued_rows", "rows that wait for the model", labels=LABELS)
        ready = GaugeMetricFamily(f"{PREFIX}_ready", "1: requests are answered", labels=LABELS)
        replicas = GaugeMetricFamily(f"{PREFIX}_replicas", "replicas that run", labels=LABELS)
        for one in listed:
            replicas.add_metric(_labels(one), one.replicas or 0)
            rows.add_metric(_labels(one), one.queued_rows)
            ready.add_metric(_labels(one), int(one.answers))
        yield rows
        yield ready
        yield replicas


@contextmanager
def metrics_served(listen: str, models: Models) -> Iterator[None]:
    """Serve http://`listen`/metrics within the block; nothing if `listen` is empty.

    Raises `SettingsError` if the port or the address is not available.
    """
    if not listen:
        yield
        return
    host, _, port = listen.rpartition(":")
    registry = CollectorRegistry()
    registry.register(ModelCollector(models))
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        remedy = "use another port" if error.errno in PORT_REFUSED else "use an address of this machine"
        raise SettingsError(f"MILLRACE_METRICS_LISTEN={listen!r}: {error.strerror}; {remedy}") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _labels(listed: Listed) -> tuple[str, str]:
    return listed.deployment.model_name, listed.version.number


def _add(family: HistogramMetricFamily, labels: tuple[str, str], histogram: Histogram) -> None:
    counts = list(accumulate(histogram.counts))
    bounds = [*map(str, histogram.bounds), "+Inf"]
    family.add_metric(labels, list(zip(bounds, counts, strict=True)), histogram.sum)
