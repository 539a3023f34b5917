"""The reconciler: a separate process, the only one of a data or train service that uses Ray.

Ray ends a process whose head stays away, so the gRPC server is a separate process, which supervises this one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from shared.errors import STORE_OUTAGES, Unavailable
from shared.jobs.actor import NAMESPACE, Standby, find_actor, memory_kill, new_actor_name, start_actor
from shared.jobs.registry import Jobs, LiveJob, log_prefix
from shared.jobs.transitions import (
    PREEMPTED,
    JobRecord,
    JobState,
    begin_attempt,
    confirm_cancel,
    confirm_suspend,
    lose_attempt,
)
from shared.logging_and_tracing import flush_logs
from shared.resource_log import ResourceLog, StaleAttempt
from shared.settings import ServiceSettings
from shared.storage import ObjectStore, open_store

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
# A marker without a job: its creator died in between. Counted from our first poll, by our own clock.
ORPHAN_AFTER_S = 300.0
LOGS_AT_ONCE = 16
# An attempt counts as lost after this many polls in a row without an actor, because another reconciler, which overlaps
# with this one, may be about to start it.
POLLS_BEFORE_LOST = 2
# Tries to start an actor. Then its attempt counts as lost, as if it had begun.
STARTS_BEFORE_LOST = 5
# A little more than an attempt takes to start.
REST_BESIDE_WORK_S = 20.0


@dataclass(frozen=True, kw_only=True)
class JobKind:
    """A kind of jobs, and how its attempts run."""

    # The kind's name in the store, e.g. `import` or `train`.
    name: str
    # The jobs' entry function, `module:function`, importable on Ray's nodes.
    entry: str
    # A function, named likewise, that an actor calls before it waits for the next attempt. The waiting actor takes a
    # process's memory, but no processor.
    prepare: str = ""
    # Returns what the cluster lacks for a job's next attempt. No attempt begins until it returns an empty text.
    missing_capacity: Callable[[JobRecord], str] = lambda _: ""
    # Of jobs that wait, those of a higher priority are asked first, and those of the same one as they came.
    priority: Callable[[JobRecord], int] = lambda _: 0
    # Returns the `choices` of a job that is about to begin an attempt; the log stores them with its beginning.
    choose: Callable[[JobRecord], dict[str, Any]] = lambda job: job.choices
    # Called at least once when the log has begun an attempt, before its actor runs it.
    begun: Callable[[JobRecord], None] = lambda _: None
    # Called at least once for each attempt whose process is lost, before its job changes. If it knows a better reason
    # than a draining node, it removes the note of that.
    lost: Callable[[ObjectStore, JobRecord], None] = lambda _, __: None
    # Called at least once for each final job, whichever process wrote its end; after an error again at the next poll.
    ended: Callable[[ObjectStore, JobRecord], None] = lambda _, __: None
    # Keep the prepared actor also while an attempt is running: for jobs that run long and should resume soon.
    standby_during_work: bool = False
    # Called before each poll of the jobs.
    polls: Callable[[ObjectStore], None] = lambda _: None


@dataclass
class _Start:
    """An attempt that is being started: the name of its actor, and the number of tries."""

    actor: str
    tries: int = 0


class Reconciler:
    """Reconciler of one kind of job: compares the logs with the live actors."""

    def __init__(self, settings: ServiceSettings, kind: JobKind) -> None:
        self._store = open_store(settings.store)
        self._settings = settings.store
        self._kind = kind
        self._jobs = Jobs(self._store, kind.name)
        rest_s = REST_BESIDE_WORK_S if kind.standby_during_work else 0.0
        self._standby = Standby(kind.name, kind.prepare, rest_s) if kind.prepare else None
        # By uid: when a marker without its job was first seen, and how many polls found no actor of an attempt.
        self._orphans: dict[str, float] = {}
        self._missing: Counter[str] = Counter()
        # By uid: attempts that the log has begun, or may have, and whose actor has not been called yet.
        self._starting: dict[str, _Start] = {}
        # By uid: the actor of the present attempt, with the attempt's number.
        self._actors: dict[str, tuple[int, Any]] = {}
        # By uid: what the next attempt waits for, as clients see it.
        self._waiting: dict[str, str] = {}
        # The logs of the live jobs, by their folders.
        self._logs: dict[str, ResourceLog] = {}

    def reconcile(self) -> None:
        """Check every live job once. If two reconcilers overlap, the log decides which one starts an attempt."""
        at_work = False
        self._poll()
        for live, job in self._in_order():
            try:
                at_work |= self._reconcile(live, job)
            except StaleAttempt:
                continue  # another reconciler was faster
            except (*STORE_OUTAGES, RayError, ConnectionError):
                raise  # such an error affects every job
            except Exception:
                logger.exception("%s cannot be reconciled; the others go on", live.folder)
        if self._standby is not None:
            # A running attempt needs the processors more, unless a restart should be short.
            self._standby.hold(replace=not at_work or self._kind.standby_during_work)

    def _poll(self) -> None:
        """Call the kind's `polls`. The jobs are checked even if it fails."""
        try:
            self._kind.polls(self._store)
        except STORE_OUTAGES as error:
            logger.warning("%s", error.message)
        except Exception:
            logger.exception("the work of a pass failed")

    def _in_order(self) -> list[tuple[LiveJob, JobRecord | None]]:
        """Return all live jobs as they are now. Those that wait come last, in the order in which they may begin."""
        live_jobs = self._jobs.live()
        # A log that is kept open costs one read where nothing is new.
        self._logs = {live.folder: self._logs.get(live.folder) or self._open(live.folder) for live in live_jobs}
        with ThreadPoolExecutor(LOGS_AT_ONCE) as pool:
            read = list(pool.map(self._read, live_jobs))
        found = [one for one in read if one is not None]

        def place(one: tuple[LiveJob, JobRecord | None]) -> tuple[bool, int]:
            job = one[1]
            waits = job is not None and job.state in (JobState.PENDING, JobState.RECOVERING)
            return waits, -self._kind.priority(job) if job is not None and waits else 0

        return sorted(found, key=place)

    def _open(self, folder: str) -> ResourceLog:
        return ResourceLog(self._store, log_prefix(folder))

    def _read(self, live: LiveJob) -> tuple[LiveJob, JobRecord | None] | None:
        """Return the job, or None if it cannot be read."""
        try:
            record = self._logs[live.folder].head()
            job = JobRecord.from_state(record.state) if record else None
        except STORE_OUTAGES:
            raise
        except Exception:
            logger.exception("%s cannot be reconciled; the others go on", live.folder)
            return None
        return live, None if job is None or job.state is JobState.DELETED else job

    def _reconcile(self, live: LiveJob, job: JobRecord | None) -> bool:
        """Reconcile one job. Return whether an attempt is running."""
        # A marker of a later generation belongs to a resumption, which may be in progress.
        if job is None or job.uid != live.uid or (job.unattended and live.generation > job.generation):
            first_seen = self._orphans.setdefault(live.uid, time.monotonic())
            if time.monotonic() - first_seen > ORPHAN_AFTER_S:
                self._forget(live)
            return False
        if job.unattended:
            if job.state.final:
                # Before the marker is removed, because it finds the job again if this process ends in between.
                self._kind.ended(self._store, job)
            self._forget(live)
            return False
        if job.state in (JobState.PENDING, JobState.RECOVERING):
            if time.time() < job.begin_after or self._waits(live, job):
                return False
            self._begin(live, job)
        elif (start := self._starting.get(live.uid)) is not None and start.actor == job.actor:
            # Begun by us: the log's answer was lost, or the actor could not be started at that time.
            self._kind.begun(job)
            self._start(live, job, start)
        elif (actor := find_actor(job.actor)) is not None:
            self._actors[live.uid] = job.attempt, actor
            self._missing.pop(live.uid, None)
        else:
            self._missing[live.uid] += 1
            if self._missing[live.uid] >= POLLS_BEFORE_LOST:
                self._lost(live, job)
        return True

    def _waits(self, live: LiveJob, job: JobRecord) -> bool:
        """Return whether the cluster lacks what the next attempt needs, and show clients what it lacks."""
        what = self._kind.missing_capacity(job)
        if what != self._waiting.get(live.uid):  # unknown at first: an earlier reconciler may have written one
            self._jobs.wait_for(live.folder, what)
            self._waiting[live.uid] = what
        return bool(what)

    def _forget(self, live: LiveJob) -> None:
        if self._waiting.pop(live.uid, None):
            self._jobs.wait_for(live.folder, "")
        self._jobs.forget(live)
        self._orphans.pop(live.uid, None)
        self._missing.pop(live.uid, None)
        self._starting.pop(live.uid, None)
        self._actors.pop(live.uid, None)

    def _begin(self, live: LiveJob, job: JobRecord) -> None:
        if zombie := find_actor(job.actor):
            ray.kill(zombie)
        self._missing.pop(live.uid, None)
        standby = self._standby.take() if self._standby else None
        name = standby[0] if standby else new_actor_name(self._kind.name)
        start = _Start(name)
        choices = self._kind.choose(job)
        begun: JobRecord | None = None

        def decide(newest: JobRecord) -> JobRecord:
            nonlocal begun
            # A cancel, or another reconciler, may have come in between.
            unchanged = (newest.state, newest.attempt) == (job.state, job.attempt)
            begun = begin_attempt(newest, time.time(), name, choices) if unchanged else None
            return begun or newest

        # Recorded before the log is written: the log may begin the attempt even if its answer is lost.
        self._starting[live.uid] = start
        # If another reconciler begins the attempt, the standby actor is lost; it ends by itself.
        self._jobs.transition(live.folder, decide, attempt=job.attempt + 1)
        if begun is None:
            del self._starting[live.uid]
        else:
            self._kind.begun(begun)
            self._start(live, begun, start)

    def _start(self, live: LiveJob, job: JobRecord, start: _Start) -> None:
        """Call the actor once to run the attempt that the log has begun."""
        start.tries += 1
        if start.tries >= STARTS_BEFORE_LOST:
            del self._starting[live.uid]
        logger.info("%s: starting attempt %d", job.name, job.attempt)
        # A standby actor that was not called in time has ended by itself.
        actor: Any = find_actor(start.actor) or start_actor(start.actor)
        self._actors[live.uid] = job.attempt, actor
        actor.run.remote(self._kind.entry, self._settings, self._kind.name, live.folder, job.attempt)
        self._starting.pop(live.uid, None)

    def _lost(self, live: LiveJob, job: JobRecord) -> None:
        """Record that an attempt is lost: its actor, its node or its Ray cluster died."""
        self._missing.pop(live.uid, None)
        # Before the transition: if this process ends in between, the next poll repeats the call.
        self._kind.lost(self._store, job)
        leaving = self._jobs.was_leaving(live.folder, job.attempt)
        attempt, actor = self._actors.get(live.uid, (0, None))
        memory = memory_kill(actor) if actor is not None and attempt == job.attempt else ""

        def decide(newest: JobRecord) -> JobRecord:
            if newest.state.final or newest.attempt != job.attempt:
                return newest
            if newest.state is JobState.CANCELLING:
                return confirm_cancel(newest, time.time())
            if newest.state is JobState.SUSPENDING:
                return confirm_suspend(newest, time.time())
            if newest.state is not JobState.RUNNING:
                return newest
            why = f"the process of attempt {job.attempt} ended"
            if leaving:
                why += ", as a node was taken away"
            elif memory:
                why += f", as {memory}"
            cause = Unavailable(why, reason=PREEMPTED if leaving else "ATTEMPT_LOST")
            return lose_attempt(newest, cause, time.time())

        after = self._jobs.transition(live.folder, decide, attempt=job.attempt)
        self._actors.pop(live.uid, None)  # only now: if the store was out, the next poll asks for the reason again
        logger.warning("%s: attempt %d has no process; now %s", job.name, job.attempt, after.state)


