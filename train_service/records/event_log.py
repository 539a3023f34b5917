"""Events and progress of a run, written by threads of rank 0.

The threads keep every step from waiting for the store.

Events are numbered without gaps. Their log is separate from the job's, and fenced by attempts like it. An
`EventPrinter` prints them as readable lines while they are written.
"""

from __future__ import annotations

import enum
import json
import logging
import math
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shared.errors import STORE_OUTAGES, DataLoss, Internal, MillraceError
from shared.jobs import Jobs, JobState
from shared.jobs.registry import progress_key
from shared.log import Record, StaleAttempt
from shared.storage import ObjectStore
from train_service.records.event_segments import GatheringLog, SegmentedLog
from train_service.store_retry import store_call

# --- Reporter ---

logger = logging.getLogger(__name__)

TRAIN_KIND = "train"
REPORT_INTERVAL_S = 1.0
REQUEST_POLL_INTERVAL_S = 1.0
# How often a report is noted for the index of jobs. Lists show reports as of so long ago.
NOTE_INTERVAL_S = 10.0

# Reasons to end a run early; of several reasons the highest counts.
GO_ON, RESIZE, PREEMPT, SUSPEND, CANCEL, STALE = range(6)
# Reasons after which another attempt continues, from a checkpoint taken for it.
PAUSES = (RESIZE, PREEMPT, SUSPEND)


