"""A training job that is read again and again for all of its watchers: its states, and its events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from shared.errors import not_found
from shared.jobs import JobRecord, JobState
from shared.jobs.registry import log_prefix
from shared.log import Record, ResourceLog
from shared.storage import ObjectStore
from train_service.records.event_log import REPORT_INTERVAL_S, Event, EventKind, EventLog

# The newest events that are kept for watchers. Those who are further behind read the log themselves.
KEPT_EVENTS = 256
# How often events and what the job waits for are read, a little below the longest interval between two readings.
SIDE_INTERVAL_S = 0.9
WAITING = (JobState.PENDING, JobState.RECOVERING)


class View(Protocol):
    """A job as clients see it."""

    @property
    def record(self) -> JobRecord: ...

    @property
    def waiting_for(self) -> str: ...


V = TypeVar("V", bound=View)


@dataclass(frozen=True)
class JobReading(Generic[V]):
    """A job and its events at one time.

    `states` are those since the job was first read, oldest first, and `view` shows the newest of them. `events` are the
    newest events up to the number `last_sequence`. They were read after the states.
    """

    states: tuple[JobRecord, ...]
    view: V
    events: tuple[Event, ...]
    last_sequence: int

    def has(self, record: JobRecord) -> bool:
        """Return whether the reading is not older than this state of the job, or is of another job of its name."""
        return record in self.states or record.uid != self.states[0].uid

    def states_after(self, record: JobRecord) -> Sequence[JobRecord]:
        """Return the states after `record`, oldest first; of another job all. Empty if the reading is older."""
        if record.uid != self.states[0].uid:
            return self.states
        return self.states[self.states.index(record) + 1 :] if record in self.states else ()

    def events_after(self, sequence: int) -> Sequence[Event] | None:
        """Return the events after the number `sequence`, or None if the reading has only later ones."""
        missing = self.last_sequence - sequence
        if missing <= 0:
            return ()
        return self.events[-missing:] if missing <= len(self.events) else None


class FollowedJob(Generic[V]):
    """Reads one job again and again, see `shared.streaming.Follower`.

    `describe` returns the view of a state, and `waiting_for` what the next attempt waits for. Both read the store.

    The job's log is read each time: one request if nothing is new. Once in `SIDE_INTERVAL_S` comes one more, for the
    next event or, in turns, for what a waiting job waits for. After a new state all events are read.
    """

    def __init__(
        self,
        store: ObjectStore,
        name: str,
        describe: Callable[[JobRecord], V],
        waiting_for: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._name = name
        self._describe = describe
        self._waiting_for = waiting_for
        self._clock = clock
        self._wall_clock = wall_clock
        self._log = ResourceLog(store, log_prefix(name))
        self._event_log = EventLog(store, name)
        self._reading: JobReading[V] | None = None
        self._side_read_at = 0.0
        self._turn = 0
        # An attempt, and by how much its worker's clock was ahead at most.
        self._ahead = (0, 0.0)

    @property
    def number(self) -> int:
        return self._log.newest_known.number if self._log.newest_known else 0

    def read(self) -> JobReading[V]:
        """Return the job as it is now. Raises `NotFound`."""
        before = self._log.newest_known
        record = self._log.head()
        job = JobRecord.from_state(record.state) if record else None
        if record is None or job is None or job.state is JobState.DELETED:
            raise not_found(self._name)
        there = self._reading
        if there is None or job.uid != there.view.record.uid:
            # A job that was created anew has events of its own, which begin with number 1.
            last = self._event_log.last_sequence() if there is None else 0
            if there is not None:
                self._event_log = EventLog(self._store, self._name)
            there = JobReading((job,), self._describe(job), (), last)
            self._reading = self._with_events(there, to_the_end=True, is_new_state=True)
        elif record is not before:
            there = replace(there, states=(*there.states, *self._since(there.states[-1], record)))
            there = replace(there, view=self._describe(job))
            self._reading = self._with_events(there, to_the_end=True, is_new_state=True)
        elif job.state.final or self._clock() - self._side_read_at >= SIDE_INTERVAL_S:
            self._reading = self._with_side(there)
        else:
            return there
        self._side_read_at = self._clock()
        return self._reading

    def _since(self, seen: JobRecord, record: Record) -> list[JobRecord]:
        """Return the states after `seen` up to that of `record`, oldest first."""
        newest = JobRecord.from_state(record.state)
        behind = [newest]
        number = record.number - 1
        while (earlier := self._log.read(number)) is not None:
            job = JobRecord.from_state(earlier.state)
            if job == seen or job.uid != newest.uid:
                break
            behind.append(job)
            number -= 1
        return behind[::-1]

    def _with_side(self, there: JobReading[V]) -> JobReading[V]:
        """Return the reading with what may change without a new state."""
        job = there.view.record
        self._turn += 1
        if job.state not in WAITING or self._turn % 2:
            # A job that waits has no attempt that writes events, but events of the last one may come late.
            return self._with_events(there, to_the_end=job.state.final)
        if self._waiting_for(self._name) == there.view.waiting_for:
            return there
        return replace(there, view=self._describe(job))

    def _with_events(self, there: JobReading[V], *, to_the_end: bool, is_new_state: bool = False) -> JobReading[V]:
        """Return the reading with the events that were written since.

        Reports come `REPORT_INTERVAL_S` apart. So unless asked to read `to_the_end`, no event is looked for right
        behind a recent report.

        Events are gathered only after the end of a job. So those of a state that has been read before are records.
        """
        found: list[Event] = []
        for event in self._event_log.after(there.last_sequence, also_gathered=is_new_state):
            found.append(event)
            is_recent = event.kind is EventKind.PROGRESS and self._age_s(event) < REPORT_INTERVAL_S
            if is_recent and not to_the_end:
                break
        if not found:
            return there
        events = (*there.events, *found)[-KEPT_EVENTS:]
        return replace(there, events=events, last_sequence=found[-1].sequence)

    def _age_s(self, event: Event) -> float:
        """Return how long ago an event was written, as far as the worker's clock is not found to be ahead."""
        attempt, ahead_s = self._ahead
        age_s = self._wall_clock() - event.time
        ahead_s = max(-age_s, ahead_s if event.attempt == attempt else 0.0)
        self._ahead = (event.attempt, ahead_s)
        return age_s + ahead_s
