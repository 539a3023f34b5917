"""The resource log: the state of one resource as immutable numbered records, appended with put-if-absent.

Each record holds the whole state after one transition. Appending record n is a put-if-absent on its key, so each number
has exactly one winner. A writer that loses reads the winner's record and decides again. Attempts fence one another:
once a record carries attempt a, no writer of an earlier attempt can append.

A claim by `request_id` is one put-if-absent, too. The same id with the same body gets the first answer; with another
body it is refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from google.protobuf.message import Message

from shared.durable import fields_of
from shared.errors import (
    STORE_OUTAGES,
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    Internal,
    MillraceError,
    Unavailable,
)
from shared.storage import ObjectExists, ObjectMissing, ObjectStore

# --- Resource log ---

logger = logging.getLogger(__name__)

State = dict[str, Any]

# The object beside the records of a long log that holds the number of a recent one.
HINT = "newest"
# The hint is written again after this many records.
HINT_EVERY = 8


class StaleAttempt(Exception):
    """A later attempt has taken over. The receiver must stop and must not write."""


@dataclass(frozen=True)
class Record:
    """A record of a log.

    `number` counts from 1. `time` is in seconds since the epoch by the writer's clock, only for display.
    """

    number: int
    nonce: str
    attempt: int
    time: float
    state: State


class ResourceLog:
    """One resource's log below the folder `prefix`. Not shared between threads; open one each.

    A log that `is_long` also stores the number of its newest record after each `HINT_EVERY` records, so that its newest
    record is found with a bounded number of reads. This is only a hint: it may be outdated or missing.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        *,
        is_long: bool = False,
        announce: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Open the log. `announce` is called with the number of each record before it is written."""
        self._store = store
        self._prefix = prefix.rstrip("/")
        self._is_long = is_long
        self._announce = announce
        self._head: Record | None = None
        # The number of the last record whose write was not answered: the record may or may not exist.
        self._unanswered = 0

    @property
    def newest_known(self) -> Record | None:
        """The record that `head` last returned, or `append` wrote."""
        return self._head

    def read(self, number: int) -> Record | None:
        """Return the record with that number, or None if it has not been written."""
        try:
            return Record(**fields_of(Record, json.loads(self._store.get(self._key(number)))))
        except ObjectMissing:
            return None

    def head(self) -> Record | None:
        """Return the newest record, or None if the resource never existed.

        Records are contiguous and never deleted. The search gallops on from the last known head and then bisects: about
        2·log2(new records) reads, and one read if there is nothing new. In a log that `is_long` it jumps to the hint
        once there are more new records than the hint's interval.
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
        """Write the record after `previous`. Return None if another writer was faster.

        Raises `StaleAttempt` if that writer, or `previous`, belongs to a later attempt. `nonce` is that of `update`.
        """
        if previous and previous.attempt > attempt:
            raise StaleAttempt(f"{self._prefix}: attempt {attempt} is fenced by attempt {previous.attempt}")
        number = previous.number + 1 if previous else 1
        record = Record(number, nonce or uuid.uuid4().hex, attempt, time.time(), state)
        self._announce(number)
        try:
            self._store.put_if_absent(self._key(number), json.dumps(asdict(record)).encode())
        except ObjectExists:
            winner = self.read(number)
            # A PUT that the client retried can meet its own first write.
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
        """Append the state that `decide` returns for the newest record, and return the newest record.

        `decide` is called again each time another writer was faster. It returns None to change nothing. Without
        `attempt` the record keeps the attempt of its predecessor. This is for clients' requests, which must not fence
        the current attempt.

        After an error of the store the record may exist all the same. A caller that retries passes the `nonce` of its
        first call, unique for each thing to write. It then gets that record, and no second one is written.
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
                continue  # a client's request belongs to no attempt: it follows the new one
            if record is not None:
                return record

    def fence(self, attempt: int, initial: State) -> Record:
        """Open the log for `attempt`, so that no earlier attempt can append. Return the newest record."""
        opened = self.update(
            lambda previous: (
                None if previous and previous.attempt == attempt else (previous.state if previous else initial)
            ),
            attempt=attempt,
        )
        assert opened is not None
        return opened

    def _hint(self, number: int) -> None:
        """Write the hint. The record exists already, so a failure here is only logged."""
        try:
            self._store.put(f"{self._prefix}/{HINT}", str(number).encode())
        except STORE_OUTAGES as error:
            logger.warning("%s/%s stays behind: %s", self._prefix, HINT, error.message)

    def _hinted(self, known: int) -> Record | None:
        """Return the record that the hint names, if it is later than `known`."""
        number = self._hinted_number(known)
        return None if number is None else self.read(number)

    def _hinted_number(self, known: int) -> int | None:
        """Return the number in the hint, if it is greater than `known`. Its record may be missing."""
        try:
            named = self._store.get(f"{self._prefix}/{HINT}")
        except ObjectMissing:
            return None
        return int(named) if named.isdigit() and int(named) > known else None

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number:012d}.json"


# --- Claims by request id ---

# After these errors the resource may have been created all the same.
OUTCOME_UNKNOWN = (Unavailable, DeadlineExceeded, Cancelled, Internal)


@dataclass(frozen=True)
class Claim:
    """A claimed request id. `name` is the first call's choice; `repeated` means that this call is not the first."""

    name: str
    repeated: bool


