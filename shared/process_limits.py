"""Limits of a child process that works on bytes or code of others: memory, files, namespaces, and its parent's life.

Standard library only: a child calls this before it imports anything else.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

CLONE_NEWUSER, CLONE_NEWIPC, CLONE_NEWNET = 1 << 28, 1 << 27, 1 << 30
PR_SET_PDEATHSIG = 1


def libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends.

    The parent may have ended before this call, so also compare `os.getppid()`.
    """
    libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def set_limits(bounds: Iterable[tuple[int, int]]) -> None:
    """Set these limits, (`RLIMIT_…`, value) each, as hard ones; a stricter hard limit stays."""
    for kind, value in bounds:
        _, hard = resource.getrlimit(kind)
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (most, most))


def enter_namespaces(kinds: int) -> bool:
    """Enter new namespaces of these kinds if the kernel grants them, and return whether it did.

    The kernel grants them to root with CAP_SYS_ADMIN, and to other users if it allows user namespaces.
    """
    if libc().unshare(kinds) == 0:
        return True
    user, group = os.getuid(), os.getgid()
    if user == 0 or libc().unshare(kinds | CLONE_NEWUSER) != 0:
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with suppress(OSError):  # AppArmor may refuse the names of users; the namespaces hold without them
            Path("/proc/self", name).write_text(text)
    return True


def memory_of(pid: int | str, *names: str) -> int:
    """Return the sum in bytes of these entries of `/proc/PID/status`; 0 for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return 0
    entries = dict(line.split(":", 1) for line in lines if ":" in line)
    # Such an entry is `  1234 kB`; a process that is ending has none.
    return sum(int(entries[name].split()[0]) * 1024 for name in names if name in entries)


def cpu_seconds_of(pid: int | str) -> float:
    """Return the processor time that the process has taken so far, in seconds; 0 for one that has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0.0
    # Behind the name, which may have spaces: utime and stime are the 12th and 13th fields, in ticks.
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def hide_module(name: str) -> None:
    """Let this process behave as if the module were not installed."""
    sys.meta_path.insert(0, _Hidden(name))


class _Hidden(MetaPathFinder):
    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:  # noqa: ARG002 - the interface's
        if fullname == self._name:
            raise ModuleNotFoundError(f"no module {fullname!r}", name=fullname)
