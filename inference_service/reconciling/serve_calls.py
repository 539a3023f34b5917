"""Calls of Ray Serve, none of which is waited for longer than a healthy Serve would take."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from shared.errors import MillraceError

# Longer than any healthy answer of Serve's controller; deploying waits for it to have taken note.
SERVE_WITHIN_S = 30.0

T = TypeVar("T")


class ServeSilent(Exception):
    """Ray Serve did not answer this time, or answered with an error of its own."""


async def call_serve(call: Callable[..., T], *arguments: object) -> T:
    """A blocking call of Serve, in a thread. Raises as `answered`."""
    return await answered(asyncio.to_thread(call, *arguments))


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
