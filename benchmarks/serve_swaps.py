"""The errors that clients see while a deployment changes: rollouts, and killed replicas."""

from __future__ import annotations

from collections import Counter
from typing import Any

import millrace_client
from benchmarks.serve_kills import kills
from benchmarks.serve_load import MODEL
from benchmarks.serve_place import LOADED_TIMEOUT_S, Place
from millrace_client.load import OK, Measured

REPLICAS, ROLLOUTS, KILLS = 2, 20, 10
# Percent of the traffic, and its duration in seconds.
STEPS = ((50, 1.0), (100, 1.0))
ROLLOUTS_TIMEOUT_S = 3000.0


def swaps(place: Place, rollouts: int = ROLLOUTS, killed: int = KILLS) -> dict[str, Any]:
    """Return the figures; `swap_errors` counts all requests of both parts that were not answered in time."""
    place.deploy(replicas=REPLICAS)
    moved = place.asked_meanwhile(lambda: _rollout_each(place, rollouts), ROLLOUTS_TIMEOUT_S)
    print(f"{rollouts} rollouts: {moved.as_dict()}", flush=True)
    hit = kills(place, killed, REPLICAS)
    print(f"{killed} killed replicas: {hit.as_dict()}", flush=True)
    return {
        "swap_errors": _errors(moved) + _errors(hit),
        "roll_outs": rollouts,
        "kills": killed,
        **_figures("roll_out", moved),
        **_figures("kill", hit),
    }


def _rollout_each(place: Place, count: int) -> None:
    """Roll out the checkpoints alternately; `wait` raises if a rollout is rolled back."""
    with millrace_client.connect(inference=place.address) as client:
        for number in range(count):
            checkpoint = place.checkpoints[(number + 1) % len(place.checkpoints)]
            operation = client.deployments.rollout(f"deployments/{MODEL}", checkpoint, steps=STEPS)
            operation.wait(timeout_s=LOADED_TIMEOUT_S)
            print(f"rollout {number + 1} of {count} is done", flush=True)


def _errors(measured: Measured) -> int:
    return sum(count for status, count in Counter(measured.statuses).items() if status != OK)


def _figures(part: str, measured: Measured) -> dict[str, Any]:
    return {
        f"{part}_errors": _errors(measured),
        f"{part}_statuses": measured.statuses,
        f"{part}_latency_ms": measured.latency_ms(OK),
        f"{part}_answers_per_s": round(measured.answered_per_s, 1),
    }
