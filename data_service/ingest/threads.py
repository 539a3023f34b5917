"""Reading, statistics and writing at the same time: each on a thread of its own, a few tables apart.

Arrow lets other threads run while it decodes, compresses and writes, so a second core is worth having.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar, cast

Item = TypeVar("Item")
# So many tables are ready before they are needed, and wait to be written.
DEPTH = 2
_END = object()


def ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
    """The same items, worked out on another thread, at most `DEPTH` before they are asked for. Whatever `items` raises
    is raised here. Once this generator is closed, nothing is worked out any more."""
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:
        following: deque[Future[Any]] = deque(pool.submit(next, items, _END) for _ in range(DEPTH))
        try:
            while (item := following.popleft().result()) is not _END:
                following.append(pool.submit(next, items, _END))
                yield cast(Item, item)
        finally:
            for one in following:
                one.cancel()


class Behind:
    """Does work on another thread, in the order in which it comes, at most `DEPTH` pieces later. What a piece raises
    is raised by a later call; at the latest when the body ends, which waits for all of it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="behind")
        self._waiting: deque[Future[Any]] = deque()

    def __enter__(self) -> Behind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._settle(0)
        finally:
            self._pool.shutdown(cancel_futures=True)

    def do(self, work: Callable[..., object], *arguments: object) -> None:
        self._settle(DEPTH - 1)
        self._waiting.append(self._pool.submit(work, *arguments))

    def result(self, work: Callable[[], Item]) -> Item:
        """Does all that waits, then this, and gives what it returns."""
        self._settle(0)
        return self._pool.submit(work).result()

    def _settle(self, most: int) -> None:
        while len(self._waiting) > most:
            self._waiting.popleft().result()
