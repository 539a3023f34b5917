"""The names of folders in turns: as many as one asks for, and no folder is left out or named twice."""

from __future__ import annotations

import pytest

from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from shared.storage.object_store import KEYS_A_LISTING
from tests.support.s3_fault_proxy import fault_proxy

NAMES = ["a", "a-b", "a0", "a1", "b", "c"]


@pytest.mark.parametrize("most", [1, 2, 6, 10])
def test_the_turns_name_each_folder_once_in_the_order_of_keys(store: ObjectStore, most: int) -> None:
    for name in NAMES:
        store.put(f"jobs/{name}/log/1", b"x")
        store.put(f"jobs/{name}/x", b"x")
    store.put("jobs/file", b"x")
    store.put("others/z/1", b"x")

    found = list(store.folders_after("jobs", "", most))
    while some := store.folders_after("jobs", found[-1], most):
        assert len(some) <= most
        found += some

    assert found == sorted(NAMES, key=lambda name: f"{name}/")


def test_a_missing_folder_has_no_folders_after_a_name(store: ObjectStore) -> None:
    assert store.folders_after("jobs", "", 5) == []


def test_a_folder_without_objects_is_none(store: ObjectStore) -> None:
    store.put("jobs/a/1", b"x")
    store.put("jobs/b/1", b"x")
    store.delete("jobs/a/1")

    assert store.folders_after("jobs", "", 5) == ["b"]


def test_a_folder_of_many_objects_is_named_once_and_hides_no_other(store: ObjectStore) -> None:
    for number in range(KEYS_A_LISTING + 5):
        store.put(f"jobs/b/{number:05d}", b"")
    for name in ("a", "c", "d"):
        store.put(f"jobs/{name}/x", b"")

    assert store.folders_after("jobs", "", 10) == ["a", "b", "c", "d"]
    assert store.folders_after("jobs", "a", 2) == ["b", "c"]


def test_many_small_folders_take_few_requests(s3_store: StoreSettings) -> None:
    direct = open_store(s3_store)
    for number in range(300):
        direct.put(f"jobs/{number:03d}/x", b"")
    with fault_proxy(s3_store) as proxy:
        found = open_store(proxy.settings(s3_store)).folders_after("jobs", "", 200)

    assert list(found) == [f"{number:03d}" for number in range(200)]
    assert proxy.requests == 1


@pytest.mark.parametrize("after", ["", "x", "x/a", "x/a/1", "x/a0", "x/b/2", "y"])
def test_keys_come_in_their_order_from_any_place(store: ObjectStore, after: str) -> None:
    keys = ["x/1", "x/a-b/1", "x/a/1", "x/a/c/9", "x/a0/1", "x/ab", "x/b/1", "x/b/3"]
    for key in (*reversed(keys), "w/1", "x-y/1", "y/1"):
        store.put(key, b"")

    assert list(store.keys_after("x", after)) == [key for key in sorted(keys) if key > after]
