"""Grandchildren whose parents died: they come to the supervisor, which reaps and, at the end, ends them.

Without this they would go to the machine's first process, which in many containers reaps nobody.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Set

from millrace_client.stack.processes import Process, children, wait_gone

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on, orphaned descendants become children of this process."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(spared: Set[int] = frozenset()) -> None:
    """Reaps children that have exited, except the `spared` pids, whose exit status somebody else wants."""
    for child in children(os.getpid()):
        if child.pid not in spared:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)


def end_orphans() -> None:
    """Kills and reaps every child that is left; for the end, when all parts are stopped."""
    left: set[Process] = set(children(os.getpid()))
    for one in left:
        one.send(signal.SIGKILL)
    wait_gone(left, 5.0)
    reap_orphans()
