"""Opens the files of an import: local ones below the allowed roots, objects on the store's S3 endpoint, and uploads.

A found file can be sent to another process. It is opened there again, by the settings of the store.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import quote

from pyarrow import fs

from data_service.domain.import_spec import (
    MAX_DEPTH,
    FileSource,
    Glob,
    S3Source,
    UploadSource,
    UriRefused,
    check_allowed,
    is_hidden,
    parse_uri,
    source_not_found,
)
from data_service.storage.local_files import LocalFiles, size_and_time_of
from data_service.storage.s3_objects import S3Objects, has_size_and_time
from data_service.uploads.upload import PinnedBlocks, UploadState, get_upload, open_upload, verify
from shared.errors import STORE_OUTAGES, InvalidArgument, invalid_field
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store

MAX_FILES = 100_000
# Links to folders are followed, and may form cycles.
MAX_FOLDERS = 200_000


def _nothing() -> None:
    """Do nothing: the default callback of a wait that is never interrupted."""


@dataclass(frozen=True)
class SourceFile:
    """A file of an import.

    `field` is the request's field that names it. `size_bytes` is None while it is an upload that still grows. `open`
    returns a new seekable file, at its first byte. It raises `InvalidArgument` if a local file or an object has another
    size or time than when it was found: rows of two files would be mixed. `relative` is its path below the named
    folder. `modified_ns` is when it was last written, in nanoseconds since the epoch; 0 for an upload, whose bytes stay
    as they are. `upload_uid` distinguishes an upload from another one of its name. A reader that reads the whole file
    before it yields rows must call `on_read` regularly; a copy in another process has no callbacks.
    """

    field: str
    uri: str
    size_bytes: int | None
    open: Callable[[], BinaryIO]
    relative: str = ""
    upload_uid: str = ""
    modified_ns: int = 0
    on_read: Callable[[], None] = _nothing

    @property
    def is_upload(self) -> bool:
        return bool(self.upload_uid)

    @property
    def identity(self) -> tuple[str | int | None, ...]:
        """The same in each process, and another for a file whose bytes may be others.

        The size of an upload is known only with its commit, and its uid stands for all its bytes.
        """
        size_bytes = None if self.is_upload else self.size_bytes
        return self.field, self.uri, self.relative, size_bytes, self.modified_ns, self.upload_uid

    def corrupt(self, why: str) -> InvalidArgument:
        """Return the error for content that cannot be imported; `why` is a sentence about the file."""
        return InvalidArgument(
            f"{self.field}: {self.uri} cannot be imported: {why}",
            reason="CORRUPT_SOURCE",
            metadata={"field": self.field, "uri": self.uri},
            fields=[(self.field, why)],
        )

    def wait_until_whole(self) -> None:
        """Wait until an upload is complete and check its digest, for readers that seek.

        Reads the upload once from its first byte to its last. Later reads are compared with these bytes. Other files
        are always complete.
        """
        if self.is_upload:
            with self.open() as opened:
                verify(opened)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"on_read": _nothing}


# (name, is a folder, size in bytes, when it was modified in ns) of all entries directly in a folder, in any order.
Lister = Callable[[str], list[tuple[str, bool, int, int]]]


class SourceFiles:
    """Opens the sources of an import.

    `roots` are the folders allowed for local files; `s3` is None without an S3 endpoint; without a `store` no upload
    can be read. `on_wait` is called repeatedly while an open upload is awaited, `on_read` while a file is read that may
    yield no rows for long; an error that they raise ends the wait or read.
    """

    def __init__(
        self,
        roots: Sequence[PurePosixPath],
        s3: fs.FileSystem | None,
        store: ObjectStore | None = None,
        *,
        on_wait: Callable[[], None] = _nothing,
        on_read: Callable[[], None] = _nothing,
    ) -> None:
        self._spelled_roots = list(roots)
        self._local = LocalFiles(roots)
        self._stores = _Stores(s3, store, on_wait)
        self._on_read = on_read
        self._pins: list[PinnedBlocks] = []

    def keep_pins(self, folder: str) -> None:
        """Write the pins of the uploads below `folder`, from where copies of their files in other processes read them.

        Call it once all sources are open. Few pins travel with the copies.
        """
        for number, pins in enumerate(self._pins):
            assert self._stores.store is not None  # no upload is opened without
            pins.keep(self._stores.store, f"{folder}/{number}")

    @contextmanager
    def kept_pins(self, folder: str) -> Iterator[None]:
        """Keep the pins of the uploads that are open so far below `folder`, until the body ends."""
        self.keep_pins(folder)
        try:
            yield
        finally:
            for pins in self._pins:
                pins.forget_kept()
            if self._pins:
                assert self._stores.store is not None
                # After an outage the garbage collector deletes it with the folders of the job's attempts.
                with suppress(*STORE_OUTAGES):
                    self._stores.store.delete_folder(folder)

    def find(self, field: str, uri: str) -> SourceFile:
        """Return the one named file.

        Raises `NotFound`, or `InvalidArgument` if it may not be read.
        """
        source = self._parsed(field, uri)
        if isinstance(source, UploadSource):
            return self._upload(field, source.name)
        if source.glob is not None:
            raise invalid_field(field, uri, "name one file, not a folder or a pattern")
        if isinstance(source, S3Source):
            return self._object(field, uri, f"{source.bucket}/{source.key}", "")
        return self._file(field, uri, str(source.path), "")

    def find_all(self, field: str, uri: str, most: int = MAX_FILES) -> list[SourceFile]:
        """Return all named files, in the byte order of their names.

        Raises the errors of `find`, and `InvalidArgument` for more than `most` files.
        """
        source = self._parsed(field, uri)
        if isinstance(source, UploadSource) or source.glob is None:
            return [self.find(field, uri)]
        with _collector_paused:
            files = self._matching(field, uri, source, source.glob, most)
        if not files:
            raise source_not_found(field, uri, "name files that exist")
        return files

    def _matching(self, field: str, uri: str, source: FileSource | S3Source, glob: Glob, most: int) -> list[SourceFile]:
        if isinstance(source, S3Source):
            base = f"{source.bucket}/{source.key}".rstrip("/")
            found = self._walk(field, uri, self._bucket().lister(field, uri), base, glob, most)
            return [
                self._object(field, f"s3://{quote(path)}", path, relative, size_and_time)
                for path, relative, size_and_time in found
            ]
        base = str(source.path)
        found = self._walk(field, uri, self._local.lister(field, uri), base, glob, most)
        return [
            self._file(field, _file_uri(path), path, relative, size_and_time) for path, relative, size_and_time in found
        ]

    def _walk(
        self, field: str, uri: str, entries: Lister, base: str, glob: Glob, most: int
    ) -> list[tuple[str, str, tuple[int, int]]]:
        """Return (path, path relative to `base`, size and time of modification) of the matching files, sorted."""
        found: list[tuple[str, str, tuple[int, int]]] = []
        waiting = [("", 0)]
        folders = 0
        while waiting:
            folder, depth = waiting.pop()
            folders += 1
            if folders > MAX_FOLDERS:
                raise invalid_field(field, uri, f"more than {MAX_FOLDERS} folders lie below it; import them in parts")
            if depth > MAX_DEPTH:
                raise invalid_field(field, uri, f"{folder!r} lies more than {MAX_DEPTH} folders deep; move it")
            for name, is_folder, size, modified_ns in entries(f"{base.rstrip('/')}/{folder}".rstrip("/") or "/"):
                relative = f"{folder}/{name}" if folder else name
                if is_hidden(name):
                    continue
                if is_folder:
                    if glob.depth is None or depth + 1 < glob.depth:
                        waiting.append((relative, depth + 1))
                elif glob.matches(relative):
                    found.append((f"{base.rstrip('/')}/{relative}", relative, (size, modified_ns)))
                    if len(found) > most:
                        raise invalid_field(field, uri, f"it names more than {most} files; import them in parts")
        return sorted(found, key=lambda one: os.fsencode(one[1]))

    def _parsed(self, field: str, uri: str) -> FileSource | S3Source | UploadSource:
        try:
            source = parse_uri(uri)
            check_allowed(source, self._spelled_roots, s3=self._stores.objects is not None)
        except UriRefused as refused:
            raise invalid_field(field, uri, str(refused)) from None
        return source

    def _file(
        self, field: str, uri: str, path: str, relative: str, size_and_time: tuple[int, int] | None = None
    ) -> SourceFile:
        if size_and_time is None:
            with self._local.open(field, uri, path) as file:
                size_and_time = size_and_time_of(field, uri, file)
        size, modified_ns = size_and_time
        open_file = _LocalFile(self._local, field, uri, path, size_and_time)
        return SourceFile(field, uri, size, open_file, relative, on_read=self._on_read, modified_ns=modified_ns)

    def _bucket(self) -> S3Objects:
        objects = self._stores.objects
        assert objects is not None  # `check_allowed` refuses s3:// without an endpoint
        return objects

    def _object(
        self, field: str, uri: str, path: str, relative: str, size_and_time: tuple[int, int] | None = None
    ) -> SourceFile:
        size, modified_ns = size_and_time or self._bucket().size_and_time(field, uri, path)
        open_object = _S3File(self._stores, field, uri, path, (size, modified_ns))
        return SourceFile(field, uri, size, open_object, relative, on_read=self._on_read, modified_ns=modified_ns)

    def _upload(self, field: str, name: str) -> SourceFile:
        store = self._stores.store
        if store is None:
            raise invalid_field(field, name, "no upload can be read here")
        upload = get_upload(store, name, field)
        size_bytes = upload.size_bytes if upload.state is UploadState.COMMITTED else None
        self._pins.append(PinnedBlocks())
        open_file = _UploadFile(self._stores, field, name, upload.uid, self._pins[-1])
        return SourceFile(field, name, size_bytes, open_file, upload_uid=upload.uid, on_read=self._on_read)


class _CollectorPause:
    """Pauses the collector of cycles of this process, until the last thread that has entered leaves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._entered:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._entered += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if not self._entered and self._was_enabled:
                gc.enable()


