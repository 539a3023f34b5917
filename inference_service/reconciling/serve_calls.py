"""Calls of Ray Serve, none of which is waited for longer than a healthy Serve would take."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from shared.errors import MillraceError

# Longer than any healthy answer of Serve's controller; deploying waits for it to have taken note.
SERVE_WITHIN_S = 30.0
# Threads of their own: those of the event loop wait for the store, which may be silent, and a Serve that had to wait
# for them would be taken for one that does not answer.
SERVE_THREADS = ThreadPoolExecutor(16, thread_name_prefix="serve")

T = TypeVar("T")
P = ParamSpec("P")


class ServeSilent(Exception):
    """Ray Serve did not answer this time, or answered with an error of its own."""


async def call_serve(call: Callable[..., T], *arguments: object) -> T:
    """A blocking call of Serve, in a thread. Raises as `answered`."""
    return await answered(to_serve_thread(call, *arguments))


async def to_serve_thread(call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """As `asyncio.to_thread`, in a thread that only waits for Ray."""
    run = partial(contextvars.copy_context().run, call, *arguments, **options)
    return await asyncio.get_running_loop().run_in_executor(SERVE_THREADS, run)


async def answered(call: Awaitable[T]) -> T:
    """What Serve answers; raises `ServeSilent` rather than wait for a Ray that is gone, for whatever Ray raises, and a
    `MillraceError` as it is: replicas raise them, too."""
    try:
        async with asyncio.timeout(SERVE_WITHIN_S):
            return await call
    except MillraceError:
        raise
    except Exception as error:
        raise ServeSilent(repr(error)) from error
