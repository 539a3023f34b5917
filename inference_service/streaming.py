"""Many requests over one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TypeVar

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")


async def in_order(
    requests: AsyncIterator[Asked], answer: Callable[[Asked], Awaitable[Answered]], *, most: int
) -> AsyncGenerator[Answered, None]:
    """The answers in the order of the requests, at most `most` of which are worked on, or wait to be taken, at a time:
    so a client that takes no answers is not read any further.

    Ends when the requests do. What reading them raises comes after the answers before it. Closed or cancelled: what is
    being worked on is cancelled, and has ended when this returns.
    """
    room = asyncio.Semaphore(most)
    waiting: asyncio.Queue[asyncio.Task[Answered] | None] = asyncio.Queue()
    working: set[asyncio.Task[Answered]] = set()

    async def work(request: Asked) -> Answered:
        return await answer(request)

    async def read() -> None:
        try:
            async for request in requests:
                await room.acquire()
                task = asyncio.create_task(work(request))
                working.add(task)
                task.add_done_callback(working.discard)
                waiting.put_nowait(task)
        finally:
            waiting.put_nowait(None)

    reader = asyncio.create_task(read())
    try:
        while (task := await waiting.get()) is not None:
            yield await task
            room.release()
        await reader
    finally:
        left = [reader, *working]
        for one in left:
            one.cancel()
        await asyncio.gather(*left, return_exceptions=True)
