"""The stack's processes, and `stack.json`, the supervisor's record of its stack.

A process is identified by its pid and start time, because a pid may have been reused. This module reads /proc, so it
needs Linux, where the embedded stack runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

# --- stack.json ---

STARTING, READY, STOPPING = "starting", "ready", "stopping"


@dataclass(frozen=True, kw_only=True)
class Record:
    """The state of one stack. `parts` are the session leaders of Ray and the services."""

    state: str
    supervisor: Process
    # host:port by service name
    addresses: Mapping[str, str]
    store: str
    ray_address: str
    dashboard: str
    import_roots: tuple[str, ...]
    # Ray's own folder, with a short path, removed at the end
    ray_folder: str
    parts: Mapping[str, Process] = field(default_factory=dict)
    # parts that have answered since their last start
    answering: tuple[str, ...] = ()

    def is_running(self) -> bool:
        return self.supervisor.is_alive()

    def with_started(self, name: str, process: Process) -> Record:
        left = tuple(one for one in self.answering if one != name)
        return replace(self, parts={**self.parts, name: process}, answering=left)

    def with_answering(self, name: str) -> Record:
        return replace(self, answering=(*self.answering, name))

    def with_state(self, state: str) -> Record:
        return replace(self, state=state)


def path(home: Path) -> Path:
    return home / "stack.json"


def read_record(home: Path) -> Record | None:
    """Return the record in `home`, or None if none is readable. It may be stale; check `is_running`."""
    try:
        values: dict[str, Any] = json.loads(path(home).read_text())
        return Record(
            **{
                **values,
                "supervisor": Process(**values["supervisor"]),
                "parts": {name: Process(**process) for name, process in values["parts"].items()},
                "import_roots": tuple(values["import_roots"]),
                "answering": tuple(values["answering"]),
            }
        )
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def write_record(home: Path, record: Record) -> None:
    """Replace the record atomically, so that no reader sees half of one."""
    fresh = home / f"stack.json.{os.getpid()}"
    fresh.write_text(json.dumps(asdict(record), indent=2) + "\n")
    fresh.replace(path(home))


def remove_record(home: Path) -> None:
    path(home).unlink(missing_ok=True)


# --- Processes ---

PROC = Path("/proc")
POLL_S = 0.05


@dataclass(frozen=True)
class Process:
    """A pid with its start time in clock ticks since boot. The pair is never reused."""

    pid: int
    start_ticks: int

    @classmethod
    def from_pid(cls, pid: int) -> Process | None:
        """Return the process that has this pid now, or None."""
        entry = _read(pid)
        return None if entry is None else cls(pid, entry.start_ticks)

    def is_alive(self) -> bool:
        """Return whether the process runs. An unreaped exited process does not."""
        entry = _read(self.pid)
        return entry is not None and entry.start_ticks == self.start_ticks and entry.state not in "ZX"

    def send(self, signal_number: int) -> None:
        """Send a signal to this process, and never to a later owner of its pid. Ignored if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self.pid)
            try:
                # The descriptor refers to one process; only now is it certain which one.
                if self.is_alive():
                    signal.pidfd_send_signal(descriptor, signal_number)
            finally:
                os.close(descriptor)


@dataclass(frozen=True)
class _Entry:
    pid: int
    state: str
    parent: int
    session: int
    start_ticks: int


def _read(pid: int) -> _Entry | None:
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # "pid (name) state ppid pgrp session …"; the name may contain anything, including brackets.
    fields = text[text.rindex(")") + 2 :].split()
    return _Entry(pid, fields[0], int(fields[1]), int(fields[3]), int(fields[19]))


def _all() -> Iterator[_Entry]:
    for folder in PROC.iterdir():
        if folder.name.isdigit() and (entry := _read(int(folder.name))) is not None:
            yield entry


def children(pid: int) -> list[Process]:
    """Return the direct children of a process, including unreaped ones."""
    return [Process(entry.pid, entry.start_ticks) for entry in _all() if entry.parent == pid]


def family(roots: Iterable[Process]) -> set[Process]:
    """Return the living roots, their descendants, and the members of sessions that a root leads.

    A root leads its own session, so its members are found even when it and their parents are dead.
    """
    entries = {entry.pid: entry for entry in _all()}
    members: set[int] = set()
    for root in roots:
        present = entries.get(root.pid)
        if present is not None and present.start_ticks != root.start_ticks:
            continue  # the pid was reused, so its old session has no members
        members |= {
            entry.pid
            for entry in entries.values()
            if entry.pid == root.pid or (entry.session == root.pid and entry.start_ticks >= root.start_ticks)
        }
    while True:
        children = {entry.pid for entry in entries.values() if entry.parent in members} - members
        if not children:
            break
        members |= children
    members.discard(os.getpid())
    return {
        Process(pid, entries[pid].start_ticks) for pid in members if pid in entries and entries[pid].state not in "ZX"
    }


def wait_gone(processes: Iterable[Process], timeout_s: float) -> set[Process]:
    """Wait at most `timeout_s` until all have ended; return those that are still alive."""
    until = time.monotonic() + timeout_s
    left = {process for process in processes if process.is_alive()}
    while left and time.monotonic() < until:
        time.sleep(POLL_S)
        left = {one for one in left if one.is_alive()}
    return left


# How long killed processes are waited for, at least between two signals.
KILL_TIMEOUT_S = 60.0
KILL_INTERVAL_S = 5.0
# How long processes are waited for that notice their parent's end themselves, unless its grace period is shorter.
FAMILY_TIMEOUT_S = 5.0


def end(root: Process, *, grace_s: float, kill_timeout_s: float = KILL_TIMEOUT_S) -> bool:
    """End a root and its family: SIGTERM to the root, SIGKILL to the rest after `grace_s`.

    It takes `grace_s`, `FAMILY_TIMEOUT_S`, `kill_timeout_s` and `KILL_INTERVAL_S` at most. Return whether SIGKILL was
    unnecessary. Nothing of the family is alive afterwards, except processes within a call to the kernel that no signal
    ends.
    """
    members = family([root])
    root.send(signal.SIGTERM)
    wait_gone([root], grace_s)
    # The processes seen before and those started since.
    left = wait_gone(members | family([root]), min(grace_s, FAMILY_TIMEOUT_S))
    graceful = not left
    until = time.monotonic() + kill_timeout_s
    while left and time.monotonic() < until:
        for one in left:
            one.send(signal.SIGKILL)
        left = wait_gone(left, KILL_INTERVAL_S) | family([root])
    return graceful
