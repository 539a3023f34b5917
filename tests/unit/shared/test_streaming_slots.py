"""Streams that hold much memory are counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from shared.errors import ResourceExhausted
from shared.grpc_server import interceptor
from shared.streaming import STALLED_AFTER_S, Slots


def test_one_stream_more_than_there_are_slots_is_refused_until_one_ends() -> None:
    slots = Slots(2)

    with slots.slot():
        with slots.slot(), pytest.raises(ResourceExhausted) as refused, slots.slot():
            pass
        assert refused.value.retry_after_s
        with slots.slot():
            pass


def test_a_stream_that_fails_gives_its_slot_back() -> None:
    slots = Slots(1)

    for _ in range(3):
        with pytest.raises(OSError, match="broken"), slots.slot():
            raise OSError("broken")


class Reader:
    """A call of a client that takes messages when it likes, behind the interceptor."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._taken = asyncio.Semaphore(0)
        self.status: list[str] = []
        context: Any = SimpleNamespace(
            write=self._write,
            set_code=lambda code: self.status.append(code.name),
            set_details=lambda details: self.status.append(details),
            invocation_metadata=tuple,
            set_trailing_metadata=lambda _: None,
            time_remaining=lambda: None,
        )
        stream = interceptor.CallInterceptor()._stream(self._read, "Read")
        self.call = asyncio.ensure_future(stream(SimpleNamespace(), context))

    async def take(self) -> None:
        self._taken.release()
        await settled()

    async def _read(self, _: object, __: object) -> AsyncIterator[bytes]:
        with self._slots.slot() as slot:
            while True:
                with slot.waiting():
                    yield b"rows"

    async def _write(self, _: bytes) -> None:
        await self._taken.acquire()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_reader_that_takes_nothing_gives_its_slot_to_one_that_waits_and_is_notified() -> None:
    now = 0.0

    async def main() -> None:
        nonlocal now
        slots = Slots(2, lambda: now)
        stalled, slow = Reader(slots), Reader(slots)
        await settled()
        now = STALLED_AFTER_S - 1
        await slow.take()
        with pytest.raises(ResourceExhausted), slots.slot():
            pass

        now = STALLED_AFTER_S + 1
        third = Reader(slots)
        await settled()

        assert stalled.call.done()
        assert stalled.status[0] == "DEADLINE_EXCEEDED"
        assert "read on" in stalled.status[1]
        await slow.take()
        assert not slow.call.done()
        assert not third.call.done()
        with pytest.raises(ResourceExhausted), slots.slot():
            pass
        for reader in (slow, third):
            reader.call.cancel()
        await asyncio.gather(slow.call, third.call, return_exceptions=True)

    asyncio.run(main())


def test_a_reader_that_takes_nothing_stays_while_nobody_waits() -> None:
    now = 0.0

    async def main() -> None:
        nonlocal now
        slots = Slots(2, lambda: now)
        paused = Reader(slots)
        await settled()
        now = 10 * STALLED_AFTER_S
        with slots.slot():
            await settled()
        await paused.take()
        assert not paused.call.done()
        paused.call.cancel()
        await asyncio.gather(paused.call, return_exceptions=True)

    asyncio.run(main())
