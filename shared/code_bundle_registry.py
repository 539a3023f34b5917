"""Bundles of users' own code in the object store, named by their digest.

`shared.code_packing` packs a bundle. It is stored at `codeBundles/{sha256}/`:

    bundle.tar      the packed bytes
    bundle.json     its description; written last, so the bundle exists once this file does
    deleting.json   present while the bundle is being deleted
    users/          markers of the jobs that name it (`shared.reference_markers`)

For the services:

    bundles = CodeBundles(store)
    record = bundles.create(spooled, sha256)           # `spooled`: a local file that holds the bytes
    record = bundles.get("codeBundles/{sha256}")
    records, token = bundles.page(page_size, page_token)
    bundles.delete("codeBundles/{sha256}")
    with using_bundle(store, "codeBundles/{sha256}", kind, uid, user) as record: ...   # while a job is created
    release_bundle(store, "codeBundles/{sha256}", kind, uid)                           # when it is deleted

For the processes that run the code, which need only an object with `get(key) -> bytes`:

    folder = unpack_on_node(store, sha256, root)       # root: a folder of this node, e.g. below the attempt's own

`folder` is read-only and holds the bundle's files; append it to `sys.path`. All calls on a node share it. Import with
`sys.dont_write_bytecode = True`, because `unpack_on_node` removes `__pycache__`, which could contain other code.

This module needs neither Ray nor torch.

`load_code` unpacks a bundle, makes it importable in this process, and `find_entry` finds its entry. Only processes that
may run users' code use them: workers and replicas. A service never calls `load_code`, and without that call no code of
a bundle can be found.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import io
import json
import logging
import os
import re
import shutil
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from shared import names
from shared.code_environment import use_environment
from shared.code_packing import (
    MAX_BUNDLE_BYTES,
    BundleFacts,
    NotABundle,
    check,
    digest_of_folder,
    requirements_of_folder,
    unpack,
)
from shared.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    MillraceError,
    ResourceExhausted,
    Unavailable,
    first_line,
    invalid_field,
    not_found,
)
from shared.jobs import JobState
from shared.reference_markers import keep_marker, let_go, live_references, markers, put_marker, unmark
from shared.resource_log import OUTCOME_UNKNOWN
from shared.storage import ObjectExists, ObjectMissing, ObjectStore

# --- Registry ---

logger = logging.getLogger(__name__)

COLLECTION = "codeBundles"
PATTERN = "codeBundles/{sha256}"
SHA256 = re.compile(r"[0-9a-f]{64}")
# A deletion ends within this time, unless the process that began it has died.
DELETED_TIMEOUT_S = 60.0
LEFT_OVER_AFTER_S = 24 * 3600.0
# Tries to store a bundle that is deleted at the same time.
TRIES = 3
# Meanwhile another process of the node unpacks at most 64 MiB.
UNPACKED_TIMEOUT_S = 300.0
LOCK_POLL_INTERVAL_S = 0.05


class Readable(Protocol):
    """The read access that workers need. A missing key raises `ObjectMissing`."""

    def get(self, key: str) -> bytes: ...


@dataclass(frozen=True)
class BundleRecord:
    """A stored bundle. `create_time` is in seconds since the epoch. `BundleFacts` describes the other fields."""

    sha256: str
    size_bytes: int
    unpacked_size_bytes: int
    file_count: int
    requirements: tuple[str, ...]
    modules: tuple[str, ...]
    create_time: float

    @property
    def name(self) -> str:
        return f"{COLLECTION}/{self.sha256}"


class CodeBundles:
    """The bundles of a store.

    All methods block on the store. Names are `codeBundles/{sha256}`.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def create(self, spooled: Path, sha256: str) -> BundleRecord:
        """Check and store the bytes of a local file.

        The same bytes again return the existing bundle. Raises `InvalidArgument` for bytes that are no bundle or have
        another digest, `ResourceExhausted` for too many bytes, and `Unavailable` if the bundle is being deleted at the
        same time. No error leaves a bundle behind.
        """
        with spooled.open("rb") as file:
            facts = checked(file)
        if facts.sha256 != sha256:
            raise invalid_field("header.sha256", sha256, f"the bytes that came have {facts.sha256}; send them again")
        for _ in range(TRIES):
            if there := self._existing(sha256):
                return there
            if record := self._stored(spooled, facts):
                return record
        raise _being_deleted(f"{COLLECTION}/{sha256}")

    def get(self, name: str) -> BundleRecord:
        """Return one bundle. Raises `InvalidArgument` or `NotFound`."""
        return load_bundle(self._store, "name", name)

    def page(self, page_size: int, page_token: str) -> tuple[list[BundleRecord], str]:
        """List bundles in the order of their names.

        A page ends early if its bundles declare very many requirements.
        """
        digests, token = names.page(self._store.folders(COLLECTION), page_size, page_token)
        records: list[BundleRecord] = []
        reported_bytes = 0
        for digest in filter(SHA256.fullmatch, digests):
            if record := _find(self._store, digest):
                reported_bytes += sum(len(text.encode()) for text in (*record.requirements, *record.modules))
                if records and reported_bytes > names.PAGE_BYTES:
                    return records, names.token_of(records[-1].sha256)
                records.append(record)
        return records, token

    def delete(self, name: str) -> None:
        """Delete a bundle.

        Raises `InvalidArgument`, `NotFound`, `FailedPrecondition` while a job that is not deleted names it, and
        `Unavailable` while another call deletes it.
        """
        sha256 = load_bundle(self._store, "name", name, deleting=True).sha256
        # The deletion is recorded first, then users are looked for. A user is marked first, then looks for a deletion.
        # So at least one of the two sees the other.
        self._say_deleting(sha256)
        if references := live_references(self._store, name, time.time()):
            self._store.delete(_key(sha256, "deleting.json"))
            shown = ", ".join(references[:5]) + (f" and {len(references) - 5} more" if len(references) > 5 else "")
            raise FailedPrecondition(
                f"{name} is named by {shown}; delete the jobs first",
                reason="IN_USE",
                metadata={"resource": name, "users": str(len(references))},
            )
        self._take_away(sha256)

    def collect(self) -> None:
        """Finish interrupted deletions and remove leftovers.

        Leftovers are bytes of uploads whose process died, and markers of jobs that no longer exist. Raises if the store
        does not answer.
        """
        for sha256 in filter(SHA256.fullmatch, self._store.folders(COLLECTION)):
            began = _deleting_since(self._store, sha256)
            if began is not None:
                if time.time() - began > DELETED_TIMEOUT_S:
                    self._finish(sha256)
            elif _find(self._store, sha256) is not None:
                self._drop_dead_markers(sha256)
            else:
                self._drop_left_over(sha256)

    def _finish(self, sha256: str) -> None:
        if _find(self._store, sha256, deleting=True) is None:
            self._take_away(sha256)
            return
        with suppress(FailedPrecondition):  # the bundle is in use, so the deletion is withdrawn
            self.delete(f"{COLLECTION}/{sha256}")

    def _drop_dead_markers(self, sha256: str) -> None:
        for marker in markers(self._store, f"{COLLECTION}/{sha256}"):
            if not marker.counts(self._store, time.time()):
                self._store.delete(marker.key)

    def _drop_left_over(self, sha256: str) -> None:
        """Remove bytes without a record whose upload has made no progress for a day.

        If the same bundle is pushed at this moment it is stored again, because `_stored` checks once more at the end.
        """
        for info in list(self._store.list(f"{COLLECTION}/{sha256}")):
            if time.time() - info.modified > LEFT_OVER_AFTER_S:
                self._store.delete(info.key)

    def _existing(self, sha256: str) -> BundleRecord | None:
        """Return the stored bundle, or None if its bytes are missing.

        Raises `Unavailable` while it is being deleted.
        """
        began = _deleting_since(self._store, sha256)
        if began is not None:
            if time.time() - began < DELETED_TIMEOUT_S:
                raise _being_deleted(f"{COLLECTION}/{sha256}")
            self._take_away(sha256)
            return None
        record = _find(self._store, sha256)
        there = record is not None and self._store.size(_key(sha256, "bundle.tar")) == record.size_bytes
        return record if there else None

    def _stored(self, spooled: Path, facts: BundleFacts) -> BundleRecord | None:
        """Store the bundle. Return None if a deletion came in between."""
        # This overwrites what an upload that died, or a damaged store, may have left. Every writer of this key writes
        # the same bytes.
        self._store.upload_file(spooled, _key(facts.sha256, "bundle.tar"))
        record = BundleRecord(**{**asdict(facts), "create_time": time.time()})
        with suppress(ObjectExists):
            self._store.put_if_absent(_key(facts.sha256, "bundle.json"), json.dumps(asdict(record)).encode())
        return self._existing(facts.sha256)

    def _say_deleting(self, sha256: str) -> None:
        """Record that the bundle is being deleted.

        Only one call may do so at a time: a call that finds users withdraws its record, and must not withdraw another
        call's.
        """
        key = _key(sha256, "deleting.json")
        word = json.dumps({"begun_at": time.time(), "by": uuid.uuid4().hex}).encode()
        try:
            self._store.put_if_absent(key, word)
        except ObjectExists:
            with suppress(ObjectMissing):
                if self._store.get(key) == word:
                    return  # the write succeeded, but its answer was lost and it was repeated
            began = _deleting_since(self._store, sha256)
            if began is None or time.time() - began < DELETED_TIMEOUT_S:
                raise _being_deleted(f"{COLLECTION}/{sha256}") from None
            self._store.put(key, word)

    def _take_away(self, sha256: str) -> None:
        for name in ("bundle.json", "bundle.tar"):
            self._store.delete(_key(sha256, name))
        for marker in markers(self._store, f"{COLLECTION}/{sha256}"):
            self._store.delete(marker.key)
        self._store.delete(_key(sha256, "deleting.json"))


