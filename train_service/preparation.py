"""The tables of rows that Ray Data's tasks prepare, for a rank that waits for them, but not for ever.

Nothing of Ray's holds a CPU for these tasks. Where others take the last one, Ray Data waits without a word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing

import pyarrow as pa

from shared.dataset_stream import DatasetStream
from shared.errors import Unavailable
from train_service.domain.watchdog import STARTING_SECONDS
from train_service.patience import PATIENCE_S, store_call

POLL_S = 1.0
# The first tasks import and compile.
FIRST_WITHIN_S = STARTING_SECONDS
# A piece of many small rows may take long to prepare, and other work may have the CPUs for a while.
NEXT_WITHIN_S = PATIENCE_S


def prepared(stream: DatasetStream, touched: Callable[[], None]) -> Generator[pa.Table, None, None]:
    """The tables of `stream`; `touched` is called for each, and whenever a task got on.

    Raises `Unavailable` where no task does, and what the stream raises. Whoever takes the tables may take his time.
    """
    watch = _Watch(stream, touched)
    with closing(stream.tables(watch.look, POLL_S)) as tables:
        while True:
            with store_call():  # as there: who waits here gives up by himself
                table = next(tables, None)
            if table is None:
                return
            watch.got_on()
            yield table
            watch.got_on()


class _Watch:
    def __init__(self, stream: DatasetStream, touched: Callable[[], None]) -> None:
        self._stream = stream
        self._touched = touched
        self._done = 0
        self._since = time.monotonic()
        self._within_s = FIRST_WITHIN_S

    def got_on(self) -> None:
        self._touched()
        self._since, self._within_s = time.monotonic(), NEXT_WITHIN_S

    def look(self) -> None:
        if (done := self._stream.done) > self._done:
            self._done = done
            self.got_on()
        elif time.monotonic() - self._since > self._within_s:
            raise Unavailable(
                f"Ray Data has prepared no row for {self._within_s:.0f} s: its tasks found no CPU, or one stands still",
                reason="PREPARATION_STALLED",
            )
