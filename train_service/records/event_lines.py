"""The events of a run as lines for people, printed while they are written."""

from __future__ import annotations

import logging
import threading

from shared.errors import STORE_OUTAGES
from shared.storage import ObjectStore
from train_service.records.events import Event, EventKind, EventLog

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5


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
            over = self._ended.wait(LOOK_EVERY_S)
            try:
                for event in self._log.after(self._seen):
                    self._seen = event.sequence
                    print(line_of(event), flush=True)
            except STORE_OUTAGES as error:
                logger.warning("events are not printed for a moment: %s", error.message)
            except Exception:
                logger.exception("an event cannot be printed; the others go on")
