"""Several frontend processes on one port.

A parent starts each process, watches its heartbeat, and restarts it when it dies or hangs.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from inference_service.peers import heartbeat_of
from inference_service.settings import metrics_of
from shared.jobs.supervisor import ChildRefused, supervise
from shared.settings import SettingsError

logger = logging.getLogger(__name__)


# --- Frontends ---
# Several frontend processes on one port: a parent starts each, and restarts it when it dies or hangs.


# A stopping frontend answers its pending requests, for 5 s at most, and disconnects from Ray.
STOP_TIMEOUT_S = 12.0
# The exit status of a process with invalid settings.
REFUSED = 2


async def run_frontends(module: str, listen: str, frontends: int, metrics_listen: str = "") -> int:
    """Runs `python -m module NUMBER FOLDER` for each number until SIGTERM or SIGINT.

    Returns the exit status: 0, or `REFUSED` if a process ends with that at its first start. Raises `SettingsError` if
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
        return Path(tempfile.mkdtemp(prefix="millrace-fronts-"))
    except OSError as error:
        raise SettingsError(f"several fronts need a folder for temporary files: {error}; set TMPDIR to one") from error


def _check_free(listen: str, metrics: Sequence[str]) -> None:
    """Raises `SettingsError` unless all ports are free.

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
                raise SettingsError(f"{name}={address!r}: several fronts need a port that is known; give one")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            one = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind((host, int(port)))
                one.listen()
            except OSError as error:
                raise SettingsError(f"{name}: {address}: {error.strerror}; use another port") from error


async def parent_gone() -> None:
    """Waits until this process's standard input ends, which its parent holds open."""
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
    """Waits until the frontend of this number stops its heartbeat for a minute, after a first one.

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
    """Returns the file's modification time; None before the process has begun."""
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
