"""No reader ever sees a part of an object, not even when the writer is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from shared.settings import StoreSettings
from shared.storage import ObjectExists, ObjectStore, open_store
from tests.support.waiting import wait_until

MIB = 1024 * 1024
SIZE = 24 * MIB


def test_a_big_object_appears_all_at_once(store: ObjectStore, tmp_path: Path) -> None:
    path = tmp_path / "big.bin"
    path.write_bytes(b"f" * SIZE)
    writes = {
        "put": lambda: store.put("big/put", b"p" * SIZE),
        "created": lambda: store.put_if_absent("big/created", b"c" * SIZE),
        "file": lambda: store.upload_file(path, "big/file"),
    }
    with ThreadPoolExecutor(1) as pool:
        for name, write in writes.items():
            writing = pool.submit(write)
            sizes: set[int | None] = set()
            while not writing.done():
                sizes.add(store.size(f"big/{name}"))
                sizes.update(info.size_bytes for info in store.list("big") if info.key == f"big/{name}")
            writing.result()
            assert sizes <= {None, SIZE}
            assert store.size(f"big/{name}") == SIZE


def test_a_reader_sees_the_old_object_or_the_new_one_but_no_mixture(store: ObjectStore) -> None:
    store.put("key", b"0" * MIB)

    def overwrite() -> None:
        for digit in b"123456789":
            store.put("key", bytes([digit]) * MIB)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(overwrite)
        while not writing.done():
            seen = store.get("key")
            assert len(seen) == MIB
            assert len(set(seen)) == 1
        writing.result()


def test_a_writer_that_is_killed_leaves_whole_objects_or_none(store_settings: StoreSettings) -> None:
    store = open_store(store_settings)
    writer = multiprocessing.get_context("spawn").Process(target=_write_for_ever, args=(store_settings,))
    writer.start()
    try:
        wait_until(lambda: store.exists("written/1"), "the second object")
    finally:
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()

    sizes = {info.key: info.size_bytes for info in store.list("written")}
    assert sizes
    assert set(sizes.values()) == {8 * MIB}
    # What it left half-written is in nobody's way. A server that has received all of it may still store it.
    torn = f"written/{len(sizes)}"
    with suppress(ObjectExists):
        store.put_if_absent(torn, b"mine")
    assert store.get(torn) in (b"mine", b"w" * 8 * MIB)


def _write_for_ever(settings: StoreSettings) -> None:
    store = open_store(settings)
    for number in range(100):
        store.put(f"written/{number}", b"w" * 8 * MIB)
