"""The batcher of one model version.

Rows of many requests wait in a queue, go to the model together, and are split into answers again. The path of a
request's rows is `submit`, `_admit`, the queue, `_pump`, `InFlight.send`, and the caller's future.

`_admit` refuses rows at once:
- RESOURCE_EXHAUSTED (QUEUE_FULL): the queue would hold more than `max_queued_rows`.
- DEADLINE_EXCEEDED: batches are in flight, and the answer is expected after the caller's deadline even with some time
  to spare.
- UNAVAILABLE (MODEL_DRAINING): the model is being taken out of service.

`_pump` runs whenever rows arrive, a batch ends, replicas are added, or its timer fires. It refuses queued rows that
would now be answered too late, and sends a batch at one of these times (`domain.batch_policy.decide`):
- A replica is idle: at once if the batch is full or has half the rows of the last batch; otherwise `max_delay_s` after
  its oldest row came, or earlier if a deadline demands it.
- All replicas are busy: shortly before the first is expected to be free, so that the batch arrives as it becomes free;
  a batch that is not full waits at least `max_delay_s` for more rows.
- Each replica has a batch that computes and one that waits there: not before one of them ends.
"""

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
from inference_service.domain.signature import DEFAULT_PRIORITY, PRIORITY_LEVELS, Array, Outputs, Rows
from inference_service.domain.statistics import Statistics
from shared.errors import DeadlineExceeded, MillraceError, ResourceExhausted
from shared.grpc_server.interceptor import Decaying
from shared.logging_and_tracing import QueueSpan as WaitingSpan
from shared.logging_and_tracing import tracing

# --- Batcher ---

BATCHES_PER_REPLICA = 2  # one computes and one is in transit, so that the replica never waits for the network
# A batch is sent SEND_AHEAD_S before its replica is expected to be free. The transfer takes part of that time, and the
# rest covers errors of the estimate. A full batch gains nothing by waiting, so it is sent earlier still, by
# FULL_LEAD_DEVIATIONS mean deviations, in case the batch before it ends early.
SEND_AHEAD_S, FULL_LEAD_DEVIATIONS = 0.003, 2.0
# Rows are admitted if they would meet their deadline even if everything took ADMIT_DEVIATIONS mean deviations longer
# than expected.
ADMIT_DEVIATIONS = 2.0
# When more requests arrive than the replicas can compute, a refused request is soon replaced by another. A long queue
# then keeps no replica busier, and the rows in it are exposed to every slow spell. So the deviations above, and each
# full batch ahead in the queue, are multiplied by (load / TOLERATED_LOAD)^5, clamped to 1..MOST_CROWDED. Up to
# TOLERATED_LOAD the queue comes from a burst or a slow spell, and its rows keep the model busy afterwards.
TOLERATED_LOAD, MOST_CROWDED = 1.4, 5.0
# The maximum factor for rows of the next batch. They wait only for the batches in flight, and without them that batch
# could leave half empty.
MOST_CROWDED_NEXT = 3.0
# LOAD_S is the time constant of the measured load. The measurement restarts when the model is idle, and LITTLE_S is
# added to the time since then, because the first moments say little. It counts all offered rows rather than the refused
# ones, because the admission policy does not change what is offered.
LOAD_S, LITTLE_S = 0.5, 0.05
# The time an answer needs from this process to its client. It counts toward the client's deadline, but this process
# cannot measure it.
WIRE_S = 0.005


