"""Several frontend processes on one port, and the state that they share.

A parent starts each process, watches its heartbeat, and restarts it when it dies or hangs.

Their state is a file for each process, in one folder. Process number 0 leads: it alone deploys and removes applications
in Ray Serve, and drives rollouts, by the counts of all processes. If it dies, the parent process restarts it;
meanwhile the others continue to answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from inference_service.domain.statistics import Counts
from inference_service.settings import metrics_of
from shared.process_supervisor import ChildRefused, supervise
from shared.settings import SettingsError

# --- Frontends ---

logger = logging.getLogger(__name__)


# Several frontend processes on one port: a parent starts each, and restarts it when it dies or hangs.


# A stopping frontend answers its pending requests, for 5 s at most, and disconnects from Ray.
STOP_TIMEOUT_S = 12.0
# The exit status of a process with invalid settings.
REFUSED = 2


async def run_frontends(module: str, listen: str, frontends: int, metrics_listen: str = "") -> int:
    """Run `python -m module NUMBER FOLDER` for each number until SIGTERM or SIGINT.

    Return the exit status: 0, or `REFUSED` if a process ends with that at its first start. Raises `SettingsError` if
    one of the ports is taken: the kernel would distribute the calls over both services.
    """
    _check_free(
        listen, [metrics_of(metrics_listen, frontend) for frontend in range(frontends)] if metrics_listen else []
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    folder = _folder()
    status = 0

    async def keep(frontend: int) -> None:
        nonlocal status
        arguments = (str(frontend), str(folder))
        try:
            await supervise(
                module,
                stop,
                arguments=arguments,
                stop_within_s=STOP_TIMEOUT_S,
                refusal=REFUSED,
                hangs=lambda pid: hangs(folder, frontend, pid),
            )
        except ChildRefused:  # the process has logged the reason
            status = REFUSED
            stop.set()

    try:
        async with asyncio.TaskGroup() as tasks:
            for frontend in range(frontends):
                tasks.create_task(keep(frontend))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return status


def _folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="millrace-frontends-"))
    except OSError as error:
        raise SettingsError(
            f"several frontends need a folder for temporary files: {error}; set TMPDIR to one"
        ) from error


def _check_free(listen: str, metrics: Sequence[str]) -> None:
    """Raise `SettingsError` unless all ports are free.

    All are held until the last is checked, so that no two settings name the same port.
    """
    with ExitStack() as held:
        for name, address in (
            ("MILLRACE_LISTEN", listen),
            *(("MILLRACE_METRICS_LISTEN", metric) for metric in metrics),
        ):
            host, _, port = address.rpartition(":")
            host = host.strip("[]")
            if int(port) == 0:
                raise SettingsError(f"{name}={address!r}: several frontends need a port that is known; give one")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            one = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind((host, int(port)))
                one.listen()
            except OSError as error:
                raise SettingsError(f"{name}: {address}: {error.strerror}; use another port") from error


async def parent_gone() -> None:
    """Wait until this process's standard input ends, which its parent holds open."""
    ended = asyncio.Event()

    class Protocol(asyncio.Protocol):
        def connection_lost(self, _: Exception | None) -> None:
            ended.set()

    await asyncio.get_running_loop().connect_read_pipe(Protocol, sys.stdin)
    await ended.wait()


# --- Signs of life ---
# Detects a hung frontend process by its heartbeat, which it writes several times a second.

HEARTBEAT_POLL_INTERVAL_S = 5.0
# The consecutive polls without a heartbeat. Polls are counted, not timed: a process that was suspended together with
# its parent gets its full time after both resume.
UNRESPONSIVE_POLLS = 12


async def hangs(folder: Path, number: int, pid: int) -> None:
    """Wait until the frontend of this number stops its heartbeat for a minute, after a first one.

    If no file in the folder can be touched, for example when it is read-only, a missing heartbeat does not count.
    """
    heartbeat_before, unresponsive = None, 0
    while unresponsive < UNRESPONSIVE_POLLS:
        await asyncio.sleep(HEARTBEAT_POLL_INTERVAL_S)
        heartbeat_at = _touched_at(heartbeat_of(folder, number, pid))
        can_touch = _touch(folder / "parent")
        unresponsive = (
            unresponsive + 1 if can_touch and heartbeat_at is not None and heartbeat_at == heartbeat_before else 0
        )
        heartbeat_before = heartbeat_at