def checked(file: BinaryIO) -> BundleFacts:
    """Run `code_packing.check`, and raise the errors of an RPC."""
    try:
        return check(file)
    except NotABundle as error:
        raise (_too_large(str(error)) if error.too_large else _not_a_bundle(str(error))) from None


def load_bundle(store: ObjectStore, field: str, name: str, *, deleting: bool = False) -> BundleRecord:
    """Return the record of the bundle that `field` names.

    Raises `InvalidArgument` for a malformed name and `NotFound` for a missing bundle. With `deleting`, bundles whose
    deletion has begun are found, too.
    """
    found = _find(store, digest_of(field, name), deleting)
    if found is None:
        raise not_found(name, "push it with `millrace code push`")
    return found


def digest_of(field: str, name: str) -> str:
    """Return the SHA-256 in a bundle's name. Raises `InvalidArgument`, naming `field`."""
    collection, _, sha256 = name.partition("/")
    if collection != COLLECTION or not SHA256.fullmatch(sha256):
        raise invalid_field(field, name, f"use a name of the form {PATTERN}, 64 digits of lower-case hex")
    return sha256


@contextmanager
def using_bundle(
    store: ObjectStore, name: str, kind: str, uid: str, holder: str, *, field: str = "spec.program.code_bundle"
) -> Iterator[BundleRecord]:
    """Mark the bundle as used while the body creates the job `holder`.

    Yields the bundle's record. The marker stays unless the job is refused. `field` is the field of the specification
    that names the bundle. As in `shared.dataset_version.version.using`, but the marker counts until the job is deleted:
    a job that has ended still names the bundle, which its checkpoints were made with. Raises what `load_bundle` raises.
    """
    digest_of(field, name)
    put_marker(store, name, kind, uid, holder, is_job=False, ends_in=JobState.DELETED)
    try:
        yield load_bundle(store, field, name)
    except MillraceError as error:
        if not isinstance(error, OUTCOME_UNKNOWN):
            let_go(store, name, kind, uid)
        raise
    keep_marker(store, name, kind, uid, holder, is_job=False, ends_in=JobState.DELETED)


