"""Measures how costs grow: the real code against simulated data, at 1, 10, 100 and 1,000 times the size.

Prints one JSON line. For each operation and size it has processor seconds, requests, bytes, peak memory, the cost of a
unit, and `NAME_ratio`: the cost of a unit at 1,000 times over that at 10 times. The cost is processor time plus the
time that a store with 15 ms a request and 1 GB/s would have taken. An operation that must cost the same at every size
has one unit. The docstring of each case says what is simulated (`benchmarks.scale.data_cases`,
`benchmarks.scale.train_cases`, `benchmarks.scale.job_cases`, `benchmarks.scale.version_cases`), as does that of
`benchmarks.scale.simulated_store`. Not covered yet: reconciling with Ray.

Each size of a case runs in its own process with limits of memory and time. A process that exceeds a limit, or fails, is
reported in `missed` with the reason; its completed operations count, and the other ratios are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.scale.measuring import Costs

SIZES = (1, 10, 100, 1000)
MEMORY_BYTES = 6 * 1024**3
TIME_S = 240.0
POLL_INTERVAL_S = 0.2
# Below this, processor time reflects the clock's resolution and gives no useful ratio.
MIN_S = 0.002

Case = Callable[[Costs, int], None]


def cases() -> dict[str, Case]:
    """Return the cases; they are imported only in the children."""
    from benchmarks.scale import data_cases, job_cases, train_cases, version_cases

    return {
        "import_files": data_cases.import_files,
        "version": data_cases.version,
        "upload_commit": data_cases.upload_commit,
        "columns": data_cases.columns,
        "order": train_cases.order,
        "coverage": train_cases.coverage,
        "checkpoints": train_cases.checkpoints,
        "jobs": job_cases.jobs,
        "events": job_cases.events,
        "versions": version_cases.versions,
        "watch": version_cases.watch,
        "deployments": train_cases.deployments,
    }


NAMES = (
    "import_files",
    "version",
    "upload_commit",
    "columns",
    "order",
    "coverage",
    "checkpoints",
    "jobs",
    "events",
    "versions",
    "watch",
    "deployments",
)


def run_here(case: str, scale: int) -> None:
    """Run a case in a child, and print each cost as a line of JSON."""

    def report(name: str, cost: dict[str, Any]) -> None:
        print(json.dumps({"name": name, "cost": cost}), flush=True)

    run = cases()[case]
    run(Costs(report), scale)


def run_child(case: str, scale: int) -> tuple[dict[str, Any], str]:
    """Return the cost of each operation, and why some are missing; empty if none is."""
    command = [sys.executable, "-m", "benchmarks.scale", "--child", case, str(scale)]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=output, stderr=errors)
        problem = _wait_within_limits(child)
        output.seek(0)
        errors.seek(0)
        if not problem and child.returncode:
            problem = (errors.read().strip().splitlines() or [f"exit {child.returncode}"])[-1]
        reported = [json.loads(line) for line in output if line.endswith("\n")]
    return {one["name"]: one["cost"] for one in reported}, problem


def _wait_within_limits(child: subprocess.Popen[bytes]) -> str:
    """Return the limit that the child exceeded, and was killed for; empty if it ended by itself."""
    until = time.monotonic() + TIME_S
    while True:
        try:
            child.wait(POLL_INTERVAL_S)
            return ""
        except subprocess.TimeoutExpired:
            problem = f"more than {TIME_S:.0f} s" if time.monotonic() > until else ""
            if _rss_bytes(child.pid) > MEMORY_BYTES:
                problem = f"more than {MEMORY_BYTES // 1024**3} GiB"
        if problem:
            child.kill()
            child.wait()
            return problem


def _rss_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0


def _unit_cost(cost: dict[str, Any]) -> float:
    return float(max(cost["per_unit_s"], MIN_S / cost["units"]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale")
    parser.add_argument("--only", choices=NAMES, action="append", help="these cases alone")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "SIZE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_here(arguments.child[0], int(arguments.child[1]))
        return
    began = time.monotonic()
    sizes: dict[str, dict[str, Any]] = {}
    missed: dict[str, str] = {}
    for case in arguments.only or NAMES:
        for scale in SIZES:
            costs, problem = run_child(case, scale)
            if problem:
                missed[f"{case}_{scale}x"] = problem
            for name, cost in costs.items():
                sizes.setdefault(name, {})[f"{scale}x"] = cost
            print(f"{case} {scale}x: {problem or 'done'}", file=sys.stderr, flush=True)
    ratios = {
        f"{name}_ratio": round(_unit_cost(by["1000x"]) / _unit_cost(by["10x"]), 3)
        for name, by in sizes.items()
        if {"10x", "1000x"} <= by.keys()
    }
    load = os.getloadavg()[0]
    print(json.dumps({**ratios, "missed": missed, "load": load, "seconds": time.monotonic() - began, "sizes": sizes}))


if __name__ == "__main__":
    main()