class Batcher:
    """Batches the rows of one model version.

    Lives on one event loop. `times` estimates how long batches take and learns from each batch; `statistics` counts
    batches.
    """

    def __init__(self, model: Model, limits: Limits, times: BatchTimes, statistics: Statistics) -> None:
        self._model = model
        self._limits = limits
        self._times = times
        self._loop = asyncio.get_running_loop()
        self._queue = PriorityQueue(limits.max_rows)
        self._in_flight = InFlight(model, limits.replicas, times, statistics, self._pump)
        # The time from a batch's return until its callers resume. Each caller waits for the answers of those before it.
        self._answering = BatchTimes()
        self._load = LoadMeter(self._loop.time())
        self._timer: asyncio.TimerHandle | None = None
        self._closed: str | None = None
        # Rows that arrived in requests no larger than a batch. Larger requests are left out because they only fill the
        # space that these leave.
        self._offered, self._idle_s = Decaying(LOAD_S), self._loop.time()
        self._background: Batcher | None = None

    @property
    def queued_rows(self) -> int:
        """Rows that wait to be sent to the model."""
        return self._queue.rows

    async def submit(
        self, rows: Rows, remaining_s: float | None, priority: int = DEFAULT_PRIORITY, *, admitted: bool = False
    ) -> Outputs:
        """Return the outputs of these rows, in their order.

        A request may have any number of rows. `remaining_s` is the caller's remaining time, None for no deadline. Rows
        with a lower `priority` value (1 to `PRIORITY_LEVELS`) are sent first, however long others have waited. If the
        rows took several batches, the reported times are the sums over those batches. `admitted` is True if `admit` has
        just accepted these rows.

        Raises `ResourceExhausted` (the queue is full, or the images of a batch are too large), `DeadlineExceeded` (the
        answer would be too late; no row reached the model, or the later batches of several did not), `InvalidArgument`
        (the model refuses some of these rows; other requests in the same batch are answered), `Internal` (the model
        failed at some of these rows; other requests are answered), `Unavailable` (draining, or the replica died twice)
        and the model's own errors. On cancellation, rows that still wait leave the queue, and a batch with no remaining
        caller is cancelled.
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
            arrays, returned_s, input_s, infer_s = entry.outputs(), entry.returned_s, entry.input_s, entry.infer_s
        finally:
            self._queue.release(entry)
            del entry  # drops the reference, see `PriorityQueue.release`
            self._load.add(-len(rows), self._loop.time())
        self._answering.observe(1, self._loop.time() - returned_s)
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
        """Check a request before its rows are decoded.

        Raises the errors that `submit` would raise at once for this many rows. `again` is True if the request was
        admitted earlier and time has passed since.
        """
        if self._closed is not None:
            raise draining(self._closed)
        now_s = self._loop.time()
        deadline_s = now_s + remaining_s if remaining_s is not None else math.inf
        self._admit(rows, form, deadline_s, priority, now_s, again=again)

    async def emptied(self) -> None:
        """Wait until no row of this batcher is queued.

        Background work uses it to let requests go first.
        """
        while self._queue:
            await self._queue.emptied.wait()

    def background(self) -> Batcher:
        """Return the batcher for rows that belong to no request.

        It sends to the same model but has its own queue, so its rows never share a batch with requests. Its batches are
        not counted in the statistics. It closes with this batcher.
        """
        if self._background is None:
            self._background = Batcher(self._model, self._limits, self._times, Statistics())
            if self._closed is not None:
                self._background.close(self._closed)
        return self._background

    def scale(self, replicas: int) -> None:
        """Set the number of replicas of the model.

        With 0 replicas, batches are still sent, as for one replica, to find out when the model is back.
        """
        limits = replace(self._limits, max_in_flight=BATCHES_PER_REPLICA * max(replicas, 1))
        if limits == self._limits:
            return
        more = limits.max_in_flight > self._limits.max_in_flight
        self._limits = limits
        self._in_flight.scale(limits.replicas)
        if self._background is not None:
            self._background.scale(replicas)
        if more:
            self._pump()

    def computing_s(self, rows: int) -> float:
        """Return the expected compute time of `rows` rows, or of a full batch, in seconds.

        Excludes the transfer, which includes the wait for the batch before. 0 while there is no measurement.
        """
        return self._times.computing_s(self._of_a_batch(rows))

    def load(self) -> Load:
        """Return the load since the last call."""
        return self._load.read(self._loop.time())

    async def drain(self, unresponsive_s: float) -> None:
        """Stop accepting rows and wait until all accepted rows are answered.

        There is no overall time limit. If `unresponsive_s` seconds pass without an answer, the remaining rows fail.
        """
        self.close("the model is being taken out of service")
        if self._background is not None:
            await self._background.drain(0.0)
        while work := self._work():
            answered, _ = await asyncio.wait(work, timeout=unresponsive_s, return_when=asyncio.FIRST_COMPLETED)
            if not answered:
                break
        left = list(self._queue)
        for entry in left:
            self._queue.remove(entry)
        fail(left, draining("the model was taken out of service"))
        self._in_flight.give_up()

    def close(self, why: str) -> None:
        """Refuse all further rows."""
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
        # An idle model always accepts. Otherwise an estimate that is too high could never be corrected.
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
            # If even an idle replica would have been too slow, more replicas would not help, so the refusal does not
            # count as load.
            if deadline_s > self._ends_s(rows, now_s, now_s, 0.0):
                self._load.refuse(rows)
            raise

    def _crowding(self, now_s: float, replicas: int) -> float:
        """Return the factor for the work ahead, see `TOLERATED_LOAD`."""
        remembered_s = LOAD_S * (1 - math.exp((self._idle_s - now_s - LITTLE_S) / LOAD_S))
        batches_per_s = self._offered.at(now_s) / remembered_s / self._limits.max_rows
        load = batches_per_s * self._times.typical_compute_s(self._limits.max_rows) / replicas
        return min(max(load / TOLERATED_LOAD, 1.0) ** 5, MOST_CROWDED)

    def _ends_s(self, rows: int, now_s: float, start_s: float, deviations: float) -> float:
        """Return when the answers of a batch of `rows` rows, begun at `start_s`, reach the client.

        Assumes that everything takes `deviations` mean deviations longer than expected.
        """
        takes_s = start_s - now_s + self._times.expected_s(self._of_a_batch(rows))
        return now_s + self._times.at_most_s(takes_s, deviations) + self._answer_s()

    def _work(self) -> set[asyncio.Future[Any]]:
        return {*self._in_flight.batches, *(entry.future for entry in self._queue)}

    def _answer_s(self) -> float:
        """Return an upper bound of the time from a batch's return to its answers' arrival."""
        return self._answering.bound_s(1) + WIRE_S

    def _of_a_batch(self, rows: int) -> int:
        return min(max(rows, 1), self._limits.max_rows)

    def _pump(self) -> None:
        """Send and refuse all entries that are due, until the policy says to wait.

        The module's docstring lists when a batch is due.
        """
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
                # Uses no deviations, which is less strict than at admission: these rows have waited, and may well be in
                # time.
                ends_s=self._ends_s(queued_rows, now_s, free_s, 0.0),
                bound_s=self._ends_s(queued_rows, now_s, now_s, ADMIT_DEVIATIONS) - now_s,
                limits=self._limits,
                due_s=free_s - SEND_AHEAD_S,
                full_due_s=free_s - SEND_AHEAD_S - (self._times.at_most_s(full_s, FULL_LEAD_DEVIATIONS) - full_s),
                # After a large batch the same clients usually send again at once. So an idle replica waits, at most
                # `max_delay_s`, until half as many rows as in the last batch have arrived: a batch of 1 costs about a
                # quarter of a batch of 32.
                min_rows_to_send=self._in_flight.last_rows // 2,
            )
            positions = {*decision.late, *decision.batch}
            if not positions:
                if decision.wake_s is not None:
                    self._timer = self._loop.call_at(decision.wake_s, self._pump)
                return
            first = islice(self._queue.of_next_form(), max(positions) + 1)
            chosen = {i: entry for i, entry in enumerate(first) if i in positions}
            # A cancelled caller removes its rows from the queue only when its task runs again, so it may still be
            # queued here.
            if gone := [entry for entry in chosen.values() if entry.future.done()]:
                for entry in gone:
                    self._queue.remove(entry)
                continue
            for position in decision.late:
                late = chosen[position]
                self._queue.remove(late)
                self._load.refuse(late.waiting.rows)
                late.future.set_exception(too_late(late.waiting.deadline_s - now_s, begun=bool(late.pieces)))
            if decision.batch:
                self._in_flight.send(self._queue.take([(chosen[at], rows) for at, rows in decision.batch.items()]))


# --- In flight ---
# The batches between this process and the model. Each request's answer is a slice of its batch's outputs.

# The minimum time left of a batch, as a fraction of the time that it has already taken.
OVERDUE = 0.25


class Model(Protocol):
    """The interface of the model that runs a batch.

    In the service it is `serve.ray_serve.ServeModel`, which sends the batch to a replica. Cancelling the call cancels
    the batch.
    """

    async def forward(self, rows: Rows) -> Outputs: ...


@dataclass
class Batch:
    """A batch in flight.

    `computing_s` is its expected compute time. `begun_s` is when the replica began it, None while another batch is
    ahead of it.
    """

    computing_s: float
    begun_s: float | None


class InFlight:
    """The batches between this process and a model.

    Lives on one event loop. `batches` are in the order in which they were sent; the first `replicas` of them are being
    computed. `last_rows` is the number of rows in the last batch. `ended` is called after each batch.
    """

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
        # The error message for the callers of a batch that is cancelled.
        self.why_given_up = "the batch was given up"

    def scale(self, replicas: int) -> None:
        self._replicas = replicas
        self._begin()

    def frees_s(self, now_s: float) -> list[float]:
        """Return when each replica is expected to be free, the earliest first."""
        frees_s: list[float] = []
        behind = []
        for batch in self.batches.values():
            if batch.begun_s is None or len(frees_s) == self._replicas:
                behind.append(batch)
            else:
                # The longer a batch has overrun its estimate, the longer it is expected to take still.
                at_least_s = now_s + OVERDUE * (now_s - batch.begun_s)
                frees_s.append(max(batch.begun_s + batch.computing_s, at_least_s))
        frees_s += [now_s] * (self._replicas - len(frees_s))
        heapq.heapify(frees_s)
        for batch in behind:
            heapq.heapreplace(frees_s, frees_s[0] + batch.computing_s)
        return sorted(frees_s)

    def send(self, entries: list[Entry]) -> None:
        """Send one batch of rows of one form."""
        self.last_rows = sum(entry.waiting.rows for entry in entries)
        # The compute time in the replica alone, without the transfer and the wait for the batch before.
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
        """Mark the batches that a returned batch has unblocked as begun."""
        for batch in islice(self.batches.values(), self._replicas):
            if batch.begun_s is None:
                batch.begun_s = self._loop.time()

    def give_up(self) -> None:
        for batch in self.batches:
            batch.cancel()

    async def _run(self, entries: list[Entry], batch: Batch) -> None:
        rows: Rows | None = None
        try:
            # The rows of a single request are passed on without a copy.
            rows = Rows.joined([entry.rows for entry in entries])
            started_s = self._loop.time()
            with tracing().batch((entry.traced for entry in entries), len(rows)):
                outputs = await self._model.forward(rows)
            returned_s = self._loop.time()
            if not outputs.sent_again:
                # The wait for the batch before is excluded: it is no part of this batch's compute time.
                begun_s = started_s if batch.begun_s is None else max(started_s, batch.begun_s)
                self._times.observe(len(rows), returned_s - begun_s, outputs.input_s + outputs.infer_s)
            stop = 0
            for entry in entries:
                start, stop = stop, stop + entry.waiting.rows
                if entry.future.done():
                    continue
                entry.input_s, entry.infer_s, entry.returned_s = outputs.input_s, outputs.infer_s, returned_s
                try:
                    its_own = outputs.slice(start, stop)
                    entry.future.set_result(its_own.checked(entry.first_row))
                    self._statistics.non_finite_rows += len(its_own.non_finite)
                except MillraceError as error:  # concerns this request only; the others in the batch are fine
                    # The traceback refers to this frame, and so to the rows of the whole batch, see
                    # `PriorityQueue.release`.
                    entry.future.set_exception(error.with_traceback(None))
            self._statistics.batch_ran(
                rows=len(rows),
                round_trip_s=returned_s - started_s,
                input_s=outputs.input_s,
                infer_s=outputs.infer_s,
                output_s=self._loop.time() - returned_s,
            )
        except asyncio.CancelledError:
            fail(entries, draining(self.why_given_up))
            raise
        except Exception as error:
            fail(entries, error)
            # Frees the rows, see `PriorityQueue.release`.
            entries.clear()
            rows = None


# --- Priority queue ---
# The rows that wait for a batch, ordered by priority, then by arrival.
#
# Requests larger than a batch ("large requests") come after all others of the same priority and fill the space that
# those leave in each batch. They are owed the space in batches that they could not share, and at least `GUARANTEED` of
# each batch, as in deficit round robin (Shreedhar and Varghese, 1995). Once they are owed a whole batch, a large
# request goes first of its priority.

# The fraction of each batch's rows that large requests get, however many rows the others have.
GUARANTEED = 1 / 8


class Entry:
    """Rows that are queued or in a batch, and the future of their outputs.

    `first_row` is the index of the first row within its request, `level` the priority's index in the queue. `input_s`,
    `infer_s` and `returned_s`, the time of the batch's return, are known once it is answered.

    A large request is one entry with the rows that still wait. Each batch takes a piece, which is an entry of its own;
    the outputs of all `pieces` together are the request's outputs.
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
        self.returned_s = 0.0
        self.pieces: list[Entry] = []
        self.unanswered = waiting.rows
        self.traced = traced

    def outputs(self) -> Sequence[Array]:
        """Return the outputs; call it only once the entry is answered."""
        if not self.pieces:
            return self.future.result()
        return [np.concatenate(parts) for parts in zip(*(piece.future.result() for piece in self.pieces), strict=True)]


