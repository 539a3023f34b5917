"""How much memory processes had at their worst, also those that come and go meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

INTERVAL_S = 0.1
MEBIBYTE = 1024 * 1024


@contextmanager
def peaks_of(pids: Callable[[], list[int]]) -> Iterator[dict[int, int]]:
    """What is yielded maps each process's id to its greatest resident size in bytes, and is whole after the body. The
    kernel keeps it, so no peak is missed, except in a process's last `INTERVAL_S`."""
    peaks: dict[int, int] = {}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(INTERVAL_S):
            for pid in pids():
                with suppress(OSError, StopIteration):
                    peaks[pid] = _peak_bytes(pid)

    watcher = threading.Thread(target=watch, name="peaks")
    watcher.start()
    try:
        yield peaks
    finally:
        over.set()
        watcher.join()


def _peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


@contextmanager
def growth_here() -> Iterator[Callable[[], int]]:
    """What is yielded tells by how many bytes this process has outgrown, at its worst, what it was at the beginning."""
    # The peak is counted from here on.
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_bytes(os.getpid())
    yield lambda: _peak_bytes(os.getpid()) - before
