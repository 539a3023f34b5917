"""Folders on local disk for what is not yet in the store. They go with the work, or with the next one's beginning."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "millrace-scratch-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder, which goes with the body. What processes left that were killed is taken away before.

    Its owner holds a lock on the folder itself, which the kernel gives back when the owner dies. Process numbers would
    not do: containers that share a temporary folder do not see each other's processes.
    """
    _sweep_unowned()
    folder, lock = _owned_folder()
    try:
        yield folder
    finally:
        try:
            shutil.rmtree(folder)
        finally:
            os.close(lock)


def _owned_folder() -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Another process may sweep the folder before it is locked: then it is gone once we have the lock.
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _sweep_unowned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # gone just now, another user's, or no folder
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)  # what cannot be removed stays for a later sweep
        except BlockingIOError:
            continue  # its owner lives
        finally:
            os.close(lock)
