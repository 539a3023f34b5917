"""A program's access to the store: the attempt signs URLs that its ranks may use, and refuses the rest.

A rank runs its user's code, so it holds no key of an S3 store, where it uses signed URLs instead
(`shared.storage.presigning`).
A local directory has no URLs to sign: each process of the user reads and writes all of it by path.

A rank may read
    the manifest, its pages and the files of the job's dataset version
    the bundle of its code
    everything below its job's checkpoints
and write or overwrite
    {job}/checkpoints/data/report-{n}-a{attempt}-{token}/r{rank}/...    of reports that are not committed yet
    {job}/logs/a{attempt}/r{rank}/...

A rank's number is not authenticated: the ranks of one attempt share its token, and belong to one user. A rank lists and
deletes nothing. A URL is valid for an hour, even after its report was committed. A rank can therefore damage its own
part of a checkpoint of this attempt, which the digests of the manifest then reveal.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa

from shared.checkpoint.registry import data_folder_of
from shared.code_bundle_registry import bundle_key
from shared.dataset_version import DatasetVersion, Manifest, load_version
from shared.dataset_version.pages import open_files
from shared.dataset_version.version import MANIFEST, check_not_deleted
from shared.errors import DataLoss, FailedPrecondition, InvalidArgument, MillraceError, not_found, shown
from shared.settings import StoreSettings
from shared.storage import ObjectMissing, ObjectStore, key_problem, open_store
from shared.storage.presigning import SIGNED_TIMEOUT_S, VALID_FOR, MultipartUploads, Presigner, SignedStore
from train_service.domain.spec import TrainingSpec
from train_service.program.coordinator import FOLDER_NAME, Reply, ReportCoordinator
from train_service.program.report_sender import Line, checked
from train_service.records.logs import rank_folder

# --- The attempt signs ---

PR_SET_DUMPABLE = 4
SIGN, BEGIN, SIGN_PARTS, COMPLETE, ABORT = "sign", "begin_parts", "sign_parts", "complete_parts", "abort_parts"
VERSION = "version"
# URLs per message: the requested file of a version and those that follow it, or parts. Each has some 450 bytes. A
# message to a stopped rank must fit into the socket's buffer, of some megabytes, or the sending thread would wait
# forever.
FILES_AT_ONCE = 64
PARTS_AT_ONCE = 16
MAX_KEYS = 64
# A file's URL is signed once for all ranks, and again after this time.
SIGNED_ANEW_AFTER_S = 600.0
# Each URL of an answer is valid for at least this long, with a margin for a request that begins at the last moment.
HOLDS_FOR_S = VALID_FOR.total_seconds() - SIGNED_ANEW_AFTER_S - 600.0
# Threads for ranks' requests that wait for the store.
THREADS = 16
REFUSED = "KEY_REFUSED"


class Handler(Protocol):
    def __call__(self, rank: int, body: dict[str, Any], reply: Reply) -> None: ...


@contextmanager
def handling(
    store: ObjectStore, job_name: str, attempt: int, spec: TrainingSpec, coordinator: ReportCoordinator
) -> Iterator[Handler]:
    """Yield the handler of the ranks' requests: the coordinator, preceded by a signer if the store is S3."""
    if urlsplit(store.settings.url).scheme != "s3":
        yield coordinator.handle
        return
    with StoreSigner(store, job_name, attempt, spec, coordinator) as signer:
        yield signer.handle


