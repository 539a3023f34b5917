"""The batches on their way to a model, at work there, and back: each request's answer is cut out of its batch's."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from inference_service.batching.priority_queue import Entry, fail
from inference_service.domain.batch_times import BatchTimes
from inference_service.domain.batching import draining
from inference_service.domain.rows import Outputs, Rows
from inference_service.domain.statistics import Statistics
from inference_service.domain.tensors import Array
from shared.errors import MillraceError
from shared.tracing import tracing

# Of the time that a batch has taken, so much is expected to be left of it at the least.
OVERDUE = 0.25


class Model(Protocol):
    """What runs a batch. Cancelling the call gives the batch up."""

    async def forward(self, rows: Rows) -> Outputs: ...


@dataclass
class Batch:
    """That is expected to be computed for `computing_s`, and was begun at `begun_s`: None while a replica has another
    one before it."""

    computing_s: float
    begun_s: float | None


class InFlight:
    """Lives on one event loop. `batches` are in the order in which they were sent, of which so many as there are
    `replicas` are at work; `last_rows` is how many rows the last one had; `ended` is called after each."""

    def __init__(
        self, model: Model, replicas: int, times: BatchTimes, statistics: Statistics, ended: Callable[[], None]
    ) -> None:
        self._model = model
        self._replicas = replicas
        self._times = times
        self._statistics = statistics
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self.batches: dict[asyncio.Task[None], Batch] = {}
        self.last_rows = 0
        # What those are told whose batch is given up.
        self.why_given_up = "the batch was given up"

    def scale(self, replicas: int) -> None:
        self._replicas = replicas
        self._begin()

    def frees_s(self, now_s: float) -> list[float]:
        """When each replica is expected to be free, the soonest first."""
        frees_s: list[float] = []
        behind = []
        for batch in self.batches.values():
            if batch.begun_s is None or len(frees_s) == self._replicas:
                behind.append(batch)
            else:
                # The longer one takes already, the longer it will still take.
                at_least_s = now_s + OVERDUE * (now_s - batch.begun_s)
                frees_s.append(max(batch.begun_s + batch.computing_s, at_least_s))
        frees_s += [now_s] * (self._replicas - len(frees_s))
        heapq.heapify(frees_s)
        for batch in behind:
            heapq.heapreplace(frees_s, frees_s[0] + batch.computing_s)
        return sorted(frees_s)

    def send(self, entries: list[Entry]) -> None:
        """One batch, of rows of one form."""
        self.last_rows = sum(entry.waiting.rows for entry in entries)
        # In the replica alone, without the way there and waiting for the one before.
        batch = Batch(self._times.computing_s(self.last_rows), None)
        task = self._loop.create_task(self._run(entries, batch))
        self.batches[task] = batch
        self._begin()

        def give_up_if_unwanted(future: asyncio.Future[Sequence[Array]]) -> None:
            if future.cancelled() and all(entry.future.done() for entry in entries):
                task.cancel()

        def done(_: object) -> None:
            del self.batches[task]
            self._begin()
            self._ended()

        for entry in entries:
            entry.future.add_done_callback(give_up_if_unwanted)
        task.add_done_callback(done)

    def _begin(self) -> None:
        """Those that were behind one that is back are at work from now on."""
        for batch in islice(self.batches.values(), self._replicas):
            if batch.begun_s is None:
                batch.begun_s = self._loop.time()

    def give_up(self) -> None:
        for batch in self.batches:
            batch.cancel()

    async def _run(self, entries: list[Entry], batch: Batch) -> None:
        rows: Rows | None = None
        try:
            # One request alone is handed on as it came, without a copy.
            rows = Rows.joined([entry.rows for entry in entries])
            started_s = self._loop.time()
            with tracing().batch((entry.traced for entry in entries), len(rows)):
                outputs = await self._model.forward(rows)
            back_s = self._loop.time()
            if not outputs.sent_again:
                # Its wait for the one before is that one's time; it says nothing of how long this one took.
                begun_s = started_s if batch.begun_s is None else max(started_s, batch.begun_s)
                self._times.learn(len(rows), back_s - begun_s, outputs.input_s + outputs.infer_s)
            stop = 0
            for entry in entries:
                start, stop = stop, stop + entry.waiting.rows
                if entry.future.done():
                    continue
                entry.input_s, entry.infer_s, entry.back_s = outputs.input_s, outputs.infer_s, back_s
                try:
                    its_own = outputs.slice(start, stop)
                    entry.future.set_result(its_own.checked(entry.first_row))
                    self._statistics.non_finite_rows += len(its_own.non_finite)
                except MillraceError as error:  # this request's own; the others are fine
                    # Its traceback has this frame, and with it the rows of all, see `PriorityQueue.let_go`.
                    entry.future.set_exception(error.with_traceback(None))
            self._statistics.batch_ran(
                rows=len(rows),
                round_trip_s=back_s - started_s,
                input_s=outputs.input_s,
                infer_s=outputs.infer_s,
                output_s=self._loop.time() - back_s,
            )
        except asyncio.CancelledError:
            fail(entries, draining(self.why_given_up))
            raise
        except Exception as error:
            fail(entries, error)
            # See `PriorityQueue.let_go`.
            entries.clear()
            rows = None