def body_digest(request: Message) -> str:
    """Return the SHA-256 in hex of a request without its `request_id`, the same for equal messages."""
    body = type(request)()
    body.CopyFrom(request)
    body.ClearField("request_id")
    return hashlib.sha256(body.SerializeToString(deterministic=True)).hexdigest()


def uid_of(request_id: str, name: str) -> str:
    """Return the uid of the job `name` that a call creates.

    A repeated call gets the same uid. It therefore shares the first call's claims and markers, and recognises a job
    that was created and has been deleted since.
    """
    return uuid.uuid5(uuid.UUID(request_id), name).hex if request_id else uuid.uuid4().hex


@contextmanager
def claimed(
    store: ObjectStore, service: str, request_id: str, digest: str, name: str, turn: int = 1
) -> Iterator[Claim]:
    """Claim a request id for the creation of `name` while the body runs.

    The claim is removed if the creation is refused, but not if an outage leaves its outcome open. A repeated call must
    return the resource that the claim names, or create it if the first call died before. If other callers have taken
    that name meanwhile, and the caller left its choice to the service, the claim of the next `turn` names another. A
    claim is never changed, so that all repetitions of a call reach the same name. Raises `AlreadyExists` if the id was
    used with another body. An empty id claims nothing.
    """
    if not request_id:
        yield Claim(name, repeated=False)
        return
    key = _key(service, request_id, turn)
    claim = _claim(store, key, request_id, digest, name)
    try:
        yield claim
    except MillraceError as error:
        if not claim.repeated and not isinstance(error, OUTCOME_UNKNOWN):
            with suppress(Unavailable):  # then the claim stays, and a repeated call tries again
                store.delete(key)
        raise


def claimed_before(store: ObjectStore, service: str, request_id: str, digest: str, turn: int = 1) -> str | None:
    """Return the name that an earlier call with this id claimed in that turn.

    The resource need not exist. Call this before checking a repeated call again, because the call's inputs may have
    been deleted since. Raises as `claimed`.
    """
    if not request_id:
        return None
    try:
        return _first_name(store.get(_key(service, request_id, turn)), request_id, digest)
    except ObjectMissing:
        return None


def _claim(store: ObjectStore, key: str, request_id: str, digest: str, name: str) -> Claim:
    while True:
        with suppress(ObjectExists):
            store.put_if_absent(key, json.dumps({"body_sha256": digest, "name": name}).encode())
            return Claim(name, repeated=False)
        try:
            return Claim(_first_name(store.get(key), request_id, digest), repeated=True)
        except ObjectMissing:
            continue  # the first call was refused just now, and removed its claim


def _first_name(claim: bytes, request_id: str, digest: str) -> str:
    first = json.loads(claim)
    if first["body_sha256"] != digest:
        raise AlreadyExists(
            f"request_id {request_id} was used with another body, for {first['name']}; use a new UUID4",
            reason="REQUEST_ID_REUSED",
            metadata={"request_id": request_id, "resource": first["name"]},
            fields=[("request_id", "used before with another body; use a new UUID4")],
        )
    return str(first["name"])


def _key(service: str, request_id: str, turn: int) -> str:
    return f"requests/{service}/{request_id}{f'.{turn}' if turn > 1 else ''}.json"
