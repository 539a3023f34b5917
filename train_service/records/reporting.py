"""How rank 0 tells the world: events and progress are written by a thread, so that no step waits for the store."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from shared.errors import STORE_OUTAGES, Internal, MillraceError
from shared.jobs import Jobs, JobState
from shared.jobs.registry import progress_key
from shared.log import StaleAttempt
from shared.storage import ObjectStore
from train_service.records.events import EventKind, EventLog
from train_service.store_retry import store_call

logger = logging.getLogger(__name__)

TRAIN_KIND = "train"
REPORT_INTERVAL_S = 1.0
REQUEST_POLL_INTERVAL_S = 1.0

# Why a run should end early; of several reasons the highest counts.
GO_ON, RESIZE, PREEMPT, SUSPEND, CANCEL, STALE = range(6)
# Those that another attempt follows, from a checkpoint taken for it.
PAUSES = (RESIZE, PREEMPT, SUSPEND)


class Reporter:
    """Writes events in order, and reads the job's wish. Use as a context: leaving it writes what is left."""

    def __init__(
        self, store: ObjectStore, job_name: str, attempt: int, asked: Callable[[], int] = lambda: GO_ON
    ) -> None:
        """`asked` is the reason to stop that the attempt itself wishes, e.g. `HeartbeatSender.request`."""
        self._asked = asked
        self._store = store
        self._job_name = job_name
        self._attempt = attempt
        self._waiting: queue.Queue[tuple[EventKind, dict[str, Any]] | None] = queue.Queue()
        self._ended = threading.Event()
        self._stop_reason = GO_ON
        # The job was deleted: its name is nobody's, or another's.
        self._gone = False
        self._broken: Exception | None = None
        self._threads = [
            threading.Thread(target=self._write, name="events", daemon=True),
            threading.Thread(target=self._watch, name="wishes", daemon=True),
        ]

    def __enter__(self) -> Reporter:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._waiting.put(None)
        self._ended.set()
        with store_call():
            for thread in self._threads:
                thread.join()
        if error is None:
            self._raise_if_broken()

    def tell(self, kind: EventKind, **payload: Any) -> None:
        """Queues an event; it is durable once the context is left without an error. Raises `Internal`, as
        leaving does, where events cannot be written."""
        self._raise_if_broken()
        self._waiting.put((kind, payload))

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise Internal("what happens in the run cannot be told", reason="EVENTS_LOST") from self._broken

    @property
    def stop_reason(self) -> int:
        """GO_ON; RESIZE (there is room for more workers); PREEMPT (a node will be taken away); SUSPEND or CANCEL (a
        client wishes it); STALE (a later attempt has taken over, or the job was deleted)."""
        return max(self._stop_reason, self._asked())

    def _write(self) -> None:
        log = EventLog(self._store, self._job_name)
        try:
            while (item := self._waiting.get()) is not None:
                if self._gone:
                    return
                kind, payload = item
                _retry_on_outage(log.append, self._attempt, kind, payload, uuid.uuid4().hex)
                if kind is EventKind.PROGRESS:
                    _retry_on_outage(self._store.put, progress_key(self._job_name), json.dumps(payload).encode())
        except StaleAttempt:
            self._stop_reason = STALE
        except Exception as error:
            logger.exception("events cannot be written any more")
            self._broken = error

    def _watch(self) -> None:
        jobs = Jobs(self._store, TRAIN_KIND)
        while not self._ended.wait(REQUEST_POLL_INTERVAL_S):
            try:
                job = jobs.find(self._job_name)
            except MillraceError as error:
                logger.warning("the wish stays as last read: %s", error.message)
                continue
            except Exception:
                # Were this thread to end, nobody could stop the run any more.
                logger.exception("the wish stays as last read")
                continue
            if job is None or job.first_attempt > self._attempt:
                self._gone = True
                self._stop_reason = STALE
            elif job.attempt != self._attempt or job.state.final:
                self._stop_reason = STALE
            elif job.state is JobState.CANCELLING:
                self._stop_reason = max(self._stop_reason, CANCEL)
            elif job.state is JobState.SUSPENDING:
                self._stop_reason = max(self._stop_reason, SUSPEND)


def _retry_on_outage(write: Callable[..., None], *arguments: Any) -> None:
    """Writes as soon as the store answers. What is called must be such that it may be repeated, whether or not the call
    before had an effect."""
    while True:
        try:
            return write(*arguments)
        except STORE_OUTAGES as error:
            logger.warning("%s; what happened waits to be written", error.message)
            time.sleep(1.0)
