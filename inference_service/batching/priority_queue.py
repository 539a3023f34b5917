"""The rows that wait for a batch: the most urgent first, and the older of two that are as urgent."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np

from inference_service.domain.batching import Waiting
from inference_service.domain.request_parameters import PRIORITY_LEVELS
from inference_service.domain.rows import Rows
from inference_service.domain.tensors import Array
from shared.tracing import Waiting as WaitingSpan
from shared.tracing import tracing


class Entry:
    """Rows that wait, or are in a batch, and the future of their outputs. `first_row` is the place of the first in its
    request, `level` its place in the queue by urgency; `input_s`, `infer_s` and when it came `back_s` are known once it
    is answered.

    A request larger than a batch is one entry of the rows that still wait, of which pieces are taken into batches, each
    an entry of its own; the outputs of all `pieces` are its own.
    """

    def __init__(
        self,
        rows: Rows,
        first_row: int,
        level: int,
        waiting: Waiting,
        future: asyncio.Future[Sequence[Array]],
        traced: WaitingSpan | None,
    ) -> None:
        self.rows = rows
        self.first_row = first_row
        self.level = level
        self.waiting = waiting
        self.future = future
        self.input_s = self.infer_s = 0.0
        self.back_s = 0.0
        self.pieces: list[Entry] = []
        self.unanswered = waiting.rows
        self.traced = traced

    def outputs(self) -> Sequence[Array]:
        """Once it is answered."""
        if not self.pieces:
            return self.future.result()
        return [np.concatenate(parts) for parts in zip(*(one.future.result() for one in self.pieces), strict=True)]


class PriorityQueue:
    """Lives on one event loop. `rows` are those that wait, of all requests. `emptied` is set while none waits."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._loop = asyncio.get_running_loop()
        # By priority, each in order of arrival; leaving from the middle is cheap. The same by form, too: rows of two
        # forms share no batch, so a batch is looked for among those of one.
        self._levels: list[dict[Entry, None]] = [{} for _ in range(PRIORITY_LEVELS)]
        self._forms: dict[str, list[dict[Entry, None]]] = {}
        # Of requests that fit a batch, by form and priority; the others are told one by one.
        self._rows_at: dict[str, list[int]] = {}
        self._large: dict[Entry, None] = {}
        self.rows = 0
        self.emptied = asyncio.Event()
        self.emptied.set()

    def __iter__(self) -> Iterator[Entry]:
        return chain.from_iterable(self._levels)

    def __bool__(self) -> bool:
        return any(self._levels)

    def of_next_form(self) -> Iterator[Entry]:
        """Those that may share a batch with the first one, in their order."""
        first = next(iter(self), None)
        return chain.from_iterable(self._forms[first.waiting.form]) if first is not None else iter(())

    def batches_ahead(self, rows: int, form: str, priority: int) -> tuple[int, int]:
        """How many batches go before the one that has the last of so many rows, if these came now, and how many of them
        would without large requests. As many rows of a large request go before others as those have themselves, in full
        batches: its pieces take turns with them."""
        ahead = {other: sum(at[:priority]) for other, at in self._rows_at.items()}
        without_large = self._batches(ahead, rows, form)
        if not self._large:
            return without_large, without_large
        turns = math.ceil(rows / self._max_rows) * self._max_rows
        for entry in self._large:
            if entry.level < priority:
                ahead[entry.waiting.form] = ahead.get(entry.waiting.form, 0) + min(entry.waiting.rows, turns)
        return self._batches(ahead, rows, form), without_large

    def _batches(self, ahead: dict[str, int], rows: int, form: str) -> int:
        others = sum(math.ceil(count / self._max_rows) for other, count in ahead.items() if other != form)
        return others + (ahead.get(form, 0) + rows - 1) // self._max_rows

    def put(self, rows: Rows, priority: int, now_s: float, deadline_s: float) -> Entry:
        """A request's rows, any number of them."""
        large = len(rows) > self._max_rows
        waiting = Waiting(len(rows), rows.form, now_s, deadline_s, rows.size_bytes, divisible=large)
        future: asyncio.Future[Sequence[Array]] = self._loop.create_future()
        entry = Entry(rows, 0, priority - 1, waiting, future, tracing().waiting(len(rows)))
        if large:
            self._large[entry] = None
        self._add(entry)
        return entry

    def take(self, entry: Entry, rows: int) -> Entry:
        """The first `rows` of an entry, on their way into a batch. What is left of a large request, and only of that
        one something may be, waits behind all that are as urgent."""
        if not entry.waiting.divisible:
            self.leave(entry)
            return entry
        waiting, start = entry.waiting, entry.first_row
        taken = entry.rows.slice(start, start + rows)
        piece_waiting = replace(waiting, rows=rows, size_bytes=taken.size_bytes, divisible=False)
        piece = Entry(taken, start, entry.level, piece_waiting, self._loop.create_future(), entry.traced)
        entry.pieces.append(piece)
        piece.future.add_done_callback(partial(_gather, entry, piece))
        if rows == waiting.rows:
            self.leave(entry)
        else:
            self._remove(entry)
            left_bytes = waiting.size_bytes * (waiting.rows - rows) // waiting.rows
            entry.waiting = replace(waiting, rows=waiting.rows - rows, size_bytes=left_bytes)
            entry.first_row = start + rows
            self._add(entry)
        return piece

    def leave(self, entry: Entry) -> None:
        if entry in self._levels[entry.level]:
            self._remove(entry)
            self._large.pop(entry, None)
            if not self:
                self.emptied.set()
            if entry.traced is not None:
                entry.traced.end()

    def let_go(self, entry: Entry) -> None:
        """Of a request that is over. An error of its has it in its traceback, and is in its future, so that all its
        rows would wait for the garbage collector if anything of it was kept."""
        self.leave(entry)
        entry.future.cancel()
        for piece in entry.pieces:
            piece.future.cancel()
        entry.pieces.clear()

    def _add(self, entry: Entry) -> None:
        form = entry.waiting.form
        if form not in self._forms:
            self._forms[form] = [{} for _ in range(PRIORITY_LEVELS)]
            self._rows_at[form] = [0] * PRIORITY_LEVELS
        self._levels[entry.level][entry] = self._forms[form][entry.level][entry] = None
        self._count(entry, entry.waiting.rows)
        self.emptied.clear()

    def _remove(self, entry: Entry) -> None:
        form = entry.waiting.form
        del self._levels[entry.level][entry], self._forms[form][entry.level][entry]
        self._count(entry, -entry.waiting.rows)
        if not any(self._forms[form]):
            del self._forms[form], self._rows_at[form]

    def _count(self, entry: Entry, rows: int) -> None:
        self.rows += rows
        if not entry.waiting.divisible:
            self._rows_at[entry.waiting.form][entry.level] += rows


def _gather(entry: Entry, piece: Entry, answered: asyncio.Future[Sequence[Array]]) -> None:
    """Ends a large request's wait once the last of its pieces is answered, or one has failed."""
    if answered.cancelled():
        return
    error = answered.exception()
    if entry.future.done():
        return
    if error is not None:
        entry.future.set_exception(error)
        return
    entry.input_s, entry.infer_s = entry.input_s + piece.input_s, entry.infer_s + piece.infer_s
    entry.back_s = max(entry.back_s, piece.back_s)
    entry.unanswered -= piece.waiting.rows
    if not entry.unanswered:
        entry.future.set_result(())


def fail(entries: Iterable[Entry], error: Exception) -> None:
    """Those that are not over already."""
    for entry in entries:
        if not entry.future.done():
            entry.future.set_exception(error)