def run_reconciler(settings: ServiceSettings, *kinds: JobKind) -> None:
    """Reconcile jobs of these kinds forever.

    Raises `ConnectionError` if Ray is not reachable; the supervisor then starts this process again.
    """
    woken = end_with_parent()
    ray.init(address=settings.ray_address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    reconcilers = [Reconciler(settings, kind) for kind in kinds]
    logger.info("reconciling %s jobs on Ray at %s", ", ".join(kind.name for kind in kinds), settings.ray_address)
    own_node = ray.get_runtime_context().get_node_id()
    while True:
        _require_cluster_of(own_node)
        for reconciler in reconcilers:
            try:
                reconciler.reconcile()
            except STORE_OUTAGES as error:
                logger.warning("%s", error.message)
        woken.wait(INTERVAL_S)
        woken.clear()


def _require_cluster_of(node_id: str) -> None:
    """Raise `ConnectionError` if the head is not the one that we joined.

    Ray reconnects to a head that comes back within a minute on the same port, though the new head knows nothing of
    earlier actors, and keeps answering from its own memory that our actors live.
    """
    if not any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes()):  # type: ignore[no-untyped-call]
        raise ConnectionError("another Ray head has taken the place of ours")


def end_with_parent() -> threading.Event:
    """End this process when the supervising one ends, however it died: our standard input closes then.

    Return the event that is set when the supervisor wakes this process.
    """
    woken = threading.Event()

    def wait() -> None:
        # Not sys.stdin: this thread would hold its lock while the interpreter ends, which aborts the process.
        while os.read(0, 1024):
            woken.set()
        flush_logs()
        os._exit(0)

    threading.Thread(target=wait, name="parent", daemon=True).start()
    return woken
