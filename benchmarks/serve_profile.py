"""The time of a request by stage, and the CPU by process: the table of `docs/serving-time.md`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks import serve_load
from benchmarks.serve_place import Place
from benchmarks.serve_statistics import ServiceStatistics
from millrace_client.load import Measured

LOADS = (1, 8, 64)
REPLICA = "ray::ServeReplica"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def profile(place: Place, seconds: float) -> tuple[str, list[dict[str, float]]]:
    """Return the table in Markdown, and its figures as a dictionary for each load.

    Times are means, in milliseconds.
    """
    found = [_of_load(place, in_flight, seconds) for in_flight in LOADS]
    head = " | ".join(f"{one['in_flight']} in flight" for one in found)
    rows = [
        f"| {name} | " + " | ".join(f"{one[name]:,.2f}" for one in found) + " |"
        for name in found[0]
        if name != "in_flight"
    ]
    return "\n".join((f"| | {head} |", "|---|" + "---:|" * len(found), *rows)), found


def _of_load(place: Place, in_flight: int, seconds: float) -> dict[str, float]:
    client = place.in_clients(os.getpid)
    replicas = place.head.processes(REPLICA)
    others = [pid for pid in place.head.processes() if pid not in replicas]
    place.in_clients(serve_load.closed, place.address, in_flight, 1.0)  # warms up
    counted = ServiceStatistics(place.address, place.metrics, serve_load.MODEL)
    groups = {"client": [client], "front": [place.service.pid], "replica": replicas, "Ray's other processes": others}
    before = {name: _cpu_s(pids) for name, pids in groups.items()}
    measured: Measured = place.in_clients(serve_load.closed, place.address, in_flight, seconds)
    cpu_s = {name: _cpu_s(pids) - before[name] for name, pids in groups.items()}
    stretch = counted.stretch()
    mean, batch = stretch.mean_ms, stretch.batch_ms
    total_ms = sum(one.ended_s - one.due_s for one in measured.outcomes) / len(measured.outcomes) * 1000
    in_model_ms = mean["compute_input"] + mean["compute_infer"]
    way_ms = batch["round_trip"] - batch["input"] - batch["infer"]
    # The load's warm-up, which the outcomes leave out, took CPU as well.
    answers = sum(size * count for size, count in stretch.batches.items())
    return {
        "in_flight": in_flight,
        "answers/s": measured.answered_per_s,
        "rows a batch": stretch.rows_per_batch,
        "**one request, ms**": total_ms,
        "client, wire and gRPC": total_ms - mean["success"],
        "front: checks, decoding, answer": mean["success"] - mean["queue"] - in_model_ms,
        "waiting for a batch, and for the model": mean["queue"] - way_ms,
        "way to the replica and back": way_ms,
        "preprocessing": mean["compute_input"],
        "model": mean["compute_infer"],
        **{f"CPU of the {name}, ms a request": spent_s / answers * 1000 for name, spent_s in cpu_s.items()},
    }


def _cpu_s(pids: Sequence[int]) -> float:
    """Return the CPU seconds of these processes so far."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):  # one that has ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_PER_S
