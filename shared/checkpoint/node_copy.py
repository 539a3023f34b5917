"""A checkpoint's files in a folder of this node, one copy for all of its processes, as long as one of them lives.

{root}/{manifest_sha256}/         the files, each compared with its digest; read-only
{root}/{manifest_sha256}.lock     held by every process that uses them, and by the process that makes or removes them
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import uuid
from pathlib import Path

from shared.checkpoint.files import CheckpointFile, files_of, read_file
from shared.checkpoint.format import Readable
from shared.errors import DataLoss

logger = logging.getLogger(__name__)

LOCK = ".lock"
HASHED_BYTES = 1 << 20
# The locks of the copies that this process uses, to its end.
_held: dict[Path, int] = {}


def default_root() -> Path:
    """A folder of this user's alone."""
    return Path(f"/tmp/millrace-{os.getuid()}/checkpoints")


def node_copy(store: Readable, folder: str, manifest_sha256: str, root: Path | None = None) -> Path:
    """The folder below `root` with the files of the checkpoint in the store's `folder`, for this process's life.

    A copy that is there is compared with its digests, and made anew where it was changed. Copies that no process uses
    any more are removed first. Raises `DataLoss` for stored files that are not what was committed, and `OSError` of
    this node's disk.
    """
    root = root or default_root()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = root / manifest_sha256
    if place in _held:
        return place
    _remove_unused(root, place)
    files = files_of(store, folder, manifest_sha256)
    lock = _locked(place, fcntl.LOCK_EX)
    try:
        if not _is_whole(place, files):
            _make(store, place, files)
        fcntl.flock(lock, fcntl.LOCK_SH)
    except BaseException:
        os.close(lock)
        raise
    _held[place] = lock
    return place


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
    return found == {one.path for one in files} and all(_digest(place / one.path) == one.sha256 for one in files)


def _digest(path: Path) -> str:
    if path.is_symlink():
        return ""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(HASHED_BYTES):
            digest.update(data)
    return digest.hexdigest()


def _locked(place: Path, kind: int) -> int:
    """Waits for those who make or remove it."""
    path = place.with_name(place.name + LOCK)
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, kind)
        if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
            return lock
        os.close(lock)  # the process that held the lock has removed the copy meanwhile


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
        except BlockingIOError:  # it is in use
            continue
        finally:
            os.close(lock)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
