"""Output and exits of a process in which users' code runs: what it prints is bounded, and `os._exit` is announced.

The watch over the memory ends a rank whose own code fills it, before the kernel or Ray picks a process.
A thread reads the anonymous memory of the process and of its children, e.g. a DataLoader's workers. That is allocated
memory, without files in the page cache and without Ray's shared objects. The limit is the job's request for `memory`.
Without a request the limit is an equal share of the node for each rank there. This limit applies only once the node is
nearly full, so that ranks may share a node unequally as long as there is room.

No limit of the kernel's is set (RLIMIT_AS): Ray's workers and CUDA reserve far more address space than they use. Code
that holds the interpreter while it allocates is not noticed in time; Ray's own monitor handles that.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from shared.errors import MillraceError, ResourceExhausted
from shared.logging_and_tracing import BackgroundHandler, current_frames

# --- Setup ---

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


# --- Memory ---

logger = logging.getLogger(__name__)

MIB, GIB = 2**20, 2**30
# A leak of 1 GiB/s exceeds its limit by 0.25 GiB.
POLL_INTERVAL_S = 0.25
# Share of a core that the thread may use: a long measurement is followed by a longer pause.
MAX_OF_A_CORE = 0.004
# Ray ends processes from 95 % on.
NODE_IS_FULL = 0.9
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
REQUEST = "placement.resources_per_worker[memory]"


@dataclass(frozen=True)
class NodeMemory:
    """Memory of this container, or of the machine, in bytes: `total` is available to processes, `used` is in use.

    Page cache that can be reclaimed counts as free.
    """

    total: int
    used: int

    @classmethod
    def read(cls, proc: Path = PROC, cgroup: Path = CGROUP) -> NodeMemory:
        lines = (proc / "meminfo").read_text().splitlines()
        of = {name: int(amount.split()[0]) * 1024 for name, _, amount in (line.partition(":") for line in lines)}
        machine = cls(of["MemTotal"], of["MemTotal"] - of["MemAvailable"])
        try:
            limit = int((cgroup / "memory.max").read_text())
            current = int((cgroup / "memory.current").read_text())
            stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no container, or one without a limit, which reads `max`
            return machine
        if limit >= machine.total:
            return machine
        cached = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
        return cls(limit, max(0, current - cached))


class ProcessMemory:
    """Memory of a process and of all its descendants."""

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self._pid = pid
        self._proc = proc

    def resident_bytes(self) -> int:
        """Return the resident anonymous memory. Cheap.

        Memory that a fork shares counts for each process.
        """
        return sum(map(self._resident, self._processes()))

    def anonymous_bytes(self) -> int:
        """Return the anonymous memory, with shared pages divided among processes and swapped pages included.

        It walks over the page tables.
        """
        return sum(map(self._proportional, self._processes()))

    def _processes(self) -> list[int]:
        found = [self._pid]
        for pid in found:  # the list grows meanwhile
            for children in (self._proc / str(pid) / "task").glob("*/children"):
                with suppress(OSError):  # the thread has ended
                    found += map(int, children.read_text().split())
        return found

    def _resident(self, pid: int) -> int:
        try:
            _, resident, shared, *_ = (self._proc / str(pid) / "statm").read_text().split()
        except (OSError, ValueError):  # the process has ended
            return 0
        return (int(resident) - int(shared)) * PAGE_BYTES

    def _proportional(self, pid: int) -> int:
        try:
            lines = (self._proc / str(pid) / "smaps_rollup").read_text().splitlines()
        except OSError:  # the process has ended
            return 0
        names = ("Pss_Anon:", "SwapPss:")
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """Limit of a rank in `bytes`.

    `is_request`: the job requested it, so it applies whether or not the node has room.
    """

    bytes: int
    is_request: bool

    @classmethod
    def for_rank(cls, request: float, ranks_of_node: int, node: NodeMemory) -> MemoryLimit:
        """Return the limit of a rank. `request` is 0 if the job has none."""
        if request:
            return cls(bytes=int(request), is_request=True)
        return cls(bytes=int(node.total * NODE_IS_FULL) // max(ranks_of_node, 1), is_request=False)

    def named(self) -> str:
        if self.is_request:
            return f"the limit of {_shown(self.bytes)} that {REQUEST} sets"
        return f"{_shown(self.bytes)}, its share of a node that is {NODE_IS_FULL:.0%} full"


class MemoryWatch:
    """Watch over a rank's memory.

    Use it as a context in the training thread. If the process is to end, the watch's thread calls `leave` once with the
    error.
    """

    def __init__(
        self,
        rank: int,
        limit: MemoryLimit,
        leave: Callable[[MillraceError], None],
        code: Path,
        *,
        memory: ProcessMemory | None = None,
        node: Callable[[], NodeMemory] = NodeMemory.read,
        poll_interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        """Prepare the watch. `code` is the folder of the program's own files."""
        self._rank = rank
        self._limit = limit
        self._leave = leave
        self._code = code
        self._memory = memory or ProcessMemory(os.getpid())
        self._node = node
        self._poll_interval_s = poll_interval_s
        self._trains = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def excess(self) -> MillraceError | None:
        """Measure now and return the error if the process exceeds its limit."""
        limit = self._limit.bytes
        if self._memory.resident_bytes() <= limit or not (self._limit.is_request or self._is_node_full()):
            return None
        used = self._memory.anonymous_bytes()
        if used <= limit:
            return None
        line = line_of_frame(current_frames().get(self._trains), self._code)
        where = f", at {line}" if line else ""
        return ResourceExhausted(
            f"rank {self._rank} has {_shown(used)} of memory{where}, more than {self._limit.named()}; look for what "
            f"grows with each step, or ask for more by {REQUEST}",
            reason="WORKER_MEMORY",
            metadata={"ranks": str(self._rank), "line": line, "limit_bytes": str(limit)},
        )

    def _is_node_full(self) -> bool:
        node = self._node()
        return node.used >= NODE_IS_FULL * node.total

    def _run(self) -> None:
        pause_s = self._poll_interval_s
        while not self._ended.wait(pause_s):
            began = time.thread_time()
            try:
                error = self.excess()
            except OSError as unread:
                logger.warning("the memory of rank %d is not looked at for a moment: %s", self._rank, unread)
                error = None
            if error is not None:
                logger.error("%s", error.message)
                self._leave(error)
                return
            pause_s = max(self._poll_interval_s, (time.thread_time() - began) / MAX_OF_A_CORE)


def line_of_frame(frame: FrameType | None, code: Path) -> str:
    """Return `path:line` of the innermost frame in the program's own files, relative to `code`. Empty if none is."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(code):
            return f"{path.relative_to(code).as_posix()}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _shown(amount: int) -> str:
    return f"{amount / GIB:.3g} GiB" if amount >= GIB else f"{amount / MIB:.0f} MiB"
