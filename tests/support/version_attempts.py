"""Attempts at jobs that make versions: the reconciler that starts them on Ray, and waiting for what they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shared.jobs import JobRecord, Jobs
from shared.settings import StoreSettings
from tests.support.process_states import stop_process
from tests.support.ray_head import RayHead
from tests.support.service_process import store_environ
from tests.support.waiting import wait_until

TIMEOUT_S = 240.0
# The data service's own reconciler, which looks oftener, for nobody nudges it.
RECONCILER = """
from data_service.reconciler import main
from shared.jobs import reconciler

reconciler.INTERVAL_S = 0.2
main()
"""


@dataclass(frozen=True)
class Reconciler:
    process: subprocess.Popen[bytes]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """It looks at nothing meanwhile: of an attempt in the test's own process it would miss the actor."""
        stop_process(self.process.pid)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@contextmanager
def running_reconciler(settings: StoreSettings, head: RayHead, log: Path) -> Iterator[Reconciler]:
    """The data service's own, which starts the attempts."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", RECONCILER],
            env={**os.environ, **store_environ(settings), "RAY_ADDRESS": head.address},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
        )
    try:
        yield Reconciler(process)
    finally:
        process.kill()
        process.communicate()


def over(jobs: Jobs, name: str, timeout_s: float = TIMEOUT_S) -> JobRecord:
    wait_until(lambda: jobs.get(name, name).state.final, f"{name} to end: {jobs.get(name, name)}", timeout_s)
    return jobs.get(name, name)


def await_worker(jobs: Jobs, name: str, signs: Path) -> None:
    """Until a custom function has left a sign `working-{pid}`."""

    def begun() -> bool:
        assert not jobs.get(name, name).state.final, jobs.get(name, name).error
        return any(signs.glob("working-*"))

    wait_until(begun, "a worker to begin", TIMEOUT_S)


def pid_of(sign: Path) -> int:
    return int(sign.name.split("-")[1])


def title_of(sign: Path) -> bytes:
    """What that worker does at present; empty where it is gone."""
    try:
        return Path(f"/proc/{pid_of(sign)}/cmdline").read_bytes()
    except OSError:
        return b""
