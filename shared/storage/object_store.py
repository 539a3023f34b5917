"""`ObjectStore`: whole objects by key, over S3 or a local directory, and how it is opened.

Its only means of coordination is put-if-absent. A store is opened from its settings, and only this module knows the
backends.

A store that does not honour put-if-absent would silently lose updates, so the start-up probe refuses it. The client of
the package `minio` sends requests that the store's own client cannot send to an S3 server.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import time
import unicodedata
import uuid
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict
from urllib.parse import urlsplit

import obstore
import pyarrow as pa
from obstore import exceptions
from obstore.store import LocalStore, S3Store
from pyarrow import fs

from shared.errors import DataLoss, MillraceError, ResourceExhausted, Unavailable
from shared.settings import StoreSettings

if TYPE_CHECKING:
    from minio import Minio
    from obstore import GetOptions, GetResult
    from obstore.store import BackoffConfig


# --- Object store ---

# The reason of the `ResourceExhausted` that a full store raises.
STORE_FULL = "STORE_FULL"
FULL_SIGNS = (
    f"(os error {errno.ENOSPC})",
    f"(os error {errno.EDQUOT})",
    "507 Insufficient Storage",
    # Error codes in the answers of S3 servers; MinIO's begin with X.
    "<Code>InsufficientStorage",
    "<Code>QuotaExceeded",
    "<Code>XMinioStorageFull",
    "<Code>XMinioAdminBucketQuotaExceeded",
)

# The error code of a request to a bucket that is not there, and that of an object in the answer to a deletion of many.
# The code alone may be in a key.
NO_BUCKET_SIGN = "<Code>NoSuchBucket</Code>"
NO_BUCKET_SIGN_OF_OBJECT = "(code: NoSuchBucket)"

# Reasons of `Unavailable`: a conflicting write, or a store whose answer did not come or was lost.
CONFLICT = "STORE_CONFLICT"
UNRESPONSIVE = "STORE_UNAVAILABLE"
# How long such a failed write is repeated, and with what pauses.
RETRY_TIMEOUT_S = 10.0
RETRY_DELAY_S = 0.1


class Parts(TypedDict):
    """How obstore cuts an object into the parts of a multipart upload."""

    chunk_size: int  # bytes
    max_concurrency: int


# Objects up to one part go in one PUT, which a server accepts in full or not at all. Four at once are 64 MiB of memory.
PART_BYTES: Final = 16 * 1024 * 1024
# S3's limit is 10,000 parts. Of a larger object than 145 GiB the parts grow, up to 5 TiB, the most that S3 takes.
MAX_PARTS: Final = 9_500
MIB: Final = 1024 * 1024
PARTS_IN_MEMORY_BYTES: Final = 4 * PART_BYTES


def parts_for(size_bytes: int) -> Parts:
    """Return how an object of this size is cut. Of larger parts than usual fewer are sent at a time."""
    part = max(PART_BYTES, -(-size_bytes // MAX_PARTS // MIB) * MIB)
    return {"chunk_size": part, "max_concurrency": max(1, PARTS_IN_MEMORY_BYTES // part)}


# A read of more bytes than this goes on where it was cut off, and has no limit of time while bytes arrive.
STREAMED_FROM_BYTES = 1024 * 1024
# Bytes that are taken over at once from a connection; what a cut connection had beyond them is asked for again.
STREAM_BYTES = 256 * 1024

# The local file of an object that is being written. No object can have such a key.
TORN_NAME = re.compile(r".+#\d+")
# S3 allows keys of 1024 bytes; the rest is for the store's folder in its bucket.
MAX_KEY_BYTES = 896
# So many objects are deleted by one request to S3, which allows no more.
KEYS_A_DELETION: Final = 1000
# So many keys are in the answer to one request of a listing.
KEYS_A_LISTING: Final = 1000
# File systems allow 255 bytes; the rest is for the suffix of an object that is being written.
MAX_NAME_BYTES = 245


class ObjectExists(Exception):
    """put-if-absent found the key taken.

    A retried PUT may have met its own first write, so compare the stored content.
    """


class ObjectMissing(Exception):
    """No object has that key."""


class _Replaced(Exception):
    """The object was overwritten while it was read."""


@dataclass(frozen=True)
class ObjectInfo:
    key: str
    size_bytes: int
    # Seconds since the epoch by the store's clock.
    modified: float = field(default=0.0, compare=False)


class ObjectStore:
    """Objects below one root.

    Keys are relative and '/'-separated. Writes are atomic and, once returned, durable. In a local directory they
    survive the death of processes, but not a power failure. Every method raises `Unavailable` if the store does not
    answer, after its own retries. Methods that write raise `ResourceExhausted` with the reason STORE_FULL if the store
    is full, and then leave no object. After an aborted multipart upload an S3 server may keep a part that arrived late,
    until its lifecycle rule removes it.
    """

    # How many objects `delete_all` removes at once, with one request.
    keys_a_deletion: int = KEYS_A_DELETION

    def __init__(
        self,
        backend: LocalStore | S3Store,
        filesystem: fs.FileSystem,
        settings: StoreSettings,
        *,
        reading: S3Store | None = None,
        writing: S3Store | None = None,
    ) -> None:
        """Create the store. `reading` and `writing` are for large objects on S3, with limits of time of their own."""
        self._backend = backend
        self._reading = reading
        self._writing = writing
        self._filesystem = filesystem
        # The settings to open the store in another process, because an open store cannot be sent.
        self.settings = settings
        if isinstance(backend, LocalStore):
            self.keys_a_deletion = 1

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Write the object, replacing an existing one."""
        size_bytes = memoryview(data).nbytes
        backend, parts = self._for_writing(size_bytes), parts_for(size_bytes)
        _written(key, lambda: obstore.put(backend, key, data, mode="overwrite", **parts))

    def put_if_absent(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Write a new object.

        Of several racing writers exactly one returns; the others get `ObjectExists`.
        """
        # Never multipart, because only a single PUT is conditional.
        _written(key, lambda: obstore.put(self._backend, key, data, mode="create", use_multipart=False))

    def get(self, key: str) -> bytes:
        """Read the whole object. A long read that is cut off goes on with the byte after the last one that came."""
        while True:
            with _errors(key):
                found = obstore.get(self._reading or self._backend, key)
                size_bytes, etag = found.meta["size"], found.meta["e_tag"]
                if self._reading is None or size_bytes <= STREAMED_FROM_BYTES:
                    return bytes(found.bytes())
            data = bytearray(size_bytes)
            try:
                self._fill(key, 0, memoryview(data), etag, found)
            except _Replaced:
                continue
            return bytes(data)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read `length` bytes from `start`.

        Raises `DataLoss` if the object ends before. It never returns fewer bytes. A long read that is cut off goes on
        with the byte after the last one that came.
        """
        if self._reading is None or length <= STREAMED_FROM_BYTES:
            return bytes(self.get_ranges(key, [(start, length)])[0])
        data = bytearray(length)
        self._fill(key, start, memoryview(data))
        return bytes(data)

    def _fill(
        self, key: str, start: int, buffer: memoryview, etag: str | None = None, answer: GetResult | None = None
    ) -> None:
        """Fill `buffer` with the bytes from `start`, over as many connections as it takes, one after the other.

        `answer` is that of a first request, if there is one. Gives up when tries have failed for `RETRY_TIMEOUT_S`
        and no byte has come. With an `etag` it raises `_Replaced` if the object is another by now.
        """
        assert self._reading is not None
        filled = 0
        failing_since: float | None = None
        while filled < len(buffer):
            is_answered, began_at = False, time.monotonic()
            options: GetOptions = {"range": (start + filled, start + len(buffer))}
            if etag is not None:
                options["if_match"] = etag
            try:
                with _errors(key):
                    try:
                        found = answer or obstore.get(self._reading, key, options=options)
                        is_answered, answer = True, None
                    except exceptions.PreconditionError:
                        raise _Replaced(key) from None
                    except exceptions.GenericError as error:
                        if not _beyond_end(error):
                            raise
                        raise _ends_before(key, start + len(buffer)) from None
                    if found.range[1] < start + len(buffer):
                        raise _ends_before(key, start + len(buffer))
                    for piece in found.stream(min_chunk_size=STREAM_BYTES):
                        buffer[filled : filled + len(piece)] = piece
                        filled += len(piece)
                        failing_since = None
            except Unavailable as error:
                now = time.monotonic()
                if failing_since is None:
                    # The client has repeated a request that was not answered. An answer that fell silent is noticed
                    # only after the client's time-out, and has not been repeated at all.
                    failing_since = now if is_answered else began_at
                if error.specific_reason != UNRESPONSIVE or now - failing_since > RETRY_TIMEOUT_S:
                    raise
                time.sleep(RETRY_DELAY_S)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Read several (start, length) ranges at the same time, as `get_range` does."""
        asked = [(start, length) for start, length in ranges if length]
        with _errors(key):
            try:
                starts, lengths = [start for start, _ in asked], [length for _, length in asked]
                # The caller joins neighbouring ranges, because it knows what lies between them.
                read = obstore.get_ranges(self._backend, key, starts=starts, lengths=lengths, coalesce=0)
                found = iter([memoryview(data) for data in read])
            except exceptions.GenericError as error:
                if not _beyond_end(error):
                    raise
                found = iter(())
        given = [next(found, memoryview(b"")) if length else memoryview(b"") for _, length in ranges]
        for data, (start, length) in zip(given, ranges, strict=True):
            if len(data) != length:
                raise _ends_before(key, start + length)
        return given

    @contextmanager
    def local_file(self, key: str) -> Iterator[pa.NativeFile | None]:
        """Open the object for Arrow to read directly; None if the store is no local directory.

        An `OSError` of the body is raised as other methods raise it.
        """
        if not isinstance(self._backend, LocalStore):
            yield None
            return
        with _errors(key), self._filesystem.open_input_file(key) as file:
            yield file

    def size(self, key: str) -> int | None:
        """Return the object's size in bytes; None if no object has that key."""
        try:
            with _errors(key):
                return obstore.head(self._backend, key)["size"]
        except ObjectMissing:
            return None

    def exists(self, key: str) -> bool:
        return self.size(key) is not None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below the folder `prefix`, in no particular order."""
        with _errors(prefix):
            for chunk in obstore.list(self._backend, _folder(prefix)):
                for meta in chunk:
                    yield ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())

    def folders(self, prefix: str) -> Sequence[str]:
        """Return the sorted names of the folders directly below `prefix` that hold an object at any depth."""
        with _errors(prefix):
            found = obstore.list_with_delimiter(self._backend, _folder(prefix))["common_prefixes"]
        if isinstance(self._backend, LocalStore):
            # A directory outlives its last object; a prefix does not.
            found = [path for path in found if any(True for _ in self.list(path))]
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in found)

    def folders_after(self, prefix: str, after: str, most: int) -> Sequence[str]:
        """Return at most `most` names as `folders` does, the next ones beyond `after` in the order of keys.

        A name counts with its slash, so `a-b` is before `a`. A request finds the names in `KEYS_A_LISTING` keys, and at
        least one.
        """
        folder = prefix.rstrip("/")
        found: MutableSequence[str] = []
        # Beyond every key that begins with the last name and a slash.
        at = f"{folder}/{after}0" if after else folder
        while len(found) < most and (keys := self.keys_after(folder, at)):
            for key in keys:
                name, slash, _ = key[len(folder) + 1 :].partition("/")
                if key > at and slash and len(found) < most:
                    found.append(name)
                    at = f"{folder}/{name}0"
            if len(keys) < KEYS_A_LISTING:
                break
            at = max(at, keys[-1])
        return found

    def keys_after(self, prefix: str, after: str) -> Sequence[str]:
        """Return the next keys below the folder `prefix` that are greater than `after`, in their order.

        They are `KEYS_A_LISTING`, or fewer if there are no more; one request to S3.
        """
        with _errors(prefix):
            if isinstance(self._backend, LocalStore):
                root = Path(str(self._backend.prefix))
                return list(itertools.islice(_local_keys(root, prefix.rstrip("/"), after), KEYS_A_LISTING))
            chunks = obstore.list(self._backend, _folder(prefix), offset=after or None, chunk_size=KEYS_A_LISTING)
            return [meta["path"] for meta in next(iter(chunks), [])]

    def delete(self, key: str) -> None:
        """Remove the object. A missing object is no error."""
        try:
            with _errors(key):
                obstore.delete(self._backend, key)
        except ObjectMissing:
            return

    def delete_all(self, keys: Iterable[str]) -> None:
        """Remove the objects, on S3 up to `KEYS_A_DELETION` by one request. Missing objects are no error.

        If it raises, some may be gone; a repeated call removes the others.
        """
        if isinstance(self._backend, LocalStore):
            for key in keys:
                self.delete(key)
            return
        left = iter(keys)
        while some := list(itertools.islice(left, KEYS_A_DELETION)):
            # Also repeats what the server refused for single objects, in an answer that is good otherwise.
            _written(some[0], partial(obstore.delete, self._backend, some))

    def delete_folder(self, prefix: str) -> None:
        """Remove every object below `prefix`."""
        self.delete_all([info.key for info in self.list(prefix)])
        with _errors(prefix):
            for path in self._torn(prefix):
                path.unlink(missing_ok=True)

    def delete_unfinished(self, prefix: str, before: float) -> None:
        """Remove unfinished objects below `prefix` that killed writers have left; no listing shows them.

        It removes those last written to (on S3: begun) before `before`, in seconds since the epoch.
        """
        if not isinstance(self._backend, LocalStore):
            # Imported here only, because its client takes a sixth of a second to import.
            from shared.storage.presigning import abort_uploads

            abort_uploads(self.settings, prefix, before)
            return
        with _errors(prefix):
            for path in self._torn(prefix):
                with suppress(FileNotFoundError):  # its writer has just ended
                    if path.stat().st_mtime < before:
                        path.unlink()

    def upload_file(self, path: Path, key: str) -> None:
        """Write a local file as an object, in parts if it is large.

        Raises `FileNotFoundError` if the file is missing.
        """
        size_bytes = path.stat().st_size
        backend, parts = self._for_writing(size_bytes), parts_for(size_bytes)
        _written(key, lambda: obstore.put(backend, key, path, mode="overwrite", **parts))

    def put_pieces(self, key: str, pieces: Callable[[], Iterator[bytes]]) -> None:
        """Write the concatenated pieces as an object, in parts if it is large.

        `pieces` is called again for each repeated try. Their size is unknown, so the parts do not grow: on S3 an object
        has at most 156 GiB.
        """
        backend, parts = self._writing or self._backend, parts_for(0)
        _written(key, lambda: obstore.put(backend, key, pieces(), mode="overwrite", **parts))

    def copy(self, source: str, target: str) -> None:
        """Write the object `source` as `target` within the store, replacing an existing one. S3 copies up to 5 GiB.

        In a local directory both are one file until one of them is written anew, where the disk has hard links. Raises
        `ObjectMissing`.
        """
        if not isinstance(self._backend, LocalStore):
            _written(target, lambda: obstore.copy(self._writing or self._backend, source, target))
            return
        try:
            with _errors(source):
                obstore.copy(self._backend, source, target)
        except Unavailable:  # the disk has no hard links
            self.upload_file(Path(str(self._backend.prefix)) / source, target)

    def _for_writing(self, size_bytes: int) -> LocalStore | S3Store:
        is_large = size_bytes > STREAMED_FROM_BYTES
        return self._writing if self._writing is not None and is_large else self._backend

    def _torn(self, prefix: str) -> Sequence[Path]:
        """Return the files of unfinished objects below `prefix`, whose writers still write or were killed."""
        if not isinstance(self._backend, LocalStore):
            return []
        folders = os.walk(Path(str(self._backend.prefix)) / prefix)
        return [Path(folder, name) for folder, _, names in folders for name in names if TORN_NAME.fullmatch(name)]

    def filesystem(self) -> fs.FileSystem:
        """The same objects for Arrow and Ray Data. Its paths are this store's keys."""
        return self._filesystem


def key_problem(key: str) -> str:
    """Explain why a store may not hold an object of that key; empty if the key is fine.

    Without this check, a store would refuse such a key as if it were unavailable.
    """
    try:
        encoded = key.encode()
    except UnicodeEncodeError:
        return "is not valid UTF-8"
    if len(encoded) > MAX_KEY_BYTES:
        return f"makes a key of {len(encoded)} bytes, and at most {MAX_KEY_BYTES} are allowed"
    if any(unicodedata.category(character) == "Cc" for character in key):
        return "has a control character"
    for name in key.split("/"):
        if name in ("", ".", ".."):
            return f"has a part {name!r}"
        if len(name.encode()) > MAX_NAME_BYTES:
            return f"has a name of {len(name.encode())} bytes in it, and at most {MAX_NAME_BYTES} are allowed"
    if re.fullmatch(r"#\d+|" + TORN_NAME.pattern, key.rpartition("/")[2]):
        return "ends with # and a number, which marks an object that is still being written"
    return ""


def _ends_before(key: str, end: int) -> DataLoss:
    return DataLoss(f"{key} ends before byte {end}", metadata={"object": key})


def _local_keys(root: Path, folder: str, after: str) -> Iterator[str]:
    """Yield the keys below a folder of a local directory that are greater than `after`, in their order."""
    try:
        entries = [(entry.name, entry.is_dir()) for entry in os.scandir(root / folder)]
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in sorted(f"{name}/" if is_folder else name for name, is_folder in entries):
        key = f"{folder}/{name}" if folder else name
        if key.endswith("/"):
            # All keys below it begin with it.
            if key > after or after.startswith(key):
                yield from _local_keys(root, key.rstrip("/"), after)
        elif key > after and not TORN_NAME.fullmatch(name):
            yield key


def _folder(prefix: str) -> str | None:
    return prefix.rstrip("/") + "/" if prefix else None


def _beyond_end(error: exceptions.GenericError) -> bool:
    """Return whether a range begins after the last byte. The library has no class for this error."""
    return "416 Range Not Satisfiable" in str(error) or "StartTooLarge" in str(error)


def _written(key: str, write: Callable[[], object]) -> None:
    """Call `write`, and repeat it for some time.

    The library does not repeat two failures by itself: a conditional PUT whose connection broke, and 409 Conflict,
    which servers answer while another operation is running at that key or, where keys are paths, at its folder.
    """
    until = time.monotonic() + RETRY_TIMEOUT_S
    while True:
        try:
            with _errors(key):
                write()
            return
        except Unavailable as error:
            if error.specific_reason not in (CONFLICT, UNRESPONSIVE) or time.monotonic() > until:
                raise
        time.sleep(RETRY_DELAY_S)


def _is_missing(error: Exception) -> bool:
    """Return whether an object is missing. All objects of a lost bucket would merely seem missing, and are not."""
    is_not_found = isinstance(error, (exceptions.NotFoundError, FileNotFoundError))
    return is_not_found and NO_BUCKET_SIGN not in str(error)


def _is_conflict(error: exceptions.AlreadyExistsError) -> bool:
    return "status code: 409" in str(error)


@contextmanager
def _errors(key: str) -> Iterator[None]:
    """Translate the library's errors into Millrace's.

    A missing bucket or refused credentials count as an outage for the caller.
    """
    try:
        yield
    except exceptions.AlreadyExistsError as error:
        if _is_conflict(error):
            raise Unavailable(
                "the object store refuses a write as being in conflict with another one",
                reason=CONFLICT,
                metadata={"object": key},
                retry_after_s=1.0,
            ) from error
        raise ObjectExists(key) from None
    except MillraceError:
        raise
    except (exceptions.BaseError, OSError) as error:
        if _is_missing(error):  # checked before any sign in the text, because the text has the key
            raise ObjectMissing(key) from None
        if _is_full(error):  # checked first, because some servers report it with 403 Forbidden
            raise store_is_full(key) from error
        if refusal := _refusal(error):
            raise refused_by_store(refusal) from error
        raise unresponsive_store(key) from error


def store_is_full(key: str) -> ResourceExhausted:
    return ResourceExhausted(
        "the object store is full: free space in it, by deleting versions, jobs or uploads, or give it more; "
        "then try again",
        reason=STORE_FULL,
        metadata={"object": key},
        retry_after_s=30.0,
    )


def refused_by_store(refusal: str) -> Unavailable:
    """Make the error for a fault that an operator has to correct."""
    return Unavailable(f"the object store cannot be used: {refusal}", reason="STORE_REFUSED", retry_after_s=30.0)


def unresponsive_store(key: str) -> Unavailable:
    return Unavailable(
        "the object store does not answer; try again", reason=UNRESPONSIVE, metadata={"object": key}, retry_after_s=1.0
    )


def upload_is_gone(key: str) -> Unavailable:
    """Make the error for a multipart upload that another process has ended, or that the store has cleaned up."""
    return Unavailable(
        f"the upload of {key} in parts is not there any more; it is begun anew",
        reason=CONFLICT,
        metadata={"object": key},
        retry_after_s=1.0,
    )


def is_full_sign(text: str) -> bool:
    """Return whether a server's text says that it is full."""
    return any(sign in text for sign in FULL_SIGNS)


def _is_full(error: Exception) -> bool:
    """Return whether the store is full.

    The library has no class for it, neither for the system's error nor for the answers of S3 servers.
    """
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return is_full_sign(str(error))


def _refusal(error: Exception) -> str | None:
    """Describe a fault that an operator has to correct, or return None.

    The library has classes for only some of these faults.
    """
    if any(sign in str(error) for sign in (NO_BUCKET_SIGN, NO_BUCKET_SIGN_OF_OBJECT)):
        return "its bucket is not there"
    denied = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError)
    # The second sign is that of a single object, in the answer to a deletion of many.
    if isinstance(error, denied) or any(sign in str(error) for sign in ("403 Forbidden", "(code: AccessDenied)")):
        return "it does not accept our credentials"
    return None


