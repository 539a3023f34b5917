"""How costs grow: the real code against simulated size, at 1, 10, 100 and 1,000 times.

Prints one JSON line. Of each operation it has, by size, processor seconds, requests, bytes and peak memory, what a unit
costs, and `NAME_ratio`: the cost of a unit at 1,000 times over that at 10 times, where the cost is processor time and
what a store of 15 ms a request and 1 GB/s would have been waited for. An operation that is to cost the same at every
size has one unit. What is simulated stands in the docstring of each case (`benchmarks.scale.data_cases`,
`benchmarks.scale.train_cases`) and of `benchmarks.scale.simulated_store`. What is not here yet: reconciling with Ray,
sweeps, deletion and watching.

Each size of a case runs in a process of its own with a limit of memory and of time. One that exceeds a limit, or fails,
is reported in `missed` with the reason; what it had done before counts, and the other ratios are left out.
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
# Below this a processor's time is not worth a ratio: it says how the clock ticks.
MIN_S = 0.002

Case = Callable[[Costs, int], None]


def cases() -> dict[str, Case]:
    """Imported in the children alone."""
    from benchmarks.scale import data_cases, train_cases

    return {
        "import_files": data_cases.import_files,
        "version": data_cases.version,
        "upload_commit": data_cases.upload_commit,
        "columns": data_cases.columns,
        "order": train_cases.order,
        "coverage": train_cases.coverage,
        "checkpoints": train_cases.checkpoints,
        "jobs": train_cases.jobs,
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
    "deployments",
)


def run_here(case: str, scale: int) -> None:
    """In a child: prints each cost as a line of JSON."""

    def tell(name: str, cost: dict[str, Any]) -> None:
        print(json.dumps({"name": name, "cost": cost}), flush=True)

    run = cases()[case]
    run(Costs(tell), scale)


def run_child(case: str, scale: int) -> tuple[dict[str, Any], str]:
    """What each operation cost, and why some are missed; empty where none is."""
    command = [sys.executable, "-m", "benchmarks.scale", "--child", case, str(scale)]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=output, stderr=errors)
        problem = _wait_within_limits(child)
        output.seek(0)
        errors.seek(0)
        if not problem and child.returncode:
            problem = (errors.read().strip().splitlines() or [f"exit {child.returncode}"])[-1]
        told = [json.loads(line) for line in output if line.endswith("\n")]
    return {one["name"]: one["cost"] for one in told}, problem


def _wait_within_limits(child: subprocess.Popen[bytes]) -> str:
    """Which limit it exceeded, and was killed for; empty where it ended by itself."""
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