def release_bundle(store: ObjectStore, name: str, kind: str, uid: str) -> None:
    """Unmark the bundle for a job that is being deleted. An unmarked bundle is no error."""
    unmark(store, name, kind, uid)


def unpack_on_node(store: Readable, sha256: str, root: Path) -> Path:
    """Return the read-only folder below `root` that holds the bundle's files.

    All processes of the node share the folder. Each call compares its files with the digest and replaces a folder that
    was changed. A process that is killed half way leaves nothing that a later call would mistake for the bundle.

    Raises `NotFound` for a bundle that is not stored, `DataLoss` for stored bytes of another digest, `Unavailable` if
    the store or another process of the node makes no progress, and `OSError` for faults of this node's disk.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = root / sha256
    with _locked(root / f"{sha256}.lock"):
        for left in root.glob(f"{sha256}.*.unpacking"):
            _remove(left)  # of a killed process, because the lock excludes others
        if folder.exists():
            if _is_whole(folder, sha256):
                return folder
            logger.warning("%s is not what was unpacked there; it is unpacked anew", folder)
            changed = root / f"{sha256}.{uuid.uuid4().hex}.unpacking"
            folder.chmod(0o700)
            folder.rename(changed)
            _remove(changed)
        data = read_bundle(store, sha256)
        fresh = root / f"{sha256}.{uuid.uuid4().hex}.unpacking"
        fresh.mkdir(mode=0o700)
        try:
            unpack(io.BytesIO(data), fresh)
            _make_read_only(fresh)
            fresh.rename(folder)
        except BaseException:
            _remove(fresh)
            raise
        return folder


def read_bundle(store: Readable, sha256: str) -> bytes:
    """Return the packed bytes after comparing their digest. Raises `NotFound` or `DataLoss`."""
    try:
        data = store.get(_key(sha256, "bundle.tar"))
    except ObjectMissing:
        raise not_found(f"{COLLECTION}/{sha256}", "push it with `millrace code push`") from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise DataLoss(
            f"the stored bytes of {COLLECTION}/{sha256} have another digest; push the bundle again",
            metadata={"resource": f"{COLLECTION}/{sha256}"},
        )
    return data


def _is_whole(folder: Path, sha256: str) -> bool:
    for caches in sorted(folder.rglob("__pycache__"), reverse=True):
        _remove(caches)
    try:
        return digest_of_folder(folder) == sha256
    except NotABundle:
        return False


def _make_read_only(folder: Path) -> None:
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            Path(parent, name).chmod(0o444)
        Path(parent).chmod(0o555)


def _remove(path: Path) -> None:
    """Remove a file or folder, including read-only content."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for parent, _, _ in os.walk(path):
        Path(parent).chmod(0o700)
    shutil.rmtree(path)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock on the file. The system releases it when the process dies."""
    until = time.monotonic() + UNPACKED_TIMEOUT_S
    with file.open("a") as opened:
        while True:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise Unavailable(
                        f"another process has held {file} for {UNPACKED_TIMEOUT_S:g} s; end it, then try again"
                    ) from None
            time.sleep(LOCK_POLL_INTERVAL_S)
        yield


def _find(store: ObjectStore, sha256: str, deleting: bool = False) -> BundleRecord | None:
    if not deleting and _deleting_since(store, sha256) is not None:
        return None
    try:
        record = json.loads(store.get(_key(sha256, "bundle.json")))
    except ObjectMissing:
        return None
    for field in ("requirements", "modules"):
        record[field] = tuple(record[field])
    return BundleRecord(**record)


def _deleting_since(store: ObjectStore, sha256: str) -> float | None:
    try:
        return float(json.loads(store.get(_key(sha256, "deleting.json")))["begun_at"])
    except ObjectMissing:
        return None


def bundle_key(name: str) -> str:
    """Return the store key of the packed bytes of `codeBundles/{sha256}`."""
    return f"{name}/bundle.tar"


def _key(sha256: str, name: str) -> str:
    return f"{COLLECTION}/{sha256}/{name}"


def _being_deleted(name: str) -> Unavailable:
    return Unavailable(f"{name} is being deleted; try again", metadata={"resource": name}, retry_after_s=1.0)


def _not_a_bundle(text: str) -> InvalidArgument:
    return InvalidArgument(f"the bytes are no code bundle: {text}", reason="NOT_A_BUNDLE")


def _too_large(text: str) -> ResourceExhausted:
    return ResourceExhausted(
        f"the code bundle is too large: {text}",
        reason="BUNDLE_TOO_LARGE",
        metadata={"max_size_bytes": str(MAX_BUNDLE_BYTES)},
    )


# --- Loading ---

# The folder of each loaded bundle, by name (`codeBundles/{sha256}`). A process loads at most one bundle, because
# modules of two could have the same names.
_loaded: dict[str, Path] = {}
_lock = threading.Lock()


def node_folder() -> Path:
    """Return the folder for unpacked bundles on this node, shared by all processes of this user."""
    return Path(f"/tmp/millrace-{os.getuid()}/code")


def load_code(
    store: Readable, code_bundle: str, root: Path | None = None, note_progress: Callable[[], None] = lambda: None
) -> Path:
    """Make the modules of `codeBundles/{sha256}` importable in this process, and the packages that they require.

    Return the folder that holds them, below `root` (default: `node_folder()`). `note_progress` is called while
    packages are installed. Raises `FailedPrecondition` if this process has loaded another bundle, and what
    `unpack_on_node` and `use_environment` raise.
    """
    sha256 = digest_of("code_bundle", code_bundle)
    with _lock:
        others = [name for name in _loaded if name != code_bundle]
        if others:
            raise FailedPrecondition(
                f"this process has loaded {others[0]} and cannot load {code_bundle} besides: their modules could have "
                "the same names; use another process",
                reason="CODE_MISMATCH",
                metadata={"resource": code_bundle, "loaded": others[0]},
            )
        root = root or node_folder()
        root.parent.mkdir(mode=0o700, exist_ok=True)
        folder = unpack_on_node(store, sha256, root)
        use_environment(requirements_of_folder(folder), os.environ, note_progress)
        # Compiled files would change the folder, whose content is compared with the digest.
        sys.dont_write_bytecode = True
        if str(folder) not in sys.path:
            # At the end of the path, so that no module of the bundle replaces an installed one.
            sys.path.append(str(folder))
        _loaded[code_bundle] = folder
        return folder


def adopt_code(code_bundle: str, folder: Path) -> None:
    """Register a bundle that is already unpacked in `folder` and on `sys.path`.

    Used by the child process that checks code before a job is created.
    """
    with _lock:
        _loaded[code_bundle] = folder


def find_entry(code_bundle: str, entry: str) -> Any:
    """Import and return the object that `module:name` means in a loaded bundle.

    Raises `FailedPrecondition`: CODE_NOT_LOADED in a process that does not run users' code, MODULE_SHADOWED if an
    installed module has the name, and ENTRY_FAILED, with the line of the bundle, for a module that cannot be imported
    or has no such object.
    """
    folder = _loaded.get(code_bundle)
    if folder is None:
        raise FailedPrecondition(
            f"{entry} is code of {code_bundle}, which this process has not loaded; only workers and replicas run "
            "such code",
            reason="CODE_NOT_LOADED",
            metadata={"resource": code_bundle},
        )
    module_name, _, name = entry.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module's import can raise anything
        raise entry_failed(code_bundle, entry, error) from error
    if not str(getattr(module, "__file__", None) or "").startswith(f"{folder}{os.sep}"):
        raise FailedPrecondition(
            f"{module_name} is {getattr(module, '__file__', 'built in')}, and not of {code_bundle}: a module of that "
            "name is installed; rename the bundle's",
            reason="MODULE_SHADOWED",
            metadata={"resource": code_bundle},
        )
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise entry_failed(code_bundle, entry, error) from error
    return found


def entry_failed(code_bundle: str, entry: str, error: BaseException) -> MillraceError:
    """Make the error for an exception in a bundle's code.

    It names the exception and the innermost line of the bundle.
    """
    where = line_in_code(error)
    at = f" at {where}" if where else ""
    return FailedPrecondition(
        f"{entry} of {code_bundle} failed{at}: {type(error).__name__}: {first_line(error)}",
        reason="ENTRY_FAILED",
        metadata={"resource": code_bundle, "entry": entry, "line": where},
    )


def line_in_code(error: BaseException) -> str:
    """Return the innermost line of a loaded bundle in the traceback, e.g. `train.py:12`.

    Empty if there is none.
    """
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        for folder in _loaded.values():
            if frame.filename.startswith(f"{folder}{os.sep}"):
                where = f"{frame.filename.removeprefix(f'{folder}{os.sep}')}:{frame.lineno}"
    return where