class StoreSigner:
    """Signer that takes the ranks' requests first, and passes all others to the coordinator. Use it as a context."""

    def __init__(
        self, store: ObjectStore, job_name: str, attempt: int, spec: TrainingSpec, coordinator: ReportCoordinator
    ) -> None:
        assert spec.program is not None
        self._store = store
        self._job_name = job_name
        self._attempt = attempt
        self._spec = spec
        self._coordinator = coordinator
        self._presigner = Presigner(store.settings, for_clients=False)
        self._uploads = MultipartUploads(store)
        self._data_folder = data_folder_of(job_name)
        self._bundle = bundle_key(spec.program.code_bundle)
        # Held by the first rank that requests the version; the others wait for its result.
        self._loading = threading.Lock()
        # The version once it is read, and its keys.
        self._version: DatasetVersion | None = None
        self._keys: _VersionKeys | None = None
        self._lock = threading.Lock()
        # Signed URLs for reading, each with its time of signing.
        self._signed: dict[str, tuple[str, float]] = {}
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="signer")
        self._answers: dict[str, Callable[[int, dict[str, Any]], dict[str, Any]]] = {
            SIGN: self._sign,
            SIGN_PARTS: self._sign_parts,
            BEGIN: self._begin,
            COMPLETE: self._complete,
            ABORT: self._abort,
            VERSION: self._find_version,
        }

    def __enter__(self) -> StoreSigner:
        hide_memory()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def handle(self, rank: int, body: dict[str, Any], reply: Reply) -> None:
        """Handle a rank's message, in the thread of its connection."""
        kind = body.get("kind")
        answer = self._answers.get(str(kind))
        if answer is None:
            self._coordinator.handle(rank, body, reply)
        elif kind in (SIGN, SIGN_PARTS):
            reply(_answered(answer, rank, body))
        else:  # these call the store, but the rank's heartbeats come through this thread
            asked_at = time.monotonic()
            self._pool.submit(lambda: self._answer_in_time(answer, rank, body, reply, asked_at))

    def _answer_in_time(
        self,
        answer: Callable[[int, dict[str, Any]], dict[str, Any]],
        rank: int,
        body: dict[str, Any],
        reply: Reply,
        asked_at: float,
    ) -> None:
        """Answer a request, but begin no upload for a rank that has stopped waiting: it would never be ended."""
        if body["kind"] == BEGIN and time.monotonic() - asked_at > SIGNED_TIMEOUT_S:
            return
        reply(_answered(answer, rank, body))

    # --- addresses -------------------------------------------------------------------------------------------------

    def _sign(self, rank: int, body: dict[str, Any]) -> dict[str, Any]:
        keys = [str(key) for key in body["keys"]]
        if len(keys) > MAX_KEYS:
            raise InvalidArgument(f"rank {rank} asks for {len(keys)} addresses at once; ask for at most {MAX_KEYS}")
        if body["method"] == "GET":
            urls = {other: self._get_url(other) for key in keys for other in self._to_read(rank, key)}
        elif body["method"] == "PUT":
            urls = {key: self._presigner.put_url(self._to_write(rank, key)) for key in keys}
        else:
            raise InvalidArgument(f"rank {rank} asks for an address for {shown(body['method'])}; use GET or PUT")
        return {"addresses": urls, "valid_for_s": HOLDS_FOR_S}

    def _get_url(self, key: str) -> str:
        now = time.monotonic()
        with self._lock:
            url, signed_at = self._signed.get(key, ("", 0.0))
            if not url or now - signed_at > SIGNED_ANEW_AFTER_S:
                url = self._presigner.get_url(key)
                self._signed[key] = url, now
            return url

    def _part_addresses(self, key: str, upload_id: str, first: int) -> dict[str, Any]:
        numbers = range(first, min(first + PARTS_AT_ONCE, 10_001))
        urls = [self._presigner.part_url(key, upload_id, number) for number in numbers]
        return {"first": first, "addresses": urls, "valid_for_s": HOLDS_FOR_S}

    def _sign_parts(self, rank: int, body: dict[str, Any]) -> dict[str, Any]:
        return self._part_addresses(self._to_write(rank, str(body["key"])), str(body["upload_id"]), int(body["first"]))

    # --- uploads in parts ------------------------------------------------------------------------------------------

    def _begin(self, rank: int, body: dict[str, Any]) -> dict[str, Any]:
        key = self._to_write(rank, str(body["key"]))
        upload_id = self._uploads.begin(key)
        return {"upload_id": upload_id, **self._part_addresses(key, upload_id, 1)}

    def _complete(self, rank: int, body: dict[str, Any]) -> dict[str, Any]:
        key, etags = self._to_write(rank, str(body["key"])), [str(etag) for etag in body["etags"]]
        self._uploads.complete(key, str(body["upload_id"]), etags, int(body["size_bytes"]))
        return {}

    def _abort(self, rank: int, body: dict[str, Any]) -> dict[str, Any]:
        self._uploads.abort(self._to_write(rank, str(body["key"])), str(body["upload_id"]))
        return {}

    # --- the dataset version ---------------------------------------------------------------------------------------

    def _find_version(self, rank: int, body: dict[str, Any]) -> dict[str, Any]:
        """Return the location of the job's version. With `again`, raise `NotFound` if it was deleted meanwhile."""
        if not self._spec.dataset_version:
            raise FailedPrecondition(f"rank {rank} asks for a dataset version, and the job names none")
        with self._loading:
            known = self._version
            if known is None:
                known = load_version(self._store, self._spec.dataset_version)
                self._keys = _VersionKeys(self._store, known)
                self._version = known
        if body.get("again"):
            check_not_deleted(self._store, known)
        return {"name": known.name, "folder": known.folder, "manifest_sha256": known.manifest_sha256}

    # --- what a rank may do ----------------------------------------------------------------------------------------

    def _to_read(self, rank: int, key: str) -> Sequence[str]:
        """Return the key, and keys that its reader needs next. Raises `FailedPrecondition` if it may not be read."""
        check_key(rank, key)
        if self._keys is not None and (found := self._keys.from_key(key)):
            return found
        if key == self._bundle or key.startswith(f"{self._data_folder}/"):
            return [key]
        raise _refused(rank, "read", key, "the job's dataset version, code bundle and checkpoints")

    def _to_write(self, rank: int, key: str) -> str:
        """Return the key. Raises `FailedPrecondition` if the rank may not write it."""
        check_key(rank, key)
        if key.startswith(f"{rank_folder(self._job_name, self._attempt, rank)}/"):
            return key
        due = self._coordinator.due
        if key.startswith(f"{self._data_folder}/"):
            folder, _, rest = key.removeprefix(f"{self._data_folder}/").partition("/")
            named = FOLDER_NAME.fullmatch(folder)
            if (
                named is not None
                and int(named["report"]) >= due
                and folder == self._coordinator.folder_name(int(named["report"]))
                and rest.startswith(f"r{rank:04d}/")
            ):
                return key
        own = f"{self._data_folder}/{self._coordinator.folder_name(due)}/r{rank:04d}/, of that report and later ones"
        raise _refused(rank, "write", key, f"its own logs, and what is below {own}")


