"""Events and progress of a run, written by threads of rank 0.

The threads keep every step from waiting for the store.

Events are numbered without gaps. Their log is separate from the job's, and fenced by attempts like it. An
`EventPrinter` prints them as readable lines while they are written.

Older records of the log are gathered into segments.

    {folder}/log/{number:012d}.json                a record, as `ResourceLog` writes it
    {folder}/log/newest                            the number of a recent one
    {folder}/gathered/{index:09d}.{id}.json.z      SEGMENT_RECORDS records, from index * SEGMENT_RECORDS + 1 on

A run appends a record about each second. While its job lives all records stay: they alone are authoritative, and
put-if-absent on the next number fences attempts. A segment is a copy of its records that is read with one request. Its
key names the last of them, so it is found only where that record is there. A segment that is missing or damaged costs
only requests.

Once the job has ended, `gather_ended` deletes the records of each segment but the last. It deletes what was listed
before a moment at which the job had ended. Later attempts begin behind that, and readers find the segment before they
look for a record.

    {folder}/segments/{index:09d}.json.z           a segment of an earlier release, which may have no records any more
"""

from __future__ import annotations

import enum
import hashlib
import json
import logging
import math
import queue
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from shared.durable import fields_of
from shared.errors import STORE_OUTAGES, DataLoss, Internal, MillraceError
from shared.jobs import Jobs, JobState
from shared.jobs.registry import progress_key
from shared.resource_log import Record, ResourceLog, StaleAttempt, State
from shared.storage import ObjectMissing, ObjectStore
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


# --- Segments ---

SEGMENT_RECORDS = 256
# Records or segments that are read at a time to be gathered.
READ_AT_ONCE = 8
# Segments whose records are deleted together: as many as one request to S3 deletes.
SEGMENTS_AT_ONCE = 3
# How often a reader looks for a record and for its segment, which is written before the record is deleted.
TRIES = 3
# What reading an object raises that is not as it was written.
DAMAGE = (zlib.error, ValueError, TypeError, AttributeError)