# Files have no cycles, and the collector would look at all of them again as they become more.
_collector_paused = _CollectorPause()


# --- Openers ---
# Open one file each, in this process or in another one.


class _Stores:
    """The store, and the S3 endpoint of objects.

    A copy in another process opens the store again, by its settings and when it is first needed; the endpoint is then
    that of the store. Only without a store does the endpoint itself travel.
    """

    def __init__(self, s3: fs.FileSystem | None, store: ObjectStore | None, on_wait: Callable[[], None]) -> None:
        self._settings = None if store is None else store.settings
        self._opened: tuple[fs.FileSystem | None, ObjectStore | None] | None = (s3, store)
        self.on_wait = on_wait

    @property
    def store(self) -> ObjectStore | None:
        return self._both()[1]

    @property
    def objects(self) -> S3Objects | None:
        s3 = self._both()[0]
        return None if s3 is None else S3Objects(s3)

    def _both(self) -> tuple[fs.FileSystem | None, ObjectStore | None]:
        if self._opened is None:
            assert self._settings is not None
            store = _opened_once(self._settings)
            self._opened = (s3_of(store), store)
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        opened = self._opened if self._settings is None else None
        return {"_settings": self._settings, "_opened": opened, "on_wait": _nothing}


@dataclass(frozen=True)
class _LocalFile:
    files: LocalFiles
    field: str
    uri: str
    path: str
    size_and_time: tuple[int, int]

    def __call__(self) -> BinaryIO:
        opened = self.files.open(self.field, self.uri, self.path)
        if size_and_time_of(self.field, self.uri, opened) != self.size_and_time:
            opened.close()
            raise _changed(self.field, self.uri)
        return opened


