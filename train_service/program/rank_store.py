"""The store of a program's rank: by path for a local directory, by signed URLs for S3.

A rank runs its user's code, so it holds no key of an S3 store (`signing` is the attempt's side). A local directory has
no URLs to sign: each process of the user reads and writes all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol
from urllib.parse import urlsplit

import pyarrow as pa

from shared.dataset_version import DatasetVersion, Manifest, load_version
from shared.dataset_version.version import MANIFEST, check_not_deleted
from shared.errors import DataLoss, not_found
from shared.settings import StoreSettings
from shared.storage import ObjectMissing, ObjectStore, open_store
from shared.storage.signed_store import SignedStore
from train_service.program.report_sender import Line, checked


class RankStore(Protocol):
    """The store's methods that a rank uses, as in `ObjectStore`."""

    def get(self, key: str) -> bytes: ...

    def get_range(self, key: str, start: int, length: int) -> bytes: ...

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]: ...

    def local_file(self, key: str) -> AbstractContextManager[pa.NativeFile | None]: ...

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None: ...

    def put_pieces(self, key: str, pieces: Callable[[], Iterator[bytes]]) -> None: ...


class Versions(Protocol):
    """Access to the job's dataset version."""

    def load(self, name: str) -> DatasetVersion:
        """Load the version. Raises as `load_version`."""

    def check_not_deleted(self, version: DatasetVersion) -> None:
        """Raise `NotFound` if the version was deleted since it was found."""


class StoredVersions:
    """Versions read from the store itself."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def load(self, name: str) -> DatasetVersion:
        return load_version(self._store, name)

    def check_not_deleted(self, version: DatasetVersion) -> None:
        check_not_deleted(self._store, version)


class AskedVersions:
    """Versions that the attempt locates."""

    def __init__(self, store: RankStore, line: Line) -> None:
        self._store = store
        self._line = line

    def load(self, name: str) -> DatasetVersion:
        found = self._find()
        key, digest = f"{found['folder']}/{MANIFEST}", found["manifest_sha256"]
        try:
            manifest = Manifest.from_json(self._store.get(key), digest)
        except ObjectMissing:
            self._find(again=True)  # raises if the version was deleted
            raise DataLoss(
                f"the manifest of {name} is gone", reason="MANIFEST_MISSING", metadata={"resource": name}
            ) from None
        return DatasetVersion(found["name"], manifest, digest, found["folder"])

    def check_not_deleted(self, version: DatasetVersion) -> None:
        if self._find(again=True)["folder"] != version.folder:
            raise not_found(version.name, "it was deleted while it was read")

    def _find(self, *, again: bool = False) -> dict[str, Any]:
        return checked(self._line.ask({"kind": "version", "again": again}))


def open_rank_store(url: str, line: Line) -> tuple[RankStore, Versions]:
    """Open the store at `url`. For S3 the URL is only a name here."""
    if urlsplit(url).scheme == "file":
        store = open_store(StoreSettings(url=url))
        return store, StoredVersions(store)
    signed = SignedStore(line.ask, line.tick)
    return signed, AskedVersions(signed, line)