class SegmentedLog(ResourceLog):
    """A resource log below `{folder}/log`. Not shared between threads; keep one for repeated reads."""

    def __init__(self, store: ObjectStore, folder: str) -> None:
        super().__init__(store, f"{folder}/log", is_long=True)
        self._records_folder = f"{folder}/log"
        self._segments_folder = f"{folder}/gathered"
        self._earlier_folder = f"{folder}/segments"
        # The segment that was read last, its records, and the size of their JSON. 0 if none is held.
        self._segment: tuple[int, list[Record]] = (-1, [])
        self.segment_bytes = 0
        # The segment that was looked for and cannot be read, so that its records are read one by one.
        self._not_gathered = -1
        # The segments of an earlier release; None before the first look.
        self._earlier: frozenset[int] | None = None

    def read(self, number: int) -> Record | None:
        """Return the record with that number, or None if it has not been written.

        Raises `DataLoss` if it is damaged, or only its segment is left and is damaged.
        """
        index, place = divmod(number - 1, SEGMENT_RECORDS)
        is_missing = False
        if index == self._not_gathered:
            if (record := self.read_record(number)) is not None:
                return record
            is_missing = True
        for _ in range(TRIES):
            is_complete = index == self._segment[0] or self._find_segment(index)
            if index == self._segment[0]:
                return self._segment[1][place]
            if is_missing and not is_complete:
                return None  # no record of it was deleted before we looked for this one
            if (record := self.read_record(number)) is not None:
                return record
            is_missing = True
        raise DataLoss(
            f"event {number} of {self._records_folder} is damaged: neither its record nor its segment can be read",
            metadata={"object": self._key(number)},
        )

    def read_record(self, number: int) -> Record | None:
        """Return the record with that number if it is an object of its own. One request.

        While a job lives these are all records. Raises `DataLoss`.
        """
        try:
            return super().read(number)
        except DAMAGE as error:
            key = self._key(number)
            raise DataLoss(f"the event in {key} is damaged: {error}", metadata={"object": key}) from None

    def head(self) -> Record | None:
        """Return the newest record, or None if there is none.

        The search reads last records of segments, and then records of the segment that is not complete. These are never
        deleted, so neither a missing nor a damaged segment matters. A newest record that is damaged is returned without
        a state, so that the log goes on behind it.
        """
        newest = self._head or self._hinted(0)
        try:
            while True:
                newest = self._last_of_complete(newest.number // SEGMENT_RECORDS if newest else 0) or newest
                index = newest.number // SEGMENT_RECORDS if newest else 0
                newest = self._newest_in(index, newest)
                if newest is None or newest.number < numbers_of(index)[-1]:
                    break  # else the segment was completed meanwhile
            self._head = self._with_state(newest)
            return self._head
        finally:
            self.forget_segment()

    def forget_segment(self) -> None:
        """Free the memory of the segment that was read last, and look for segments anew."""
        self._segment = (-1, [])
        self.segment_bytes = 0
        self._not_gathered = -1
        self._earlier = None

    def is_at_hand(self, number: int) -> bool:
        """Return whether `read` returns that record without a request."""
        return (number - 1) // SEGMENT_RECORDS == self._segment[0]

    def add(self, state: State, attempt: int, nonce: str) -> None:
        """Append a state that does not depend on the one before, as `update` does.

        It takes one request where this log wrote the newest record.
        """
        newest = self._head
        if (
            newest is not None
            and newest.attempt == attempt
            and self._unanswered <= newest.number
            and self.append(newest, state, attempt, nonce) is not None
        ):
            return
        self.update(lambda _: state, attempt=attempt, nonce=nonce)

    # --- The newest record ---

    def _hinted(self, known: int) -> Record | None:
        number = self._hinted_number(known)
        if number is None:
            return None
        # The record may be gathered. The last one of its segment is there then.
        return self._probe(number) or self._last_of((number - 1) // SEGMENT_RECORDS)

    def _last_of_complete(self, index: int) -> Record | None:
        """Return the last record of the last complete segment from `index` on. None if `index` is not complete."""
        newest, low, step = None, index - 1, 1
        while (found := self._last_of(low + step)) is not None:
            newest, low, step = found, low + step, step * 2
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            if (found := self._last_of(middle)) is not None:
                newest, low = found, middle
            else:
                high = middle
        return newest

    def _newest_in(self, index: int, newest: Record | None) -> Record | None:
        """Return the newest record up to the end of a segment that was not complete, or `newest` if none is later."""
        low, end, step = max(newest.number if newest else 0, index * SEGMENT_RECORDS), numbers_of(index)[-1], 1
        while low + step <= end and (found := self._probe(low + step)) is not None:
            newest, low, step = found, low + step, step * 2
        high = min(low + step, end + 1)
        while high - low > 1:
            middle = (low + high) // 2
            if (found := self._probe(middle)) is not None:
                newest, low = found, middle
            else:
                high = middle
        return newest

    def _last_of(self, index: int) -> Record | None:
        """Return the last record of a segment, perhaps without its state. None if the segment is not complete."""
        number = numbers_of(index)[-1]
        return self._probe(number) or (_unreadable(number) if index in self._earlier_segments() else None)

    def _probe(self, number: int) -> Record | None:
        """Return the record if it is an object of its own; a damaged one without its state."""
        try:
            return self.read_record(number)
        except DataLoss as error:
            logger.warning("%s", error.message)
            return _unreadable(number)

    def _with_state(self, newest: Record | None) -> Record | None:
        """Return the newest record with its state, if that is in a segment of an earlier release."""
        if newest is None or newest.nonce or newest.number % SEGMENT_RECORDS:
            return newest
        try:
            return self.read(newest.number) or newest
        except DataLoss as error:
            logger.warning("%s", error.message)
            return newest

    # --- Segments ---

    def _find_segment(self, index: int) -> bool:
        """Read a segment, or note that its records are to be read. Return whether the segment is complete."""
        last, records = self._probe(numbers_of(index)[-1]), None
        if last is not None and last.nonce:
            records = self._readable(self._segment_key(last), last)
        if records is None and index in self._earlier_segments():
            records = self._readable(self._earlier_key(index), last)
        if records is None:
            self._not_gathered = index
        else:
            self._segment = (index, records)
        return records is not None or last is not None or index in self._earlier_segments()

    def _readable(self, key: str, last: Record | None) -> list[Record] | None:
        """Return the records of a segment whose last one is `last`, if that is known. None if it cannot be read."""
        try:
            content = zlib.decompress(self._store.get(key))
            records = [Record(**fields_of(Record, state)) for state in json.loads(content)]
        except ObjectMissing:
            return None
        except DAMAGE as error:
            logger.warning("the events in %s are damaged: %s", key, error)
            return None
        index = _number_in(key)
        if [record.number for record in records] != list(numbers_of(index)):
            logger.warning("the events in %s are damaged: some are missing", key)
            return None
        if last is not None and last.nonce and last.nonce != records[-1].nonce:
            return None  # of a deleted job that had this name
        self.segment_bytes = len(content)
        return records

    def _earlier_segments(self) -> frozenset[int]:
        """Return the segments of an earlier release. It did not delete a record until minutes after its segment."""
        if self._earlier is None:
            self._earlier = frozenset(_number_in(info.key) for info in self._store.list(self._earlier_folder))
        return self._earlier

    def _segment_key(self, last: Record) -> str:
        """Return the key of the segment with that last record, which no other log of this name has."""
        identity = hashlib.sha256(f"{last.attempt} {last.nonce}".encode()).hexdigest()[:16]
        return f"{self._segments_folder}/{last.number // SEGMENT_RECORDS - 1:09d}.{identity}.json.z"

    def _earlier_key(self, index: int) -> str:
        return f"{self._earlier_folder}/{index:09d}.json.z"


class GatheringLog(SegmentedLog):
    """A log that also gathers its records: the one of the run's reporter, or of a process that tidies up."""

    def __init__(self, store: ObjectStore, folder: str) -> None:
        super().__init__(store, folder)
        # The newest records that this log wrote, by number.
        self._recent: dict[int, Record] = {}
        # The segment that is written next, and the later ones that are there. None before the first look.
        self._next: int | None = None
        self._there: frozenset[int] = frozenset()

    def append(self, previous: Record | None, state: State, attempt: int = 0, nonce: str = "") -> Record | None:
        record = super().append(previous, state, attempt, nonce)
        if record is not None:
            self._recent[record.number] = record
            while len(self._recent) > 2 * SEGMENT_RECORDS:
                del self._recent[min(self._recent)]
        return record

    def gather(self) -> None:
        """Write the next segment, where its records are all there. Those that cannot be read stay without one."""
        if self._head is None:
            return
        if self._next is None:
            written = (_number_in(info.key) for info in self._store.list(self._segments_folder))
            self._next, self._there = 0, frozenset(written) | self._earlier_segments()
        while self._next in self._there:
            self._next += 1
        if self._head.number >= (self._next + 1) * SEGMENT_RECORDS:
            self._gathers(self._next)
            self._next += 1

    def gather_ended(self, remove: Callable[[Sequence[str]], bool]) -> None:
        """Write the segments that are missing, and delete the records that are in one, but for the last of each.

        The job has ended. `remove` deletes objects that were listed before it is called. It returns whether it did:
        not if the job has changed. What is left, also by a process that died, is deleted by the next call.
        """
        records: dict[int, list[str]] = {}
        for info in self._store.list(self._records_folder):
            if info.key.endswith(".json"):
                records.setdefault((_number_in(info.key) - 1) // SEGMENT_RECORDS, []).append(info.key)
        due: dict[int, list[str]] = {}
        for index, keys in sorted(records.items()):
            last = self._key(numbers_of(index)[-1])
            if len(keys) > 1 and last in keys and index not in self._earlier_segments():
                due[index] = [key for key in keys if key != last]
        while due:
            some = [(index, due.pop(index)) for index in list(due)[:SEGMENTS_AT_ONCE]]
            keys = [key for index, keys in some if self._is_gathered(index) for key in keys]
            if keys and not remove(keys):
                return

    def _is_gathered(self, index: int) -> bool:
        """Return whether the segment can be read, which is written if it cannot."""
        last = self._probe(numbers_of(index)[-1])
        if last is None or not last.nonce:
            return False
        return self._readable(self._segment_key(last), last) is not None or self._gathers(index)

    def _gathers(self, index: int) -> bool:
        try:
            self._write_segment(index)
        except DataLoss as error:
            logger.warning("events of %s stay in records of their own: %s", self._records_folder, error.message)
            return False
        return True

    def _write_segment(self, index: int) -> None:
        """Write a segment, also over a damaged one: all writers of a key write the same."""
        numbers = numbers_of(index)
        last = self._recent.get(numbers[-1])
        if last is None:
            # Another process wrote it. It may be another job's that has the name by now, so what we remember may not be
            # in its log. That log has all records before this one.
            last, own = self.read_record(numbers[-1]), {}
        else:
            own = self._recent

        def record(number: int) -> Record | None:
            return own.get(number) or self.read_record(number)

        before_last, records = numbers[:-1], []
        with ThreadPoolExecutor(READ_AT_ONCE) as pool:
            # A segment with a missing or damaged record is due again at each sweep, which reads only up to that record.
            for begin in range(0, len(before_last), READ_AT_ONCE):
                for one in pool.map(record, before_last[begin : begin + READ_AT_ONCE]):
                    if one is None or last is None:
                        raise DataLoss(f"the events {numbers[0]} to {numbers[-1]} are not all there")
                    records.append(one)
        assert last is not None
        data = zlib.compress(json.dumps([asdict(one) for one in (*records, last)]).encode())
        self._store.put(self._segment_key(last), data)
        for number in numbers:
            self._recent.pop(number, None)


def numbers_of(index: int) -> range:
    """Return the numbers of a segment's records."""
    return range(index * SEGMENT_RECORDS + 1, (index + 1) * SEGMENT_RECORDS + 1)


def _unreadable(number: int) -> Record:
    """Return what stands for a record that is there, and whose state is not known."""
    return Record(number, "", 0, 0.0, {})


def _number_in(key: str) -> int:
    return int(key.rsplit("/", 1)[-1].split(".")[0])
