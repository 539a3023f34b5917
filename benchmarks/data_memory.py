"""The total memory of the data service and its workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.ray_head import RayHead
from tests.support.service_process import ServiceProcess

INTERVAL_S = 0.05
# Ray's own processes, and idle workers.
NOT_WORKERS = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")


class PeakMemory:
    """Measures the peak memory of the service, its reconciler and Ray's busy workers.

    Sums the proportional set sizes (PSS: shared pages are divided among the processes that share them) every
    `INTERVAL_S`.
    """

    def __init__(self, service: ServiceProcess, head: RayHead) -> None:
        self.idle_bytes = 0
        self.peak_bytes = 0
        self._service = service
        self._head = head
        self._over = threading.Event()

    @contextmanager
    def measured(self) -> Iterator[None]:
        self.idle_bytes = self._now()
        thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            self.peak_bytes = max(self.peak_bytes, self._now())
            self._over.wait(max(0.0, INTERVAL_S - (time.monotonic() - began)))

    def _now(self) -> int:
        others = set().union(*(self._head.processes(title) for title in NOT_WORKERS))
        workers = [pid for pid in self._head.processes("ray::") if pid not in others]
        return sum(map(_pss_bytes, {*_family(self._service.pid), *workers}))


def _family(pid: int) -> list[int]:
    """Return the process and all its descendants."""
    found = [pid]
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _family(int(child))
    return found


def _pss_bytes(pid: int) -> int:
    with suppress(OSError):  # it may have ended
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
