"""Output and exits of a process in which users' code runs: what it prints is bounded, and `os._exit` is announced."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator

from shared.telemetry import BackgroundHandler

PIPE_BYTES = 1024 * 1024
LINES_BYTES = 256 * 1024


@contextlib.contextmanager
def exits_announced(announce: Callable[[int, str], None]) -> Iterator[None]:
    """Announce the code and the calling line of `os._exit` before it exits.

    A forked child, such as a DataLoader's worker, exits without announcement: its end is not the rank's, and the
    connection is its parent's.
    """
    # If it is nested, only the inner one announces, because it sees the line that called `os._exit`.
    before, owner = os._exit, os.getpid()
    leave = getattr(before, "leave", before)

    def announced(status: int) -> None:
        if os.getpid() != owner:
            leave(status)
        frame = sys._getframe(1)
        try:
            announce(status, f"{frame.f_code.co_filename}:{frame.f_lineno}")
        finally:
            leave(status)

    announced.leave = leave  # type: ignore[attr-defined]
    os._exit = announced  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = before


@contextlib.contextmanager
def captured_output(add: Callable[[bytes], None]) -> Iterator[None]:
    """Redirect file descriptors 1 and 2 to `add` only, in whole lines of up to LINES_BYTES.

    This captures output of any language. The process's own log still goes to its old target, because its records
    already reach the log that `add` serves.
    """
    reading, writing = os.pipe()
    with contextlib.suppress(OSError):  # a small pipe only makes a writer wait sooner
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = [os.dup(fd) for fd in (1, 2)]
    logs = [one for one in logging.getLogger().handlers if isinstance(one, BackgroundHandler) and one.descriptor == 2]
    for handler in logs:
        handler.write_to(kept[1])
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
        for handler in logs:
            handler.write_to(2)
        for before in kept:
            os.close(before)
        thread.join(5.0)  # a process that the program started may hold the pipe
        if not thread.is_alive():
            os.close(reading)


def forward_lines(reading: int, add: Callable[[bytes], None]) -> None:
    """Pass everything read from a descriptor to `add`, until no process writes to it any more.

    It is passed in whole lines of up to LINES_BYTES.
    """
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
