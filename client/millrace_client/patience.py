"""How long a client waits for a server that is away, as while it restarts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from millrace_client.errors import Cancelled, DeadlineExceeded, Internal, MillraceError, Unavailable

# For so long without any progress a server may be away, before it is given up.
PATIENCE_S = 120.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0

Result = TypeVar("Result")


class Backoff:
    """Pauses that double, each cut at random to between a half and all of it: the clients of a server that restarts do
    not all come back in the same moment."""

    def __init__(self) -> None:
        self._pause_s = FIRST_PAUSE_S

    def next_s(self) -> float:
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return pause_s * random.uniform(0.5, 1.0)


class Patience:
    """Pauses between tries, the longer the longer nothing goes on, for at most `allowed_s` without progress, by default
    `PATIENCE_S`."""

    def __init__(self, allowed_s: float | None = None) -> None:
        self._allowed_s = allowed_s
        self.progressed()

    def allow(self, allowed_s: float | None = None) -> None:
        """From now on that long; it begins anew."""
        self._allowed_s = allowed_s
        self.progressed()

    def progressed(self) -> None:
        self._progressed_at, self._backoff = time.monotonic(), Backoff()

    def calling(self, call: Callable[[], Result]) -> Result:
        """What it returns, also where the server is away for a while."""
        while True:
            try:
                return call()
            except MillraceError as error:
                self.pause_after(error)

    def pause_after(self, error: MillraceError, at_most_s: float = LONGEST_PAUSE_S) -> None:
        """Raises it where another try cannot help, or there was no progress for too long."""
        allowed_s = PATIENCE_S if self._allowed_s is None else self._allowed_s
        if not _may_pass(error) or time.monotonic() - self._progressed_at > allowed_s:
            raise error
        time.sleep(min(self._backoff.next_s(), at_most_s))


def _may_pass(error: MillraceError) -> bool:
    """A broken connection has many statuses, what went wrong on the wire is sent again, and a place becomes free; a
    fault that the server tells of would come again."""
    passing = ("WRONG_CRC32C", "TOO_MANY_UPLOADS", "TOO_MANY_DOWNLOADS")
    if isinstance(error, (Unavailable, DeadlineExceeded)) or error.reason in passing:
        return True
    broken = isinstance(error, (Cancelled, Internal)) or error.status == "UNKNOWN"
    return broken and not error.correlation_id
