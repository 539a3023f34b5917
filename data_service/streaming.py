"""What the servicer's streams are made of: blocking iterators run in threads, and messages that are bytes already."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from shared.errors import DeadlineExceeded, ResourceExhausted

Item = TypeVar("Item")


async def in_threads(items: Generator[Item, None, None]) -> AsyncIterator[Item]:
    """Takes each item in a thread while the one before is sent, and no further: a slow client holds up its own
    reading. Closes the generator at the end, also where the client has gone."""
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


# A reader that takes no message for so long gives its slot up to one that waits. A message has up to 3.5 MiB, so
# whoever takes 60 KiB a second stays in any case, and while there are slots left so does whoever pauses.
STALLED_AFTER_S = 60.0


class Slots:
    """So many streams at once: each holds some tens of MiB, whatever its client does. For one event loop."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._taken: set[Slot] = set()

    @contextmanager
    def one(self) -> Iterator[Slot]:
        """Raises `ResourceExhausted` where all are taken by readers that take something."""
        if len(self._taken) >= self._most:
            self._take_from_stalled()
        slot = Slot(self._clock)
        self._taken.add(slot)
        try:
            yield slot
        finally:
            self._taken.discard(slot)

    def _take_from_stalled(self) -> None:
        longest = max(self._taken, key=lambda slot: slot.stalled_s)
        if longest.stalled_s < STALLED_AFTER_S:
            raise ResourceExhausted(
                f"{self._most} versions are being read at present, which is the most; try again",
                reason="TOO_MANY_READS",
                retry_after_s=1.0,
            )
        self._taken.remove(longest)
        longest.lose()


class Slot:
    """Of one call, in whose task all is called but `lose`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None
        self._task: asyncio.Task[Any] | None = None
        self._lost = False

    @property
    def stalled_s(self) -> float:
        """How long the client has taken nothing of a message that lies ready."""
        return 0.0 if self._since is None else self._clock() - self._since

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Around each `yield` of a message. Raises `DeadlineExceeded` where the slot was lost meanwhile."""
        self._since, self._task = self._clock(), asyncio.current_task()
        try:
            yield
        finally:
            self._since = None
            if self._lost and self._task is not None:
                # The call's task waits in the interceptor, for its client to take the message. Its cancellation closes
                # the servicer's generator, and here becomes an error that has a status.
                self._task.uncancel()
                raise DeadlineExceeded(
                    f"no message was taken for {STALLED_AFTER_S:.0f} s while others wait to read; read on with "
                    "`offset` from the first row that is missing",
                    reason="READER_STALLED",
                )

    def lose(self) -> None:
        self._lost = True
        if self._task is not None:
            self._task.cancel()


def framed(field_number: int, parts: Sequence[bytes | memoryview]) -> bytes:
    """A protobuf message whose one set field, of type bytes, is `parts` one after the other: what the library makes of
    it too, with one copy instead of three."""
    return b"".join((_varint(field_number << 3 | 2), _varint(sum(len(part) for part in parts)), *parts))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
