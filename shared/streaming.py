"""Helpers for servicers' streams: blocking iterators in threads, limited slots, and ready-made messages."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from shared.errors import DeadlineExceeded, ResourceExhausted

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
