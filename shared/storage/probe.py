"""The start-up probe: a store that does not honour put-if-absent would lose updates silently, so it is refused."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor

from shared.errors import Unavailable
from shared.storage.object_store import ObjectExists, ObjectStore

ROUNDS = 3
WRITERS = 8


class StoreRefused(RuntimeError):
    """The store cannot be used; the text says why."""


def probe(store: ObjectStore) -> None:
    """Lets writers race for a key; raises `StoreRefused` unless each time exactly one wins and is read back.

    Raises `StoreRefused` as well for a missing bucket or refused credentials, `Unavailable` when nothing
    answers, and `ResourceExhausted` when the store is full.
    """
    try:
        _race(store)
    except Unavailable as error:
        if error.specific_reason == "STORE_REFUSED":
            raise StoreRefused(f"{store.settings.url}: {error.message}") from error
        raise


def _race(store: ObjectStore) -> None:
    folder = f"probe/{uuid.uuid4().hex}"
    with ThreadPoolExecutor(WRITERS) as pool:
        for round_number in range(ROUNDS):
            key = f"{folder}/{round_number}"
            try:
                values = [f"{writer}".encode() for writer in range(WRITERS)]
                won = list(pool.map(lambda value, key=key: _try(store, key, value), values))
                winners = [value for value, one in zip(values, won, strict=True) if one]
                # None, where the winner's answer was lost, so that it met its own write.
                if len(winners) > 1 or store.get(key) not in (winners or values):
                    raise StoreRefused(
                        f"{store.settings.url} does not honour put-if-absent (If-None-Match: *): of {WRITERS} "
                        f"concurrent creates {len(winners)} succeeded; "
                        "use a store with conditional writes, such as MinIO or S3"
                    )
            finally:
                store.delete(key)


def _try(store: ObjectStore, key: str, value: bytes) -> bool:
    try:
        store.put_if_absent(key, value)
    except ObjectExists:
        return False
    return True
