"""The reconciler: a process of its own, the only one of a data or train service that talks to Ray.

Ray ends a process whose head stays away, so the gRPC server is not that process; it supervises this one.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

import ray

from shared.errors import Unavailable
from shared.jobs.actor import NAMESPACE, actor_name, find_actor, start_attempt
from shared.jobs.record import JobRecord, JobState, begin_attempt, confirm_cancel, lose_attempt
from shared.jobs.registry import Jobs, LiveJob
from shared.log import StaleAttempt
from shared.settings import ServiceSettings
from shared.storage import open_store

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
# A marker whose job was never written: its creator died in between.
ORPHAN_AFTER_S = 300.0


class Reconciler:
    """Compares what the logs say with the actors there are, for one kind of job."""

    def __init__(self, settings: ServiceSettings, kind: str, entry: str) -> None:
        self._settings = settings.store
        self._jobs = Jobs(open_store(settings.store), kind)
        self._kind = kind
        self._entry = entry

    def reconcile(self) -> None:
        """One look at every live job. Should two reconcilers overlap, the log decides who starts an attempt."""
        for live in self._jobs.live():
            try:
                self._reconcile(live)
            except StaleAttempt:
                continue  # another reconciler was faster

    def _reconcile(self, live: LiveJob) -> None:
        job = self._jobs.find(live.folder)
        if job is None or job.uid != live.uid:
            if time.time() - live.marked_at > ORPHAN_AFTER_S:
                self._jobs.forget(live.uid)
            return
        if job.state.final:
            self._jobs.forget(live.uid)
        elif job.state in (JobState.PENDING, JobState.RECOVERING):
            self._begin(live, job)
        elif find_actor(actor_name(self._kind, job)) is None:
            self._lost(live, job)

    def _begin(self, live: LiveJob, job: JobRecord) -> None:
        if zombie := find_actor(actor_name(self._kind, job)):
            ray.kill(zombie)
        after = self._jobs.transition(
            live.folder,
            # A cancel may have come between.
            lambda newest: begin_attempt(newest, time.time()) if newest.state is job.state else newest,
            attempt=job.attempt + 1,
        )
        if after.state is JobState.RUNNING and after.attempt == job.attempt + 1:
            logger.info("%s: starting attempt %d", after.name, after.attempt)
            start_attempt(self._entry, self._settings, self._kind, live.folder, after)

    def _lost(self, live: LiveJob, job: JobRecord) -> None:
        """No actor works on it: it died, or its Ray cluster did."""

        def decide(newest: JobRecord) -> JobRecord:
            if newest.state.final or newest.attempt != job.attempt:
                return newest
            if newest.state is JobState.CANCELLING:
                return confirm_cancel(newest, time.time())
            if newest.state is not JobState.RUNNING:
                return newest
            cause = Unavailable(f"the process of attempt {job.attempt} ended", reason="ATTEMPT_LOST")
            return lose_attempt(newest, cause, time.time())

        after = self._jobs.transition(live.folder, decide, attempt=job.attempt)
        logger.warning("%s: attempt %d has no process; now %s", job.name, job.attempt, after.state)


def run_reconciler(settings: ServiceSettings, kind: str, entry: str) -> None:
    """Reconciles for ever. Raises `ConnectionError` where Ray is not there: whoever supervises starts it again.

    `entry` is `module:function`, the job's entry function, importable on Ray's nodes.
    """
    end_with_parent()
    ray.init(address=settings.ray_address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    reconciler = Reconciler(settings, kind, entry)
    logger.info("reconciling %s jobs on Ray at %s", kind, settings.ray_address)
    while True:
        try:
            reconciler.reconcile()
        except Unavailable as error:
            logger.warning("%s", error.message)
        time.sleep(INTERVAL_S)


def end_with_parent() -> None:
    """Ends this process when the supervising one is gone, however it died: its end of our standard input closes."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=wait, name="parent", daemon=True).start()
