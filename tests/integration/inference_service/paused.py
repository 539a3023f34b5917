"""A replica that is stopped for a while: what is asked meanwhile waits, however fast the machine is."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from tests.integration.inference_service.conftest import Stack
from tests.support.process_states import stop_process

REPLICA = "ray::ServeReplica"


@contextmanager
def paused(pids: Iterable[int]) -> Iterator[None]:
    """Stop the processes, and let them go on at the end."""
    pids = list(pids)
    try:
        for pid in pids:
            stop_process(pid)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def queued_rows(stack: Stack, model: str) -> float:
    """The rows that wait for the model's replicas, as Prometheus reads them."""
    with urllib.request.urlopen(f"http://{stack.metrics}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    wanted = f'millrace_inference_queued_rows{{model="{model}"'
    return sum(float(line.split()[-1]) for line in lines if line.startswith(wanted))
