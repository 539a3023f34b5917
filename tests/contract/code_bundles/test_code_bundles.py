"""Bundles of code on every kind of store: stored once, deleted only when nobody names them, unpacked once a node."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared import code_bundle_registry, names
from shared.code_bundle_registry import CodeBundles, release_bundle, unpack_on_node, using_bundle
from shared.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from shared.settings import StoreSettings
from shared.storage import ObjectMissing, ObjectStore, open_store
from tests.support.code_folders import LOOP, packed_bytes, store_bundle

FILES = {"train.py": LOOP, "pkg/__init__.py": "", "requirements.txt": "numpy>=1\n"}


@pytest.fixture
def store(store_settings: StoreSettings) -> ObjectStore:
    """An empty store; a test that takes it runs on every backend."""
    return open_store(store_settings)


def spooled(folder: Path, data: bytes) -> Path:
    path = folder / "spooled"
    path.write_bytes(data)
    return path


def test_the_same_bytes_again_give_the_bundle_that_there_is(store: ObjectStore) -> None:
    first = store_bundle(store, FILES)
    before = sorted(info.key for info in store.list())
    assert store_bundle(store, FILES) == first == CodeBundles(store).get(first.name)
    assert sorted(info.key for info in store.list()) == before
    assert (first.modules, first.requirements, first.file_count) == (("pkg", "train"), ("numpy>=1",), 3)


def test_racing_pushes_make_one_bundle(store: ObjectStore) -> None:
    with ThreadPoolExecutor(6) as pool:
        records = list(pool.map(lambda _: store_bundle(store, FILES), range(6)))
    assert len(set(records)) == 1


def test_refused_bytes_leave_nothing(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundles, data = CodeBundles(store), packed_bytes(FILES)
    with pytest.raises(InvalidArgument, match=r"header\.sha256"):
        bundles.create(spooled(tmp_path, data), "0" * 64)
    with pytest.raises(InvalidArgument, match="no code bundle"):
        bundles.create(spooled(tmp_path, data + b"x"), "0" * 64)
    monkeypatch.setattr("shared.code_packing.MAX_FILES", 2)
    with pytest.raises(ResourceExhausted, match="more than 2 files"):
        bundles.create(spooled(tmp_path, data), "0" * 64)
    assert list(store.list()) == []


def test_bundles_are_listed_by_pages_in_the_order_of_their_names(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = sorted(store_bundle(store, {"train.py": f"x = {number}"}).name for number in range(5))
    bundles = CodeBundles(store)
    found, token = [], ""
    while True:
        page, token = bundles.page(2, token)
        found += [record.name for record in page]
        if not token:
            break
    assert found == made
    monkeypatch.setattr(names, "PAGE_BYTES", 1)
    page, token = bundles.page(0, "")
    assert [record.name for record in page] == made[:1]
    assert [record.name for record in bundles.page(0, token)[0]] == made[1:2]


@pytest.mark.parametrize("name", ["", "codeBundles/", "codeBundles/ABC", "datasets/d", f"codeBundles/{'0' * 64}/x"])
def test_malformed_names_are_refused(store: ObjectStore, name: str) -> None:
    with pytest.raises(InvalidArgument):
        CodeBundles(store).get(name)
    with pytest.raises(InvalidArgument):
        CodeBundles(store).delete(name)
    with pytest.raises(NotFound):
        CodeBundles(store).delete(f"codeBundles/{'0' * 64}")


def test_a_deleted_bundle_leaves_nothing_and_can_be_pushed_again(store: ObjectStore) -> None:
    first = store_bundle(store, FILES)
    CodeBundles(store).delete(first.name)
    assert list(store.list()) == []
    assert store_bundle(store, FILES).name == first.name


def test_a_bundle_stays_while_a_user_of_it_may_appear(store: ObjectStore) -> None:
    bundle = store_bundle(store, FILES)
    with using_bundle(store, bundle.name, "train", "1" * 32, "trainingJobs/a"):
        pass
    with pytest.raises(FailedPrecondition, match="is named by trainingJobs/a") as caught:
        CodeBundles(store).delete(bundle.name)
    assert caught.value.specific_reason == "IN_USE"
    assert CodeBundles(store).get(bundle.name) == bundle
    release_bundle(store, bundle.name, "train", "1" * 32)
    CodeBundles(store).delete(bundle.name)


def test_a_refused_user_leaves_no_mark(store: ObjectStore) -> None:
    bundle = store_bundle(store, FILES)
    with pytest.raises(InvalidArgument), using_bundle(store, bundle.name, "train", "1" * 32, "trainingJobs/a"):
        raise InvalidArgument("no")
    with pytest.raises(NotFound), using_bundle(store, f"codeBundles/{'0' * 64}", "train", "2" * 32, "trainingJobs/b"):
        pytest.fail("it is not there")
    assert not [info for info in store.list() if "/users/" in info.key]


def test_a_deletion_that_was_begun_is_finished_by_the_garbage_collector_and_by_a_push(store: ObjectStore) -> None:
    bundle = store_bundle(store, FILES)
    bundles = CodeBundles(store)

    def begin(seconds_ago: float) -> None:
        begun = json.dumps({"begun_at": time.time() - seconds_ago}).encode()
        store.put(f"{bundle.name}/deleting.json", begun)

    begin(1)
    with pytest.raises(NotFound):
        bundles.get(bundle.name)
    with pytest.raises(Unavailable, match="is being deleted"):
        store_bundle(store, FILES)
    with pytest.raises(Unavailable, match="is being deleted"):
        bundles.delete(bundle.name)
    bundles.collect()  # another process may have begun the deletion, and still be at it
    assert store.exists(f"{bundle.name}/bundle.tar")
    begin(1000)
    assert store_bundle(store, FILES).sha256 == bundle.sha256
    assert bundles.get(bundle.name).sha256 == bundle.sha256
    begin(1000)
    bundles.collect()
    assert list(store.list()) == []


def test_the_garbage_collector_removes_leftovers_of_dead_uploads_and_keeps_bundles(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = store_bundle(store, FILES)
    store.put(f"codeBundles/{'a' * 64}/bundle.tar", b"half")
    CodeBundles(store).collect()
    assert store.exists(f"codeBundles/{'a' * 64}/bundle.tar")
    monkeypatch.setattr(code_bundle_registry, "LEFT_OVER_AFTER_S", -60.0)
    CodeBundles(store).collect()
    assert not store.exists(f"codeBundles/{'a' * 64}/bundle.tar")
    assert CodeBundles(store).get(bundle.name) == bundle


def test_a_push_puts_back_bytes_that_the_store_has_lost(store: ObjectStore, tmp_path: Path) -> None:
    bundle = store_bundle(store, FILES)
    store.delete(f"{bundle.name}/bundle.tar")
    assert store_bundle(store, FILES).sha256 == bundle.sha256
    assert unpack_on_node(store, bundle.sha256, tmp_path / "node").is_dir()


def test_a_node_unpacks_once_and_read_only(store: ObjectStore, tmp_path: Path) -> None:
    bundle = store_bundle(store, FILES)
    asked: list[str] = []

    class Reading:
        """All that a worker has of a store."""

        def get(self, key: str) -> bytes:
            asked.append(key)
            return store.get(key)

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(unpack_on_node, Reading(), bundle.sha256, tmp_path / "node") for _ in range(4)]
    folders = {call.result() for call in calls}
    assert asked == [f"{bundle.name}/bundle.tar"]
    (folder,) = folders
    assert (folder / "train.py").read_text() == LOOP
    modes = {path.stat().st_mode & 0o777 for path in folder.rglob("*")} | {folder.stat().st_mode & 0o777}
    assert modes == {0o444, 0o555}


def test_files_that_were_changed_on_the_node_are_put_right(store: ObjectStore, tmp_path: Path) -> None:
    bundle = store_bundle(store, FILES)
    folder = unpack_on_node(store, bundle.sha256, tmp_path / "node")

    def write_cache() -> None:
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__/train.cpython-311.pyc").write_bytes(b"evil")

    changes: list[Callable[[], object]] = [
        lambda: (folder / "train.py").write_text("evil"),
        lambda: (folder / "more.py").write_text("evil"),
        lambda: (folder / "train.py").unlink(),
        lambda: (folder / "link.py").symlink_to("/etc/passwd"),
        write_cache,
    ]
    for change in changes:
        folder.chmod(0o700)
        (folder / "train.py").chmod(0o600)  # as whoever is not root would have to
        change()
        assert unpack_on_node(store, bundle.sha256, tmp_path / "node") == folder
        assert sorted(path.name for path in folder.rglob("*")) == ["__init__.py", "pkg", "requirements.txt", "train.py"]
        assert (folder / "train.py").read_text() == LOOP


def test_damaged_and_missing_bytes_are_reported_and_leave_no_folder(store: ObjectStore, tmp_path: Path) -> None:
    bundle = store_bundle(store, FILES)
    store.put(f"{bundle.name}/bundle.tar", packed_bytes({"train.py": "evil"}))
    with pytest.raises(DataLoss):
        unpack_on_node(store, bundle.sha256, tmp_path / "node")
    with pytest.raises(NotFound):
        unpack_on_node(store, "0" * 64, tmp_path / "node")
    assert [path.suffix for path in (tmp_path / "node").iterdir()] == [".lock", ".lock"]


class _OneBundle:
    """Gives these bytes, whatever is asked for."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def get(self, _key: str) -> bytes:
        return self._data


def _unpack_half(data: bytes, sha256: str, root: Path) -> None:
    def stop(_folder: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    code_bundle_registry._make_read_only = stop  # type: ignore[assignment]
    unpack_on_node(_OneBundle(data), sha256, root)


def test_a_process_killed_half_way_leaves_nothing_that_counts(tmp_path: Path) -> None:
    data = packed_bytes(FILES)
    sha256 = hashlib.sha256(data).hexdigest()
    process = multiprocessing.get_context("fork").Process(target=_unpack_half, args=(data, sha256, tmp_path / "node"))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list((tmp_path / "node").glob("*.unpacking"))
    folder = unpack_on_node(_OneBundle(data), sha256, tmp_path / "node")
    assert (folder / "train.py").read_text() == LOOP
    assert not list((tmp_path / "node").glob("*.unpacking"))


def test_a_missing_key_of_any_reader_is_not_found(tmp_path: Path) -> None:
    class Empty:
        def get(self, key: str) -> bytes:
            raise ObjectMissing(key)

    with pytest.raises(NotFound):
        unpack_on_node(Empty(), "0" * 64, tmp_path / "node")
