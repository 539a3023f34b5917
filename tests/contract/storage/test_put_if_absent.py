"""The one primitive: of any number of racing writers exactly one wins, and its bytes are what is there."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from shared.settings import StoreSettings
from shared.storage import ObjectExists, ObjectStore, open_store
from tests.support import racing


def test_the_second_writer_is_refused_and_changes_nothing(store: ObjectStore) -> None:
    store.put_if_absent("key", b"first")

    with pytest.raises(ObjectExists):
        store.put_if_absent("key", b"second")

    assert store.get("key") == b"first"


def test_an_empty_object_counts_as_there(store: ObjectStore) -> None:
    store.put("key", b"")

    with pytest.raises(ObjectExists):
        store.put_if_absent("key", b"second")

    assert store.get("key") == b""


def test_of_racing_threads_exactly_one_wins_each_key(store: ObjectStore) -> None:
    writers, keys = 16, 25

    def won(job: tuple[int, int]) -> bool:
        key, writer = job
        try:
            store.put_if_absent(f"race/{key}", f"{writer}".encode())
        except ObjectExists:
            return False
        return True

    jobs = [(key, writer) for key in range(keys) for writer in range(writers)]
    with ThreadPoolExecutor(writers) as pool:
        winners = [job for job, one in zip(jobs, pool.map(won, jobs), strict=True) if one]

    assert Counter(key for key, _ in winners) == dict.fromkeys(range(keys), 1)
    assert {key: int(store.get(f"race/{key}")) for key in range(keys)} == dict(winners)


def test_of_racing_processes_exactly_one_wins_each_key(store_settings: StoreSettings, racers: racing.Racers) -> None:
    keys = 200

    won = racers.race(racing.claim_keys, store_settings, keys)

    assert sorted(key for one in won for key in one) == list(range(keys))
    store = open_store(store_settings)
    for racer, one in enumerate(won):
        assert all(store.get(f"race/{key}") == f"{racer}".encode() for key in one)
