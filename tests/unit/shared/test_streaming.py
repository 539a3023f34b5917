from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.data.v1 import data_service_pb2
from shared.streaming import framed, in_threads


@given(st.lists(st.binary(max_size=400), max_size=4))
def test_a_framed_message_is_the_one_that_the_library_makes(parts: list[bytes]) -> None:
    parsed = data_service_pb2.ReadVersionResponse.FromString(framed(1, parts))
    assert parsed.arrow_ipc == b"".join(parts)


def test_a_large_message_has_its_length_in_front() -> None:
    made = data_service_pb2.ReadVersionResponse(arrow_ipc=bytes(3_000_000)).SerializeToString()
    assert framed(1, [bytes(1_000_000), memoryview(bytes(2_000_000))]) == made


class Counting:
    """A generator of 0, 1, 2, … that tells how far it came, and whether it was closed."""

    def __init__(self, fails_at: int = 100) -> None:
        self.made = 0
        self.closed = threading.Event()
        self._fails_at = fails_at

    def run(self) -> Generator[int, None, None]:
        try:
            while self.made < 100:
                if self.made == self._fails_at:
                    raise ValueError("no more")
                self.made += 1
                yield self.made - 1
        finally:
            self.closed.set()


def test_items_come_in_their_order_and_the_generator_is_closed() -> None:
    counting = Counting()

    async def main() -> list[int]:
        return [item async for item in in_threads(counting.run())]

    assert asyncio.run(main()) == list(range(100))
    assert counting.closed.is_set()


async def test_a_slow_taker_holds_up_the_making() -> None:
    counting = Counting()

    items = in_threads(counting.run())
    for expected in range(5):
        assert await anext(items) == expected
        for _ in range(20):
            await asyncio.sleep(0)
        assert counting.made <= expected + 2
    await items.aclose()  # type: ignore[attr-defined]

    assert counting.closed.is_set()


async def test_an_error_is_raised_in_its_place() -> None:
    counting = Counting(fails_at=3)

    items = in_threads(counting.run())
    assert [await anext(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="no more"):
        await anext(items)

    assert counting.closed.is_set()


def test_a_cancelled_taker_closes_the_generator() -> None:
    counting = Counting()

    async def take(got_one: asyncio.Event) -> None:
        async for _ in in_threads(counting.run()):
            got_one.set()
            await asyncio.Event().wait()

    async def main() -> None:
        got_one = asyncio.Event()
        task = asyncio.create_task(take(got_one))
        await got_one.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert counting.closed.wait(60)
