"""A bench that is interrupted leaves no Ray head behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.ray_head import RayNode
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
# As the benches do: see `benchmarks.data.main` and the others.
BENCH = """
import signal
import time
# Where tests run in the background of a shell without job control, SIGINT is ignored, and so it would be here.
signal.signal(signal.SIGINT, signal.default_int_handler)
from benchmarks.signals import exit_on_signals
from tests.support.ray_head import ray_head

exit_on_signals()
with ray_head(num_cpus=1, dashboard=False) as head:
    print(head.pid, head.folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def bench() -> Iterator[tuple[subprocess.Popen[str], RayNode]]:
    """A bench at work, and the Ray head that it started."""
    with subprocess.Popen(
        [sys.executable, "-c", BENCH], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        pid, folder = process.stdout.readline().split()
        head = RayNode(int(pid), Path(folder))
        try:
            yield process, head
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            head.kill()


@pytest.mark.parametrize(
    "signals",
    [
        # Each starts a Ray head. `make test` has a signal that comes again while the first one is handled, and the one
        # that leaves no time for any clean-up.
        pytest.param([signal.SIGINT], id="Ctrl-C", marks=pytest.mark.long),
        pytest.param([signal.SIGTERM], id="SIGTERM", marks=pytest.mark.long),
        pytest.param([signal.SIGINT] * 3, id="Ctrl-C again and again"),
        pytest.param([signal.SIGKILL], id="SIGKILL"),
    ],
)
def test_an_interrupted_bench_leaves_no_ray_head(
    bench: tuple[subprocess.Popen[str], RayNode], signals: list[signal.Signals]
) -> None:
    process, head = bench
    assert head.processes()
    for number in signals:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
    process.wait(240)
    wait_until(lambda: not head.processes(), "the end of the head's processes")
    wait_until(lambda: not head.folder.exists(), "the end of its folder")
