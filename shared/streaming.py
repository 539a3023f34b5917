"""What servicers share: streams of blocking iterators, watches of resources, and `google.longrunning.Operations`.

Of a watched resource one poller reads for all of its watchers in a process.

Watchers wait in the event loop and take no thread. A poller reads often just after a change, so that the end of short
work is seen at once, and then less and less often, up to `LONGEST_INTERVAL_S` apart. Its reads run in threads of their
own, so that a slow store does not keep other calls waiting.

A service's source of operations is its durable jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import empty_pb2
from grpc import aio

from shared import names
from shared.errors import DeadlineExceeded, NotFound, ResourceExhausted, Unimplemented, invalid_field
from shared.storage import ObjectStore
from shared.storage.object_store import unresponsive_store

# --- Streams ---

Item = TypeVar("Item")


async def in_threads(items: Generator[Item, None, None]) -> AsyncIterator[Item]:
    """Compute each item in a thread while the one before it is sent, and not further ahead.

    A slow client thus slows down only its own reading. The generator is closed at the end, also if the client has
    disconnected.
    """
    done = object()
    # A cancelled call leaves its step running in the thread, and a running generator cannot be closed.
    running = threading.Lock()

    def step() -> Item | object:
        with running:
            return next(items, done)

    def close() -> None:
        with running:
            items.close()

    try:
        following = asyncio.ensure_future(asyncio.to_thread(step))
        while (item := await following) is not done:
            following = asyncio.ensure_future(asyncio.to_thread(step))
            yield cast(Item, item)
    finally:
        following.cancel()
        await asyncio.to_thread(close)


# A client that keeps its call waiting for this long gives its slot to a waiting one. A message has up to 3.5 MiB, so a
# client that takes 60 KiB a second always keeps its slot. While slots are free, every client keeps its slot.
STALLED_AFTER_S = 60.0


@dataclass(frozen=True)
class Wording:
    """Texts and reasons for refused clients.

    `full` and `full_reason` are for a client that finds every slot taken; `stalled` and `stalled_reason` are for one
    whose slot went to another.
    """

    full: str
    full_reason: str
    stalled: str
    stalled_reason: str


READS = Wording(
    full="versions are being read",
    full_reason="TOO_MANY_READS",
    stalled="no message was taken for {:.0f} s while others wait to read; read on with `offset` from the first row "
    "that is missing",
    stalled_reason="READER_STALLED",
)
DOWNLOADS = Wording(
    full="checkpoints are being downloaded",
    full_reason="TOO_MANY_DOWNLOADS",
    stalled="no message was taken for {:.0f} s while others wait to download; go on in a new call from the file and "
    "offset that are missing",
    stalled_reason="READER_STALLED",
)
IMPORTS = Wording(
    full="checkpoints are being imported",
    full_reason="TOO_MANY_IMPORTS",
    stalled="nothing was sent for {:.0f} s while others wait to import; import it again",
    stalled_reason="SENDER_STALLED",
)
UPLOADS = Wording(
    full="calls are sending chunks",
    full_reason="TOO_MANY_UPLOADS",
    stalled="nothing was sent or taken for {:.0f} s while others wait to send their chunks; go on in a new call from "
    "what GetUpload says",
    stalled_reason="SENDER_STALLED",
)


class Slots:
    """Limit on concurrent streams, because each holds some tens of MiB. For one event loop."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic, wording: Wording = READS) -> None:
        self._most = most
        self._clock = clock
        self._wording = wording
        self._taken: set[Slot] = set()

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        """Take a slot. Raises `ResourceExhausted` if active clients hold all slots."""
        if len(self._taken) >= self._most:
            self._take_from_stalled()
        slot = Slot(self._clock, self._wording)
        self._taken.add(slot)
        try:
            yield slot
        finally:
            self._taken.discard(slot)

    def _take_from_stalled(self) -> None:
        longest = max(self._taken, key=lambda slot: slot.stalled_s)
        if longest.stalled_s < STALLED_AFTER_S:
            raise ResourceExhausted(
                f"{self._most} {self._wording.full} at present, which is the most; try again",
                reason=self._wording.full_reason,
                retry_after_s=1.0,
            )
        self._taken.remove(longest)
        longest.lose()


class Slot:
    """The slot of one call. The call's own tasks use all methods but `lose`."""

    def __init__(self, clock: Callable[[], float], wording: Wording) -> None:
        self._clock = clock
        self._wording = wording
        # The time since when each of the call's tasks waits for the client.
        self._waiting: dict[asyncio.Task[Any], float] = {}
        self._lost = False

    @property
    def stalled_s(self) -> float:
        """Return how long the client has neither taken a ready message nor sent an awaited one."""
        return max((self._clock() - since for since in self._waiting.values()), default=0.0)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure a wait for the client: around the `yield` of a message, or until the client sends one.

        Raises `DeadlineExceeded` if the slot was lost meanwhile.
        """
        task = asyncio.current_task()
        assert task is not None
        self._waiting[task] = self._clock()
        try:
            yield
        finally:
            del self._waiting[task]
            if self._lost:
                # The call's task waits in the interceptor for its client to take the message. Its cancellation closes
                # the servicer's generator, and becomes an error with a status here.
                task.uncancel()
                raise DeadlineExceeded(
                    self._wording.stalled.format(STALLED_AFTER_S), reason=self._wording.stalled_reason
                )

    def lose(self) -> None:
        self._lost = True
        for task in self._waiting:
            task.cancel()


def framed(field_number: int, parts: Sequence[bytes | memoryview]) -> bytes:
    """Encode a protobuf message whose one set field, of type bytes, is the concatenation of `parts`.

    The result equals the library's, with one copy instead of three.
    """
    return b"".join((_varint(field_number << 3 | 2), _varint(sum(len(part) for part in parts)), *parts))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


# --- Watches ---

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


# --- Operations ---

LONGEST_WAIT_S = 60.0
# A wait is answered so long before the caller's own deadline cuts the call off.
ANSWER_S = 0.2
# How long a shorter wait goes on until the operation was read once.
FIRST_READ_S = 10.0
# Operations of a list that are read at a time.
READ_AT_ONCE = 16

Context = aio.ServicerContext[Any, Any]


class OperationSource(Protocol):
    """A service's operations, by name (`operations/{o}`). Called in threads."""

    def get(self, name: str, *, brief: bool = False) -> operations_pb2.Operation:
        """Return one operation. `brief` limits it to `PAGE_BYTES`, as in lists. Raises `NotFound`."""

    def follow(self, name: str) -> Follower[operations_pb2.Operation]:
        """Open one operation for repeated reads. Raises `NotFound`."""

    def ids_after(self, after: str, most: int) -> Sequence[str]:
        """Return the next ids beyond `after` of this service's operations, in order; see `operation_ids_after`."""

    def cancel(self, name: str) -> None:
        """Request the operation's end. Raises `NotFound`."""


