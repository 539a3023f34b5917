"""What every backend of `ObjectStore` does alike: whole objects by key."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shared.errors import DataLoss, MillraceError
from shared.settings import StoreSettings
from shared.storage import ObjectExists, ObjectInfo, ObjectMissing, ObjectStore, open_store

MIB = 1024 * 1024


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 9], ids=["empty", "one-byte", "all-bytes"])
def test_get_returns_the_bytes_that_put_wrote(store: ObjectStore, data: bytes) -> None:
    store.put("a/b/c.bin", data)

    assert store.get("a/b/c.bin") == data
    assert store.size("a/b/c.bin") == len(data)
    assert store.exists("a/b/c.bin")


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_any_buffer_can_be_put(store: ObjectStore, kind: type[bytearray] | type[memoryview]) -> None:
    store.put("put", kind(b"one"))
    store.put_if_absent("created", kind(b"two"))

    assert (store.get("put"), store.get("created")) == (b"one", b"two")


def test_a_second_put_replaces_the_first_whole(store: ObjectStore) -> None:
    store.put("key", b"a long first value")
    store.put("key", b"short")

    assert store.get("key") == b"short"


@pytest.mark.parametrize(
    "key",
    ["one", "a/deep/er/key", "with.dots.json", "a-b_c=d", "00000000001.json", "space and %2F percent", "UPPER/lower"],
)
def test_a_key_is_kept_as_it_is(store: ObjectStore, key: str) -> None:
    store.put_if_absent(key, b"value")

    assert store.get(key) == b"value"
    assert [info.key for info in store.list()] == [key]


@pytest.mark.parametrize("key", ["../outside", "a/../../outside", "a//b"])
def test_a_key_cannot_leave_the_store(store: ObjectStore, key: str) -> None:
    with pytest.raises(ValueError, match="path"):
        store.put(key, b"value")


def test_a_missing_object_is_distinguished_from_an_empty_one(store: ObjectStore) -> None:
    store.put("folder/object", b"")

    for missing in ("nothing", "folder", "folder/nothing", "folder/object2"):
        assert store.size(missing) is None
        assert not store.exists(missing)
        with pytest.raises(ObjectMissing):
            store.get(missing)
        with pytest.raises(ObjectMissing):
            store.get_range(missing, 0, 1)


def test_a_range_is_cut_out_exactly(store: ObjectStore) -> None:
    store.put("key", bytes(range(100)))

    assert store.get_range("key", 0, 100) == bytes(range(100))
    assert store.get_range("key", 10, 5) == bytes(range(10, 15))
    assert store.get_range("key", 99, 1) == b"\x63"
    assert store.get_range("key", 7, 0) == b""


@pytest.mark.parametrize(("start", "length"), [(8, 5), (10, 1), (50, 1)])
def test_a_range_beyond_the_end_is_an_error_and_never_short(store: ObjectStore, start: int, length: int) -> None:
    store.put("key", b"0123456789")

    with pytest.raises(DataLoss, match="key"):
        store.get_range("key", start, length)


def test_list_names_every_object_of_a_folder_and_only_those(store: ObjectStore) -> None:
    for key in ("a/1", "a/b/2", "a/b/c/3", "ab/4", "a.5"):
        store.put(key, key.encode())

    assert sorted(store.list("a"), key=lambda info: info.key) == [
        ObjectInfo("a/1", 3),
        ObjectInfo("a/b/2", 5),
        ObjectInfo("a/b/c/3", 7),
    ]
    assert {info.key for info in store.list("a/")} == {"a/1", "a/b/2", "a/b/c/3"}
    assert len(list(store.list())) == 5
    assert list(store.list("nothing")) == []
    assert list(store.list("a/1")) == []


def test_list_is_not_cut_at_a_page_of_the_store(store: ObjectStore) -> None:
    many = 1005  # a page of S3 has 1,000
    for number in range(many):
        store.put(f"many/{number:04d}/x", b"")

    assert len(list(store.list("many"))) == many
    assert len(store.folders("many")) == many


def test_folders_are_the_direct_children_that_hold_objects(store: ObjectStore) -> None:
    for key in ("datasets/b/log/1", "datasets/a/log/1", "datasets/a/versions/v/log/1", "datasets/object", "other/x"):
        store.put(key, b"")

    assert list(store.folders("datasets")) == ["a", "b"]
    assert list(store.folders("datasets/")) == ["a", "b"]
    assert list(store.folders("")) == ["datasets", "other"]
    assert list(store.folders("nothing")) == []


def test_a_folder_is_gone_with_its_last_object(store: ObjectStore) -> None:
    store.put("datasets/a/log/1", b"")
    store.put("datasets/b/log/1", b"")

    store.delete("datasets/a/log/1")

    assert list(store.folders("datasets")) == ["b"]


def test_delete_removes_one_object_and_may_be_repeated(store: ObjectStore) -> None:
    store.put("a/1", b"")
    store.put("a/2", b"")

    store.delete("a/1")
    store.delete("a/1")
    store.delete("never/was")

    assert [info.key for info in store.list()] == ["a/2"]


def test_a_deleted_key_can_be_created_again(store: ObjectStore) -> None:
    store.put_if_absent("key", b"first")
    store.delete("key")
    store.put_if_absent("key", b"second")

    assert store.get("key") == b"second"


def test_delete_folder_leaves_its_neighbours(store: ObjectStore) -> None:
    for key in ("a/1", "a/b/2", "ab/3", "c"):
        store.put(key, b"")

    store.delete_folder("a")
    store.delete_folder("never")

    assert {info.key for info in store.list()} == {"ab/3", "c"}


@pytest.mark.parametrize("size", [0, 1, 17 * MIB], ids=["empty", "byte", "large"])
def test_a_file_is_uploaded_whole(store: ObjectStore, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    path = tmp_path / "local.bin"
    path.write_bytes(data)

    store.upload_file(path, "uploaded/file.bin")

    assert store.get("uploaded/file.bin") == data


def test_uploading_a_file_that_is_not_there_names_it(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        store.upload_file(tmp_path / "absent.bin", "uploaded/file.bin")

    assert not store.exists("uploaded/file.bin")


def test_large_objects_come_back_bit_for_bit(store: ObjectStore) -> None:
    data = os.urandom(20 * MIB + 7)

    store.put("large", data)
    store.put_if_absent("large-created", data)

    assert store.get("large") == data
    assert store.get("large-created") == data
    assert store.get_range("large", 16 * MIB - 1, 4) == data[16 * MIB - 1 : 16 * MIB + 3]
    with pytest.raises(ObjectExists):
        store.put_if_absent("large", b"small")


def test_arrow_sees_the_same_objects(store: ObjectStore) -> None:
    table = pa.table({"label": [3, 1, 4]})
    store.put("bytes/from-the-store", b"hello")

    with store.filesystem().open_input_file("bytes/from-the-store") as file:
        assert file.read() == b"hello"
    with store.filesystem().open_output_stream("bytes/from-arrow.parquet") as file:
        pq.write_table(table, file)

    assert store.size("bytes/from-arrow.parquet") == len(store.get("bytes/from-arrow.parquet"))
    assert pq.read_table(pa.BufferReader(store.get("bytes/from-arrow.parquet"))).equals(table)


def test_settings_travel_by_pickle_to_another_process(store: ObjectStore, store_settings: StoreSettings) -> None:
    store.put("key", b"value")

    assert open_store(pickle.loads(pickle.dumps(store_settings))).get("key") == b"value"


def test_two_prefixes_of_one_store_do_not_see_each_other(store_settings: StoreSettings) -> None:
    one = open_store(StoreSettings(**{**vars(store_settings), "url": f"{store_settings.url}/one"}))
    two = open_store(StoreSettings(**{**vars(store_settings), "url": f"{store_settings.url}/two"}))

    one.put("key", b"1")

    assert not two.exists("key")
    assert list(two.list()) == []


def test_signals_of_presence_are_not_errors_that_a_caller_sees() -> None:
    assert not issubclass(ObjectExists, MillraceError)
    assert not issubclass(ObjectMissing, MillraceError)
