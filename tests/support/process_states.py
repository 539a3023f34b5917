"""What the kernel says of a process: whether it is stopped, or gone."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from tests.support.waiting import wait_until


def thread_states(pid: int) -> set[str]:
    """The states of the process's threads as `ps` writes them: R, S, D, T (stopped), Z (dead, its parent was not there
    yet). Empty where there is no such process."""
    states: set[str] = set()
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # the thread has ended
                states.add((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states


def stop_process(pid: int) -> None:
    """SIGSTOP, and the wait until no thread of the process runs any more: on a busy machine that takes a while.

    Raises `ProcessLookupError` where there is no such process.
    """
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: thread_states(pid) <= {"T", "Z"}, f"process {pid} to stop")


def child_running(parent: int, module: str) -> int:
    """The pid of the child of `parent` that runs `module`; 0 where there is none."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            its_parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if its_parent == parent and module.encode() in (entry / "cmdline").read_bytes():
                return int(entry.name)
    return 0
