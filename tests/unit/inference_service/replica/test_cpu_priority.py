"""A replica's priority. Each in a process of its own: without privileges there is no way back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Started as by Ray: nice, and with a thread that is there already.
AS_BY_RAY = """
import os, threading

os.nice(15 - os.nice(0))
from inference_service.serve.replica import raise_priority

ended = threading.Event()
threading.Thread(target=ended.wait).start()
if {unprivileged} and os.geteuid() == 0:
    os.setuid(65534)
raise_priority()
print({{os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task")}})
ended.set()
"""


def run_as_by_ray(*, unprivileged: bool) -> subprocess.CompletedProcess[str]:
    code = AS_BY_RAY.format(unprivileged=unprivileged)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)


@pytest.mark.skipif(
    os.geteuid() != 0,
    reason="Linux lets only root, or CAP_SYS_NICE, lower a niceness; the next test covers the others",
)
def test_all_threads_of_a_replica_come_before_a_frontend() -> None:
    assert run_as_by_ray(unprivileged=False).stdout == "{-10}\n"


def test_a_replica_that_may_not_raise_its_priority_goes_on_and_says_what_helps() -> None:
    ran = run_as_by_ray(unprivileged=True)
    assert ran.stdout == "{15}\n"
    assert "give Ray's workers CAP_SYS_NICE" in ran.stderr