class _VersionKeys:
    """The keys of a version: its manifest, the pages of that, and its files, in this order.

    A large version has many files, so their paths are one array: (paths,), of bytes.
    """

    def __init__(self, store: ObjectStore, version: DatasetVersion) -> None:
        files = open_files(store, version)
        parts = [[MANIFEST, *files.page_paths()], *(page.paths() for page in files.pages())]
        self._folder = version.folder
        self._paths = np.concatenate([np.array([path.encode() for path in part], np.bytes_) for part in parts if part])
        self._sorted = np.argsort(self._paths, kind="stable")

    def from_key(self, key: str) -> list[str]:
        """Return the key and those after it that a reader needs next, at most `FILES_AT_ONCE`; none if it is no key."""
        path = key.removeprefix(f"{self._folder}/").encode()
        if not key.startswith(f"{self._folder}/") or len(path) > self._paths.itemsize:
            return []
        found = int(np.searchsorted(self._paths, np.bytes_(path), sorter=self._sorted))
        if found == len(self._paths) or self._paths[self._sorted[found]] != path:
            return []
        place = int(self._sorted[found])
        following = self._paths[place : place + FILES_AT_ONCE] if place else self._paths[:1]
        return [f"{self._folder}/{path.decode()}" for path in following.tolist()]


def hide_memory() -> None:
    """Hide this process's memory and environment from the user's other processes, except root's.

    A rank may be on the same node. Only Linux supports this.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def check_key(rank: int, key: str) -> None:
    """Refuse a key that a server could take for another: it may resolve `..`, or collapse `//`."""
    problem = key_problem(key) or ("has a backslash" if "\\" in key else "")
    if problem:
        raise InvalidArgument(
            f"rank {rank} names the object {shown(key)}, which {problem}; use another name", reason=REFUSED
        )


def _refused(rank: int, what: str, key: str, allowed: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"rank {rank} may not {what} {shown(key)}: it may {what} {allowed} alone",
        reason=REFUSED,
        metadata={"object": key, "ranks": str(rank)},
    )


def _answered(
    answer: Callable[[int, dict[str, Any]], dict[str, Any]], rank: int, body: dict[str, Any]
) -> dict[str, Any]:
    try:
        return answer(rank, body)
    except MillraceError as error:
        return {"error": error.as_record()}
    except (KeyError, TypeError, ValueError) as error:
        refusal = InvalidArgument(f"rank {rank} sends a request that is malformed: {type(error).__name__}: {error}")
        return {"error": refusal.as_record()}


# --- A rank reads and writes ---


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


class RemoteVersions:
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
    signed = SignedStore(line.ask, line.note_progress)
    return signed, RemoteVersions(signed, line)