class OperationsServicer(operations_pb2_grpc.OperationsServicer):  # type: ignore[misc]
    """Servicer of Get, List, Wait and Cancel.

    Delete is UNIMPLEMENTED, because an operation is the history of a resource.
    """

    def __init__(self, source: OperationSource) -> None:
        self._source = source
        self._watches = Watches(source.follow)
        # Reads the operations of lists.
        self._pool = ThreadPoolExecutor(READ_AT_ONCE, thread_name_prefix="operations")

    async def GetOperation(self, request: Any, context: Context) -> operations_pb2.Operation:
        return await asyncio.to_thread(self._source.get, _checked(request.name))

    async def ListOperations(self, request: Any, context: Context) -> operations_pb2.ListOperationsResponse:
        if request.name not in ("", "operations"):
            raise invalid_field("name", request.name, "use operations")
        if request.filter:
            raise invalid_field("filter", request.filter, "leave it empty; filters are not served")
        return await asyncio.to_thread(self._list, request.page_size, request.page_token)

    async def WaitOperation(self, request: Any, context: Context) -> operations_pb2.Operation:
        """Return the operation once it is done, or in its present state after `timeout` (default and limit: 60 s).

        Raises `Unavailable` if the present state cannot be read in that time and in `FIRST_READ_S`.
        """
        name = _checked(request.name)
        # ToTimedelta refuses some of the durations that a client may send.
        given = request.timeout.seconds + request.timeout.nanos / 1e9 if request.HasField("timeout") else LONGEST_WAIT_S
        remaining = context.time_remaining()
        remaining = LONGEST_WAIT_S if remaining is None else remaining - ANSWER_S
        wait_s = min(given, remaining, LONGEST_WAIT_S - 1)
        if wait_s <= 0:
            return await asyncio.to_thread(self._source.get, name)
        now = asyncio.get_running_loop().time()
        until = now + wait_s
        async with self._watches.watching(name) as watch:
            try:
                async with asyncio.timeout_at(now + min(max(wait_s, FIRST_READ_S), remaining)):
                    operation = await watch.first()
            except TimeoutError:
                raise unresponsive_store(name) from None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    while not operation.done:
                        operation = await watch.next()
        return operation

    async def CancelOperation(self, request: Any, context: Context) -> empty_pb2.Empty:
        await asyncio.to_thread(self._source.cancel, _checked(request.name))
        return empty_pb2.Empty()

    async def DeleteOperation(self, request: Any, context: Context) -> empty_pb2.Empty:
        raise Unimplemented("operations are kept as history; delete the resource that it made")

    def _list(self, page_size: int, page_token: str) -> operations_pb2.ListOperationsResponse:
        """Return one page, which ends early if its operations exceed one message."""
        size, after = names.checked_size(page_size), names.key_of(page_token)
        if after and not names.ID.fullmatch(after):
            raise invalid_field("page_token", page_token, "send a next_page_token as it came, or none")
        found = self._source.ids_after(after, size + 1)
        ids = found[:size]
        answer = operations_pb2.ListOperationsResponse(
            next_page_token=names.token_of(ids[-1]) if len(found) > size else ""
        )
        size_bytes, last = 0, ""
        for start in range(0, len(ids), READ_AT_ONCE):
            some = ids[start : start + READ_AT_ONCE]
            for one, operation in zip(some, self._pool.map(self._find, some), strict=True):
                if operation is None:
                    continue
                size_bytes += operation.ByteSize()
                if answer.operations and size_bytes > names.PAGE_BYTES:
                    answer.next_page_token = names.token_of(last)
                    return answer
                answer.operations.append(operation)
                last = one
        return answer

    def _find(self, operation_id: str) -> operations_pb2.Operation | None:
        try:
            return self._source.get(f"operations/{operation_id}", brief=True)
        except NotFound:  # the caller died before it created the job
            return None


def _checked(name: str) -> str:
    names.parse("name", name, "operations/{o}")
    return name


def operation_ids_after(store: ObjectStore, prefixes: Iterable[str], after: str, most: int) -> list[str]:
    """Return the next ids with one of these prefixes, beyond the id `after` and in order, at most `most`.

    Each operation has a folder below `operations/`, with those of all services.
    """
    found: list[str] = []
    for prefix in sorted(prefixes):
        if len(found) < most and (after < prefix or after.startswith(prefix)):
            ids = store.folders_after("operations", max(after, prefix), most - len(found))
            found += itertools.takewhile(lambda one, prefix=prefix: one.startswith(prefix), ids)  # type: ignore[misc]
    return found
