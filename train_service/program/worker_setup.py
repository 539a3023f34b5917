"""A worker's process before a program's module is imported: its setup, and the folder of the attempt on the node.

It removes keys from the environment, seeds generators and counts the steps of optimizers.

The ranks of an attempt on one node share a folder, for TMPDIR, spools, and copies of checkpoints:

    /tmp/millrace-{uid}/
        lock                            held while folders are made and swept
        code/                           unpacked bundles, for all jobs
        {job}-a{attempt}/               {job}: a digest of the store's URL and the job's name
            lock                        each rank holds it, shared, until its process ends
            r{rank}/tmp                 TMPDIR of the rank
            r{rank}/run                 its run folder: files that it reports, and copies that wait for their upload
            checkpoints/                copies of checkpoints

The last rank that leaves deletes the folder. If the ranks were killed, the next attempt on the node, of any job and
stack, deletes it, because no process holds its lock any more.

A checkpoint's files are downloaded once for all ranks of the node, verified while they are written, and read-only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import random
import re
import shutil
import stat
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from shared.checkpoint.format import ProgramFile, load_program_checkpoint, read_program_file
from shared.checkpoint.reading import Readable
from shared.errors import DataLoss, FailedPrecondition, Internal
from train_service.store_retry import retry_on_outage

# --- Setup ---

# Variables of a node's environment that users' code must not see. The attempt has Ray start its ranks with these set to
# empty, whatever the node's environment.
HIDDEN_VARIABLES = (
    "MILLRACE_S3_ACCESS_KEY",
    "MILLRACE_S3_SECRET_KEY",
    "MILLRACE_TOKEN_FILE",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
)


def drop_hidden_variables() -> None:
    """Remove hidden variables that are empty: cloud libraries would read an empty key as a wrong one."""
    for name in HIDDEN_VARIABLES:
        if not os.environ.get(name):
            os.environ.pop(name, None)


def seed_everything(job_seed: int, report: int, rank: int) -> None:
    """Seed torch, NumPy and `random` by the attempt's start, so that another attempt from there draws the same."""
    digest = hashlib.sha256(f"{job_seed}/{report}/{rank}".encode()).digest()
    seed = int.from_bytes(digest[:8], "little")
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class OptimizerSteps:
    """Counter of the steps of all torch optimizers in the process. Each step is a sign of progress."""

    def __init__(self, first: int, stepped: Callable[[int], None]) -> None:
        """Count from `first`. `stepped` is called with each new count."""
        self.count = first
        self._stepped = stepped
        self._handle = register_optimizer_step_post_hook(self._note)

    def _note(self, *_: object) -> None:
        self.count += 1
        self._stepped(self.count)

    def remove(self) -> None:
        self._handle.remove()


def line_of(error: BaseException, code: Path) -> str:
    """Return `path:line` of the innermost frame in the program's own files, relative to `code`. Empty if none is."""
    return next(
        (
            f"{Path(frame.filename).relative_to(code).as_posix()}:{frame.lineno}"
            for frame in reversed(traceback.extract_tb(error.__traceback__))
            if Path(frame.filename).is_relative_to(code)
        ),
        "",
    )


# --- Folder of the attempt ---

logger = logging.getLogger(__name__)

# Short: sockets of DataLoader's workers lie below TMPDIR, and their paths may have 107 bytes.
ROOT = Path("/tmp")
NAME = re.compile(r"[0-9a-f]{10}-a\d+")
# Prefix of a folder that is being deleted.
GOING = "going-"


