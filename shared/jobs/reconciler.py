"""The reconciler: a process of its own, the only one of a data or train service that talks to Ray.

Ray ends a process whose head stays away, so the gRPC server is not that process; it supervises this one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from shared.errors import STORE_OUTAGES, Unavailable
from shared.jobs.actor import NAMESPACE, Standby, find_actor, new_actor_name, start_actor
from shared.jobs.registry import Jobs, LiveJob
from shared.jobs.transitions import (
    PREEMPTED,
    JobRecord,
    JobState,
    begin_attempt,
    confirm_cancel,
    confirm_suspend,
    lose_attempt,
)
from shared.log import StaleAttempt
from shared.settings import ServiceSettings
from shared.storage import ObjectStore, open_store
from shared.telemetry import flush_logs

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
# A marker whose job was never written: its creator died in between. Counted from our first look, by our own clock.
ORPHAN_AFTER_S = 300.0
# So many looks in a row must find no actor before an attempt is taken for lost: another reconciler, which overlaps with
# this one, may be about to start it.
POLLS_BEFORE_LOST = 2
# So often an actor that cannot be started is tried; then its attempt is lost, as if it had begun.
STARTS_BEFORE_LOST = 5
# What an attempt takes to start, and a little more.
REST_BESIDE_WORK_S = 20.0


@dataclass(frozen=True, kw_only=True)
class JobKind:
    """`entry` is `module:function`, the jobs' entry function, importable on Ray's nodes. With `prepare`, a function
    named likewise, an actor that has called it waits for the next attempt; it holds a process's memory, and no
    processor. `missing_capacity` tells what the cluster lacks for a job's next attempt, and no attempt begins until
    that is nothing. `choose` gives the `choices` of the job that is about to begin an attempt, which the log keeps with
    its beginning. `lost` is told of each attempt whose process is gone, at least once, before its job is; where it
    knows better why that was, it takes the note of a node that leaves away. `ended` is told
    of each job that is final, at least once, whoever wrote its end; where it raises, again at the next look. With
    `standby_during_work` the prepared actor is there while an attempt is at work, too: for jobs that run long and
    should resume soon. `polls` is called before each look at the jobs.
    """

    name: str
    entry: str
    prepare: str = ""
    missing_capacity: Callable[[JobRecord], str] = lambda _: ""
    choose: Callable[[JobRecord], dict[str, Any]] = lambda job: job.choices
    lost: Callable[[ObjectStore, JobRecord], None] = lambda _, __: None
    ended: Callable[[ObjectStore, JobRecord], None] = lambda _, __: None
    standby_during_work: bool = False
    polls: Callable[[ObjectStore], None] = lambda _: None


@dataclass
class _Start:
    """An attempt on its way: the name of its actor, and how often that was tried."""

    actor: str
    tries: int = 0


class Reconciler:
    """Compares what the logs say with the actors there are, for one kind of job."""

    def __init__(self, settings: ServiceSettings, kind: JobKind) -> None:
        self._store = open_store(settings.store)
        self._settings = settings.store
        self._kind = kind
        self._jobs = Jobs(self._store, kind.name)
        rest_s = REST_BESIDE_WORK_S if kind.standby_during_work else 0.0
        self._standby = Standby(kind.name, kind.prepare, rest_s) if kind.prepare else None
        # By uid: when a marker without its job was first seen, and how often an attempt had no actor.
        self._orphans: dict[str, float] = {}
        self._missing: Counter[str] = Counter()
        # By uid: attempts that the log has begun, or may have, and whose actor was not told to run yet.
        self._starting: dict[str, _Start] = {}
        # By uid: what clients were told that its next attempt waits for.
        self._waiting: dict[str, str] = {}

    def reconcile(self) -> None:
        """One look at every live job. Should two reconcilers overlap, the log decides who starts an attempt."""
        at_work = False
        self._poll()
        for live in self._jobs.live():
            try:
                at_work |= self._reconcile(live)
            except StaleAttempt:
                continue  # another reconciler was faster
            except (*STORE_OUTAGES, RayError, ConnectionError):
                raise  # which holds for every job
            except Exception:
                logger.exception("%s cannot be reconciled; the others go on", live.folder)
        if self._standby is not None:
            # An attempt that is at work has more need of the processors, unless a restart is to be short.
            self._standby.hold(replace=not at_work or self._kind.standby_during_work)

    def _poll(self) -> None:
        """What the kind does at each look. The jobs are looked at all the same where that fails."""
        try:
            self._kind.polls(self._store)
        except STORE_OUTAGES as error:
            logger.warning("%s", error.message)
        except Exception:
            logger.exception("what is done at each look failed")

    def _reconcile(self, live: LiveJob) -> bool:
        """Whether an attempt is at work on it."""
        job = self._jobs.find(live.folder)
        # A marker of a generation to come is that of a resumption, which may be under way.
        if job is None or job.uid != live.uid or (job.unattended and live.generation > job.generation):
            first_seen = self._orphans.setdefault(live.uid, time.monotonic())
            if time.monotonic() - first_seen > ORPHAN_AFTER_S:
                self._forget(live)
            return False
        if job.unattended:
            if job.state.final:
                # Before the marker goes, by which it is found again should we end in between.
                self._kind.ended(self._store, job)
            self._forget(live)
            return False
        if job.state in (JobState.PENDING, JobState.RECOVERING):
            if time.time() < job.begin_after or self._waits(live, job):
                return False
            self._begin(live, job)
        elif (start := self._starting.get(live.uid)) is not None and start.actor == job.actor:
            # Begun by us: the log's answer was lost, or the actor could not be started just then.
            self._start(live, job, start)
        elif find_actor(job.actor) is not None:
            self._missing.pop(live.uid, None)
        else:
            self._missing[live.uid] += 1
            if self._missing[live.uid] >= POLLS_BEFORE_LOST:
                self._lost(live, job)
        return True

    def _waits(self, live: LiveJob, job: JobRecord) -> bool:
        """Whether the cluster lacks what the next attempt needs; if so clients are told."""
        what = self._kind.missing_capacity(job)
        if what != self._waiting.get(live.uid):  # unknown at first: an earlier reconciler may have told something
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
            # A cancel, or another reconciler, may have come between.
            unchanged = (newest.state, newest.attempt) == (job.state, job.attempt)
            begun = begin_attempt(newest, time.time(), name, choices) if unchanged else None
            return begun or newest

        # Noted before the log is asked: it may have begun the attempt though its answer never comes.
        self._starting[live.uid] = start
        # A spare whose attempt another reconciler begins is lost; it ends by itself.
        self._jobs.transition(live.folder, decide, attempt=job.attempt + 1)
        if begun is None:
            del self._starting[live.uid]
        else:
            self._start(live, begun, start)

    def _start(self, live: LiveJob, job: JobRecord, start: _Start) -> None:
        """Has the actor run the attempt that the log has begun, once."""
        start.tries += 1
        if start.tries >= STARTS_BEFORE_LOST:
            del self._starting[live.uid]
        logger.info("%s: starting attempt %d", job.name, job.attempt)
        # A spare that nobody called in time has ended by itself.
        actor: Any = find_actor(start.actor) or start_actor(start.actor)
        actor.run.remote(self._kind.entry, self._settings, self._kind.name, live.folder, job.attempt)
        self._starting.pop(live.uid, None)

    def _lost(self, live: LiveJob, job: JobRecord) -> None:
        """No actor works on it: it died, or its node or its Ray cluster did."""
        self._missing.pop(live.uid, None)
        # Before the transition: should we end in between, the next look tells it again.
        self._kind.lost(self._store, job)
        leaving = self._jobs.was_leaving(live.folder, job.attempt)

        def decide(newest: JobRecord) -> JobRecord:
            if newest.state.final or newest.attempt != job.attempt:
                return newest
            if newest.state is JobState.CANCELLING:
                return confirm_cancel(newest, time.time())
            if newest.state is JobState.SUSPENDING:
                return confirm_suspend(newest, time.time())
            if newest.state is not JobState.RUNNING:
                return newest
            why = f"the process of attempt {job.attempt} ended{', as a node was taken away' if leaving else ''}"
            cause = Unavailable(why, reason=PREEMPTED if leaving else "ATTEMPT_LOST")
            return lose_attempt(newest, cause, time.time())

        after = self._jobs.transition(live.folder, decide, attempt=job.attempt)
        logger.warning("%s: attempt %d has no process; now %s", job.name, job.attempt, after.state)


def run_reconciler(settings: ServiceSettings, *kinds: JobKind) -> None:
    """Reconciles jobs of these kinds for ever.

    Raises `ConnectionError` where Ray is not there: whoever supervises starts it again.
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
    """Raises `ConnectionError` when the head is not the one that we joined. Ray reconnects to a head that comes back
    within a minute on the same port, though it knows nothing of what there was, and goes on answering from its own
    memory that our actors live."""
    if not any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes()):  # type: ignore[no-untyped-call]
        raise ConnectionError("another Ray head has taken the place of ours")


def end_with_parent() -> threading.Event:
    """Ends this process when the supervising one is gone, however it died: its end of our standard input closes.

    Returns the event that it sets when it nudges us: there is something to do now.
    """
    woken = threading.Event()

    def wait() -> None:
        # Not sys.stdin, whose lock this thread would hold while the interpreter ends, which aborts it.
        while os.read(0, 1024):
            woken.set()
        flush_logs()
        os._exit(0)

    threading.Thread(target=wait, name="parent", daemon=True).start()
    return woken
