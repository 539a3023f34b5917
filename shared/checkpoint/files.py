"""The files of any checkpoint, a model's or a program's: for downloads, and copied to a node.

A download has the manifest first, then the files that it names. A reader needs no knowledge of their contents: each
file has a path, size and SHA-256.

All processes of a node share one copy, as long as one of them lives.

    {root}/{manifest_sha256}/         the files, each compared with its digest; read-only
    {root}/{manifest_sha256}.lock     held by every process that uses them, and by the process that makes or removes
                                      them
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.checkpoint.format import MANIFEST, OTHER_FORMAT, PROGRAM_FORMAT, ProgramContent, read_manifest
from shared.checkpoint.reading import Readable, StoredFile, read_pieces
from shared.errors import DataLoss, Unavailable

# --- Files for download ---

# The manifest's path among a program's files, which may include their own `manifest.json`.
PROGRAM_MANIFEST = "millrace-manifest.json"
FORMATS = "millrace.checkpoint/"


@dataclass(frozen=True)
class CheckpointFile:
    """A file of a checkpoint: `path` in a downloaded checkpoint, `key` in the store."""

    path: str
    key: str
    size_bytes: int
    sha256: str
    # With the digests of its blocks, where the manifest has them.
    file: StoredFile | None = field(default=None, compare=False)

    @property
    def stored(self) -> StoredFile:
        return self.file or StoredFile(self.key, self.size_bytes, self.sha256)


def files_of(store: Readable, folder: str, manifest_sha256: str) -> list[CheckpointFile]:
    """Return the manifest, then the files that it names, in its order.

    `folder` is the checkpoint's folder in the store. If a program's own file has the path `PROGRAM_MANIFEST`, it takes
    precedence, and the manifest is left out. Raises `DataLoss` if the manifest is missing, not the one that the
    registry names, or of an unknown format.
    """
    key = f"{folder}/{MANIFEST}"
    manifest, manifest_bytes = read_manifest(store, folder, manifest_sha256)
    if not str(manifest.get("format", "")).startswith(FORMATS):
        raise DataLoss(
            f"{key} has the format {manifest.get('format')!r}, which this release does not know",
            reason=OTHER_FORMAT,
            metadata={"file": key},
        )
    is_program = manifest["format"] == PROGRAM_FORMAT
    named = _of_program(folder, manifest) if is_program else _of_model(folder, manifest["files"])
    own_path = PROGRAM_MANIFEST if is_program else MANIFEST
    if any(one.path == own_path for one in named):
        return named
    return [CheckpointFile(own_path, key, manifest_bytes, manifest_sha256), *named]


def read_file(store: Readable, file: CheckpointFile, offset: int = 0) -> Iterator[bytes]:
    """Yield the bytes of a file from `offset` on, as `read_pieces` of `shared.checkpoint.reading` does."""
    return read_pieces(store, file.stored, offset)


def _of_model(folder: str, files: Sequence[Mapping[str, Any]]) -> list[CheckpointFile]:
    found = [(file["path"], StoredFile.from_manifest(folder, file)) for file in files]
    return [CheckpointFile(path, one.key, one.size_bytes, one.sha256, one) for path, one in found]


def _of_program(folder: str, manifest: Mapping[str, Any]) -> list[CheckpointFile]:
    return [
        CheckpointFile(file.path, f"{folder}/{file.object}", file.size_bytes, file.sha256)
        for file in ProgramContent.from_manifest(manifest).files
    ]


# --- Copy on a node ---

logger = logging.getLogger(__name__)

LOCK = ".lock"
HASHED_BYTES = 1 << 20
LOCK_POLL_S = 0.05
# The longest waits for a process that makes the copy, and for those that use a damaged one.
MAKE_TIMEOUT_S = 3_600.0
IN_USE_TIMEOUT_S = 60.0
# Locks of the copies that this process uses, held until its end.
_held: dict[Path, int] = {}


def default_root() -> Path:
    """Return the folder of this user's copies."""
    return Path(f"/tmp/millrace-{os.getuid()}/checkpoints")


def node_copy(store: Readable, folder: str, manifest_sha256: str, root: Path | None = None) -> Path:
    """Return the folder below `root` with the files of a checkpoint, for this process's life.

    `folder` is the checkpoint's folder in the store. An existing copy is compared with its digests, and replaced if it
    was changed. Copies that no process uses any more are removed first. Raises `DataLoss` for stored files that differ
    from what was committed, `Unavailable` if other processes make the copy or use a changed one for too long, and
    `OSError` for faults of this node's disk.
    """
    root = root or default_root()
    for one in (root.parent, root):  # both may be new, and `mode` is that of the last folder alone
        one.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = root / manifest_sha256
    if place in _held:
        return place
    _remove_unused(root, place)
    files = files_of(store, folder, manifest_sha256)
    _held[place] = _lease(store, place, files)
    return place


