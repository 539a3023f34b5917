"""Watches of resources in the store: one poller reads a resource for all of its watchers in a process.

Watchers wait in the event loop and take no thread. A poller reads often just after a change, so that the end of short
work is seen at once, and then less and less often, up to `LONGEST_INTERVAL_S` apart. Its reads run in threads of their
own, so that a slow store does not keep other calls waiting.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

# The interval between two readings is this share of the time for which nothing has changed, within its limits.
UNCHANGED_SHARE = 0.1
SHORTEST_INTERVAL_S = 0.1
LONGEST_INTERVAL_S = 1.0
# How long a poller without watchers is kept. Clients repeat a wait of a second until their operation is done.
LINGER_S = 5.0
# The threads that read for all watchers of one `Watches`.
READS_AT_ONCE = 16

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Follower(Protocol[T_co]):
    """Reads one resource again and again. Called by one thread at a time."""

    @property
    def number(self) -> int:
        """The number of the newest record that was read. Another number makes the readings frequent for a while."""

    def read(self) -> T_co:
        """Return the resource as it is now. Costs at most two requests where nothing is new."""


def interval_s(unchanged_s: float) -> float:
    """Return the pause before the next reading of a resource that has not changed for `unchanged_s`."""
    return min(max(unchanged_s * UNCHANGED_SHARE, SHORTEST_INTERVAL_S), LONGEST_INTERVAL_S)


class Watches(Generic[T]):
    """The watched resources of one service.

    `follow` opens a resource by its name. It may block, and raises the errors that a watcher of an unknown resource
    gets. All methods belong to the event loop.
    """

    def __init__(self, follow: Callable[[str], Follower[T]]) -> None:
        self._follow = follow
        self._pool = ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="watches")
        self._pollers: dict[str, Poller[T]] = {}

    @asynccontextmanager
    async def watching(self, name: str) -> AsyncIterator[Watch[T]]:
        """Watch a resource while the context is open."""
        watch = Watch(self, name)
        try:
            yield watch
        finally:
            watch.leave()

    def join(self, name: str) -> Poller[T]:
        """Return the resource's poller, with one watcher more."""
        poller = self._pollers.get(name)
        if poller is None or poller.has_ended:
            poller = Poller(self._pool, lambda: self._follow(name))
            self._pollers[name] = poller
            # In a context of its own: it outlives the call of its first watcher.
            poller.task = asyncio.create_task(self._poll(name, poller), context=contextvars.Context())
        poller.add_watcher()
        return poller

    async def _poll(self, name: str, poller: Poller[T]) -> None:
        try:
            await poller.run()
        finally:
            # Nothing is awaited between the poller's last look at its watchers and this.
            poller.end()
            if self._pollers.get(name) is poller:
                del self._pollers[name]


class Watch(Generic[T]):
    """One watcher of a resource. Its methods raise the error of the reading that they wait for."""

    def __init__(self, watches: Watches[T], name: str) -> None:
        self._watches = watches
        self._name = name
        self._poller = watches.join(name)
        self._seen = 0

    async def first(self) -> T:
        """Return the newest reading, and wait for one only if the next is due. So it is at most an interval old."""
        return await self._reading(self._poller.number_of_first())

    async def fresh(self) -> T:
        """Return a reading that began after this call. Calls at the same time share one."""
        while True:
            try:
                return await self._reading(self._poller.request())
            except _EndedBefore:  # with a reading that had begun before this call
                self.leave()
                self._poller = self._watches.join(self._name)

    async def next(self) -> T:
        """Return the newest reading after the one that was returned last. Readings in between are left out."""
        return await self._reading(self._seen + 1)

    def leave(self) -> None:
        self._poller.remove_watcher()

    async def _reading(self, number: int) -> T:
        value = await self._poller.reading(number)
        self._seen = self._poller.readings
        return value


class _EndedBefore(Exception):
    """The poller has ended, and the reading was never begun."""


class Poller(Generic[T]):
    """The reader of one resource. `readings` counts those that are done, and `begun` those that were begun."""

    def __init__(self, pool: ThreadPoolExecutor, follow: Callable[[], Follower[T]]) -> None:
        self.task: asyncio.Task[None] | None = None
        self.readings = 0
        self.has_ended = False
        self._pool = pool
        self._follow = follow
        self._follower: Follower[T] | None = None
        self._begun = 0
        # When the next reading is due, by the event loop's clock.
        self._due_at = 0.0
        self._watchers = 0
        # The newest reading; empty before the first.
        self._value: list[T] = []
        self._error: Exception | None = None
        # Set when a reading is done, and then replaced.
        self._done = asyncio.Event()
        # Set when a reading is due before its time, and when a watcher comes.
        self._requested = asyncio.Event()
        self._came = asyncio.Event()

    def add_watcher(self) -> None:
        self._watchers += 1
        self._came.set()

    def remove_watcher(self) -> None:
        self._watchers -= 1

    def number_of_first(self) -> int:
        """Return the number of the reading that a new watcher gets first."""
        is_due = asyncio.get_running_loop().time() >= self._due_at
        return self.readings + 1 if is_due else self.readings

    def request(self) -> int:
        """Request a reading at once. Return its number."""
        self._requested.set()
        return self._begun + 1

    async def reading(self, number: int) -> T:
        """Wait for the reading of that number. Return the newest one."""
        while self.readings < number:
            if self.has_ended:
                if self._error is not None and number <= self._begun:
                    raise self._error.with_traceback(None)
                raise _EndedBefore
            await self._done.wait()
        return self._value[0]

    async def run(self) -> None:
        """Read until no watcher has been there for `LINGER_S`, or a reading fails."""
        loop = asyncio.get_running_loop()
        number, changed_at = -1, loop.time()
        try:
            while True:
                self._begun += 1
                self._requested.clear()
                began = loop.time()
                self._value = [await loop.run_in_executor(self._pool, self._read)]
                assert self._follower is not None
                if self._follower.number != number:
                    number, changed_at = self._follower.number, began
                self._due_at = began + interval_s(began - changed_at)
                self.readings += 1
                self._announce()
                if not await self._pause():
                    return
        except Exception as error:  # of the store, or the resource is gone: each watcher raises it
            self._error = error

    def end(self) -> None:
        self.has_ended = True
        self._announce()

    def _read(self) -> T:
        if self._follower is None:
            self._follower = self._follow()
        return self._follower.read()

    def _announce(self) -> None:
        self._done.set()
        self._done = asyncio.Event()

    async def _pause(self) -> bool:
        """Wait for the time of the next reading. Return False if the watchers stay away."""
        loop = asyncio.get_running_loop()
        while True:
            self._came.clear()
            if not self._watchers:
                if not await _is_set_within(self._came, LINGER_S) and not self._watchers:
                    return False
            elif self._requested.is_set() or (left_s := self._due_at - loop.time()) <= 0:
                return True
            else:
                await _is_set_within(self._requested, left_s)


async def _is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
