"""An object is copied within the store, without passing through the client."""

from __future__ import annotations

import obstore
import pytest
from obstore import exceptions

from shared.settings import StoreSettings
from shared.storage import ObjectMissing, ObjectStore, open_store

MIB = 1024 * 1024


@pytest.mark.parametrize("data", [b"", b"x", bytes(2 * MIB)], ids=["empty", "small", "large"])
def test_a_copy_has_the_bytes_and_the_source_stays(store: ObjectStore, data: bytes) -> None:
    store.put("from/a", data)
    store.copy("from/a", "to/deep/b")
    assert store.get("to/deep/b") == store.get("from/a") == data


def test_a_copy_is_an_object_of_its_own(store: ObjectStore) -> None:
    store.put("a", b"first")
    store.copy("a", "b")
    store.put("a", b"second")
    assert store.get("b") == b"first"
    store.delete_folder("")
    store.put("c", b"third")
    store.put("d", b"fourth")
    store.copy("c", "d")
    assert {info.key: store.get(info.key) for info in store.list()} == {"c": b"third", "d": b"third"}


def test_a_missing_object_is_not_copied(store: ObjectStore) -> None:
    with pytest.raises(ObjectMissing):
        store.copy("none", "b")
    assert not store.exists("b")


def test_a_disk_without_hard_links_is_copied_on(file_store: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise exceptions.GenericError("Unable to copy file: Operation not permitted (os error 1)")

    monkeypatch.setattr(obstore, "copy", refuse)
    store = open_store(file_store)
    store.put("from/a", b"data")
    store.copy("from/a", "to/b")
    assert store.get("to/b") == b"data"
