"""One attempt at a job: runs its entry function and records in the log how it ended."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
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
from shared.jobs.registry import Jobs, progress_key
from shared.jobs.transitions import JobRecord, JobState, fail, lose_attempt, succeed
from shared.logging_and_tracing import hidden, identity
from shared.resource_log import StaleAttempt
from shared.storage import ObjectStore

logger = logging.getLogger(__name__)

REQUEST_POLL_INTERVAL_S = 1.0
COMMIT_TIMEOUT_S = 300.0
COMMIT_RETRY_S = 1.0
# Errors that another attempt may not meet. For a job that a client ends, `Cancelled` is the end itself.
TRANSIENT = (Unavailable, ResourceExhausted, DeadlineExceeded, Internal, Cancelled)


class AttemptContext:
    """Context of an entry function. The function must call `raise_if_stopped` often, and write only below `folder`."""

    def __init__(self, store: ObjectStore, jobs: Jobs, folder: str, job: JobRecord) -> None:
        self.store = store
        self.folder = folder
        self.job = job
        self.attempt = job.attempt
        self._jobs = jobs
        self._newest = job
        # The last report, and what the attempt waits for.
        self._progress: dict[str, Any] = {}
        self._waiting_for = ""
        # What this attempt's last report in the store says; None if that is unknown after an outage.
        self._reported_waiting_for: str | None = ""
        # The job was deleted, whether or not another job has its name since.
        self._gone = False
        self._ended = threading.Event()
        self._afterwards: list[Callable[[], None]] = []

    def report(self, **progress: Any) -> None:
        """Replace the progress that clients see. An outage of the store loses the report, never the attempt."""
        self._progress = progress
        self._put_progress()

    def report_waiting(self, what: str) -> bool:
        """Report beside the progress what the attempt waits for. Empty: nothing.

        Return whether clients may see now that it waits: an outage of the store loses a report.
        """
        self._waiting_for = what
        if what != self._reported_waiting_for:
            self._put_progress()
        return self._reported_waiting_for != ""

    def _put_progress(self) -> None:
        if self._gone or self._newest.attempt != self.attempt:
            return  # the progress belongs to a later attempt, or to another job
        # Another attempt may run before it reports anything, so the report names the attempt that waits.
        waiting = {"waiting_for": self._waiting_for, "waiting_attempt": self.attempt} if self._waiting_for else {}
        try:
            self.store.put(progress_key(self.folder), json.dumps({**self._progress, **waiting}).encode())
            self._reported_waiting_for = self._waiting_for
        except STORE_OUTAGES as error:
            self._reported_waiting_for = None
            logger.warning("a report of progress is lost: %s", error.message)

    def raise_if_stopped(self, *, fresh: bool = False) -> None:
        """Raise `Cancelled` if a client requested an end or a pause, `StaleAttempt` if the attempt is outdated.

        It is outdated if a later attempt took over or the job was deleted. The call is cheap, because it uses a state
        of the last second. With `fresh` it reads the log now.
        """
        if fresh:
            self._newest = self.newest()
        if self._gone:
            raise StaleAttempt(f"{self.job.name} was deleted")
        newest = self._newest
        if newest.attempt != self.attempt or newest.state.final:
            raise StaleAttempt(f"{newest.name} is at attempt {newest.attempt}, {newest.state}")
        if newest.state in (JobState.CANCELLING, JobState.SUSPENDING):
            raise Cancelled(f"{newest.name} is {newest.state}", metadata={"resource": newest.name})

    def newest(self) -> JobRecord:
        """Return the job from the log. Raises `StaleAttempt` if it was deleted."""
        job = self._jobs.find(self.folder)
        if job is None or job.uid != self.job.uid:
            self._gone = True
            raise StaleAttempt(f"{self.job.name} was deleted")
        return job

    def choose(self, choices: Mapping[str, Any], budgets: Mapping[str, int] | None = None) -> None:
        """Add to the choices of the job's attempts, for this one and later ones.

        `budgets` are new values of `max_failures` and `max_preemptions`. Raises `StaleAttempt` if a later attempt is
        running.
        """

        def allowed(job: JobRecord) -> JobRecord:
            most = {"max_failures": job.max_failures, "max_preemptions": job.max_preemptions, **(budgets or {})}
            return replace(job, max_failures=most["max_failures"], max_preemptions=most["max_preemptions"])

        def chosen(newest: JobRecord) -> JobRecord:
            if newest.uid != self.job.uid or newest.attempt != self.attempt or newest.state.final:
                raise StaleAttempt(f"{newest.name} is at attempt {newest.attempt}, {newest.state}")
            after = allowed(replace(newest, choices={**newest.choices, **choices}))
            return newest if after == newest else after

        newest = self._jobs.transition(self.folder, chosen, self.attempt)
        self.job = allowed(replace(self.job, choices=newest.choices))

    def note_leaving(self) -> None:
        """Record that a node of the attempt will be taken away: if its process ends with it, that is no failure."""
        self._jobs.note_leaving(self.folder, self.attempt)

    @property
    def is_suspending(self) -> bool:
        """Whether a client requested a pause, by a state of the last second."""
        return self._newest.state is JobState.SUSPENDING

    @property
    def is_superseded(self) -> bool:
        """Whether a later attempt of the same job has taken over, by a state of the last second."""
        return not self._gone and self._newest.attempt > self.attempt

    def afterwards(self, do: Callable[[], None]) -> None:
        """Call `do` once the log records the attempt's end, so that no client waits for it."""
        self._afterwards.append(do)

    def end(self) -> None:
        """Run the `afterwards` callbacks; the runner of the attempt calls this."""
        for do in self._afterwards:
            do()

    @contextmanager
    def watching_requests(self) -> Iterator[None]:
        """Read the log once a second while the body runs."""
        thread = threading.Thread(target=self._watch, name="requested-state", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(REQUEST_POLL_INTERVAL_S):
            try:
                self._newest = self.newest()
            except StaleAttempt:
                return
            except MillraceError as error:
                logger.warning("the requested state stays as last read: %s", error.message)
            except Exception:
                # If this thread ended, the attempt could not be stopped any more.
                logger.exception("the requested state stays as last read")


Entry = Callable[[AttemptContext], dict[str, Any]]


def run_attempt(entry: Entry, store: ObjectStore, kind: str, folder: str, attempt: int) -> None:
    """Run `entry` as attempt number `attempt` of the job in `folder`. Each of its errors becomes a transition."""
    jobs = Jobs(store, kind)
    job = jobs.find(folder)
    if job is None or job.attempt != attempt or job.state.final:
        logger.warning("attempt %d of %s is no longer wanted", attempt, folder)
        return
    context = AttemptContext(store, jobs, folder, job)
    with identity(job=job.name, attempt=str(attempt)):
        try:
            with context.watching_requests():
                result = entry(context)
            _conclude(jobs, folder, job, lambda newest: succeed(newest, result, time.time()))
        except StaleAttempt:
            logger.warning("a later attempt has taken over, or the job was deleted; this one stops")
        except MillraceError as raised:
            error = raised
            if isinstance(error, TRANSIENT):
                logger.warning("attempt lost: %s", error.message)
                _conclude(jobs, folder, job, lambda newest: _lose(newest, error))
            else:
                logger.info("failed: %s", error.message)
                _conclude(jobs, folder, job, lambda newest: fail(newest, error, time.time()))
        except Exception as unexpected:
            shown_error = hidden(unexpected, logger, "attempt lost")
            _conclude(jobs, folder, job, lambda newest: _lose(newest, shown_error))
        context.end()


def _lose(newest: JobRecord, cause: MillraceError) -> JobRecord:
    # RECOVERING: a reconciler considered this attempt dead, and has counted it.
    return newest if newest.state is JobState.RECOVERING else lose_attempt(newest, cause, time.time())


def _conclude(jobs: Jobs, folder: str, job: JobRecord, decide: Callable[[JobRecord], JobRecord]) -> None:
    """Record the end of `job`'s attempt in the log. Waits out an outage of the store, because the work is done."""
    give_up_at = time.monotonic() + COMMIT_TIMEOUT_S

    def unless_over(newest: JobRecord) -> JobRecord:
        over = newest.uid != job.uid or newest.attempt != job.attempt or newest.state.final
        return newest if over else decide(newest)

    while True:
        try:
            jobs.transition(folder, unless_over, job.attempt)
            return
        except StaleAttempt:
            logger.warning("a later attempt has taken over; nothing is committed")
            return
        except STORE_OUTAGES:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(COMMIT_RETRY_S)