def _touched_at(path: Path) -> int | None:
    """Return the file's modification time; None before the process has begun."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _touch(path: Path) -> bool:
    try:
        path.touch()
    except OSError:
        return False
    return True


# --- Peers ---

POLL_INTERVAL_S = 0.25
# A live process that has not reported for this long hangs or cannot write: its last report may be outdated.
UNRESPONSIVE_AFTER_S = 5.0


@dataclass(frozen=True, kw_only=True)
class PeerState:
    """The state that one process reports.

    It has whether the process listens on the port, whether it is ready to answer, the applications that it may send
    batches to (`holds`), those that it is removing from Serve (`going`), how many logs it has written, and its request
    counts of versions in a rollout, by application.
    """

    pid: int
    listens: bool
    ready: bool
    holds: list[str]
    going: list[str] = field(default_factory=list)
    written: int = 0
    counts: Mapping[str, Counts] = field(default_factory=dict)

    @staticmethod
    def from_json(text: str) -> PeerState:
        found: dict[str, Any] = json.loads(text)
        counts = {
            name: Counts(one["answered"], one["faults"], {int(place): count for place, count in one["took"].items()})
            for name, one in found.pop("counts").items()
        }
        return PeerState(**found, counts=counts)


class Peers:
    """The peers of this process. None without a `folder`.

    `number` counts from 0.
    """

    def __init__(self, folder: Path | None = None, number: int = 0) -> None:
        self._folder = folder
        self._number = number

    @property
    def is_leader(self) -> bool:
        return self._number == 0

    @property
    def are_there(self) -> bool:
        """Whether this process may have peers."""
        return self._folder is not None

    def heartbeat(self) -> None:
        """Touch the heartbeat file that the parent process watches.

        Raises nothing. After the first call it needs neither a file descriptor nor disk space: a process that lacks
        these but answers does not hang.
        """
        if self._folder is None:
            return
        own = heartbeat_of(self._folder, self._number, os.getpid())
        with suppress(OSError):
            if not own.exists():
                for before in self._folder.glob(f"{self._number}.*.beat"):
                    before.unlink(missing_ok=True)
            own.touch()

    def publish(self, state: PeerState) -> None:
        """Replace this process's reported state. A concurrent reader sees the old or the new one."""
        self._write("json", json.dumps(asdict(state)).encode())

    def leave(self, name: str, data: bytes) -> None:
        """Replace this process's data under that name."""
        self._write(name, data)

    def left(self, name: str) -> list[bytes]:
        """Return the other processes' data under that name.

        A dead process's data stays until its restart.
        """
        found = []
        for path in self._folder.glob(f"*.{name}") if self._folder is not None else ():
            if path.stem != str(self._number):
                with suppress(FileNotFoundError):
                    found.append(path.read_bytes())
        return found

    def counts(self, application: str) -> Iterable[Counts]:
        """Return the counts of each other process with a recent report."""
        return [
            state.counts[application]
            for reported_at, state in self._others()
            if application in state.counts and _is_recent(reported_at)
        ]

    def may_listen(self, ready: bool, holds: Iterable[str]) -> bool:
        """Return whether this process, which `holds` these applications, may listen on the shared port.

        The kernel (SO_REUSEPORT) distributes connections over all listeners, so a new listener must serve everything
        that the existing ones serve. The leader may listen at once if no other process does, so that clients get
        STARTING instead of a refused connection. Otherwise this process and every listening peer with a recent report
        must be ready, and this process must hold all their applications.
        """
        listening = [(at, state) for at, state in self._others() if state.listens]
        if self.is_leader and not listening:
            return True
        own = set(holds)
        return ready and all(state.ready and own.issuperset(state.holds) for at, state in listening if _is_recent(at))

    def all_hold(self, application: str, unresponsive_s: float) -> bool:
        """Return whether every other listening process can send batches to the application.

        A process without a report for `unresponsive_s` does not count.
        """
        return all(
            application in state.holds
            for reported_at, state in self._others()
            if state.listens and time.time() - reported_at < unresponsive_s
        )

    def going(self) -> set[str]:
        """Return the applications that another process is removing from Serve.

        That process has read a log without them, and waits until no process sends them batches. So no process may, even
        if the log names them again by now.
        """
        return {name for reported_at, state in self._others() if _is_recent(reported_at) for name in state.going}

    def news(self) -> dict[int, tuple[int, list[str], list[str]]]:
        """Return by pid how many logs each other process has written, what it holds and what it removes."""
        return {state.pid: (state.written, state.holds, state.going) for _, state in self._others()}

    async def let_go(self, application: str, since_s: float, unresponsive_s: float) -> None:
        """Wait until no other process sends batches to the application.

        Each must have reported so after `since_s`, in seconds since the epoch, which is when this process announced the
        removal: until it reads that, a peer may still attach. A process without a report for `unresponsive_s` is not
        waited for.
        """
        while any(  # noqa: ASYNC110 - a file sends no event
            (reported_at <= since_s or application in state.holds) and time.time() - reported_at < unresponsive_s
            for reported_at, state in self._others()
        ):
            await asyncio.sleep(POLL_INTERVAL_S)

    def _others(self) -> Iterator[tuple[float, PeerState]]:
        """Yield the last report of each live peer, with its time in seconds since the epoch."""
        if self._folder is None:
            return
        for path in self._folder.glob("*.json"):
            if path == self._path(self._number):
                continue
            with suppress(FileNotFoundError):
                reported_at, state = path.stat().st_mtime, PeerState.from_json(path.read_text())
                if _lives(state.pid):
                    yield reported_at, state

    def _write(self, name: str, data: bytes) -> None:
        if self._folder is not None:
            path = self._path(self._number).with_suffix(f".{name}")
            new = path.with_suffix(".new")
            new.write_bytes(data)
            new.replace(path)

    def _path(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{number}.json"


def heartbeat_of(folder: Path, number: int, pid: int) -> Path:
    """Return the empty file that the process of this number and pid touches as its heartbeat."""
    return folder / f"{number}.{pid}.beat"


def _is_recent(reported_at: float) -> bool:
    return time.time() - reported_at < UNRESPONSIVE_AFTER_S


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the pid belongs to another user's process by now
        return False
    return True
