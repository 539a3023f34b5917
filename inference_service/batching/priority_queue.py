"""The rows that wait for a batch: the most urgent first, and the older of two that are as urgent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from inference_service.domain.batching import Waiting, pieces
from inference_service.domain.request_parameters import PRIORITY_LEVELS
from inference_service.domain.rows import Rows
from inference_service.domain.tensors import Array
from shared.tracing import tracing


class Entry:
    """Rows that wait, and the future of their outputs. `first_row` is the place of the first in its request, `level`
    its place in the queue by urgency; `input_s`, `infer_s` and when it came `back_s` are known once it is answered."""

    def __init__(
        self, rows: Rows, first_row: int, level: int, waiting: Waiting, future: asyncio.Future[Sequence[Array]]
    ) -> None:
        self.rows = rows
        self.first_row = first_row
        self.level = level
        self.waiting = waiting
        self.future = future
        self.input_s = self.infer_s = 0.0
        self.back_s = 0.0
        # Whether it was sent to the model; and all of its request's, where these are several.
        self.sent = False
        self.of_request: Sequence[Entry] = ()
        self.traced = tracing().waiting(waiting.rows)


class PriorityQueue:
    """Lives on one event loop. `rows` are those that wait, of all requests; an entry has at most `max_rows`. `emptied`
    is set while none waits."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._loop = asyncio.get_running_loop()
        # By priority, each in order of arrival; leaving from the middle is cheap.
        self._levels: list[dict[Entry, None]] = [{} for _ in range(PRIORITY_LEVELS)]
        self._rows_at = [0] * PRIORITY_LEVELS
        self.rows = 0
        self.emptied = asyncio.Event()
        self.emptied.set()

    def __iter__(self) -> Iterator[Entry]:
        return chain.from_iterable(self._levels)

    def __bool__(self) -> bool:
        return any(self._levels)

    def rows_ahead(self, priority: int) -> int:
        """Those that are as urgent, or more."""
        return sum(self._rows_at[:priority])

    def put(self, rows: Rows, priority: int, now_s: float, deadline_s: float) -> list[Entry]:
        """A request's rows, in pieces that each fit a batch."""
        if len(rows) <= self._max_rows:
            return [self._put(rows, 0, priority - 1, now_s, deadline_s)]
        entries = [
            self._put(rows.slice(start, stop), start, priority - 1, now_s, deadline_s)
            for start, stop in pieces(len(rows), self._max_rows)
        ]
        for entry in entries:
            entry.of_request = entries
        return entries

    def leave(self, entry: Entry) -> None:
        if entry in self._levels[entry.level]:
            del self._levels[entry.level][entry]
            self._rows_at[entry.level] -= entry.waiting.rows
            self.rows -= entry.waiting.rows
            if not self:
                self.emptied.set()
            if entry.traced is not None:
                entry.traced.end()

    def let_go(self, entries: list[Entry]) -> None:
        """Of a request that is over. The list is emptied: an error of theirs has it in its traceback, and is in their
        futures, so that all their rows would wait for the garbage collector."""
        for entry in entries:
            self.leave(entry)
            entry.future.cancel()
        entries.clear()

    def _put(self, rows: Rows, first_row: int, level: int, now_s: float, deadline_s: float) -> Entry:
        waiting = Waiting(len(rows), rows.form, now_s, deadline_s, rows.size_bytes)
        entry = Entry(rows, first_row, level, waiting, self._loop.create_future())
        self._levels[level][entry] = None
        self._rows_at[level] += waiting.rows
        self.rows += waiting.rows
        self.emptied.clear()
        return entry


def fail(entries: Iterable[Entry], error: Exception) -> None:
    """Those that are not over already."""
    for entry in entries:
        if not entry.future.done():
            entry.future.set_exception(error)
