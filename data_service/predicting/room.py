"""Whether the cluster has a node on which a worker of a prediction could ever be started."""

from __future__ import annotations

import ray

from data_service.domain.predict_spec import PredictSpec, Workers
from data_service.transforming.parallel import Pool, pool_fits
from shared.jobs import JobRecord


def lacks(job: JobRecord) -> str:
    """What the cluster lacks for one worker of a prediction; empty for any other job. Busy nodes count: a worker waits
    for its place on them."""
    if "predict" not in job.spec:
        return ""
    workers = PredictSpec.from_record(job.spec["predict"]).workers
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    if any(pool_fits(pool_of(workers), node["Resources"]) for node in nodes if node["Alive"]):
        return ""
    gpus = f" and {workers.gpus:g} GPU" if workers.gpus else ""
    return f"a node with {workers.cpus} CPU{gpus} for a worker"


def pool_of(workers: Workers) -> Pool:
    return Pool(most=workers.most, cpus=workers.cpus, gpus=workers.gpus)
