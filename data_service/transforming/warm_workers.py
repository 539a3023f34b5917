"""Ray's workers that wait for the tasks of the next transform: a transform of a few seconds would spend most of them on
their start."""

from __future__ import annotations

import functools
import logging

from ray.exceptions import RayError

from shared.jobs import warm_workers
from shared.jobs.nodes import staying_nodes
from shared.jobs.warm_workers import WarmWorkers

logger = logging.getLogger(__name__)

WARM_WORKERS = WarmWorkers(("ray.data", "data_service.transforming.work"))
# Each holds about 200 MiB.
MOST_A_NODE = 4


def start_for_the_next() -> None:
    """To be called when a transform has taken those there were; returns at once. Where Ray is lost, none wait."""
    if not warm_workers.wanted():
        return
    try:
        cpus = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in staying_nodes()}
        WARM_WORKERS.start({node_id: min(count, MOST_A_NODE) for node_id, count in cpus.items() if count})
    except RayError as error:
        logger.warning("no processes wait for the next transform: %s", error)


@functools.cache
def start_for_the_first() -> None:
    """Once in a process that has joined a cluster."""
    start_for_the_next()
