"""Copies of requests for a version that is to be tried with real ones: nobody waits for them, and they come last."""

from __future__ import annotations

import asyncio
import logging

from inference_service.batching.batcher import Batcher
from inference_service.domain.held_bytes import HeldBytes
from inference_service.domain.request_parameters import PRIORITY_LEVELS
from inference_service.domain.rows import Rows
from inference_service.domain.statistics import OK, Statistics
from shared.errors import MillraceError
from shared.grpc_errors import status_code
from shared.telemetry import hidden, identify

logger = logging.getLogger(__name__)

AT_ONCE = 16
WITHIN_S = 10.0
SHED = "SHED"


class Shadowing:
    """Lives on one event loop. At most `AT_ONCE` copies are worked on; each costs its request only the making of a
    task."""

    def __init__(self, held: HeldBytes) -> None:
        self._held = held
        self._copies: set[asyncio.Task[None]] = set()

    def copy(self, rows: Rows, real: Batcher, version: str, shadow: Batcher | None, statistics: Statistics) -> None:
        """Sends the rows to the model of `shadow`, in batches of copies alone, and returns at once; sheds them where
        anything waits for a model, so that a machine that is busy with real requests does not get busier, and where
        they would leave these less than half of the bytes. `version`, its number, and `statistics` are the
        shadow's."""
        waits = shadow is None or real.queued_rows or shadow.queued_rows or shadow.apart().queued_rows
        size_bytes = rows.size_bytes
        many = len(self._copies) >= AT_ONCE or not self._held.would_leave_half(size_bytes)
        if shadow is None or waits or many:
            statistics.shadow_ended(SHED)
            return
        self._held.take(size_bytes)
        task = asyncio.create_task(_send(rows, version, shadow.apart(), statistics))
        self._copies.add(task)
        task.add_done_callback(self._copies.discard)
        task.add_done_callback(lambda _: self._held.give_back(size_bytes))


async def _send(rows: Rows, version: str, shadow: Batcher, statistics: Statistics) -> None:
    identify(model_version=version)  # a task has the ids of who made it: here, of the real version
    status = OK
    try:
        await shadow.submit(rows, WITHIN_S, PRIORITY_LEVELS)
    except MillraceError as error:
        status = status_code(error).name
    except Exception as unexpected:
        status = status_code(hidden(unexpected, logger, "a copy for a shadow failed")).name
    statistics.shadow_ended(status)
