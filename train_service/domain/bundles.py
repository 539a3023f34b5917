"""What a run asks of a cluster, and whether a cluster could ever give it: on the totals of nodes, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from train_service.domain.sizing import ACCELERATOR, Resources, told, workers_that_fit
from train_service.domain.spec import RAY_DATA, TrainingSpec

# What a worker asks of a node with an accelerator of its type: a mark, of which a node has 1.
MARK = 0.001
INGEST_CPUS = 1.0
FIELDS = {"CPU": "spec.placement.cpus_per_worker", "GPU": "spec.placement.gpus_per_worker"}


def bundle_of(spec: TrainingSpec, totals: Sequence[Resources]) -> dict[str, float]:
    """What one worker asks of Ray, without zeros; `totals` are all that the nodes have."""
    placement = spec.placement
    gpus = placement.gpus_per_worker
    if gpus is None and placement.backend == "nccl":
        gpus = 1.0
    if gpus is None:
        gpus = 1.0 if sum(node.get("GPU", 0.0) for node in totals) >= spec.fewest_workers else 0.0
    bundle = {"CPU": placement.cpus_per_worker, "GPU": gpus, **placement.resources_per_worker}
    if placement.accelerator_type:
        bundle[f"{ACCELERATOR}{placement.accelerator_type}"] = MARK
    return {name: amount for name, amount in bundle.items() if amount > 0}


def lasts(resource: str) -> bool:
    """Whether it tells the size of a node, and not which one it is, or what differs at each of its starts."""
    return not resource.startswith(("node:", "object_store_memory"))


def besides_ingest(nodes: Sequence[Resources], jobs: int) -> list[Resources]:
    """What is left of the nodes for workers where Ray Data prepares the rows of so many jobs: for each of them its
    tasks must find a CPU, too."""
    left = [dict(node) for node in nodes]
    for _ in range(jobs if left else 0):
        roomiest = max(left, key=lambda node: node.get("CPU", 0.0))
        roomiest["CPU"] = roomiest.get("CPU", 0.0) - INGEST_CPUS
    return list(left)


def never_fits(spec: TrainingSpec, clusters: Sequence[Sequence[Resources]]) -> tuple[list[str], str]:
    """The fields that ask for more than any of `clusters` (nodes' totals each) could give the fewest workers, and what
    the last of them has, for people. No fields where one of them could, or where none is known."""
    if spec.local or not clusters or any(_could_hold(spec, nodes) for nodes in clusters):
        return [], ""
    nodes = clusters[-1]
    bundle = bundle_of(spec, nodes)
    sums = {name: sum(node.get(name, 0.0) for node in nodes) for name in bundle}
    has = f"{told(sums)} on {len(nodes)} node{'' if len(nodes) == 1 else 's'}"
    # A worker that no node could hold is the matter of what it asks for, not of how many there are.
    alone = [
        name for name, need in bundle.items() if lasts(name) and not any(node.get(name, 0.0) >= need for node in nodes)
    ]
    return [_field(spec, name) for name in alone] or [_workers(spec)], has


def beyond(spec: TrainingSpec, most: Mapping[str, float]) -> list[str]:
    """As `never_fits`, for a cluster that becomes no larger than `most` in all; what it does not name has no bound."""
    if spec.local:
        return []
    bundle = bundle_of(spec, [])
    over = [name for name, need in bundle.items() if name in most and spec.fewest_workers * need > most[name]]
    alone = [name for name in over if bundle[name] > most[name]]
    return [_field(spec, name) for name in alone] or ([_workers(spec)] if over else [])


def _could_hold(spec: TrainingSpec, nodes: Sequence[Resources]) -> bool:
    fewest = spec.fewest_workers
    bundle = {name: need for name, need in bundle_of(spec, nodes).items() if lasts(name)}
    left = besides_ingest(nodes, int(spec.ingest == RAY_DATA))
    return workers_that_fit(left, bundle, spec.placement.strategy, fewest, fewest) > 0


def _field(spec: TrainingSpec, resource: str) -> str:
    if resource == "GPU" and spec.placement.gpus_per_worker is None:
        return "spec.placement.backend"  # nccl; else the cluster says whether there are any
    if resource.startswith(ACCELERATOR):
        return "spec.placement.accelerator_type"
    return FIELDS.get(resource, f"spec.placement.resources_per_worker[{resource}]")


def _workers(spec: TrainingSpec) -> str:
    return "spec.min_workers" if spec.min_workers else "spec.num_workers"
