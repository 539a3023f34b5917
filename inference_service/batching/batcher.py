"""The batcher of one model version: gathers rows of many requests into one call of the model.

It stands in front of Ray, so that Ray's cost per call is paid once a batch. `domain.batching` decides; this asks it
whenever rows come, a batch is back, or time has passed, with the clock, the queue and the batches in flight before it.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from itertools import islice
from typing import Any

from inference_service.batching.in_flight import InFlight, Model
from inference_service.batching.priority_queue import PriorityQueue, fail
from inference_service.domain.batch_times import BatchTimes
from inference_service.domain.batching import Limits, admit, decide, draining, starts_s, too_late
from inference_service.domain.load import Load, LoadMeter
from inference_service.domain.request_parameters import DEFAULT_PRIORITY
from inference_service.domain.rows import Outputs, Rows
from inference_service.domain.statistics import Statistics
from shared.errors import DeadlineExceeded, ResourceExhausted
from shared.grpc_server.door import Decaying

BATCHES_PER_REPLICA = 2  # one at work, one on its way: the replica never waits for the wire
# A batch is sent so long before its replica is expected to be free: the way there takes some of it, and estimates are
# wrong by the rest. One that is full gains nothing by waiting, so it is there also where the one before is earlier than
# expected by so many mean deviations.
LEAD_S, FULL_LEAD_DEVIATIONS = 0.003, 2.0
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
        self._apart: Batcher | None = None

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
        self._answering.learn(1, self._loop.time() - back_s)
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

    def apart(self) -> Batcher:
        """One before the same model for rows that are no requests: with a queue of its own, so that they share no batch
        with any, and counted nowhere. It closes with this one."""
        if self._apart is None:
            self._apart = Batcher(self._model, self._limits, self._times, Statistics())
            if self._closed is not None:
                self._apart.close(self._closed)
        return self._apart

    def scale(self, replicas: int) -> None:
        """The model has so many replicas now. While it has none, one batch at a time finds out when it has again."""
        limits = replace(self._limits, max_in_flight=BATCHES_PER_REPLICA * max(replicas, 1))
        if limits == self._limits:
            return
        more = limits.max_in_flight > self._limits.max_in_flight
        self._limits = limits
        self._in_flight.scale(limits.at_work)
        if self._apart is not None:
            self._apart.scale(replicas)
        if more:
            self._pump()

    def computing_s(self, rows: int) -> float:
        """What the model computes for so many rows, or a full batch, without the way there, which has the wait for the
        batch before; 0 while nobody knows."""
        return self._times.computing_s(self._of_a_batch(rows))

    def load(self) -> Load:
        """What it had to do since this was last asked."""
        return self._load.read(self._loop.time())

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
        left = list(self._queue)
        for entry in left:
            self._queue.leave(entry)
        fail(left, draining("the model was taken out of service"))
        self._in_flight.give_up()

    def close(self, why: str) -> None:
        """Refuses rows that come from now on."""
        self._closed = self._in_flight.why_given_up = why
        if self._apart is not None:
            self._apart.close(why)

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
                due_s=free_s - LEAD_S,
                full_due_s=free_s - LEAD_S - (self._times.at_most_s(full_s, FULL_LEAD_DEVIATIONS) - full_s),
                # Where the last batch had many rows, the first of the next ones does not go alone: as many come again,
                # most often, and one row costs a model a quarter of what 32 do.
                company=self._in_flight.last_rows // 2,
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