class PriorityQueue:
    """The queue of waiting rows.

    Lives on one event loop. `rows` counts the waiting rows of all requests. `emptied` is set while the queue is empty.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._loop = asyncio.get_running_loop()
        # One dictionary per priority and size class, see `_turn`: within a priority, requests that fit a batch come
        # before large ones. Each is in order of arrival, and removal from the middle is cheap. `_forms` holds the same
        # by form: rows of two forms share no batch, so a batch is formed from the entries of one form.
        self._turns: list[dict[Entry, None]] = [{} for _ in range(2 * PRIORITY_LEVELS)]
        self._forms: dict[str, list[dict[Entry, None]]] = {}
        # Rows of requests that fit a batch, by form and priority. Large requests are few and are counted one by one.
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
        """Iterate over the entries that may share a batch with the first one, in order."""
        first = next(iter(self), None)
        return self._in_order(self._forms[first.waiting.form]) if first is not None else iter(())

    def batches_ahead(self, rows: int, form: str, priority: int) -> int:
        """Return how many batches would go before the one with the last of `rows` new rows.

        A new large request takes turns, batch by batch, with the large requests of its priority. Before a smaller
        request they take only the whole batches that they are owed; in a shared batch they get the space left over.
        """
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
        if any(waiting.form != form for waiting in peers):  # they alternate with batches of the other form
            return 2 * batches + 1
        return batches + int(self._owed_rows / self._max_rows + batches * GUARANTEED)

    def _batches(self, ahead: dict[str, int], rows: int, form: str) -> int:
        others = sum(math.ceil(count / self._max_rows) for other, count in ahead.items() if other != form)
        return others + (ahead.get(form, 0) + rows - 1) // self._max_rows

    def put(self, rows: Rows, priority: int, now_s: float, deadline_s: float) -> Entry:
        """Queue the rows of one request, any number of them."""
        large = len(rows) > self._max_rows
        waiting = Waiting(len(rows), rows.form, now_s, deadline_s, rows.size_bytes, divisible=large)
        future: asyncio.Future[Sequence[Array]] = self._loop.create_future()
        entry = Entry(rows, 0, priority - 1, waiting, future, tracing().waiting(len(rows)))
        if large:
            self._large[entry] = None
        self._add(entry)
        return entry

    def take(self, chosen: Sequence[tuple[Entry, int]]) -> list[Entry]:
        """Remove a batch from the queue: the first `rows` rows of each chosen entry.

        Only of a large request may rows be left over; they wait behind all entries of the same priority.
        """
        if self._large:
            large_rows = sum(rows for entry, rows in chosen if entry.waiting.divisible)
            left_rows = self._max_rows - sum(rows for entry, rows in chosen if not entry.waiting.divisible)
            # If it went first because it was owed a batch, its rows pay off that debt.
            due_rows = 0.0 if self._large_first() else max(left_rows, GUARANTEED * self._max_rows)
            owed_rows = self._owed_rows + due_rows - large_rows
            self._owed_rows = min(max(owed_rows, 0.0), 2.0 * self._max_rows)
        return [self._take(entry, rows) for entry, rows in chosen]

    def _take(self, entry: Entry, rows: int) -> Entry:
        if not entry.waiting.divisible:
            self.remove(entry)
            return entry
        waiting, start = entry.waiting, entry.first_row
        taken = entry.rows.slice(start, start + rows)
        piece_waiting = replace(waiting, rows=rows, size_bytes=taken.size_bytes, divisible=False)
        piece = Entry(taken, start, entry.level, piece_waiting, self._loop.create_future(), entry.traced)
        entry.pieces.append(piece)
        piece.future.add_done_callback(partial(_gather, entry, piece))
        if rows == waiting.rows:
            self.remove(entry)
        else:
            self._unlink(entry)
            left_bytes = waiting.size_bytes * (waiting.rows - rows) // waiting.rows
            entry.waiting = replace(waiting, rows=waiting.rows - rows, size_bytes=left_bytes)
            entry.first_row = start + rows
            self._add(entry)
        return piece

    def remove(self, entry: Entry) -> None:
        if entry in self._turns[_turn(entry)]:
            self._unlink(entry)
            self._large.pop(entry, None)
            if not self._large:
                self._owed_rows = 0.0
            if not self:
                self.emptied.set()
            if entry.traced is not None:
                entry.traced.end()

    def release(self, entry: Entry) -> None:
        """Remove a finished request from the queue and break its reference cycles.

        An error's traceback refers to the entry, and the entry's future to the error. Anything kept here would hold all
        rows until the garbage collector runs.
        """
        self.remove(entry)
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

    def _unlink(self, entry: Entry) -> None:
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
    """Return the index of the entry's priority and size class, when large requests are owed nothing."""
    return 2 * entry.level + int(entry.waiting.divisible)


def _gather(entry: Entry, piece: Entry, answered: asyncio.Future[Sequence[Array]]) -> None:
    """Complete a large request once its last piece is answered, or one has failed."""
    if answered.cancelled():
        return
    error = answered.exception()
    if entry.future.done():
        return
    if error is not None:
        entry.future.set_exception(error)
        return
    entry.input_s, entry.infer_s = entry.input_s + piece.input_s, entry.infer_s + piece.infer_s
    entry.returned_s = max(entry.returned_s, piece.returned_s)
    entry.unanswered -= piece.waiting.rows
    if not entry.unanswered:
        entry.future.set_result(())


def fail(entries: Iterable[Entry], error: Exception) -> None:
    """Fail all entries that are not done yet."""
    for entry in entries:
        if not entry.future.done():
            entry.future.set_exception(error)