# --- Opening ---

# Short enough that an RPC can still answer UNAVAILABLE before its deadline.
RETRY_FOR = timedelta(seconds=10)
BACKOFF: BackoffConfig = {
    "init_backoff": timedelta(milliseconds=100),
    "max_backoff": timedelta(seconds=1),
    "base": 2,
}
# The limit of one request with all its bytes. Large objects are written in parts, and read without this limit.
REQUEST_TIMEOUT = timedelta(seconds=30)
# The library has no way to say "no limit".
UNLIMITED = timedelta(days=365)
# The limit of one part of a large object, or of a PUT above 1 MiB. While it is sent the server is silent, and the
# library cannot tell that bytes are going out.
WRITE_TIMEOUT = timedelta(seconds=120)


def open_store(settings: StoreSettings) -> ObjectStore:
    """Open the store. A missing local directory is created; a bucket must exist (`ensure_bucket`)."""
    parts = urlsplit(settings.url)
    return _open_local(Path(parts.path), settings) if parts.scheme == "file" else _open_s3(settings)


def ensure_bucket(settings: StoreSettings) -> None:
    """Create the bucket of an `s3://` store if it is missing. Does nothing for `file://`.

    Raises `StoreRefused` if the server refuses, `Unavailable` if it does not answer.
    """
    parts = urlsplit(settings.url)
    if parts.scheme != "s3":
        return
    # Imported here only: they take a sixth of a second, and workers, which start often, create no buckets.
    import urllib3
    from minio.error import MinioException, S3Error

    client = minio_client(settings)
    endpoint = urlsplit(settings.s3_endpoint or S3_ENDPOINT)
    try:
        if not client.bucket_exists(parts.netloc):
            client.make_bucket(parts.netloc)
    except S3Error as error:
        if error.code != "BucketAlreadyOwnedByYou":  # another service was faster
            raise StoreRefused(f"{settings.url} on {endpoint.netloc}: {error.code}: {error.message}") from None
    except (MinioException, ValueError) as error:  # minio raises it for an invalid bucket name
        raise StoreRefused(f"{settings.url} on {endpoint.netloc}: {error}") from None
    except urllib3.exceptions.HTTPError as error:
        raise Unavailable(
            f"no S3 server answers at {endpoint.netloc}", reason="STORE_UNAVAILABLE", retry_after_s=1.0
        ) from error


