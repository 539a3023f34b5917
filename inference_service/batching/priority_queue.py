"""The rows that wait for a batch: the most urgent first, and the older of two that are as urgent.

Requests larger than a batch come after all others that are as urgent, and fill what these leave of each batch. What is
left of a batch that they cannot share, and at least `GUARANTEED` of each, is owed to them, as in deficit round robin
(Shreedhar and Varghese, 1995): once that is a whole batch, one goes first.
"""

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

# Of a batch's rows: what requests larger than a batch get, however much the others ask for.
GUARANTEED = 1 / 8


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
        # By priority, and in each those that fit a batch before the larger ones, see `_turn`; each in order of arrival;
        # leaving from the middle is cheap. The same by form, too: rows of two forms share no batch, so a batch is
        # looked for among those of one.
        self._turns: list[dict[Entry, None]] = [{} for _ in range(2 * PRIORITY_LEVELS)]
        self._forms: dict[str, list[dict[Entry, None]]] = {}
        # Of requests that fit a batch, by form and priority; the others are looked at one by one.
        self._rows_at: dict[str, list[int]] = {}
        self._large: dict[Entry, None] = {}
        self._owed_rows = 0.0
        self.rows = 0
        self.emptied = asyncio.Event()
        self.emptied.set()

    def __iter__(self) -> Iterator[Entry]:
        return self._in_order(self._turns)

    def __bool__(self) -> bool:
        return any(self._turns)

    def of_next_form(self) -> Iterator[Entry]:
        """Those that may share a batch with the first one, in their order."""
        first = next(iter(self), None)
        return self._in_order(self._forms[first.waiting.form]) if first is not None else iter(())

    def batches_ahead(self, rows: int, form: str, priority: int) -> int:
        """How many batches go before the one that has the last of so many rows, if these came now. Large requests that
        are as urgent take turns in batches with another large one, and go before others only in batches that they are
        owed by then; of one that waits for the same batch, only what is left over is in it."""
        ahead = {other: sum(at[:priority]) for other, at in self._rows_at.items()}
        turns = math.ceil(rows / self._max_rows) * self._max_rows
        peers = []
        for entry in self._large:
            if entry.level < priority - 1:
                ahead[entry.waiting.form] = ahead.get(entry.waiting.form, 0) + entry.waiting.rows
            elif entry.level == priority - 1:
                peers.append(entry.waiting)
        if rows > self._max_rows:
            for waiting in peers:
                ahead[waiting.form] = ahead.get(waiting.form, 0) + min(waiting.rows, turns)
            return self._batches(ahead, rows, form)
        batches = self._batches(ahead, rows, form)
        if not peers:
            return batches
        if any(waiting.form != form for waiting in peers):  # in batches of their own, one after each
            return 2 * batches + 1
        return batches + int(self._owed_rows / self._max_rows + batches * GUARANTEED)

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

    def take(self, chosen: Sequence[tuple[Entry, int]]) -> list[Entry]:
        """A batch of the first rows of some entries, so many of each. What is left of a large request, and only of that
        one something may be, waits behind all that are as urgent."""
        if self._large:
            large_rows = sum(rows for entry, rows in chosen if entry.waiting.divisible)
            left_rows = self._max_rows - sum(rows for entry, rows in chosen if not entry.waiting.divisible)
            # A batch that it got because it was owed is paid off with its rows.
            due_rows = 0.0 if self._large_first() else max(left_rows, GUARANTEED * self._max_rows)
            owed_rows = self._owed_rows + due_rows - large_rows
            self._owed_rows = min(max(owed_rows, 0.0), 2.0 * self._max_rows)
        return [self._take(entry, rows) for entry, rows in chosen]

    def _take(self, entry: Entry, rows: int) -> Entry:
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
        if entry in self._turns[_turn(entry)]:
            self._remove(entry)
            self._large.pop(entry, None)
            if not self._large:
                self._owed_rows = 0.0
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

    def _large_first(self) -> bool:
        return self._owed_rows >= self._max_rows

    def _in_order(self, turns: Sequence[dict[Entry, None]]) -> Iterator[Entry]:
        swapped = int(self._large_first())
        return chain.from_iterable(turns[place ^ swapped] for place in range(len(turns)))

    def _add(self, entry: Entry) -> None:
        form, turn = entry.waiting.form, _turn(entry)
        if form not in self._forms:
            self._forms[form] = [{} for _ in self._turns]
            self._rows_at[form] = [0] * PRIORITY_LEVELS
        self._turns[turn][entry] = self._forms[form][turn][entry] = None
        self._count(entry, entry.waiting.rows)
        self.emptied.clear()

    def _remove(self, entry: Entry) -> None:
        form, turn = entry.waiting.form, _turn(entry)
        del self._turns[turn][entry], self._forms[form][turn][entry]
        self._count(entry, -entry.waiting.rows)
        if not any(self._forms[form]):
            del self._forms[form], self._rows_at[form]

    def _count(self, entry: Entry, rows: int) -> None:
        self.rows += rows
        if not entry.waiting.divisible:
            self._rows_at[entry.waiting.form][entry.level] += rows


def _turn(entry: Entry) -> int:
    """Its place among the kinds of entries, where nothing is owed to large ones."""
    return 2 * entry.level + int(entry.waiting.divisible)


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
