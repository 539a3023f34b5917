"""The batcher of one model version: rows of many requests wait in a queue, go to the model together, and come back."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, Protocol

import numpy as np

from inference_service.domain.batch_policy import (
    BatchTimes,
    Limits,
    Load,
    LoadMeter,
    Waiting,
    admit,
    decide,
    draining,
    starts_s,
    too_late,
)
from inference_service.domain.signature import DEFAULT_PRIORITY, PRIORITY_LEVELS, Outputs, Rows
from inference_service.domain.statistics import Statistics
from inference_service.domain.tensors import Array
from shared.errors import DeadlineExceeded, MillraceError, ResourceExhausted
from shared.grpc_server.load_shedder import Decaying
from shared.tracing import QueueSpan as WaitingSpan
from shared.tracing import tracing

# --- Batcher ---
# The batcher of one model version: gathers rows of many requests into one call of the model.
#
# It stands in front of Ray, so that Ray's cost per call is paid once a batch. `domain.batching` decides; this asks it
# whenever rows come, a batch is back, or time has passed, with the clock, the queue and the batches in flight before
# it.

BATCHES_PER_REPLICA = 2  # one at work, one on its way: the replica never waits for the wire
# A batch is sent so long before its replica is expected to be free: the way there takes some of it, and estimates are
# wrong by the rest. One that is full gains nothing by waiting, so it is there also where the one before is earlier than
# expected by so many mean deviations.
SEND_AHEAD_S, FULL_LEAD_DEVIATIONS = 0.003, 2.0
# Rows are admitted where they would be in time also if everything took so many mean deviations longer than expected.
ADMIT_DEVIATIONS = 2.0
# Where more requests arrive than the replicas can compute, others take the place of whoever is refused now, so a long
# queue keeps no replica busier, and those in it meet every slow spell. Hence these deviations, and each whole batch
# ahead in the queue, count as often as the fifth power of the load over `TOLERATED_LOAD`, from 1 to `MOST_CROWDED`.
# Up to that load the queue is that of a burst or of a slow spell: whoever waits keeps the model at work after it.
TOLERATED_LOAD, MOST_CROWDED = 1.4, 5.0
# For rows of the next batch: they wait for the batches in flight alone, and without them it would leave half empty.
MOST_CROWDED_NEXT = 3.0
# The load is that of about so long, or since the model was idle, of which the first moments say little. What is
# offered, other than what is refused, does not depend on the policy itself.
LOAD_S, LITTLE_S = 0.5, 0.05
# An answer's way from this process to its client: it counts to the client's deadline, and nobody here sees it.
WIRE_S = 0.005


class Batcher:
    """Lives on one event loop. `times` says how long batches take and learns from each; `statistics` counts them."""

    def __init__(self, model: Model, limits: Limits, times: BatchTimes, statistics: Statistics) -> None:
        self._model = model
        self._limits = limits
        self._times = times
        self._loop = asyncio.get_running_loop()
        self._queue = PriorityQueue(limits.max_rows)
        self._in_flight = InFlight(model, limits.at_work, times, statistics, self._pump)
        # From a batch's return to when those who asked go on: each waits for those before it to be answered.
        self._answering = BatchTimes()
        self._load = LoadMeter(self._loop.time())
        self._timer: asyncio.TimerHandle | None = None
        self._closed: str | None = None
        # Rows that arrived in requests no larger than a batch: larger ones take what these leave.
        self._offered, self._idle_s = Decaying(LOAD_S), self._loop.time()
        self._background: Batcher | None = None

    @property
    def queued_rows(self) -> int:
        """Rows that wait to be sent to the model."""
        return self._queue.rows

    async def submit(
        self, rows: Rows, remaining_s: float | None, priority: int = DEFAULT_PRIORITY, *, admitted: bool = False
    ) -> Outputs:
        """The outputs of these rows, any number of them, in their order; `remaining_s` is the caller's time left, and
        rows of a lower `priority`, 1 to `PRIORITY_LEVELS`, go first, however long others have waited. Of rows that took
        several batches, the times are those of all of them. They are `admitted` where `admit` has just let them in.

        Raises `ResourceExhausted` (the queue is full, or a batch's images too large), `DeadlineExceeded` (it would come
        too late; no row reached the model, or of several batches the later ones did not), `InvalidArgument` (the model
        refuses some of these rows; others' in the same batch are answered), `Internal` (it failed at them, alike),
        `Unavailable` (draining, or the replica died twice) and what the model raises. Cancelled: rows that still wait
        leave the queue, and a batch that nobody waits for any longer is given up.
        """
        if self._closed is not None:
            raise draining(self._closed)
        now_s = self._loop.time()
        deadline_s = now_s + remaining_s if remaining_s is not None else math.inf
        if not admitted:
            self._admit(len(rows), rows.form, deadline_s, priority, now_s)
        entry = self._queue.put(rows, priority, now_s, deadline_s)
        self._load.add(len(rows), now_s)
        if len(self._in_flight.batches) < self._limits.max_in_flight:
            self._pump()
        try:
            await entry.future
            arrays, back_s, input_s, infer_s = entry.outputs(), entry.back_s, entry.input_s, entry.infer_s
        finally:
            self._queue.let_go(entry)
            del entry  # see `PriorityQueue.let_go`
            self._load.add(-len(rows), self._loop.time())
        self._answering.observe(1, self._loop.time() - back_s)
        return Outputs(arrays, input_s=input_s, infer_s=infer_s)

    def admit(
        self,
        rows: int,
        form: str,
        remaining_s: float | None,
        priority: int = DEFAULT_PRIORITY,
        *,
        again: bool = False,
    ) -> None:
        """Raises what `submit` would at once, of so many rows that nobody has read yet. `again`: they were admitted
        before, and time has passed since."""
        if self._closed is not None:
            raise draining(self._closed)
        now_s = self._loop.time()
        deadline_s = now_s + remaining_s if remaining_s is not None else math.inf
        self._admit(rows, form, deadline_s, priority, now_s, again=again)

    async def emptied(self) -> None:
        """Returns once none of its own rows wait: what is no request then takes no turn of one that does."""
        while self._queue:
            await self._queue.emptied.wait()

    def background(self) -> Batcher:
        """One before the same model for rows that are no requests: with a queue of its own, so that they share no batch
        with any, and counted nowhere. It closes with this one."""
        if self._background is None:
            self._background = Batcher(self._model, self._limits, self._times, Statistics())
            if self._closed is not None:
                self._background.close(self._closed)
        return self._background

    def scale(self, replicas: int) -> None:
        """The model has so many replicas now. While it has none, one batch at a time finds out when it has again."""
        limits = replace(self._limits, max_in_flight=BATCHES_PER_REPLICA * max(replicas, 1))
        if limits == self._limits:
            return
        more = limits.max_in_flight > self._limits.max_in_flight
        self._limits = limits
        self._in_flight.scale(limits.at_work)
        if self._background is not None:
            self._background.scale(replicas)
        if more:
            self._pump()

    def computing_s(self, rows: int) -> float:
        """What the model computes for so many rows, or a full batch, without the way there, which has the wait for the
        batch before; 0 while nobody knows."""
        return self._times.computing_s(self._of_a_batch(rows))

    def load(self) -> Load:
        """What it had to do since this was last asked."""
        return self._load.read(self._loop.time())

    async def drain(self, unresponsive_s: float) -> None:
        """Takes no more rows and returns when all that it has are answered, however long that takes; gives up what is
        left after `unresponsive_s` in which nothing was."""
        self.close("the model is being taken out of service")
        if self._background is not None:
            await self._background.drain(0.0)
        while work := self._work():
            answered, _ = await asyncio.wait(work, timeout=unresponsive_s, return_when=asyncio.FIRST_COMPLETED)
            if not answered:
                break
        left = list(self._queue)
        for entry in left:
            self._queue.leave(entry)
        fail(left, draining("the model was taken out of service"))
        self._in_flight.give_up()

    def close(self, why: str) -> None:
        """Refuses rows that come from now on."""
        self._closed = self._in_flight.why_given_up = why
        if self._background is not None:
            self._background.close(why)

    def _admit(
        self, rows: int, form: str, deadline_s: float, priority: int, now_s: float, *, again: bool = False
    ) -> None:
        queued_rows, max_rows = self._queue.rows, self._limits.max_rows
        full_batch_s = self._times.computing_s(max_rows)
        frees_s = self._in_flight.frees_s(now_s)
        if not self._in_flight.batches:
            self._offered, self._idle_s = Decaying(LOAD_S), now_s
        crowding = self._crowding(now_s, len(frees_s))
        ahead = self._queue.batches_ahead(rows, form, priority)
        if not ahead:
            crowding = min(crowding, MOST_CROWDED_NEXT)
        ends_s = starts_s(frees_s, ahead, full_batch_s * crowding)
        # An idle model always tries: an estimate that is too high could otherwise never be put right.
        if self._in_flight.batches:
            ends_s = self._ends_s(queued_rows + rows, now_s, ends_s, ADMIT_DEVIATIONS * crowding)
        if rows <= max_rows and not again:
            self._offered.add(now_s, rows)
        try:
            admit(
                rows,
                deadline_s,
                queued_rows=queued_rows,
                now_s=now_s,
                ends_s=ends_s,
                drained_s=queued_rows / max_rows * full_batch_s / len(frees_s),
                limits=self._limits,
            )
        except (ResourceExhausted, DeadlineExceeded):
            # Where a replica of its own would have been too slow as well, more of them are no help.
            if deadline_s > self._ends_s(rows, now_s, now_s, 0.0):
                self._load.refuse(rows)
            raise

    def _crowding(self, now_s: float, replicas: int) -> float:
        """How many times over what is ahead counts, see `TOLERATED_LOAD`."""
        remembered_s = LOAD_S * (1 - math.exp((self._idle_s - now_s - LITTLE_S) / LOAD_S))
        batches_per_s = self._offered.at(now_s) / remembered_s / self._limits.max_rows
        load = batches_per_s * self._times.usually_s(self._limits.max_rows) / replicas
        return min(max(load / TOLERATED_LOAD, 1.0) ** 5, MOST_CROWDED)

    def _ends_s(self, rows: int, now_s: float, start_s: float, deviations: float) -> float:
        """When the answers of a batch of so many rows that a replica begins then have arrived, if all takes so many
        mean deviations longer than expected."""
        takes_s = start_s - now_s + self._times.expected_s(self._of_a_batch(rows))
        return now_s + self._times.at_most_s(takes_s, deviations) + self._answer_s()

    def _work(self) -> set[asyncio.Future[Any]]:
        return {*self._in_flight.batches, *(entry.future for entry in self._queue)}

    def _answer_s(self) -> float:
        """From a batch's return to its answers' arrival, at most."""
        return self._answering.bound_s(1) + WIRE_S

    def _of_a_batch(self, rows: int) -> int:
        return min(max(rows, 1), self._limits.max_rows)

    def _pump(self) -> None:
        """Sends and refuses whatever is due, until the policy says to wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._queue:
            now_s = self._loop.time()
            free_s = self._in_flight.frees_s(now_s)[0]
            queued_rows = self._queue.rows
            full_s = self._times.computing_s(self._limits.max_rows)
            decision = decide(
                (entry.waiting for entry in self._queue.of_next_form()),
                in_flight=len(self._in_flight.batches),
                now_s=now_s,
                # Less strict than when they came: they have waited, and may well be in time.
                ends_s=self._ends_s(queued_rows, now_s, free_s, 0.0),
                bound_s=self._ends_s(queued_rows, now_s, now_s, ADMIT_DEVIATIONS) - now_s,
                limits=self._limits,
                due_s=free_s - SEND_AHEAD_S,
                full_due_s=free_s - SEND_AHEAD_S - (self._times.at_most_s(full_s, FULL_LEAD_DEVIATIONS) - full_s),
                # Where the last batch had many rows, the first of the next ones does not go alone: as many come again,
                # most often, and one row costs a model a quarter of what 32 do.
                min_rows_to_send=self._in_flight.last_rows // 2,
            )
            positions = {*decision.late, *decision.batch}
            if not positions:
                if decision.wake_s is not None:
                    self._timer = self._loop.call_at(decision.wake_s, self._pump)
                return
            first = islice(self._queue.of_next_form(), max(positions) + 1)
            chosen = {i: entry for i, entry in enumerate(first) if i in positions}
            # A caller that has just been cancelled takes its rows from the queue only when it runs again.
            if gone := [entry for entry in chosen.values() if entry.future.done()]:
                for entry in gone:
                    self._queue.leave(entry)
                continue
            for position in decision.late:
                late = chosen[position]
                self._queue.leave(late)
                self._load.refuse(late.waiting.rows)
                late.future.set_exception(too_late(late.waiting.deadline_s - now_s, begun=bool(late.pieces)))
            if decision.batch:
                self._in_flight.send(self._queue.take([(chosen[at], rows) for at, rows in decision.batch.items()]))


# --- In flight ---
# The batches on their way to a model, at work there, and back: each request's answer is cut out of its batch's.

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
                self._times.observe(len(rows), back_s - begun_s, outputs.input_s + outputs.infer_s)
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


# --- Priority queue ---
# The rows that wait for a batch: the most urgent first, and the older of two that are as urgent.
#
# Requests larger than a batch come after all others that are as urgent, and fill what these leave of each batch. What
# is left of a batch that they cannot share, and at least `GUARANTEED` of each, is owed to them, as in deficit round
# robin (Shreedhar and Varghese, 1995): once that is a whole batch, one goes first.

# Of a batch's rows: what requests larger than a batch get, however much the others ask for.
GUARANTEED = 1 / 8


class Entry:
    """Rows that wait, or are in a batch, and the future of their outputs. `first_row` is the place of the first in its
    request, `level` its place in the queue by urgency; `input_s`, `infer_s` and when it came `back_s` are known once it
    is answered.

    A request larger than a batch is one entry of the rows that still wait, of which pieces are taken into batches, each
    an entry of its own; the outputs of all `pieces` are its own.
    """

    def __init__(
        self,
        rows: Rows,
        first_row: int,
        level: int,
        waiting: Waiting,
        future: asyncio.Future[Sequence[Array]],
        traced: WaitingSpan | None,
    ) -> None:
        self.rows = rows
        self.first_row = first_row
        self.level = level
        self.waiting = waiting
        self.future = future
        self.input_s = self.infer_s = 0.0
        self.back_s = 0.0
        self.pieces: list[Entry] = []
        self.unanswered = waiting.rows
        self.traced = traced

    def outputs(self) -> Sequence[Array]:
        """Once it is answered."""
        if not self.pieces:
            return self.future.result()
        return [np.concatenate(parts) for parts in zip(*(one.future.result() for one in self.pieces), strict=True)]


class PriorityQueue:
    """Lives on one event loop. `rows` are those that wait, of all requests. `emptied` is set while none waits."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._loop = asyncio.get_running_loop()
        # By priority, and in each those that fit a batch before the larger ones, see `_turn`; each in order of arrival;
        # leaving from the middle is cheap. The same by form, too: rows of two forms share no batch, so a batch is
        # looked for among those of one.
        self._turns: list[dict[Entry, None]] = [{} for _ in range(2 * PRIORITY_LEVELS)]
        self._forms: dict[str, list[dict[Entry, None]]] = {}
        # Of requests that fit a batch, by form and priority; the others are looked at one by one.
        self._rows_at: dict[str, list[int]] = {}
        self._large: dict[Entry, None] = {}
        self._owed_rows = 0.0
        self.rows = 0
        self.emptied = asyncio.Event()
        self.emptied.set()

    def __iter__(self) -> Iterator[Entry]:
        return self._in_order(self._turns)

    def __bool__(self) -> bool:
        return any(self._turns)

    def of_next_form(self) -> Iterator[Entry]:
        """Those that may share a batch with the first one, in their order."""
        first = next(iter(self), None)
        return self._in_order(self._forms[first.waiting.form]) if first is not None else iter(())

    def batches_ahead(self, rows: int, form: str, priority: int) -> int:
        """How many batches go before the one that has the last of so many rows, if these came now. Large requests that
        are as urgent take turns in batches with another large one, and go before others only in batches that they are
        owed by then; of one that waits for the same batch, only what is left over is in it."""
        ahead = {other: sum(at[:priority]) for other, at in self._rows_at.items()}
        turns = math.ceil(rows / self._max_rows) * self._max_rows
        peers = []
        for entry in self._large:
            if entry.level < priority - 1:
                ahead[entry.waiting.form] = ahead.get(entry.waiting.form, 0) + entry.waiting.rows
            elif entry.level == priority - 1:
                peers.append(entry.waiting)
        if rows > self._max_rows:
            for waiting in peers:
                ahead[waiting.form] = ahead.get(waiting.form, 0) + min(waiting.rows, turns)
            return self._batches(ahead, rows, form)
        batches = self._batches(ahead, rows, form)
        if not peers:
            return batches
        if any(waiting.form != form for waiting in peers):  # in batches of their own, one after each
            return 2 * batches + 1
        return batches + int(self._owed_rows / self._max_rows + batches * GUARANTEED)

    def _batches(self, ahead: dict[str, int], rows: int, form: str) -> int:
        others = sum(math.ceil(count / self._max_rows) for other, count in ahead.items() if other != form)
        return others + (ahead.get(form, 0) + rows - 1) // self._max_rows

    def put(self, rows: Rows, priority: int, now_s: float, deadline_s: float) -> Entry:
        """A request's rows, any number of them."""
        large = len(rows) > self._max_rows
        waiting = Waiting(len(rows), rows.form, now_s, deadline_s, rows.size_bytes, divisible=large)
        future: asyncio.Future[Sequence[Array]] = self._loop.create_future()
        entry = Entry(rows, 0, priority - 1, waiting, future, tracing().waiting(len(rows)))
        if large:
            self._large[entry] = None
        self._add(entry)
        return entry

    def take(self, chosen: Sequence[tuple[Entry, int]]) -> list[Entry]:
        """A batch of the first rows of some entries, so many of each. What is left of a large request, and only of that
        one something may be, waits behind all that are as urgent."""
        if self._large:
            large_rows = sum(rows for entry, rows in chosen if entry.waiting.divisible)
            left_rows = self._max_rows - sum(rows for entry, rows in chosen if not entry.waiting.divisible)
            # A batch that it got because it was owed is paid off with its rows.
            due_rows = 0.0 if self._large_first() else max(left_rows, GUARANTEED * self._max_rows)
            owed_rows = self._owed_rows + due_rows - large_rows
            self._owed_rows = min(max(owed_rows, 0.0), 2.0 * self._max_rows)
        return [self._take(entry, rows) for entry, rows in chosen]

    def _take(self, entry: Entry, rows: int) -> Entry:
        if not entry.waiting.divisible:
            self.leave(entry)
            return entry
        waiting, start = entry.waiting, entry.first_row
        taken = entry.rows.slice(start, start + rows)
        piece_waiting = replace(waiting, rows=rows, size_bytes=taken.size_bytes, divisible=False)
        piece = Entry(taken, start, entry.level, piece_waiting, self._loop.create_future(), entry.traced)
        entry.pieces.append(piece)
        piece.future.add_done_callback(partial(_gather, entry, piece))
        if rows == waiting.rows:
            self.leave(entry)
        else:
            self._remove(entry)
            left_bytes = waiting.size_bytes * (waiting.rows - rows) // waiting.rows
            entry.waiting = replace(waiting, rows=waiting.rows - rows, size_bytes=left_bytes)
            entry.first_row = start + rows
            self._add(entry)
        return piece

    def leave(self, entry: Entry) -> None:
        if entry in self._turns[_turn(entry)]:
            self._remove(entry)
            self._large.pop(entry, None)
            if not self._large:
                self._owed_rows = 0.0
            if not self:
                self.emptied.set()
            if entry.traced is not None:
                entry.traced.end()

    def let_go(self, entry: Entry) -> None:
        """Of a request that is over. An error of its has it in its traceback, and is in its future, so that all its
        rows would wait for the garbage collector if anything of it was kept."""
        self.leave(entry)
        entry.future.cancel()
        for piece in entry.pieces:
            piece.future.cancel()
        entry.pieces.clear()

    def _large_first(self) -> bool:
        return self._owed_rows >= self._max_rows

    def _in_order(self, turns: Sequence[dict[Entry, None]]) -> Iterator[Entry]:
        swapped = int(self._large_first())
        return chain.from_iterable(turns[place ^ swapped] for place in range(len(turns)))

    def _add(self, entry: Entry) -> None:
        form, turn = entry.waiting.form, _turn(entry)
        if form not in self._forms:
            self._forms[form] = [{} for _ in self._turns]
            self._rows_at[form] = [0] * PRIORITY_LEVELS
        self._turns[turn][entry] = self._forms[form][turn][entry] = None
        self._count(entry, entry.waiting.rows)
        self.emptied.clear()

    def _remove(self, entry: Entry) -> None:
        form, turn = entry.waiting.form, _turn(entry)
        del self._turns[turn][entry], self._forms[form][turn][entry]
        self._count(entry, -entry.waiting.rows)
        if not any(self._forms[form]):
            del self._forms[form], self._rows_at[form]

    def _count(self, entry: Entry, rows: int) -> None:
        self.rows += rows
        if not entry.waiting.divisible:
            self._rows_at[entry.waiting.form][entry.level] += rows


def _turn(entry: Entry) -> int:
    """Its place among the kinds of entries, where nothing is owed to large ones."""
    return 2 * entry.level + int(entry.waiting.divisible)


def _gather(entry: Entry, piece: Entry, answered: asyncio.Future[Sequence[Array]]) -> None:
    """Ends a large request's wait once the last of its pieces is answered, or one has failed."""
    if answered.cancelled():
        return
    error = answered.exception()
    if entry.future.done():
        return
    if error is not None:
        entry.future.set_exception(error)
        return
    entry.input_s, entry.infer_s = entry.input_s + piece.input_s, entry.infer_s + piece.infer_s
    entry.back_s = max(entry.back_s, piece.back_s)
    entry.unanswered -= piece.waiting.rows
    if not entry.unanswered:
        entry.future.set_result(())


def fail(entries: Iterable[Entry], error: Exception) -> None:
    """Those that are not over already."""
    for entry in entries:
        if not entry.future.done():
            entry.future.set_exception(error)
