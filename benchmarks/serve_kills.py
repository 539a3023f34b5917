"""Ten replicas of a deployment killed, one after the other, while clients ask without a pause."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import ray
from ray import serve
from ray.serve._private.common import ReplicaState

from benchmarks import serve_load
from benchmarks.serve_place import Place
from inference_service.ray_serve import NAMESPACE
from millrace_client.load.measured import OK, Measured
from tests.support.waiting import wait_until

KILLS, REPLICAS, IN_FLIGHT, DEADLINE_S = 10, 2, 8, 5.0
# Of all kills, of one replica's replacement, and of load on both between two kills.
WITHIN_S, REPLACED_WITHIN_S, BETWEEN_S = 600.0, 120.0, 2.0
REPLICA = "ray::ServeReplica"


def kills(place: Place) -> dict[str, Any]:
    """What clients were answered."""
    place.deploy(replicas=REPLICAS)
    stop = place.folder / "stop"
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_connect, initargs=(place.head.address,)) as watcher:
        arguments = place.address, IN_FLIGHT, DEADLINE_S, stop, WITHIN_S
        load = place.begin_in_clients(serve_load.closed_until, *arguments)
        victim = 0
        try:
            for number in range(KILLS):
                _wait_until_replaced(place, watcher, victim)
                time.sleep(BETWEEN_S)  # a load on both, not a wait for something
                victim = sorted(place.head.processes(REPLICA))[number % REPLICAS]
                os.kill(victim, signal.SIGKILL)
                print(f"killed replica {number + 1} of {KILLS}", flush=True)
            _wait_until_replaced(place, watcher, victim)
            time.sleep(BETWEEN_S)
        finally:
            stop.touch()
            measured: Measured = load.result(WITHIN_S)
            watcher.submit(ray.shutdown).result()
    return {
        "kill_errors": sum(count for status, count in measured.statuses.items() if status != OK),
        "kill_statuses": measured.statuses,
        "kills": KILLS,
        "kill_latency_ms": measured.latency_ms(OK),
        "kill_answers_per_s": round(measured.answered_per_s, 1),
    }


def _wait_until_replaced(place: Place, watcher: ProcessPoolExecutor, victim: int) -> None:
    """Until Ray Serve calls both running, and none of them is the victim."""

    def replaced() -> bool:
        pids = place.head.processes(REPLICA)
        return len(pids) == REPLICAS and victim not in pids and watcher.submit(_running).result() == REPLICAS

    wait_until(replaced, f"{REPLICAS} replicas", REPLACED_WITHIN_S, interval_s=0.25)


def _connect(address: str) -> None:
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)


def _running() -> int:
    """Replicas, of all applications, that Ray Serve calls running."""
    deployments = [one for app in serve.status().applications.values() for one in app.deployments.values()]
    return sum(one.replica_states.get(ReplicaState.RUNNING, 0) for one in deployments)
