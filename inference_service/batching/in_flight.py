"""The batches on their way to a model, at work there, and back: each request's answer is cut out of its batch's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from inference_service.batching.priority_queue import Entry, fail
from inference_service.domain.batch_times import BatchTimes
from inference_service.domain.batching import draining
from inference_service.domain.rows import Outputs, Rows
from inference_service.domain.statistics import Statistics
from inference_service.domain.tensors import Array
from shared.errors import MillraceError
from shared.tracing import tracing


class Model(Protocol):
    """What runs a batch. Cancelling the call gives the batch up."""

    async def forward(self, rows: Rows) -> Outputs: ...


class InFlight:
    """Lives on one event loop. `batches` has when each one's replica is expected to be done with it, `last_rows` how
    many rows the last one had; `ended` is called after each."""

    def __init__(self, model: Model, times: BatchTimes, statistics: Statistics, ended: Callable[[], None]) -> None:
        self._model = model
        self._times = times
        self._statistics = statistics
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self.batches: dict[asyncio.Task[None], float] = {}
        self.last_rows = 0
        # What those are told whose batch is given up.
        self.why_given_up = "the batch was given up"

    def free_s(self, at_work: int) -> float:
        """When the replica that the next batch is for is expected to be free, where `at_work` batches leave none idle;
        0 where one is idle."""
        ahead = len(self.batches) - at_work
        return sorted(self.batches.values())[ahead] if ahead >= 0 else 0.0

    def send(self, entries: list[Entry], free_s: float) -> None:
        """One batch, to a replica that is expected to be free then."""
        self.last_rows = sum(entry.waiting.rows for entry in entries)
        # In the replica alone, without the way there and waiting for the one before.
        ends_s = max(self._loop.time(), free_s) + self._times.computing_s(self.last_rows)
        task = self._loop.create_task(self._run(entries))
        self.batches[task] = ends_s

        def give_up_if_unwanted(future: asyncio.Future[Sequence[Array]]) -> None:
            if future.cancelled() and all(entry.future.done() for entry in entries):
                task.cancel()

        def done(_: object) -> None:
            del self.batches[task]
            self._ended()

        for entry in entries:
            entry.sent = True
            entry.future.add_done_callback(give_up_if_unwanted)
        task.add_done_callback(done)

    def give_up(self) -> None:
        for batch in self.batches:
            batch.cancel()

    async def _run(self, entries: list[Entry]) -> None:
        rows: Rows | None = None
        try:
            # One request alone is handed on as it came, without a copy.
            rows = Rows.joined([entry.rows for entry in entries])
            started_s = self._loop.time()
            with tracing().batch((entry.traced for entry in entries), len(rows)):
                outputs = await self._model.forward(rows)
            back_s = self._loop.time()
            if not outputs.sent_again:
                self._times.learn(len(rows), back_s - started_s, outputs.input_s + outputs.infer_s)
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
