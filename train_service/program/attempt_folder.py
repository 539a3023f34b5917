"""The folder of an attempt on a node, which its ranks there share: TMPDIR, spools, and copies of checkpoints.

    /tmp/millrace-{uid}/
        lock                            held while folders are made and swept
        code/                           unpacked bundles, for all jobs
        {job}-a{attempt}/               {job}: a digest of the store's URL and the job's name
            lock                        each rank holds it, shared, until its process ends
            r{rank}/tmp                 TMPDIR of the rank
            r{rank}/run                 its run folder: what it reports from, and copies that wait for their upload
            checkpoints/                copies of checkpoints

The last rank that leaves takes the folder away. One whose ranks were killed is taken away by the next attempt on the
node, of any job and stack: no process holds its lock any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from shared.errors import FailedPrecondition

logger = logging.getLogger(__name__)

# Short: sockets of DataLoader's workers lie below TMPDIR, and their paths may have 107 bytes.
ROOT = Path("/tmp")
NAME = re.compile(r"[0-9a-f]{10}-a\d+")
# A folder that is being taken away has another name.
GOING = "going-"


class AttemptFolder:
    """One rank's use of it. `path` and what is below it are there while `entered` lasts."""

    def __init__(self, store_url: str, job_name: str, attempt: int, rank: int, root: Path = ROOT) -> None:
        self._root = root / f"millrace-{os.getuid()}"
        job = hashlib.sha256(f"{store_url}\n{job_name}".encode()).hexdigest()[:10]
        self.path = self._root / f"{job}-a{attempt}"
        self._own = self.path / f"r{rank}"
        self.tmp, self.run = self._own / "tmp", self._own / "run"
        self.checkpoints = self.path / "checkpoints"
        self.code = self._root / "code"

    @contextlib.contextmanager
    def entered(self) -> Iterator[AttemptFolder]:
        """Makes the rank's folders, and its `tmp` the process's TMPDIR. Sweeps the folders that no process uses.

        Raises `FailedPrecondition` where the folder of this user on the node is another user's."""
        make_own_folder(self._root)
        with self._root_locked() as going:
            going += self._unused()
            for folder in (self.tmp, self.run):
                folder.mkdir(parents=True, exist_ok=True)
            held = (self.path / "lock").open("a")
            fcntl.flock(held, fcntl.LOCK_SH)
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"], tempfile.tempdir = str(self.tmp), None
        try:
            yield self
        finally:
            os.environ.pop("TMPDIR", None)
            if before is not None:
                os.environ["TMPDIR"] = before
            tempfile.tempdir = None
            shutil.rmtree(self._own, ignore_errors=True)
            held.close()
            with self._root_locked() as going:
                if _is_free(self.path):
                    going.append(_renamed(self.path))

    def _unused(self) -> list[Path]:
        """Moves those that no process uses to another name; with the root's lock held."""
        found = []
        for folder in self._root.iterdir():
            if folder.name.startswith(GOING):  # the process that removed it was killed
                found.append(folder)
            elif NAME.fullmatch(folder.name) and folder != self.path and _is_free(folder):
                found.append(_renamed(folder))
        return found

    @contextlib.contextmanager
    def _root_locked(self) -> Iterator[list[Path]]:
        """The folders that are put into the list are taken away once the lock is free again: that may take long."""
        going: list[Path] = []
        with (self._root / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield going
        for folder in going:
            shutil.rmtree(folder, ignore_errors=True)


def make_own_folder(path: Path) -> None:
    """In a folder that is everybody's, as /tmp: raises `FailedPrecondition` where it is there and not this user's."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise FailedPrecondition(
            f"{path} is a link, another user's, or others may write into it; have it removed, and try again",
            reason="FOLDER_NOT_OWN",
            metadata={"folder": str(path)},
        )


def _is_free(folder: Path) -> bool:
    """Whether no process holds the folder's lock."""
    try:
        file: IO[str] = (folder / "lock").open("r+")
    except FileNotFoundError:  # without a lock: the process that made the folder was killed before it had one
        return folder.exists()
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _renamed(folder: Path) -> Path:
    return folder.rename(folder.with_name(f"{GOING}{uuid.uuid4().hex[:8]}"))
