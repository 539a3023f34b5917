"""What happened in a run, numbered without gaps: a log of its own beside the job's, fenced by attempts like it.

An `EventPrinter` prints events as lines for people while they are written.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shared.errors import STORE_OUTAGES
from shared.log import Record, ResourceLog
from shared.storage import ObjectStore

# --- Events ---

# An end is told after all else; what a rank still had to tell may come behind it.
LOOKED_BACK = 32


class EventKind(enum.StrEnum):
    """Named as the fields of `millrace.train.v1.TrainingEvent`."""

    ATTEMPT_STARTED = "attempt_started"
    PROGRESS = "progress"
    VALIDATED = "validated"
    CHECKPOINT_COMMITTED = "checkpoint_committed"
    WARNING = "warning"
    ATTEMPT_ENDED = "attempt_ended"
    DEVICE_CHANGED = "device_changed"


@dataclass(frozen=True)
class Event:
    """`sequence` counts from 1; `time` is in seconds since the epoch; `payload` fits the message of its kind."""

    sequence: int
    time: float
    attempt: int
    kind: EventKind
    payload: dict[str, Any]


class EventLog:
    """The events of `trainingJobs/{j}`. One writer or reader each; not shared between threads."""

    def __init__(self, store: ObjectStore, job_name: str) -> None:
        self._log = ResourceLog(store, f"{job_name}/events/log")

    def append(self, attempt: int, kind: EventKind, payload: dict[str, Any], nonce: str = "") -> None:
        """Raises `StaleAttempt` once a later attempt has written. Called again with the same `nonce`, after an error of
        the store, it writes no second event."""
        state = {"time": time.time(), "kind": kind, "payload": payload}
        self._log.update(lambda _: state, attempt=attempt, nonce=nonce)

    def has(self, attempt: int, kind: EventKind) -> bool:
        """As `find`, whether there is one."""
        return self.find(attempt, kind) is not None

    def find(self, attempt: int, kind: EventKind) -> Event | None:
        """The newest event of that kind among the last `LOOKED_BACK` of this attempt, the newest that wrote."""
        record = self._log.head()
        for _ in range(LOOKED_BACK):
            if record is None or record.attempt < attempt:
                return None
            if record.attempt == attempt and record.state["kind"] == kind:
                return _event(record)
            record = self._log.read(record.number - 1) if record.number > 1 else None
        return None

    def last_sequence(self) -> int:
        head = self._log.head()
        return head.number if head else 0

    def last_attempt(self) -> int:
        """The newest one that has written; 0 where none has."""
        head = self._log.head()
        return head.attempt if head else 0

    def after(self, sequence: int) -> Iterator[Event]:
        """The events written so far behind `sequence`."""
        while (record := self._log.read(sequence + 1)) is not None:
            yield _event(record)
            sequence += 1


def _event(record: Record) -> Event:
    state = record.state
    try:
        kind, payload = EventKind(state["kind"]), state["payload"]
    except ValueError:
        # Its number is taken, and who follows the events waits for it.
        kind, payload = EventKind.WARNING, {"text": f"an event that only a later release knows: {state['kind']}"}
    return Event(record.number, state["time"], record.attempt, kind, payload)


# --- Lines for people ---

logger = logging.getLogger(__name__)

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
            told = "  ".join(f"{name} {value:.4f}" for name, value in {**first, **payload["metrics"]}.items())
            return f"validated after epoch {payload['epoch'] + 1}: {told}"
        case EventKind.CHECKPOINT_COMMITTED:
            return f"checkpoint {payload['name']}  sha256:{payload['manifest_sha256'][:12]}"
        case EventKind.WARNING:
            return f"warning: {payload['text']}"
        case EventKind.ATTEMPT_ENDED:
            return f"attempt {event.attempt} ended: {payload['text']}"
        case EventKind.DEVICE_CHANGED:
            return f"on {payload['device'].removeprefix('DEVICE_')}s from here on: {payload['text']}"


class EventPrinter:
    """Prints the events of one job that are written while the context is open."""

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
            # Read before the events: what was told before the end is among them.
            over = self._ended.wait(POLL_INTERVAL_S)
            try:
                for event in self._log.after(self._seen):
                    self._seen = event.sequence
                    print(line_of(event), flush=True)
            except STORE_OUTAGES as error:
                logger.warning("events are not printed for a moment: %s", error.message)
            except Exception:
                logger.exception("an event cannot be printed; the others go on")
