"""Ray's workers that wait for the tasks of the next transform: a transform of a few seconds would spend most of them on
their start."""

from __future__ import annotations

import logging
import os
from collections import Counter
from itertools import chain, islice

import ray

from shared.jobs import warm_workers
from shared.jobs.warm_workers import WarmWorkers

logger = logging.getLogger(__name__)

WARM_WORKERS = WarmWorkers(
    # The last two are what a dataset brings its tasks: its settings, and whoever watches them.
    ("ray.data", "data_service.transforming.work", "shared.dataset_stream", "ray.data._internal.issue_detection"),
    kept_for_s=900,
)
# Each holds about 200 MiB.
MOST = 4


class Waiting:
    """Of one attempt, which has a process of its own: the workers that its tasks find waiting, and those that wait for
    the next one's in their place. Ray does not tell how many there are, so only so many are started as were taken."""

    def __init__(self) -> None:
        self._taken = 0

    def take(self, tasks: int) -> None:
        """Where none wait, has some start while this process gets the first tasks ready: else it does so first, and
        then they. Once is enough."""
        if self._taken:
            return
        self._taken = tasks
        meet = ray.remote(num_cpus=1, max_retries=0, runtime_env=WARM_WORKERS.runtime_env)(_meet)
        for _ in range(tasks):
            meet.remote()

    def replace(self) -> None:
        """To be called when the job is done. It must not fail of what is for the next."""
        if not self._taken or not warm_workers.wanted():
            return
        try:
            # Ray may be told of more CPUs than there are, and a start wants a real one.
            start(min(self._taken, MOST, os.cpu_count() or 1))
        except Exception:
            logger.warning("no processes wait for the next transform", exc_info=True)


WAITING = Waiting()


def start(count: int) -> None:
    """Starts at most so many, one after the other on each node that has a CPU for them."""
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    cpus = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in nodes}
    rounds = ([node_id for node_id in cpus if cpus[node_id] > number] for number in range(MOST))
    WARM_WORKERS.start(Counter(islice(chain.from_iterable(rounds), count)))


def _meet() -> None:
    """The worker has imported all when it is called."""