class Reporter:
    """Writer of events in order, and reader of the job's requested state.

    Use it as a context: leaving it writes the remaining events.
    """

    def __init__(
        self, store: ObjectStore, job_name: str, attempt: int, asked: Callable[[], int] = lambda: GO_ON
    ) -> None:
        """Prepare the reporter. `asked` returns the attempt's own reason to stop, e.g. `HeartbeatSender.request`."""
        self._asked = asked
        self._store = store
        self._job_name = job_name
        self._attempt = attempt
        self._waiting: queue.Queue[tuple[EventKind, dict[str, Any]] | None] = queue.Queue()
        self._ended = threading.Event()
        self._stop_reason = GO_ON
        # The job was deleted: its name is free, or belongs to another job.
        self._gone = False
        self._broken: Exception | None = None
        self._noted_at = -math.inf
        # A report was not noted, as another one had just been.
        self._is_unnoted = False
        self._threads = [
            threading.Thread(target=self._write, name="events", daemon=True),
            threading.Thread(target=self._watch, name="requested-state", daemon=True),
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

    def emit(self, kind: EventKind, **payload: Any) -> None:
        """Queue an event. It is durable once the context is left without an error.

        Raises `Internal`, as leaving does, if events cannot be written.
        """
        self._raise_if_broken()
        self._waiting.put((kind, payload))

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise Internal("events of the run cannot be written", reason="EVENTS_LOST") from self._broken

    @property
    def stop_reason(self) -> int:
        """Why the run should stop, or GO_ON.

        RESIZE: there is room for more workers. PREEMPT: a node will be taken away. SUSPEND or CANCEL: a client
        requested it. STALE: a later attempt has taken over, or the job was deleted.
        """
        return max(self._stop_reason, self._asked())

    def _write(self) -> None:
        log = EventLog(self._store, self._job_name, gathers=True)
        try:
            while (item := self._next()) is not None:
                if self._gone:
                    return
                kind, payload = item
                _retry_on_outage(log.append, self._attempt, kind, payload, uuid.uuid4().hex)
                if kind is EventKind.PROGRESS:
                    _retry_on_outage(self._store.put, progress_key(self._job_name), json.dumps(payload).encode())
                if kind in (EventKind.PROGRESS, EventKind.CHECKPOINT_COMMITTED):
                    self._note()
                if not self._ended.is_set():
                    log.gather()
        except StaleAttempt:
            self._stop_reason = STALE
        except Exception as error:
            logger.exception("events cannot be written any more")
            self._broken = error

    def _next(self) -> tuple[EventKind, dict[str, Any]] | None:
        """Wait for the next event, and note a report that was the last one for a while."""
        while True:
            due_s = self._noted_at + NOTE_INTERVAL_S - time.monotonic() if self._is_unnoted else None
            try:
                return self._waiting.get(timeout=None if due_s is None else max(due_s, 0.0))
            except queue.Empty:
                if not self._gone:
                    self._note()

    def _note(self) -> None:
        """Note now and then for the index that the attempt has reported."""
        self._is_unnoted = time.monotonic() - self._noted_at < NOTE_INTERVAL_S
        if self._is_unnoted:
            return
        self._noted_at = time.monotonic()
        try:
            Jobs(self._store, TRAIN_KIND).note_report(self._job_name)
        except STORE_OUTAGES as error:
            logger.warning("lists show an older report: %s", error.message)

    def _watch(self) -> None:
        jobs = Jobs(self._store, TRAIN_KIND)
        while not self._ended.wait(REQUEST_POLL_INTERVAL_S):
            try:
                job = jobs.find(self._job_name)
            except MillraceError as error:
                logger.warning("the requested state stays as last read: %s", error.message)
                continue
            except Exception:
                # If this thread ended, the run could not be stopped any more.
                logger.exception("the requested state stays as last read")
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
    """Call `write` until the store answers.

    `write` must be safe to repeat, whether or not the call before had an effect.
    """
    while True:
        try:
            return write(*arguments)
        except STORE_OUTAGES as error:
            logger.warning("%s; what happened waits to be written", error.message)
            time.sleep(1.0)


# --- Events ---

# An attempt's end is written last, but delayed events of a rank may follow it.
LOOKED_BACK = 32
# A page of events ends where it would take more memory. A watcher whose client is slow holds one.
PAGE_BYTES = 256 * 1024
# About how many bytes of memory a byte of an event's JSON takes; several times more where the events are small, but of
# those a page has no more than a segment.
MEMORY_PER_BYTE = 4
PAGES_A_SEGMENT = 8


class EventKind(enum.StrEnum):
    """Kinds of events, named as the fields of `millrace.train.v1.TrainingEvent`."""

    ATTEMPT_STARTED = "attempt_started"
    PROGRESS = "progress"
    VALIDATED = "validated"
    CHECKPOINT_COMMITTED = "checkpoint_committed"
    WARNING = "warning"
    ATTEMPT_ENDED = "attempt_ended"
    DEVICE_CHANGED = "device_changed"


@dataclass(frozen=True)
class Event:
    """An event of a job.

    `sequence` counts from 1; `time` is in seconds since the epoch; `payload` fits the message of its kind.
    """

    sequence: int
    time: float
    attempt: int
    kind: EventKind
    payload: dict[str, Any]


class EventLog:
    """The events of `trainingJobs/{j}`. Each writer or reader has its own; not shared between threads.

    With `gathers`, `gather` does something.
    """

    def __init__(self, store: ObjectStore, job_name: str, *, gathers: bool = False) -> None:
        folder = f"{job_name}/events"
        self._gathering = GatheringLog(store, folder) if gathers else None
        self._log = self._gathering or SegmentedLog(store, folder)

    def append(self, attempt: int, kind: EventKind, payload: dict[str, Any], nonce: str = "") -> None:
        """Write an event. Raises `StaleAttempt` once a later attempt has written.

        A repeated call with the same `nonce`, after an error of the store, writes no second event.
        """
        state = {"time": time.time(), "kind": kind, "payload": payload}
        self._log.add(state, attempt, nonce)

    def gather(self) -> None:
        """Write the next segment of older events, if they are complete. What cannot be gathered stays as it is."""
        if self._gathering is None:
            return
        try:
            self._gathering.gather()
        except STORE_OUTAGES as error:
            logger.warning("events are gathered later: %s", error.message)
        except MillraceError as error:
            logger.warning("the events of this attempt are not gathered: %s", error.message)
            self._gathering = None

    def append_first(self, attempt: int, kind: EventKind, payload: dict[str, Any]) -> None:
        """Write an event unless `find` finds one, also if two processes do so at once. Raises as `append` does."""
        state = {"time": time.time(), "kind": kind, "payload": payload}
        self._log.update(lambda newest: None if self._find(newest, attempt, kind) else state, attempt=attempt)

    def find(self, attempt: int, kind: EventKind) -> Event | None:
        """Return the newest event of that kind among the attempt's last `LOOKED_BACK` events.

        It finds none once a later attempt has written.
        """
        return self._find(self._log.head(), attempt, kind)

    def _find(self, record: Record | None, attempt: int, kind: EventKind) -> Event | None:
        try:
            newest = record.number if record else 0
            for number in range(newest, max(newest - LOOKED_BACK, 0), -1):
                if number < newest:
                    record = self._read_intact(number)
                if record is None or not record.state:
                    continue
                if record.attempt < attempt:
                    return None
                if record.attempt == attempt and record.state["kind"] == kind:
                    return _event(record)
            return None
        finally:
            self._log.forget_segment()

    def _read_intact(self, number: int) -> Record | None:
        """Return a record, or None if it is damaged: it stops neither attempts nor the report of their ends."""
        try:
            return self._log.read(number)
        except DataLoss as error:
            logger.warning("%s", error.message)
            return None

    def last_sequence(self) -> int:
        head = self._log.head()
        return head.number if head else 0

    def last_attempt(self) -> int:
        """Return the newest attempt that has written. 0 if none has."""
        head = self._log.head()
        return head.attempt if head else 0

    def after(self, sequence: int, *, also_gathered: bool = True) -> Iterator[Event]:
        """Yield the events written so far after `sequence`.

        Without `also_gathered` it takes one request if there are none, and misses those that were gathered after the
        end of the job. It is for readers that have read all up to `sequence` in the present state of the job.
        """
        read = self._log.read if also_gathered else self._log.read_record
        try:
            while (record := read(sequence + 1)) is not None:
                yield _event(record)
                sequence += 1
        finally:
            self._log.forget_segment()

    def page(self, sequence: int, size: int) -> list[Event]:
        """Return the `size` next events after `sequence`, or more if these cost no further request.

        They are fewer, but at least one, if more would take more memory than `PAGE_BYTES`. Of a segment of large events
        a page has at least an eighth (`PAGES_A_SEGMENT`), because each page reads the whole segment.
        """
        page: list[Event] = []
        left_bytes: int | None = None
        for event in self.after(sequence):
            if left_bytes is None:
                left_bytes = max(PAGE_BYTES, MEMORY_PER_BYTE * self._log.segment_bytes // PAGES_A_SEGMENT)
            left_bytes -= MEMORY_PER_BYTE * len(json.dumps(event.payload))
            if page and left_bytes < 0:
                break
            page.append(event)
            if len(page) >= size and not self._log.is_at_hand(event.sequence + 1):
                break
        return page


def gather_ended(store: ObjectStore, job_name: str, remove: Callable[[Sequence[str]], bool]) -> None:
    """Gather the events of a job that has ended, see `GatheringLog.gather_ended`."""
    GatheringLog(store, f"{job_name}/events").gather_ended(remove)


def _event(record: Record) -> Event:
    state = record.state
    try:
        kind, payload = EventKind(state["kind"]), state["payload"]
    except ValueError:
        # Its number is taken, and readers of the events wait for it, so it cannot be skipped.
        kind, payload = EventKind.WARNING, {"text": f"an event that only a later release knows: {state['kind']}"}
    return Event(record.number, state["time"], record.attempt, kind, payload)


# --- Readable lines ---


POLL_INTERVAL_S = 0.5


def line_of(event: Event) -> str:
    payload = event.payload
    match event.kind:
        case EventKind.ATTEMPT_STARTED:
            number = payload["num_workers"]
            ranks, at = f"{number} rank{'' if number == 1 else 's'}", payload["checkpoint"] or "the beginning"
            return f"attempt {event.attempt} on {ranks}, from {at}"
        case EventKind.PROGRESS:
            return (
                f"step {payload['step']}/{payload['total_steps']}  loss {payload['loss']:.4f}  "
                f"{payload['rows_per_second']:.0f} rows/s  {payload['seconds_left']:.0f} s left"
            )
        case EventKind.VALIDATED:
            first = {name: payload[name] for name in ("loss", "accuracy") if name in payload}
            values_text = "  ".join(f"{name} {value:.4f}" for name, value in {**first, **payload["metrics"]}.items())
            return f"validated after epoch {payload['epoch'] + 1}: {values_text}"
        case EventKind.CHECKPOINT_COMMITTED:
            return f"checkpoint {payload['name']}  sha256:{payload['manifest_sha256'][:12]}"
        case EventKind.WARNING:
            return f"warning: {payload['text']}"
        case EventKind.ATTEMPT_ENDED:
            return f"attempt {event.attempt} ended: {payload['text']}"
        case EventKind.DEVICE_CHANGED:
            return f"on {payload['device'].removeprefix('DEVICE_')}s from here on: {payload['text']}"


class EventPrinter:
    """Printer of the events of one job that are written while the context is open."""

    def __init__(self, store: ObjectStore, job_name: str) -> None:
        self._log = EventLog(store, job_name)
        self._seen = self._log.last_sequence()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="printer", daemon=True)

    def __enter__(self) -> EventPrinter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        over = False
        while not over:
            # Read before the events, so that all events from before the end are included.
            over = self._ended.wait(POLL_INTERVAL_S)
            try:
                for event in self._log.after(self._seen, also_gathered=over):
                    self._seen = event.sequence
                    print(line_of(event), flush=True)
            except STORE_OUTAGES as error:
                logger.warning("events are not printed for a moment: %s", error.message)
            except Exception:
                logger.exception("an event cannot be printed; the others go on")