def _open_local(root: Path, settings: StoreSettings) -> ObjectStore:
    root.mkdir(parents=True, exist_ok=True)
    return ObjectStore(LocalStore(root), fs.SubTreeFileSystem(str(root), fs.LocalFileSystem()), settings)


def _open_s3(settings: StoreSettings) -> ObjectStore:
    parts = urlsplit(settings.url)
    prefix = parts.path.strip("/")
    endpoint = urlsplit(settings.s3_endpoint)

    def backend(timeout: timedelta, silence: timedelta) -> S3Store:
        return S3Store(
            parts.netloc,
            prefix=prefix or None,
            endpoint=settings.s3_endpoint or None,
            access_key_id=settings.s3_access_key,
            secret_access_key=settings.s3_secret_key,
            region=settings.s3_region,
            virtual_hosted_style_request=False,
            client_options={
                "allow_http": endpoint.scheme == "http",
                "connect_timeout": CONNECT_TIMEOUT,
                "read_timeout": silence,
                "timeout": timeout,
            },
            # As many retries as the time allows, because a restarting server is unavailable for some seconds.
            retry_config={"max_retries": 30, "retry_timeout": RETRY_FOR, "backoff": BACKOFF},
        )

    filesystem = fs.S3FileSystem(
        access_key=settings.s3_access_key,
        secret_key=settings.s3_secret_key,
        region=settings.s3_region,
        endpoint_override=endpoint.netloc or None,
        scheme=endpoint.scheme or "https",
        connect_timeout=5,
        request_timeout=30,
        # Arrow's default of three is too few: among the requests of one file, some are refused three times and would
        # succeed at the fifth try.
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=6),
    )
    root = f"{parts.netloc}/{prefix}" if prefix else parts.netloc
    tree = fs.SubTreeFileSystem(root, filesystem)
    return ObjectStore(
        backend(REQUEST_TIMEOUT, SILENCE_TIMEOUT),
        tree,
        settings,
        reading=backend(UNLIMITED, SILENCE_TIMEOUT),
        writing=backend(WRITE_TIMEOUT, WRITE_TIMEOUT),
    )