class AttemptFolder:
    """One rank's use of the attempt's folder. `path` and everything below it exist while `entered` lasts."""

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
        """Make the rank's folders, and its `tmp` the process's TMPDIR. Sweep folders that no process uses.

        Raises `FailedPrecondition` if this user's root folder on the node belongs to another user.
        """
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
        """Rename the folders that no process uses, for deletion. The caller holds the root's lock."""
        found = []
        for folder in self._root.iterdir():
            if folder.name.startswith(GOING):  # the process that removed it was killed
                found.append(folder)
            elif NAME.fullmatch(folder.name) and folder != self.path and _is_free(folder):
                found.append(_renamed(folder))
        return found

    @contextlib.contextmanager
    def _root_locked(self) -> Iterator[list[Path]]:
        """Hold the root's lock, and delete the folders in the yielded list after its release, because that may take
        long."""
        going: list[Path] = []
        with (self._root / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield going
        for folder in going:
            shutil.rmtree(folder, ignore_errors=True)


def make_own_folder(path: Path) -> None:
    """Make a private folder in a public one, such as /tmp.

    Raises `FailedPrecondition` if it exists and is not this user's own.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise FailedPrecondition(
            f"{path} is a link, another user's, or others may write into it; have it removed, and try again",
            reason="FOLDER_NOT_OWN",
            metadata={"folder": str(path)},
        )


def _is_free(folder: Path) -> bool:
    """Return whether no process holds the folder's lock."""
    try:
        file: IO[str] = (folder / "lock").open("r+")
    except FileNotFoundError:  # no lock: the process that made the folder was killed first
        return folder.exists()
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _renamed(folder: Path) -> Path:
    return folder.rename(folder.with_name(f"{GOING}{uuid.uuid4().hex[:8]}"))


# --- Copies of checkpoints ---

# Files that are downloaded at the same time.
DOWNLOADS = 4
# A rank may still read the copy before the newest. No rank is further behind, because the reports synchronize ranks.
KEPT_COPIES = 2
COPY_NAME = re.compile(r"report-\d{8}-[0-9a-f]{8}")


class NodeCopies:
    """Copies of checkpoints below `folder`, shared by the ranks of one attempt on one node.

    The newest `KEPT_COPIES` are kept.
    """

    def __init__(
        self,
        store: Readable,
        folder: Path,
        note_progress: Callable[[], None] = lambda: None,
        *,
        keeps_all: bool = False,
    ) -> None:
        """Prepare the copies.

        `note_progress` is called as bytes arrive. With `keeps_all` no copy is deleted as long as the folder exists.
        """
        self._keeps_all = keeps_all
        self._store = store
        self._folder = folder
        self._note_progress = note_progress

    def folder_of(self, checkpoint: Mapping[str, Any]) -> Path:
        """Return the folder with the files of a checkpoint, which `coordinator.described` describes.

        Raises `Internal` if it is damaged: the attempt found it whole, and the next attempt chooses again.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"report-{checkpoint['report']:08d}-{checkpoint['manifest_sha256'][:8]}"
        target = self._folder / name
        with _locked(self._folder / f"{name}.lock"):
            if not target.exists():
                unfinished = self._folder / f"{name}.unfinished"
                shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process
                try:
                    retry_on_outage(lambda: self._download(checkpoint, unfinished), "the checkpoint to go on from")
                except DataLoss as error:
                    text = f"{checkpoint['name']} was read damaged: {error.message}"
                    raise Internal(text, reason="READ_DAMAGED") from error
                _make_read_only(unfinished)
                unfinished.rename(target)
                if not self._keeps_all:
                    self._drop_old(target)
        return target

    def _drop_old(self, target: Path) -> None:
        """Delete all copies except `target`, whose lock this process holds, and the newest others."""
        others = sorted(path for path in self._folder.iterdir() if COPY_NAME.fullmatch(path.name) and path != target)
        for old in others[: 1 - KEPT_COPIES]:
            # A process that holds a copy's lock is about to delete copies, too, so neither waits for the other.
            with suppress(BlockingIOError), _locked(old.with_name(f"{old.name}.lock"), fcntl.LOCK_NB):
                shutil.rmtree(old, ignore_errors=True)

    def _download(self, checkpoint: Mapping[str, Any], folder: Path) -> None:
        content = load_program_checkpoint(self._store, checkpoint["folder"], checkpoint["manifest_sha256"])
        folder.mkdir(exist_ok=True)

        def write(file: ProgramFile) -> None:
            path = folder / file.path
            if not path.resolve().is_relative_to(folder.resolve()):
                raise DataLoss(f"{checkpoint['name']} names a file outside of its folder: {file.path}")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as written:
                for piece in read_program_file(self._store, checkpoint["folder"], file, self._note_progress):
                    written.write(piece)

        with ThreadPoolExecutor(DOWNLOADS, thread_name_prefix="checkpoint") as downloads:
            for _ in downloads.map(write, content.files):
                pass


def _make_read_only(folder: Path) -> None:
    """Make the files read-only. Folders stay writable, so that they can be deleted."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o444)


@contextmanager
def _locked(path: Path, options: int = 0) -> Iterator[None]:
    """Hold a file lock that one process of the node has at a time. The system releases it if the process dies.

    With LOCK_NB it raises `BlockingIOError` if another process holds it.
    """
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | options)
        yield