def _lease(store: Readable, place: Path, files: list[CheckpointFile]) -> int:
    """Return a shared lock on a whole copy, which this process makes if there is none.

    The shared lock comes first, because other processes may hold theirs for life. Only a process that must make the
    copy takes the exclusive lock.
    """
    lock, damaged, in_use_until = _locked(place), None, float("inf")
    try:
        while True:
            # A copy without a state is missing. A large one is not read again until it was replaced.
            if (state := _state(place)) != damaged and _is_whole(place, files):
                return lock
            damaged = state
            fcntl.flock(lock, fcntl.LOCK_UN)
            if _try_lock(lock, fcntl.LOCK_EX) and _is_current(lock, place):
                if _state(place) == damaged or not _is_whole(place, files):
                    _make(store, place, files)
                in_use_until = float("inf")
            else:
                in_use_until = min(in_use_until, time.monotonic() + IN_USE_TIMEOUT_S)
                if time.monotonic() > in_use_until:
                    raise Unavailable(
                        f"the copy {place} of a checkpoint was changed while other processes use it; end them, then "
                        "try again"
                    )
                time.sleep(LOCK_POLL_S)
            # The file may have been replaced, and between two locks another process may have removed the copy.
            os.close(lock)
            lock = -1
            lock = _locked(place)
    except BaseException:
        if lock >= 0:
            os.close(lock)
        raise


def _make(store: Readable, place: Path, files: list[CheckpointFile]) -> None:
    fresh = place.with_name(f"{place.name}.{uuid.uuid4().hex}")
    try:
        for file in files:
            path = fresh / file.path
            if not path.resolve().is_relative_to(fresh.resolve()):
                raise DataLoss(f"{file.key} would lie outside of its folder", metadata={"file": file.key})
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as written:
                for piece in read_file(store, file):
                    written.write(piece)
            path.chmod(0o444)
        _remove(place)
        fresh.rename(place)
    except BaseException:
        _remove(fresh)
        raise


def _is_whole(place: Path, files: list[CheckpointFile]) -> bool:
    if not place.is_dir():
        return False
    found = {one.relative_to(place).as_posix() for one in place.rglob("*") if not one.is_dir()}
    return found == {file.path for file in files} and all(_digest(place / one.path) == one.sha256 for one in files)


def _digest(path: Path) -> str:
    if path.is_symlink():
        return ""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(HASHED_BYTES):
            digest.update(data)
    return digest.hexdigest()


def _locked(place: Path) -> int:
    """Return a shared lock on the copy, after waiting for a process that makes or removes it."""
    until = time.monotonic() + MAKE_TIMEOUT_S
    while True:
        lock = os.open(_lock_of(place), os.O_RDWR | os.O_CREAT, 0o600)
        if _try_lock(lock, fcntl.LOCK_SH) and _is_current(lock, place):
            return lock
        os.close(lock)  # another process makes the copy, or has removed it meanwhile
        if time.monotonic() > until:
            raise Unavailable(f"another process has made the copy {place} of a checkpoint for too long; try again")
        time.sleep(LOCK_POLL_S)


def _lock_of(place: Path) -> Path:
    return place.with_name(place.name + LOCK)


def _try_lock(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _is_current(lock: int, place: Path) -> bool:
    """Return whether the locked file is still the copy's. It is removed with an unused copy."""
    try:
        return os.path.samestat(os.fstat(lock), _lock_of(place).stat())
    except FileNotFoundError:
        return False


def _state(place: Path) -> tuple[int, int] | None:
    """Return what tells a copy from the one that replaces it, or None if there is none."""
    try:
        found = place.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_ctime_ns


def _remove_unused(root: Path, place: Path) -> None:
    for path in root.glob(f"*{LOCK}"):
        if path.name == place.name + LOCK:
            continue
        try:
            lock = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in root.glob(f"{path.name.removesuffix(LOCK)}*"):
                if not left.name.endswith(LOCK):
                    _remove(left)
            path.unlink(missing_ok=True)
        except BlockingIOError:  # the copy is in use
            continue
        finally:
            os.close(lock)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