# --- Client of minio ---

S3_ENDPOINT = "https://s3.amazonaws.com"

CONNECT_TIMEOUT = timedelta(seconds=5)
# A server that accepts and then sends nothing for this time is given up.
SILENCE_TIMEOUT = timedelta(seconds=10)


def minio_client(settings: StoreSettings, silence: timedelta = SILENCE_TIMEOUT) -> Minio:
    """Make a client. `silence` is how long a server may send nothing."""
    # Imported here only: they take a sixth of a second, and workers, which start often, need none.
    import urllib3
    from minio import Minio

    endpoint = urlsplit(settings.s3_endpoint or S3_ENDPOINT)
    return Minio(
        endpoint=endpoint.netloc,
        access_key=settings.s3_access_key,
        secret_key=settings.s3_secret_key,
        region=settings.s3_region,
        secure=endpoint.scheme == "https",
        http_client=urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT.total_seconds(), read=silence.total_seconds()),
            retries=urllib3.Retry(total=2, backoff_factor=0.2),
        ),
    )


# --- Start-up probe ---

ROUNDS = 3
WRITERS = 8


class StoreRefused(RuntimeError):
    """The store cannot be used. The text says why."""


def probe(store: ObjectStore) -> None:
    """Test put-if-absent with racing writers.

    Raises `StoreRefused` unless each time exactly one writer wins and its value is read back, and for a missing bucket
    or refused credentials; `Unavailable` if nothing answers, and `ResourceExhausted` if the store is full.
    """
    try:
        _race(store)
    except Unavailable as error:
        if error.specific_reason == "STORE_REFUSED":
            raise StoreRefused(f"{store.settings.url}: {error.message}") from error
        raise


def _race(store: ObjectStore) -> None:
    folder = f"probe/{uuid.uuid4().hex}"
    with ThreadPoolExecutor(WRITERS) as pool:
        for round_number in range(ROUNDS):
            key = f"{folder}/{round_number}"
            try:
                values = [f"{writer}".encode() for writer in range(WRITERS)]
                won = list(pool.map(lambda value, key=key: _try(store, key, value), values))
                winners = [value for value, one in zip(values, won, strict=True) if one]
                # No winner: the winner's answer was lost, so its retry met its own write.
                if len(winners) > 1 or store.get(key) not in (winners or values):
                    raise StoreRefused(
                        f"{store.settings.url} does not honour put-if-absent (If-None-Match: *): of {WRITERS} "
                        f"concurrent creates {len(winners)} succeeded; "
                        "use a store with conditional writes, such as MinIO or S3"
                    )
            finally:
                store.delete(key)


def _try(store: ObjectStore, key: str, value: bytes) -> bool:
    try:
        store.put_if_absent(key, value)
    except ObjectExists:
        return False
    return True
