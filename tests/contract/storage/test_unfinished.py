"""What writers that were killed left of objects is removed, and only that."""

from __future__ import annotations

import os
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from shared.storage.object_store import minio_client

HOUR_S = 3600.0
PART = b"p" * 5 * 1024 * 1024


@pytest.fixture
def file_root(file_store: StoreSettings) -> Path:
    return Path(urlsplit(file_store.url).path)


def torn(root: Path, key: str, age_s: float = 0.0) -> Path:
    """The file that a writer leaves which is killed before it can give it its name."""
    path = root / f"{key}#1"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"half")
    os.utime(path, (time.time() - age_s, time.time() - age_s))
    return path


def test_a_folder_goes_with_what_was_never_finished_in_it(file_store: StoreSettings, file_root: Path) -> None:
    store = open_store(file_store)
    store.put("a/b/whole", b"x")
    inside, only, beside = torn(file_root, "a/b/whole"), torn(file_root, "a/c/only"), torn(file_root, "ab/other")

    store.delete_folder("a")
    store.delete_folder("never")

    assert [path.exists() for path in (inside, only, beside)] == [False, False, True]


def test_old_unfinished_writes_are_removed_and_running_writes_stay(file_store: StoreSettings, file_root: Path) -> None:
    store = open_store(file_store)
    store.put("a/whole", b"x")
    os.utime(file_root / "a/whole", (0, 0))
    old, new = torn(file_root, "a/old", 2 * HOUR_S), torn(file_root, "a/new")
    beside = torn(file_root, "ab/old", 2 * HOUR_S)

    store.delete_unfinished("a", time.time() - HOUR_S)
    store.delete_unfinished("never", time.time())

    assert [path.exists() for path in (old, new, beside)] == [False, True, True]
    assert store.get("a/whole") == b"x"


def test_parts_of_an_object_that_nobody_finishes_go_once_they_are_old(s3_store: StoreSettings) -> None:
    store: ObjectStore = open_store(s3_store)
    parts = urlsplit(s3_store.url)
    client, bucket, root = minio_client(s3_store), parts.netloc, parts.path.strip("/")
    for key in ("a/large", "ab/large"):
        upload = client._create_multipart_upload(bucket, f"{root}/{key}", {})
        client._upload_part(bucket, f"{root}/{key}", PART, None, upload, 1)

    def left() -> list[str]:
        found = client._list_multipart_uploads(bucket, prefix=f"{root}/").uploads
        return sorted(one.object_name.removeprefix(f"{root}/") for one in found)

    store.put("a/whole", b"x")
    assert left() == ["a/large", "ab/large"]
    store.delete_unfinished("a", time.time() - HOUR_S)
    assert left() == ["a/large", "ab/large"]
    store.delete_unfinished("a", time.time() + HOUR_S)
    assert left() == ["ab/large"]
    assert store.get("a/whole") == b"x"
