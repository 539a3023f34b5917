"""Several front processes on one port: a parent that starts each, and starts it again when it dies."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path

from shared.jobs.supervisor import supervise
from shared.settings import SettingsError

logger = logging.getLogger(__name__)

# A front that is told to stop answers what it has, for 5 s at most, and leaves Ray.
STOP_WITHIN_S = 12.0


async def run_fronts(module: str, listen: str, fronts: int) -> None:
    """Runs `python -m module NUMBER FOLDER` for each number until SIGTERM or SIGINT.

    Raises `SettingsError` where another service has the port: the kernel would share out the calls among both.
    """
    _check_free(listen)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    folder = Path(tempfile.mkdtemp(prefix="millrace-fronts-"))
    try:
        async with asyncio.TaskGroup() as tasks:
            for front in range(fronts):
                arguments = (str(front), str(folder))
                tasks.create_task(supervise(module, stop, arguments=arguments, stop_within_s=STOP_WITHIN_S))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_free(listen: str) -> None:
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((host, int(port)))
        except OSError as error:
            raise SettingsError(f"MILLRACE_LISTEN={listen!r}: {error.strerror}; use another port") from error


async def parent_gone() -> None:
    """Returns when this process's standard input ends, which its parent holds."""
    ended = asyncio.Event()

    class Protocol(asyncio.Protocol):
        def connection_lost(self, _: Exception | None) -> None:
            ended.set()

    await asyncio.get_running_loop().connect_read_pipe(Protocol, sys.stdin)
    await ended.wait()
