"""What a run asks of a cluster, and whether a cluster could ever give it: on the totals of nodes, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from train_service.domain.sizing import ACCELERATOR, Resources, told, workers_that_fit
from train_service.domain.spec import CPU, GPU, RAY_DATA, TrainingSpec

# What a worker asks of a node with an accelerator of its type: a mark, of which a node has 1.
MARK = 0.001
INGEST_CPUS = 1.0
FIELDS = {"CPU": "spec.placement.cpus_per_worker", "GPU": "spec.placement.gpus_per_worker"}


def device_of_run(spec: TrainingSpec, totals: Sequence[Resources]) -> str:
    """GPU or CPU, as the first attempt chooses it for the whole run where `spec` leaves it open; `totals` are all that
    the nodes have."""
    gpus = spec.placement.gpus_per_worker
    if spec.local or gpus == 0:
        return CPU
    if gpus is None and spec.placement.backend != "nccl":
        return GPU if sum(node.get("GPU", 0.0) for node in totals) >= spec.effective_min_workers else CPU
    return GPU


def device_of_attempt(spec: TrainingSpec, run: str, totals: Sequence[Resources]) -> str:
    """What the next attempt at a run on `run` needs: the same, unless the cluster lost the GPUs for it and the run may
    go on on CPUs. GPUs that others hold are not lost."""
    falls_back = run == GPU and spec.placement.allow_cpu_fallback and not _could_hold(spec, GPU, totals)
    return CPU if falls_back else run


def bundle_of(spec: TrainingSpec, device: str) -> dict[str, float]:
    """What one worker on such a device asks of Ray, without zeros."""
    placement = spec.placement
    gpus = 0.0
    if device == GPU:
        gpus = 1.0 if placement.gpus_per_worker is None else placement.gpus_per_worker
    bundle = {"CPU": placement.cpus_per_worker, "GPU": gpus, **placement.resources_per_worker}
    # Of a run on GPUs it is the type of these, which a node without GPUs need not have.
    if placement.accelerator_type and (device == GPU or not placement.allow_cpu_fallback):
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
    if spec.local or not clusters or any(_could_hold(spec, _first_device(spec, nodes), nodes) for nodes in clusters):
        return [], ""
    nodes = clusters[-1]
    bundle = first_bundle(spec, nodes)
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
    bundle = first_bundle(spec, [])
    over = [name for name, need in bundle.items() if name in most and spec.effective_min_workers * need > most[name]]
    alone = [name for name in over if bundle[name] > most[name]]
    return [_field(spec, name) for name in alone] or ([_workers(spec)] if over else [])


def first_bundle(spec: TrainingSpec, nodes: Sequence[Resources]) -> dict[str, float]:
    """What one worker of a first attempt asks for on such a cluster."""
    return bundle_of(spec, _first_device(spec, nodes))


def _first_device(spec: TrainingSpec, nodes: Sequence[Resources]) -> str:
    return device_of_attempt(spec, device_of_run(spec, nodes), nodes)


def _could_hold(spec: TrainingSpec, device: str, nodes: Sequence[Resources]) -> bool:
    fewest = spec.effective_min_workers
    bundle = {name: need for name, need in bundle_of(spec, device).items() if lasts(name)}
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
