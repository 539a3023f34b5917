"""A checkpoint's files on a node: downloaded once for all ranks there, verified while they are written, read-only."""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shared.checkpoint.format import Readable
from shared.checkpoint.program import ProgramFile, load_program_checkpoint, read_pieces
from shared.errors import DataLoss, Internal
from train_service.store_retry import retry_on_outage

# Files that are read at the same time.
DOWNLOADS = 4
# A rank may still read the copy before the newest; the reports meet in between, so no rank is further behind.
KEPT_COPIES = 2
NAME = re.compile(r"report-\d{8}-[0-9a-f]{8}")


class NodeCopies:
    """Copies below `folder`, which the ranks of one attempt on one node share; the newest `KEPT_COPIES` are kept."""

    def __init__(
        self, store: Readable, folder: Path, advanced: Callable[[], None] = lambda: None, *, keeps_all: bool = False
    ) -> None:
        """`advanced` is called as bytes come. With `keeps_all` no copy is taken away while the folder is there."""
        self._keeps_all = keeps_all
        self._store = store
        self._folder = folder
        self._advanced = advanced

    def folder_of(self, checkpoint: Mapping[str, Any]) -> Path:
        """The files of a checkpoint, as `coordinator.described` names it. Raises `Internal` where it is damaged: the
        attempt has found it whole, and the next one chooses again."""
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"report-{checkpoint['report']:08d}-{checkpoint['manifest_sha256'][:8]}"
        target = self._folder / name
        with _locked(self._folder / f"{name}.lock"):
            if not target.exists():
                unfinished = self._folder / f"{name}.unfinished"
                shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
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
        """All but `target`, whose lock this process holds, and the newest of the others."""
        others = sorted(path for path in self._folder.iterdir() if NAME.fullmatch(path.name) and path != target)
        for old in others[: 1 - KEPT_COPIES]:
            # Whoever holds it is about to drop copies as well: neither waits for the other.
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
                for piece in read_pieces(self._store, checkpoint["folder"], file, self._advanced):
                    written.write(piece)

        with ThreadPoolExecutor(DOWNLOADS, thread_name_prefix="checkpoint") as downloads:
            for _ in downloads.map(write, content.files):
                pass


def _make_read_only(folder: Path) -> None:
    """The files; folders stay as they are, for whoever takes them away."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o444)


@contextmanager
def _locked(path: Path, options: int = 0) -> Iterator[None]:
    """Held by one process of the node; the system lets go of it for one that dies. With LOCK_NB raises
    `BlockingIOError` where another has it."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | options)
        yield
