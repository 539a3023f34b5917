"""`make soak`: a soak test of a real service with two replicas on its own Ray head.

For minutes it sends good, malformed, cancelled, late, oversized and abandoned requests. Memory must stay flat, no good
request may fail, and no connection or queued row may remain. The last line is one JSON object: requests by kind and
status, and the memory of each process. If a check fails, the exit status is 1 and `wrong` has the reason.

    python -m benchmarks.serve_soak [--minutes 4] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from benchmarks.serve_load import MODEL
from benchmarks.serve_memory import Held, ProcessMemory
from benchmarks.serve_place import serving
from benchmarks.serve_soak_clients import EXPECTED, Counted, soak
from benchmarks.serve_statistics import metric
from benchmarks.signals import exit_on_signals
from tests.support.ray_head import RayHead
from tests.support.service_process import ServiceProcess
from tests.support.waiting import wait_until

REPLICAS = 2
REPLICA = "ray::ServeReplica"
QUEUED = "millrace_inference_queued_rows"
EVERY_S = 1.0
# A process loads and caches data in its first requests, which is no leak.
WARM_UP_SHARE, MIN_WARM_UP_S = 0.2, 20.0
# The limit of the last quarter's memory over the first one's; allocators vary by a few per cent.
MAX_GROWTH = 1.05
# Within this time the connections of disconnected clients are closed, and the queue is empty.
SETTLED_TIMEOUT_S = 30.0
MAX_MORE_FILES = 8


def main() -> None:
    parser = argparse.ArgumentParser(prog="soak")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    exit_on_signals()
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        found = _soaked(Path(scratch), given.minutes * 60, given.seed)
    for kind, statuses in found["requests"].items():
        print(f"{kind:>10}: {sum(statuses.values()):>9,}  {statuses}")
    print(json.dumps(found))
    sys.exit(1 if found["wrong"] else 0)


def _soaked(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    with serving(folder) as ours:
        ours.deploy(REPLICAS)
        service = ProcessMemory(ours.service.pid)
        files = service.open_files()
        load = ours.clients.submit(soak, ours.address, seconds, seed)
        held = _watch(load, ours.head, ours.service)
        counted: Counted = load.result()
        wait_until(lambda: metric(ours.metrics, QUEUED, MODEL) == 0, "an empty queue", SETTLED_TIMEOUT_S)
        wait_until(
            lambda: service.open_files() <= files + MAX_MORE_FILES,
            f"no more than {files} open files and sockets",
            SETTLED_TIMEOUT_S,
        )
        return _report(seconds, counted, held, (files, service.open_files()))


def _watch(load: Future[Counted], head: RayHead, service: ServiceProcess) -> dict[str, Held]:
    """Sample the memory of the service and of each replica until the load ends."""
    pids = {"service": service.pid, **{f"replica {pid}": pid for pid in head.processes(REPLICA)}}
    assert len(pids) == 1 + REPLICAS, pids
    watched = {name: ProcessMemory(pid) for name, pid in pids.items()}
    while not load.done():
        for one in watched.values():
            one.sample()
        try:
            load.result(timeout=EVERY_S)
        except TimeoutError:
            continue
    return {name: one.held(WARM_UP_SHARE, MIN_WARM_UP_S / EVERY_S) for name, one in watched.items()}


def _report(seconds: float, counted: Counted, held: dict[str, Held], files: tuple[int, int]) -> dict[str, Any]:
    wrong = [
        f"{kind}: {count} times {status}"
        for kind, statuses in counted.items()
        for status, count in statuses.items()
        if status not in EXPECTED[kind]
    ]
    wrong += [f"no request of kind {kind} was sent" for kind in EXPECTED if not counted.get(kind)]
    wrong += [
        f"the memory of {name} grew {one.ratio:.3f} times" for name, one in held.items() if one.ratio > MAX_GROWTH
    ]
    return {
        "minutes": round(seconds / 60, 2),
        "requests": {kind: dict(sorted(statuses.items())) for kind, statuses in counted.items()},
        "requests_in_all": sum(sum(statuses.values()) for statuses in counted.values()),
        "memory_ratio": {name: round(one.ratio, 4) for name, one in held.items()},
        "memory_mib": {name: [round(one.first_mib, 1), round(one.last_mib, 1)] for name, one in held.items()},
        "memory_bar": f"at most {MAX_GROWTH}: the last quarter's over the first one's, after the warm-up",
        "open_files": {"before": files[0], "after": files[1]},
        "wrong": wrong,
    }


if __name__ == "__main__":
    main()
