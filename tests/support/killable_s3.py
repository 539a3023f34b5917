"""An S3 server of a test's own that can be killed, and started again on the same port with the same data."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.settings import StoreSettings
from tests.support.ports import free_ports
from tests.support.s3_server import ACCESS_KEY, HOST, SECRET_KEY, S3Program, S3Server

START_TIMEOUT_S = 120.0


class KillableS3:
    """`name` is that of the program; `kills` counts."""

    def __init__(self, program: S3Program, folder: Path) -> None:
        self.name = program.name
        self.kills = 0
        self._program = program
        self._folder = folder
        self._address = f"{HOST}:{free_ports(1)[0]}"
        self._process: subprocess.Popen[bytes] | None = None

    def settings(self, url: str) -> StoreSettings:
        server = S3Server(
            name=self.name, endpoint=f"http://{self._address}", access_key=ACCESS_KEY, secret_key=SECRET_KEY
        )
        return server.settings(url)

    def start(self) -> None:
        """Return once it answers."""
        data = self._folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._program.command(self._address, data),
                env={**os.environ, **self._program.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        until = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError((self._folder / "server.log").read_text(errors="replace"))
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL, in the middle of whatever it does."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
            self.kills += 1

    def kill_for(self, away_s: float) -> threading.Thread:
        """Kill it now; it is back after `away_s`. Join what is returned."""
        self.kill()

        def come_back() -> None:
            time.sleep(away_s)
            self.start()

        thread = threading.Thread(target=come_back)
        thread.start()
        return thread

    def _answers(self) -> bool:
        import urllib.error
        import urllib.request

        try:
            with urllib.request.urlopen(f"http://{self._address}{self._program.health_path}", timeout=10):
                return True
        except (urllib.error.URLError, OSError):
            return False


@contextmanager
def killable_s3(program: S3Program, folder: Path) -> Iterator[KillableS3]:
    server = KillableS3(program, folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()
