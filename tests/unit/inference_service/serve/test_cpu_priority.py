"""A replica's priority. Each in a process of its own: without privileges there is no way back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Started as by Ray: nice, and with a thread that is there already. What takes seconds to import is imported once.
AS_BY_RAY = """
import os, threading

os.nice(15 - os.nice(0))
from inference_service.serve.replica import raise_priority

def show(unprivileged):
    ended = threading.Event()
    threading.Thread(target=ended.wait).start()
    if unprivileged and os.geteuid() == 0:
        os.setuid(65534)
    raise_priority()
    priorities = {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task")}
    print(unprivileged, priorities, flush=True)
    ended.set()

for unprivileged in (False, True):
    if os.fork() == 0:
        show(unprivileged)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def as_by_ray() -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", AS_BY_RAY], capture_output=True, text=True, timeout=240, check=True)


@pytest.mark.skipif(
    os.geteuid() != 0,
    reason="Linux lets only root, or CAP_SYS_NICE, lower a niceness; the next test covers the others",
)
def test_all_threads_of_a_replica_come_before_a_frontend(as_by_ray: subprocess.CompletedProcess[str]) -> None:
    assert as_by_ray.stdout.splitlines()[0] == "False {-10}"


def test_a_replica_that_may_not_raise_its_priority_goes_on_and_says_what_helps(
    as_by_ray: subprocess.CompletedProcess[str],
) -> None:
    assert as_by_ray.stdout.splitlines()[-1] == "True {15}"
    assert "give Ray's workers CAP_SYS_NICE" in as_by_ray.stderr
