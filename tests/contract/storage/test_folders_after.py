"""The names of folders in turns: as many as one asks for, and no folder is left out or named twice."""

from __future__ import annotations

import pytest

from shared.storage import ObjectStore

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


def test_there_are_none_below_a_folder_that_is_not_there(store: ObjectStore) -> None:
    assert store.folders_after("jobs", "", 5) == []


def test_a_folder_without_objects_is_none(store: ObjectStore) -> None:
    store.put("jobs/a/1", b"x")
    store.put("jobs/b/1", b"x")
    store.delete("jobs/a/1")

    assert store.folders_after("jobs", "", 5) == ["b"]
