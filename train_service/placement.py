"""Where the workers of a run go: what Ray has free, how many fit, and how Ray Train is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import state as ray_state

from shared.jobs.actor import NOT_BESIDE_A_SERVICE
from shared.jobs.nodes import staying_nodes
from train_service.domain.bundles import INGEST_CPUS, besides_ingest, bundle_of
from train_service.domain.sizing import Resources, what_is_missing, workers_that_fit
from train_service.domain.spec import RAY_DATA, TrainingSpec

ROLE_LABEL = "millrace.role"


@dataclass(frozen=True)
class Node:
    """One that takes workers: `free` and `total` by the names of resources."""

    node_id: str
    free: Resources
    total: Resources


@dataclass(frozen=True)
class Size:
    """How many workers, and what each asks for."""

    workers: int
    bundle: dict[str, float]

    @property
    def use_gpu(self) -> bool:
        return self.bundle.get("GPU", 0.0) > 0

    def held(self, workers: Mapping[str, int]) -> dict[str, Resources]:
        """By node id what such workers hold, of whom there are so many on each."""
        return {
            node_id: {name: number * need for name, need in self.bundle.items()} for node_id, number in workers.items()
        }


def usable_nodes() -> list[Node]:
    """The nodes that answer, stay, and are no service's own."""
    free: Mapping[str, Resources] = ray_state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return [
        Node(node["NodeID"], free.get(node["NodeID"], {}), node["Resources"])
        for node in staying_nodes()
        if _takes_workers(node)
    ]


def totals() -> list[Resources]:
    """All that the nodes which may take workers have, by what Ray knows of them."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return [node["Resources"] for node in nodes if node["Alive"] and _takes_workers(node)]


def size_now(
    spec: TrainingSpec, beside: Callable[[], int] = lambda: 0, own: Mapping[str, Resources] | None = None
) -> Size:
    """The most workers for which there is room, 0 where not even the fewest fit. `beside` tells for how many other jobs
    Ray Data prepares rows; it is asked only where there is room. `own` is what the caller's workers hold, by node id:
    they would make room for others."""
    nodes = usable_nodes()
    bundle = bundle_of(spec, [node.total for node in nodes])
    free = [_with_own(node, (own or {}).get(node.node_id, {})) for node in nodes]

    def fits(others: int) -> int:
        left = besides_ingest(free, _ingests(spec, others))
        return workers_that_fit(left, bundle, spec.placement.strategy, spec.fewest_workers, spec.num_workers)

    workers = fits(0)
    if workers and (others := beside()):
        workers = fits(others)
    return Size(workers, bundle)


def lacking(spec: TrainingSpec, beside: Callable[[], int] = lambda: 0) -> str:
    """What the cluster lacks for the fewest workers of a run; empty where they fit. `beside` as for `size_now`."""
    if spec.local:
        return ""
    nodes = usable_nodes()
    missing = _missing(spec, nodes, _ingests(spec))
    if not missing and (others := beside()):
        missing = _missing(spec, nodes, _ingests(spec, others))
    return missing


def _missing(spec: TrainingSpec, nodes: Sequence[Node], ingests: int) -> str:
    bundle = bundle_of(spec, [node.total for node in nodes])
    free, total = (besides_ingest([getattr(node, kind) for node in nodes], ingests) for kind in ("free", "total"))
    strategy, fewest = spec.placement.strategy, spec.fewest_workers
    if workers_that_fit(free, bundle, strategy, fewest, spec.num_workers):
        return ""
    missing = what_is_missing(free, total, bundle, strategy, fewest)
    verb = "prepares" if ingests == 1 else "prepare"
    return f"{missing}, besides {ingests * INGEST_CPUS:g} CPU that {verb} rows" if ingests else missing


def _ingests(spec: TrainingSpec, others: int = 0) -> int:
    """For how many jobs Ray Data prepares rows once this one has begun."""
    return others + (spec.ingest == RAY_DATA)


def is_settling(spec: TrainingSpec) -> bool:
    """Whether there would be room for more workers if the nodes were empty: somebody, maybe the attempt that has just
    ended, still holds it."""
    nodes = usable_nodes()
    bundle = bundle_of(spec, [node.total for node in nodes])

    def fits(resources: list[Resources]) -> int:
        return workers_that_fit(resources, bundle, spec.placement.strategy, 1, spec.num_workers)

    return fits([node.free for node in nodes]) < fits([node.total for node in nodes])


def selector() -> dict[str, str]:
    """The labels that a worker's node must have."""
    return dict(NOT_BESIDE_A_SERVICE)


def _takes_workers(node: Mapping[str, Any]) -> bool:
    return (node.get("Labels") or {}).get(ROLE_LABEL) != "service"


def _with_own(node: Node, own: Resources) -> Resources:
    return {**node.free, **{name: node.free.get(name, 0.0) + amount for name, amount in own.items()}}
