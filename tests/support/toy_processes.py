"""The processes that do toy jobs, and what a test asks of such jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared.jobs import JobRecord, Jobs
from shared.settings import StoreSettings
from tests.support.ray_head import RayHead
from tests.support.service_process import store_environ
from tests.support.waiting import wait_until


class Toys:
    """Starts the processes that do toy jobs, and ends them after the test."""

    def __init__(self, settings: StoreSettings, ray: RayHead, folder: Path) -> None:
        self._environ = {
            **os.environ,
            **store_environ(settings),
            "RAY_ADDRESS": ray.address,
            "TOY_PIDS": str(folder / "pids"),
        }
        self._pids = folder / "pids"
        self._pids.mkdir()
        self.spares_folder = folder / "spares"
        self.spares_folder.mkdir()
        self._log = folder / "toys.log"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, role: str = "reconcile", *, standby: bool = False) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.toy_jobs", role],
                env={**self._environ, "TOY_SPARES": str(self.spares_folder) if standby else ""},
                stdin=subprocess.PIPE,  # closed with us, which ends it
                stdout=log,
                stderr=log,
            )
        self._processes.append(process)
        return process

    def pids(self, role: str = "reconcile") -> list[int]:
        """Of every process in that role since the test began, the supervised ones too."""
        return [int(path.name.rsplit("-", 1)[1]) for path in self._pids.glob(f"{role}-*")]

    def spares(self) -> set[int]:
        """The pids of the prepared actors that ever waited for an attempt of this test."""
        return {int(path.name) for path in self.spares_folder.iterdir()}

    @property
    def said(self) -> str:
        return self._log.read_text()

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def new_job(jobs: Jobs, **spec: Any) -> JobRecord:
    name = f"toys/{uuid.uuid4().hex}"
    job = JobRecord(uid=uuid.uuid4().hex, name=name, spec=spec, create_time=1.0, update_time=1.0, max_failures=2)
    return jobs.create(name, job)


def wait_for_state(jobs: Jobs, job: JobRecord, state: str) -> JobRecord:
    wait_until(lambda: jobs.get(job.name, job.name).state == state, f"{job.name} to be {state}")
    return jobs.get(job.name, job.name)
