"""One attempt at a job: runs its entry function and writes into the log how it ended."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shared.errors import (
    STORE_OUTAGES,
    Cancelled,
    DeadlineExceeded,
    Internal,
    MillraceError,
    ResourceExhausted,
    Unavailable,
)
from shared.jobs.record import JobRecord, JobState
from shared.jobs.registry import Jobs, progress_key
from shared.jobs.transitions import fail, lose_attempt, succeed
from shared.log import StaleAttempt
from shared.storage import ObjectStore
from shared.telemetry import identity
from shared.unexpected import hidden

logger = logging.getLogger(__name__)

WISH_INTERVAL_S = 1.0
COMMIT_PATIENCE_S = 300.0
COMMIT_RETRY_S = 1.0
# Errors that another attempt may not meet. Of a job that a client wishes to end, `Cancelled` is the end itself.
TRANSIENT = (Unavailable, ResourceExhausted, DeadlineExceeded, Internal, Cancelled)


class AttemptContext:
    """What an entry function gets. It must call `raise_if_stopped` often, and write only below `folder`."""

    def __init__(self, store: ObjectStore, jobs: Jobs, folder: str, job: JobRecord) -> None:
        self.store = store
        self.folder = folder
        self.job = job
        self.attempt = job.attempt
        self._jobs = jobs
        self._newest = job
        self._ended = threading.Event()
        self._afterwards: list[Callable[[], None]] = []

    def report(self, **progress: Any) -> None:
        """Replaces the progress that clients see. An outage of the store costs the report, never the attempt."""
        if self._newest.attempt != self.attempt:
            return  # the progress is a later attempt's
        try:
            self.store.put(progress_key(self.folder), json.dumps(progress).encode())
        except STORE_OUTAGES as error:
            logger.warning("a report of progress is lost: %s", error.message)

    def raise_if_stopped(self, *, fresh: bool = False) -> None:
        """Raises `Cancelled` when a client wishes an end or a pause, `StaleAttempt` when a later attempt took over.

        Cheap: it looks at what was read within the last second. With `fresh` it reads the log now.
        """
        if fresh:
            self._newest = self._jobs.get(self.folder, self.job.name)
        newest = self._newest
        if newest.attempt != self.attempt or newest.state.final:
            raise StaleAttempt(f"{newest.name} is at attempt {newest.attempt}, {newest.state}")
        if newest.state in (JobState.CANCELLING, JobState.SUSPENDING):
            raise Cancelled(f"{newest.name} is {newest.state}", metadata={"resource": newest.name})

    def newest(self) -> JobRecord:
        """The job as the log has it now."""
        return self._jobs.get(self.folder, self.job.name)

    @property
    def is_suspending(self) -> bool:
        """Whether a client wishes a pause, by what was read within the last second."""
        return self._newest.state is JobState.SUSPENDING

    def afterwards(self, do: Callable[[], None]) -> None:
        """Has something done once the log says how the attempt ended: nobody who waits for that shall wait for it."""
        self._afterwards.append(do)

    def end(self) -> None:
        """For whoever runs the attempt."""
        for do in self._afterwards:
            do()

    @contextmanager
    def watching_wishes(self) -> Iterator[None]:
        """Reads the log once a second while the body runs."""
        thread = threading.Thread(target=self._watch, name="wishes", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(WISH_INTERVAL_S):
            try:
                self._newest = self._jobs.get(self.folder, self.job.name)
            except MillraceError as error:
                logger.warning("the wish stays as last read: %s", error.message)


Entry = Callable[[AttemptContext], dict[str, Any]]


def run_attempt(entry: Entry, store: ObjectStore, kind: str, folder: str, attempt: int) -> None:
    """Runs `entry` as attempt number `attempt` of the job in `folder`. Whatever it raises becomes a transition."""
    jobs = Jobs(store, kind)
    job = jobs.find(folder)
    if job is None or job.attempt != attempt or job.state.final:
        logger.warning("attempt %d of %s is no longer wanted", attempt, folder)
        return
    context = AttemptContext(store, jobs, folder, job)
    with identity(job=job.name, attempt=str(attempt)):
        try:
            with context.watching_wishes():
                result = entry(context)
            _conclude(jobs, folder, attempt, lambda newest: succeed(newest, result, time.time()))
        except StaleAttempt:
            logger.warning("a later attempt has taken over; this one stops")
        except MillraceError as raised:
            error = raised
            if isinstance(error, TRANSIENT):
                logger.warning("attempt lost: %s", error.message)
                _conclude(jobs, folder, attempt, lambda newest: _lose(newest, error))
            else:
                logger.info("failed: %s", error.message)
                _conclude(jobs, folder, attempt, lambda newest: fail(newest, error, time.time()))
        except Exception as unexpected:
            told = hidden(unexpected, logger, "attempt lost")
            _conclude(jobs, folder, attempt, lambda newest: _lose(newest, told))
        context.end()


def _lose(newest: JobRecord, cause: MillraceError) -> JobRecord:
    # RECOVERING: a reconciler took this attempt for dead, and has counted it.
    return newest if newest.state is JobState.RECOVERING else lose_attempt(newest, cause, time.time())


def _conclude(jobs: Jobs, folder: str, attempt: int, decide: Callable[[JobRecord], JobRecord]) -> None:
    """Writes the end into the log; an outage of the store is waited out, for the work is done."""
    give_up_at = time.monotonic() + COMMIT_PATIENCE_S

    def unless_over(newest: JobRecord) -> JobRecord:
        return newest if newest.state.final or newest.attempt != attempt else decide(newest)

    while True:
        try:
            jobs.transition(folder, unless_over, attempt)
            return
        except StaleAttempt:
            logger.warning("a later attempt has taken over; nothing is committed")
            return
        except STORE_OUTAGES:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(COMMIT_RETRY_S)