@dataclass(frozen=True)
class _S3File:
    stores: _Stores
    field: str
    uri: str
    path: str
    size_and_time: tuple[int, int]

    def __call__(self) -> BinaryIO:
        objects = self.stores.objects
        assert objects is not None
        opened = objects.open(self.field, self.uri, self.path)
        if not has_size_and_time(opened, *self.size_and_time):
            opened.close()
            raise _changed(self.field, self.uri)
        return opened


def _changed(field: str, uri: str) -> InvalidArgument:
    why = "it changed while it was read; import files that no other program writes"
    return InvalidArgument(
        f"{field}: {uri} cannot be imported: {why}",
        reason="SOURCE_CHANGED",
        metadata={"field": field, "uri": uri},
        fields=[(field, why)],
    )


@dataclass(frozen=True)
class _UploadFile:
    """`pins` travel, so that another process reads the bytes that were read and verified here."""

    stores: _Stores
    field: str
    name: str
    uid: str
    pins: PinnedBlocks

    def __call__(self) -> BinaryIO:
        store = self.stores.store
        assert store is not None
        pins = self.pins.found(store)
        return open_upload(store, self.name, on_wait=self.stores.on_wait, field=self.field, uid=self.uid, pins=pins)


@cache
def _opened_once(settings: StoreSettings) -> ObjectStore:
    """Open the store, once in a process."""
    return open_store(settings)


def s3_of(store: ObjectStore) -> fs.FileSystem | None:
    """Return the S3 endpoint of an `s3://` store, from which sources may come; None for a `file://` store."""
    filesystem: Any = store.filesystem()
    return filesystem.base_fs if isinstance(filesystem.base_fs, fs.S3FileSystem) else None


def _file_uri(path: str) -> str:
    return "file://" + quote(os.fsencode(path))
