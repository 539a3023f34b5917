"""Watches: one poller for all watchers of a resource, which reads less and less often while nothing changes."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from shared import streaming
from shared.errors import Unavailable
from shared.streaming import Watches, interval_s

LIMIT_S = 60.0


class Counter:
    """Returns how many readings there were. The reading number `held` waits for `go_on`, and `fails_at` fails."""

    number = 1

    def __init__(self, fails_at: int = 0, held: int = 0) -> None:
        self.readings = 0
        self.threads: set[str] = set()
        self.go_on, self.is_held = threading.Event(), threading.Event()
        self._fails_at, self._held = fails_at, held

    def read(self) -> int:
        self.threads.add(threading.current_thread().name)
        self.readings += 1
        if self.readings == self._held:
            self.is_held.set()
            assert self.go_on.wait(LIMIT_S)
        if self.readings == self._fails_at:
            raise Unavailable("the object store does not answer; try again")
        return self.readings


async def is_held(counter: Counter, threads: ThreadPoolExecutor | None = None) -> None:
    assert await asyncio.get_running_loop().run_in_executor(threads, counter.is_held.wait, LIMIT_S)


def readings_in(seconds: float) -> int:
    now = 0.0
    for readings in count(1):
        now += interval_s(now)
        if now > seconds:
            return readings
    raise AssertionError


def test_readings_are_frequent_after_a_change_and_then_a_second_apart() -> None:
    assert [interval_s(unchanged_s) for unchanged_s in (0.0, 1.0, 2.0, 5.0, 10.0, 3600.0)] == [0.1, 0.1, 0.2, 0.5, 1, 1]
    assert readings_in(10.0) < 40
    assert readings_in(3610.0) - readings_in(10.0) in (3599, 3600, 3601)


async def test_a_hundred_watchers_share_the_readings_and_take_no_thread_of_other_calls() -> None:
    counter = Counter(held=1)
    watches = Watches(lambda _: counter)
    busy = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(busy)
    blocked = busy.submit(counter.go_on.wait, LIMIT_S)

    async def watch() -> list[int]:
        async with watches.watching("one") as watched:
            return [await watched.first(), await watched.next(), await watched.next()]

    async with asyncio.timeout(LIMIT_S):
        watchers = [asyncio.create_task(watch()) for _ in range(100)]
        await is_held(counter, ThreadPoolExecutor(1))
        counter.go_on.set()
        seen = await asyncio.gather(*watchers)

    assert blocked.result()
    assert seen == [[1, 2, 3]] * 100
    assert counter.readings <= 4
    assert all(thread.startswith("watches") for thread in counter.threads)


async def test_a_fresh_reading_begins_after_the_request_and_is_shared() -> None:
    counter = Counter(held=1)
    watches = Watches(lambda _: counter)

    async def fresh() -> int:
        async with watches.watching("one") as watched:
            return await watched.fresh()

    async with asyncio.timeout(LIMIT_S), watches.watching("one") as watched:
        first = asyncio.create_task(watched.first())
        await is_held(counter)
        others = [asyncio.create_task(fresh()) for _ in range(10)]
        await asyncio.sleep(0)  # each of them has requested a reading
        counter.go_on.set()
        assert await first == 1
        assert await asyncio.gather(*others) == [2] * 10


async def test_a_failed_reading_reaches_each_watcher_and_the_next_one_opens_the_resource_anew() -> None:
    opened: list[Counter] = []

    def follow(_: str) -> Counter:
        opened.append(Counter(fails_at=2))
        return opened[-1]

    watches = Watches(follow)

    async def watch() -> int:
        async with watches.watching("one") as watched:
            await watched.first()
            return await watched.next()

    async with asyncio.timeout(LIMIT_S):
        outcomes = await asyncio.gather(*(watch() for _ in range(3)), return_exceptions=True)
        assert [type(one) for one in outcomes] == [Unavailable] * 3
        async with watches.watching("one") as watched:
            assert await watched.first() == 1

    assert len(opened) == 2


async def test_a_fresh_reading_is_not_that_which_failed_before_it_was_requested() -> None:
    counters = [Counter(fails_at=1, held=1), Counter()]
    remaining = iter(counters)
    watches = Watches(lambda _: next(remaining))

    async with asyncio.timeout(LIMIT_S), watches.watching("one") as early, watches.watching("one") as late:
        first = asyncio.create_task(early.first())
        await is_held(counters[0])
        fresh = asyncio.create_task(late.fresh())
        await asyncio.sleep(0)
        counters[0].go_on.set()
        with pytest.raises(Unavailable):
            await first
        assert await fresh == 1

    assert counters[0].readings == 1


async def test_a_poller_without_watchers_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "LINGER_S", 0.0)
    opened: list[Counter] = []

    def follow(_: str) -> Counter:
        opened.append(Counter())
        return opened[-1]

    watches = Watches(follow)
    async with asyncio.timeout(LIMIT_S):
        while len(opened) < 2:
            async with watches.watching("one") as watched:
                await watched.first()
            await asyncio.sleep(0.01)


async def test_a_watcher_that_comes_back_soon_continues_with_the_same_poller() -> None:
    opened: list[Counter] = []

    def follow(_: str) -> Counter:
        opened.append(Counter())
        return opened[-1]

    watches = Watches(follow)
    async with asyncio.timeout(LIMIT_S):
        for _ in range(3):
            async with watches.watching("one") as watched:
                await watched.next()

    assert len(opened) == 1
