"""What a worker's process is given before a program's module is imported: a folder, seeds, captured output, hooks."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import random
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

# Short: sockets of DataLoader's workers lie below TMPDIR, and their paths may have 107 bytes.
ROOT = Path("/tmp")
PIPE_BYTES = 1024 * 1024
LINES_BYTES = 256 * 1024


class AttemptFolder:
    """A folder of one attempt on this node, for its ranks there. What earlier attempts of the job left goes first.

    r{rank}/tmp     TMPDIR of the rank
    r{rank}/run     the rank's run folder: what it reports from, and copies that wait for their upload
    checkpoints     copies of checkpoints, for all ranks
    """

    def __init__(self, job_name: str, attempt: int, rank: int, root: Path = ROOT) -> None:
        self._root = root / f"millrace-{os.getuid()}"
        self._job = self._root / hashlib.sha256(job_name.encode()).hexdigest()[:10]
        self._attempt = attempt
        self.path = self._job / f"a{attempt}"
        self._own = self.path / f"r{rank}"
        self.tmp, self.run = self._own / "tmp", self._own / "run"
        self.checkpoints = self.path / "checkpoints"
        # Where bundles of code are unpacked, for all jobs.
        self.code = self._root / "code"

    @contextlib.contextmanager
    def entered(self) -> Iterator[AttemptFolder]:
        """Makes it, and its `tmp` the process's TMPDIR; the last rank of the node that leaves takes it away."""
        self._root.mkdir(mode=0o700, exist_ok=True)
        with self._locked():
            for other in self._job.glob("a*"):
                number = other.name[1:]
                if number.isdecimal() and int(number) < self._attempt:
                    shutil.rmtree(other, ignore_errors=True)
            for folder in (self.tmp, self.run):
                folder.mkdir(parents=True, exist_ok=True)
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"], tempfile.tempdir = str(self.tmp), None
        try:
            yield self
        finally:
            os.environ.pop("TMPDIR")
            if before is not None:
                os.environ["TMPDIR"] = before
            tempfile.tempdir = None
            with self._locked():
                shutil.rmtree(self._own, ignore_errors=True)
                if not any(self.path.glob("r*")):
                    shutil.rmtree(self.path, ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._job.mkdir(exist_ok=True)
        with (self._job / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def seed_everything(job_seed: int, report: int, rank: int) -> None:
    """Seeds torch, NumPy and `random` by where the attempt begins: another attempt from there draws the same."""
    digest = hashlib.sha256(f"{job_seed}/{report}/{rank}".encode()).digest()
    seed = int.from_bytes(digest[:8], "little")
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class OptimizerSteps:
    """Counts the steps of all torch optimizers of the process, each of which is a sign that it gets on."""

    def __init__(self, first: int, stepped: Callable[[int], None]) -> None:
        """Counts on from `first`; `stepped` is called with each new count."""
        self.count = first
        self._stepped = stepped
        self._handle = register_optimizer_step_post_hook(self._note)

    def _note(self, *_: object) -> None:
        self.count += 1
        self._stepped(self.count)

    def remove(self) -> None:
        self._handle.remove()


@contextlib.contextmanager
def exits_announced(announce: Callable[[int, str], None]) -> Iterator[None]:
    """While it is entered, `os._exit` says first with what code and from which line it was called. A forked child, as
    a DataLoader's worker is, leaves as ever: its end is not the rank's, and the connection is its parent's."""
    leave, owner = os._exit, os.getpid()

    def announced(status: int) -> None:
        if os.getpid() != owner:
            leave(status)
        frame = sys._getframe(1)
        try:
            announce(status, f"{frame.f_code.co_filename}:{frame.f_lineno}")
        finally:
            leave(status)

    os._exit = announced  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = leave


@contextlib.contextmanager
def captured_output(add: Callable[[bytes], None]) -> Iterator[None]:
    """What the process writes to file descriptors 1 and 2, in whatever language, goes to `add`, in whole lines where
    they are no longer than LINES_BYTES, and nowhere else."""
    reading, writing = os.pipe()
    with contextlib.suppress(OSError):  # a small pipe only makes who prints wait sooner
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = [os.dup(fd) for fd in (1, 2)]
    for fd in (1, 2):
        os.dup2(writing, fd)
    os.close(writing)

    thread = threading.Thread(target=forward_lines, args=(reading, add), name="output", daemon=True)
    thread.start()
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        for fd, before in zip((1, 2), kept, strict=True):
            os.dup2(before, fd)
            os.close(before)
        thread.join(5.0)  # a process that the program started may hold the pipe
        if not thread.is_alive():
            os.close(reading)


def forward_lines(reading: int, add: Callable[[bytes], None]) -> None:
    """Gives all that can be read from a descriptor to `add`, in whole lines where they are no longer than LINES_BYTES,
    until nobody writes to it any more."""
    rest = b""
    while data := os.read(reading, PIPE_BYTES):
        lines, newline, rest = (rest + data).rpartition(b"\n")
        if newline:
            add(lines)
        if len(rest) > LINES_BYTES:
            add(rest)
            rest = b""
    if rest:
        add(rest)


def line_of(error: BaseException, code: Path) -> str:
    """`path:line` of the innermost frame in the program's own files, relative to them; empty where there is none."""
    return next(
        (
            f"{Path(frame.filename).relative_to(code).as_posix()}:{frame.lineno}"
            for frame in reversed(traceback.extract_tb(error.__traceback__))
            if Path(frame.filename).is_relative_to(code)
        ),
        "",
    )
