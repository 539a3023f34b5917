"""The batcher of one model version: gathers rows of many requests into one call of the model.

It stands in front of Ray, so that Ray's cost per call is paid once a batch. `domain.batching` decides; this keeps the
queue, the clock and the batches in flight.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, Protocol

import numpy as np

from inference_service.domain.batch_times import BatchTimes
from inference_service.domain.batching import Limits, Waiting, admit, decide, pieces, too_late
from inference_service.domain.load import Load, LoadMeter
from inference_service.domain.request_parameters import DEFAULT_PRIORITY, PRIORITY_LEVELS
from inference_service.domain.rows import Outputs, Rows
from inference_service.domain.statistics import Statistics
from inference_service.domain.tensors import Array
from shared.errors import DeadlineExceeded, MillraceError, ResourceExhausted, Unavailable
from shared.tracing import tracing

logger = logging.getLogger(__name__)

BATCHES_PER_REPLICA = 2  # one at work, one on its way: the replica never waits for the wire
# A batch is sent so long before its replica is expected to be free: the way there takes some of it, and estimates are
# wrong by the rest.
LEAD_S = 0.003
# An answer's way from this process to its client: it counts to the client's deadline, and nobody here sees it.
WIRE_S = 0.005


class Model(Protocol):
    """What runs a batch. Cancelling the call gives the batch up."""

    async def forward(self, rows: Rows) -> Outputs: ...


class _Entry:
    """Rows that wait, and the future of their outputs. `first_row` is the place of the first in its request, `level`
    its place in the queue by urgency; `input_s`, `infer_s` and when it came `back_s` are known once it is answered."""

    def __init__(
        self, rows: Rows, first_row: int, level: int, waiting: Waiting, future: asyncio.Future[Sequence[Array]]
    ) -> None:
        self.rows = rows
        self.first_row = first_row
        self.level = level
        self.waiting = waiting
        self.future = future
        self.input_s = self.infer_s = 0.0
        self.back_s = 0.0
        # Whether it was sent to the model; and all of its request's, where these are several.
        self.sent = False
        self.of_request: Sequence[_Entry] = ()
        self.traced = tracing().waiting(waiting.rows)


class Batcher:
    """Lives on one event loop. `times` says how long batches take and learns from each; `statistics` counts them."""

    def __init__(self, model: Model, limits: Limits, times: BatchTimes, statistics: Statistics) -> None:
        self._model = model
        self._limits = limits
        self._times = times
        self._statistics = statistics
        self._loop = asyncio.get_running_loop()
        # By priority, each in order of arrival; leaving from the middle is cheap.
        self._levels: list[dict[_Entry, None]] = [{} for _ in range(PRIORITY_LEVELS)]
        self._rows_at = [0] * PRIORITY_LEVELS
        # The batches in flight, each with when its replica is expected to be done with it.
        self._batches: dict[asyncio.Task[None], float] = {}
        # From a batch's return to when those who asked go on: each waits for those before it to be answered.
        self._answering = BatchTimes()
        # Where the last batch had many rows, the first of the next ones does not go alone: as many come again, most
        # often, and one row costs a model a quarter of what 32 do.
        self._last_rows = 0
        self._load = LoadMeter(self._loop.time())
        self._timer: asyncio.TimerHandle | None = None
        self._closed: str | None = None
        self._apart: Batcher | None = None

    @property
    def queued_rows(self) -> int:
        """Rows that wait to be sent to the model."""
        return sum(self._rows_at)

    async def submit(self, rows: Rows, remaining_s: float | None, priority: int = DEFAULT_PRIORITY) -> Outputs:
        """The outputs of these rows, any number of them, in their order; `remaining_s` is the caller's time left, and
        rows of a lower `priority`, 1 to `PRIORITY_LEVELS`, go first, however long others have waited. Of rows that took
        several batches, the times are those of all of them.

        Raises `ResourceExhausted` (the queue is full, or a batch's images too large), `DeadlineExceeded` (it would come
        too late; no row reached the model, or of several batches the later ones did not), `InvalidArgument` (the model
        refuses some of these rows; others' in the same batch are answered), `Internal` (it failed at them, alike),
        `Unavailable` (draining, or the replica died twice) and what the model raises. Cancelled: rows that still wait
        leave the queue, and a batch that nobody waits for any longer is given up.
        """
        if self._closed is not None:
            raise _draining(self._closed)
        now_s = self._loop.time()
        deadline_s = now_s + remaining_s if remaining_s is not None else float("inf")
        self._admit(len(rows), deadline_s, priority, now_s)
        if len(rows) <= self._limits.max_rows:
            entries = [self._enqueue(rows, 0, priority - 1, now_s, deadline_s)]
        else:
            entries = self._enqueue_pieces(rows, priority - 1, now_s, deadline_s)
        self._load.add(len(rows), now_s)
        if len(self._batches) < self._limits.max_in_flight:
            self._pump()
        try:
            if len(entries) == 1:
                answers = [await entries[0].future]
            else:
                answers = await asyncio.gather(*(entry.future for entry in entries))
            back_s = max(entry.back_s for entry in entries)
            input_s, infer_s = sum(entry.input_s for entry in entries), sum(entry.infer_s for entry in entries)
        finally:
            self._let_go(entries)
            self._load.add(-len(rows), self._loop.time())
        self._answering.learn(1, self._loop.time() - back_s)
        return Outputs(
            answers[0] if len(answers) == 1 else [np.concatenate(parts) for parts in zip(*answers, strict=True)],
            input_s=input_s,
            infer_s=infer_s,
        )

    def apart(self) -> Batcher:
        """One before the same model for rows that are no requests: with a queue of its own, so that they share no batch
        with any, and counted nowhere. It closes with this one."""
        if self._apart is None:
            self._apart = Batcher(self._model, self._limits, self._times, Statistics())
            self._apart._closed = self._closed
        return self._apart

    def scale(self, replicas: int) -> None:
        """The model has so many replicas now. While it has none, one batch at a time finds out when it has again."""
        limits = replace(self._limits, max_in_flight=BATCHES_PER_REPLICA * max(replicas, 1))
        if limits == self._limits:
            return
        more = limits.max_in_flight > self._limits.max_in_flight
        self._limits = limits
        if self._apart is not None:
            self._apart.scale(replicas)
        if more:
            self._pump()

    def load(self) -> Load:
        """What it had to do since this was last asked."""
        return self._load.read(self._loop.time())

    def missed(self, rows: int) -> None:
        """So many rows came, and nobody had time to read them: more replicas might."""
        self._load.refuse(rows)

    async def drain(self, silent_s: float) -> None:
        """Takes no more rows and returns when all that it has are answered, however long that takes; gives up what is
        left after `silent_s` in which nothing was."""
        self.close("the model is being taken out of service")
        if self._apart is not None:
            await self._apart.drain(0.0)
        while work := self._work():
            answered, _ = await asyncio.wait(work, timeout=silent_s, return_when=asyncio.FIRST_COMPLETED)
            if not answered:
                break
        left = list(self._queue())
        for entry in left:
            self._leave(entry)
        self._fail(left, _draining("the model was taken out of service"))
        for batch in self._batches:
            batch.cancel()

    def close(self, why: str) -> None:
        """Refuses rows that come from now on."""
        self._closed = why
        if self._apart is not None:
            self._apart.close(why)

    def _admit(self, rows: int, deadline_s: float, priority: int, now_s: float) -> None:
        try:
            admit(
                rows,
                deadline_s,
                queued_rows=self.queued_rows,
                rows_ahead=sum(self._rows_at[:priority]),
                in_flight=len(self._batches),
                now_s=now_s,
                batch_s=self._batch_s(self.queued_rows + rows),
                bound_s=self._bound_s(self.queued_rows + rows),
                limits=self._limits,
            )
        except (ResourceExhausted, DeadlineExceeded):
            # Where a replica of its own would have been too slow as well, more of them are no help.
            if deadline_s - now_s > self._bound_s(rows):
                self._load.refuse(rows)
            raise

    def _work(self) -> set[asyncio.Future[Any]]:
        return {*self._batches, *(entry.future for entry in self._queue())}

    def _batch_s(self, rows: int) -> float:
        return self._times.expected_s(self._of_a_batch(rows))

    def _bound_s(self, rows: int) -> float:
        """Until the answers have arrived, at most."""
        return self._times.bound_s(self._of_a_batch(rows)) + self._answer_s()

    def _answer_s(self) -> float:
        """From a batch's return to its answers' arrival, at most."""
        return self._answering.bound_s(1) + WIRE_S

    def _of_a_batch(self, rows: int) -> int:
        return min(max(rows, 1), self._limits.max_rows)

    def _queue(self) -> Iterator[_Entry]:
        """What waits, the most urgent first."""
        return chain.from_iterable(self._levels)

    def _enqueue(self, rows: Rows, first_row: int, level: int, now_s: float, deadline_s: float) -> _Entry:
        waiting = Waiting(len(rows), rows.form, now_s, deadline_s, rows.size_bytes)
        entry = _Entry(rows, first_row, level, waiting, self._loop.create_future())
        self._levels[level][entry] = None
        self._rows_at[level] += waiting.rows
        return entry

    def _enqueue_pieces(self, rows: Rows, level: int, now_s: float, deadline_s: float) -> list[_Entry]:
        entries = [
            self._enqueue(rows.slice(start, stop), start, level, now_s, deadline_s)
            for start, stop in pieces(len(rows), self._limits.max_rows)
        ]
        for entry in entries:
            entry.of_request = entries
        return entries

    def _leave(self, entry: _Entry) -> None:
        if entry in self._levels[entry.level]:
            del self._levels[entry.level][entry]
            self._rows_at[entry.level] -= entry.waiting.rows
            if entry.traced is not None:
                entry.traced.end()

    def _let_go(self, entries: list[_Entry]) -> None:
        """Of a request that is over. The list is emptied: an error of theirs has it in its traceback, and is in their
        futures, so that all their rows would wait for the garbage collector."""
        for entry in entries:
            self._leave(entry)
            entry.future.cancel()
        entries.clear()

    def _pump(self) -> None:
        """Sends and refuses whatever is due, until the policy says to wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while any(self._levels):
            now_s = self._loop.time()
            decision = decide(
                (entry.waiting for entry in self._queue()),
                in_flight=len(self._batches),
                now_s=now_s,
                batch_s=self._batch_s(self.queued_rows) + self._answer_s(),
                bound_s=self._bound_s(self.queued_rows),
                limits=self._limits,
                free_s=self._free_s() - LEAD_S,
                company=self._last_rows // 2,
            )
            positions = {*decision.late, *decision.batch}
            if not positions:
                if decision.wake_s is not None:
                    self._timer = self._loop.call_at(decision.wake_s, self._pump)
                return
            chosen = {i: entry for i, entry in enumerate(islice(self._queue(), max(positions) + 1)) if i in positions}
            # A caller that has just been cancelled takes its rows from the queue only when it runs again.
            gone = [entry for entry in chosen.values() if entry.future.done()]
            for entry in gone or chosen.values():
                self._leave(entry)
            if gone:
                continue
            for position in decision.late:
                late = chosen[position]
                self._load.refuse(late.waiting.rows)
                begun = any(one.sent for one in late.of_request)
                late.future.set_exception(too_late(late.waiting.deadline_s - now_s, begun=begun))
            if decision.batch:
                self._send([chosen[position] for position in decision.batch])

    def _free_s(self) -> float:
        """When the replica that the next batch is for is expected to be free; 0 where one is idle."""
        ahead = len(self._batches) - self._limits.at_work
        return sorted(self._batches.values())[ahead] if ahead >= 0 else 0.0

    def _send(self, entries: list[_Entry]) -> None:
        self._last_rows = sum(entry.waiting.rows for entry in entries)
        # In the replica alone, without the way there and waiting for the one before.
        ends_s = max(self._loop.time(), self._free_s()) + self._times.computing_s(self._last_rows)
        task = self._loop.create_task(self._run(entries))
        self._batches[task] = ends_s

        def give_up_if_unwanted(future: asyncio.Future[Sequence[Array]]) -> None:
            if future.cancelled() and all(entry.future.done() for entry in entries):
                task.cancel()

        def done(_: object) -> None:
            del self._batches[task]
            self._pump()

        for entry in entries:
            entry.sent = True
            entry.future.add_done_callback(give_up_if_unwanted)
        task.add_done_callback(done)

    async def _run(self, entries: list[_Entry]) -> None:
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
                    entry.future.set_result(outputs.slice(start, stop).checked(entry.first_row))
                except MillraceError as error:  # this request's own; the others are fine
                    # Its traceback has this frame, and with it the rows of all, see `_let_go`.
                    entry.future.set_exception(error.with_traceback(None))
            self._statistics.batch_ran(
                rows=len(rows),
                round_trip_s=back_s - started_s,
                input_s=outputs.input_s,
                infer_s=outputs.infer_s,
                output_s=self._loop.time() - back_s,
            )
        except asyncio.CancelledError:
            self._fail(entries, _draining(self._closed or "the batch was given up"))
            raise
        except Exception as error:
            self._fail(entries, error)
            # See `_let_go`.
            entries.clear()
            rows = None

    @staticmethod
    def _fail(entries: list[_Entry], error: Exception) -> None:
        for entry in entries:
            if not entry.future.done():
                entry.future.set_exception(error)


def _draining(why: str) -> Unavailable:
    return Unavailable(why, reason="MODEL_DRAINING", retry_after_s=1.0)
