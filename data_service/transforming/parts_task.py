"""What Ray's workers are asked to do: the work of some parts, one after the other, with a record of how each went."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from data_service.attempt_folder import FULL
from data_service.transforming.crashes import Begun
from data_service.transforming.plan import Part
from shared.errors import MillraceError, ResourceExhausted
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from shared.telemetry import hidden

logger = logging.getLogger(__name__)

# A part's work; it must travel by pickle, and so must what it returns.
Work = Callable[[Part], Any]


class PartsTask:
    """What Ray's worker calls, once for each group of parts."""

    def __init__(self, work: Work, settings: StoreSettings, begun: Begun) -> None:
        self._work = work
        self._settings = settings
        self._begun = begun

    def __call__(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A record for each part, as it is done. Errors are records too: Ray would wrap them, and try some again."""
        store = open_store(self._settings)
        for part in pickle.loads(row["parts"]):
            record = self._record(store, part)
            yield record
            if record["error"]:
                return

    def _record(self, store: ObjectStore, part: Part) -> dict[str, Any]:
        try:
            with _one_thread(), self._begun.working_on(store, part):
                return {"part": part.number, "result": pickle.dumps(self._work(part)), "error": b""}
        except Exception as error:
            return {"part": part.number, "result": b"", "error": pickle.dumps(_told(error, part).as_record())}


@contextmanager
def _one_thread() -> Iterator[None]:
    """A task has one CPU. The worker may do other things later."""
    before = pa.cpu_count()
    pa.set_cpu_count(1)
    try:
        yield
    finally:
        pa.set_cpu_count(before)


def _told(error: Exception, part: Part) -> MillraceError:
    """The error of a part as the attempt gets it; one that nobody expected without its internals."""
    if isinstance(error, MillraceError):
        return error
    if isinstance(error, MemoryError):
        return ResourceExhausted(f"a worker of Ray has too little memory for the rows of part {part.number}")
    if isinstance(error, OSError) and error.errno in FULL:
        return ResourceExhausted(
            "the disk of a node of Ray is full; free some space in its temporary folder", reason="SCRATCH_FULL"
        )
    return hidden(error, logger, f"part {part.number} failed")


class PoolWorker:
    """What an actor of a pool calls: its work stays from part to part."""

    def __init__(self, task: PartsTask) -> None:
        self._task = task

    def __call__(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        return self._task(row)
