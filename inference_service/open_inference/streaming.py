"""Many requests over one stream."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TypeVar

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")


async def in_order(
    requests: AsyncIterator[Asked],
    answer: Callable[[Asked], Awaitable[Answered]],
    *,
    most: int,
    size_bytes: Callable[[Asked], int] = lambda _: 0,
    answer_bytes: Callable[[Answered], int] = lambda _: 0,
    most_bytes: float = math.inf,
) -> AsyncGenerator[Answered, None]:
    """The answers in the order of the requests, at most `most` of which are worked on, or wait to be taken, at a time,
    and none is read while these have `most_bytes`: so a client that takes no answers is not read any further.
    `size_bytes` is asked for a request as soon as it was read, by whoever read it, and `answer_bytes` for its answer:
    the larger of both counts until it is taken.

    Ends when the requests do. What reading them raises comes after the answers before it. Closed or cancelled: what is
    being worked on is cancelled, and has ended when this returns.
    """
    waiting: asyncio.Queue[asyncio.Task[tuple[Answered, int]] | None] = asyncio.Queue()
    working: set[asyncio.Task[tuple[Answered, int]]] = set()
    held = held_bytes = 0
    taken = asyncio.Event()

    async def work(request: Asked, size: int) -> tuple[Answered, int]:
        nonlocal held_bytes
        answered = await answer(request)
        larger = max(size, answer_bytes(answered))
        held_bytes += larger - size
        return answered, larger

    async def read() -> None:
        nonlocal held, held_bytes
        try:
            async for request in requests:
                size = size_bytes(request)
                held, held_bytes = held + 1, held_bytes + size
                task = asyncio.create_task(work(request, size))
                working.add(task)
                task.add_done_callback(working.discard)
                waiting.put_nowait(task)
                # Whoever waits, here and below, keeps nothing meanwhile: a stream may be idle for hours.
                del request, task
                while held >= most or held_bytes >= most_bytes:
                    taken.clear()
                    await taken.wait()
        finally:
            waiting.put_nowait(None)

    reader = asyncio.create_task(read())
    try:
        while (task := await waiting.get()) is not None:
            answered, size = await task
            del task
            yield answered
            del answered
            held, held_bytes = held - 1, held_bytes - size
            taken.set()
        await reader
    finally:
        left = [reader, *working]
        for one in left:
            one.cancel()
        await asyncio.gather(*left, return_exceptions=True)
