"""What the servicer's streams are made of: blocking iterators run in threads, and messages that are bytes already."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, cast

from shared.errors import ResourceExhausted

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


class Slots:
    """So many streams at once: each holds some tens of MiB, whatever its client does."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Raises `ResourceExhausted` where all are taken. For one event loop."""
        if self._taken >= self._most:
            raise ResourceExhausted(
                f"{self._most} versions are being read at present, which is the most; try again",
                reason="TOO_MANY_READS",
                retry_after_s=1.0,
            )
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1


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
