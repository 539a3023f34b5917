"""Kills replicas of a deployment, one after the other, while clients send requests without a pause."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor

import ray
from ray import serve
from ray.serve._private.common import ReplicaState

from benchmarks.serve_place import Place
from inference_service.serve.ray_serve import NAMESPACE
from millrace_client.load import Measured
from tests.support.waiting import wait_until

# The time limits of all kills and of one replica's replacement, and the time of load between two kills.
TIMEOUT_S, REPLACED_TIMEOUT_S, BETWEEN_S = 600.0, 120.0, 2.0
REPLICA = "ray::ServeReplica"


def kills(place: Place, count: int, replicas: int) -> Measured:
    """Return the clients' results during the kills; the deployment has `replicas` replicas."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_connect, initargs=(place.head.address,)) as watcher:
        try:
            return place.asked_meanwhile(lambda: _kill_each(place, watcher, count, replicas), TIMEOUT_S)
        finally:
            watcher.submit(ray.shutdown).result()


def _kill_each(place: Place, watcher: ProcessPoolExecutor, count: int, replicas: int) -> None:
    victim = 0
    for number in range(count):
        _wait_until_replaced(place, watcher, replicas, victim)
        time.sleep(BETWEEN_S)  # applies load to both replicas; it does not wait for an event
        victim = sorted(place.head.processes(REPLICA))[number % replicas]
        os.kill(victim, signal.SIGKILL)
        print(f"killed replica {number + 1} of {count}", flush=True)
    _wait_until_replaced(place, watcher, replicas, victim)
    time.sleep(BETWEEN_S)


def _wait_until_replaced(place: Place, watcher: ProcessPoolExecutor, replicas: int, victim: int) -> None:
    """Wait until Ray Serve reports all replicas running, without the victim."""

    def replaced() -> bool:
        pids = place.head.processes(REPLICA)
        return len(pids) == replicas and victim not in pids and watcher.submit(_running).result() == replicas

    wait_until(replaced, f"{replicas} replicas", REPLACED_TIMEOUT_S, interval_s=0.25)


def _connect(address: str) -> None:
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)


def _running() -> int:
    """Return the replicas, of all applications, that Ray Serve reports as running."""
    deployments = [one for app in serve.status().applications.values() for one in app.deployments.values()]
    return sum(one.replica_states.get(ReplicaState.RUNNING, 0) for one in deployments)
