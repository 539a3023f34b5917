"""The resource log: the state of one resource as immutable numbered records, appended with put-if-absent.

Each record holds the whole state after one transition. Appending record n is a put-if-absent on its key, so each
number has exactly one winner; who loses reads the winner's record and decides again. Attempts fence one another:
once a record carries attempt a, no writer of an earlier attempt can append.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from shared.durable import fields_of
from shared.errors import STORE_OUTAGES
from shared.storage import ObjectExists, ObjectMissing, ObjectStore

logger = logging.getLogger(__name__)

State = dict[str, Any]

# The object beside the records of a long log that names one of its last ones.
HINT = "newest"
# After so many records it is written again.
HINT_EVERY = 8


class StaleAttempt(Exception):
    """A later attempt has taken over: whoever gets this must stop and must not write."""


@dataclass(frozen=True)
class Record:
    """`number` counts from 1; `time` is seconds since the epoch by the writer's clock, for people only."""

    number: int
    nonce: str
    attempt: int
    time: float
    state: State


class ResourceLog:
    """One resource's log below the folder `prefix`. Not shared between threads; open one each.

    A log that `is_long` also notes, after each `HINT_EVERY` records, which is the newest; so its newest record is found
    with a bounded number of reads. The note is a hint and no more: it may be behind or missing.
    """

    def __init__(self, store: ObjectStore, prefix: str, *, is_long: bool = False) -> None:
        self._store = store
        self._prefix = prefix.rstrip("/")
        self._is_long = is_long
        self._head: Record | None = None
        # The number of the last record whose write was not answered: it may be there or not.
        self._unanswered = 0

    @property
    def newest_known(self) -> Record | None:
        """What `head` gave last, or `append` wrote."""
        return self._head

    def read(self, number: int) -> Record | None:
        """The record with that number; None where it has not been written."""
        try:
            return Record(**fields_of(Record, json.loads(self._store.get(self._key(number)))))
        except ObjectMissing:
            return None

    def head(self) -> Record | None:
        """The newest record, None for a resource that never was.

        Records are contiguous and never deleted, so it gallops on from the last head seen and then halves the gap:
        about 2·log2(new records) reads, and one where nothing is new. In a log that `is_long` it leaps to the hint once
        there are more new records than hints are apart.
        """
        known = self._head.number if self._head else 0
        step = 1
        best = self._head
        hints = self._is_long
        while (found := self.read(known + step)) is not None:
            best, known, step = found, found.number, step * 2
            if hints and step >= HINT_EVERY:
                hints = False
                if (hinted := self._hinted(known)) is not None:
                    best, known, step = hinted, hinted.number, 1
        low, high = known, known + step
        while high - low > 1:
            middle = (low + high) // 2
            if (found := self.read(middle)) is not None:
                best, low = found, middle
            else:
                high = middle
        self._head = best
        return best

    def append(self, previous: Record | None, state: State, attempt: int = 0, nonce: str = "") -> Record | None:
        """Writes the record after `previous`. None if another writer was faster; raises `StaleAttempt` if that one, or
        `previous`, belongs to a later attempt. `nonce` is that of `update`."""
        if previous and previous.attempt > attempt:
            raise StaleAttempt(f"{self._prefix}: attempt {attempt} is fenced by attempt {previous.attempt}")
        number = previous.number + 1 if previous else 1
        record = Record(number, nonce or uuid.uuid4().hex, attempt, time.time(), state)
        try:
            self._store.put_if_absent(self._key(number), json.dumps(asdict(record)).encode())
        except ObjectExists:
            winner = self.read(number)
            # A PUT that was retried inside the client can meet its own first write.
            if winner is None or winner.nonce != record.nonce:
                if winner is not None and winner.attempt > attempt:
                    raise StaleAttempt(
                        f"{self._prefix}: attempt {attempt} is fenced by attempt {winner.attempt}"
                    ) from None
                return None
        except Exception:
            self._unanswered = number
            raise
        self._head = record
        if self._is_long and number % HINT_EVERY == 0:
            self._hint(number)
        return record

    def update(
        self, decide: Callable[[Record | None], State | None], attempt: int | None = None, nonce: str = ""
    ) -> Record | None:
        """Appends what `decide` makes of the newest record, deciding again each time another writer was faster.

        `decide` returns None to leave things as they are. Without `attempt` the record keeps the attempt that it
        follows: that is for wishes of clients, which must not fence the attempt at work. Returns the newest record.

        After an error of the store it may have been written all the same. Who calls again with the `nonce` of the call
        before, one of its own for each thing to write, then gets that record and writes no second one.
        """
        if nonce and self._unanswered:
            written = self.read(self._unanswered)
            if written is not None and written.nonce == nonce:
                return written
        while True:
            previous = self.head()
            state = decide(previous)
            if state is None:
                return previous
            own = attempt if attempt is not None else (previous.attempt if previous else 0)
            try:
                record = self.append(previous, state, own, nonce)
            except StaleAttempt:
                if attempt is not None:
                    raise
                continue  # a wish belongs to no attempt: it follows the new one
            if record is not None:
                return record

    def fence(self, attempt: int, initial: State) -> Record:
        """Opens the log for `attempt`: from here on no earlier attempt can append. Returns the newest record."""
        opened = self.update(
            lambda previous: (
                None if previous and previous.attempt == attempt else (previous.state if previous else initial)
            ),
            attempt=attempt,
        )
        assert opened is not None
        return opened

    def _hint(self, number: int) -> None:
        """The record is written already, so what fails here fails nothing."""
        try:
            self._store.put(f"{self._prefix}/{HINT}", str(number).encode())
        except STORE_OUTAGES as error:
            logger.warning("%s/%s stays behind: %s", self._prefix, HINT, error.message)

    def _hinted(self, known: int) -> Record | None:
        """The record that the hint names, where that is a later one than `known`."""
        try:
            named = self._store.get(f"{self._prefix}/{HINT}")
        except ObjectMissing:
            return None
        return self.read(int(named)) if named.isdigit() and int(named) > known else None

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number:012d}.json"
