"""Where the workers of a run go: what Ray has free, how many fit, and how Ray Train is told.

Ray holds no CPU for the tasks of Ray Data that prepare the rows of jobs at work, so others leave them alone here: it
takes any CPU that is free at the moment, and held in a placement group, its tasks could use no other.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import state as ray_state
from ray.core.generated import gcs_pb2

from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.actor import NOT_BESIDE_A_SERVICE, staying_nodes
from shared.storage import ObjectStore
from train_service.domain.capacity import (
    GRAIN,
    INGEST_CPUS,
    ClusterUse,
    RayActor,
    RayGroup,
    Resources,
    besides_ingest,
    bundle_of,
    device_of_attempt,
    device_of_run,
    use_of,
    what_is_missing,
    workers_that_fit,
)
from train_service.domain.spec import CPU, GPU, RAY_DATA, TrainingSpec
from train_service.records.reporting import TRAIN_KIND

# --- Placement ---

ROLE_LABEL = "millrace.role"
# What Ray calls the CPUs that a placement group holds on a node; those of its bundles have a number besides.
GROUP_CPUS = re.compile(r"CPU_group_[0-9a-f]{20,}")


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

    @property
    def device(self) -> str:
        return GPU if self.use_gpu else CPU

    def held(self, workers: Mapping[str, int]) -> dict[str, Resources]:
        """By node id what such workers hold, of whom there are so many on each."""
        return {
            node_id: {name: number * need for name, need in self.bundle.items()} for node_id, number in workers.items()
        }


def usable_nodes() -> list[Node]:
    """The nodes that answer, stay, and are no service's own."""
    free = free_of_nodes()
    return [
        Node(node["NodeID"], free.get(node["NodeID"], {}), node["Resources"])
        for node in staying_nodes()
        if _takes_workers(node)
    ]


def free_of_nodes() -> Mapping[str, Resources]:
    free: Mapping[str, Resources] = ray_state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return free


def totals() -> list[Resources]:
    """All that the nodes which may take workers have, by what Ray knows of them."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return [node["Resources"] for node in nodes if node["Alive"] and _takes_workers(node)]


def devices_of(spec: TrainingSpec, run: str, nodes: Sequence[Node]) -> tuple[str, str]:
    """GPU or CPU, of the run and of its next attempt on these nodes; `run` is what the first attempt chose, empty
    before that."""
    if spec.local:
        return CPU, CPU
    totals = [node.total for node in nodes]
    run = run or device_of_run(spec, totals)
    return run, device_of_attempt(spec, run, totals)


def size_now(
    spec: TrainingSpec,
    device: str,
    concurrent_ingests: Callable[[], int] = lambda: 0,
    own: Mapping[str, Resources] | None = None,
    more_than: int = 0,
) -> Size:
    """The most workers on `device` for which there is room, 0 where not even the fewest fit. `concurrent_ingests` tells
    for how many other jobs Ray Data prepares rows; it is asked only where there is room for more than `more_than`
    without them. `own` is what the caller's workers hold, by node id: they would make room for others."""
    nodes = usable_nodes()
    bundle = bundle_of(spec, device)
    free = [_with_own(node, (own or {}).get(node.node_id, {})) for node in nodes]

    def fits(ingests: int) -> int:
        left = besides_ingest(free, ingests)
        return workers_that_fit(left, bundle, spec.placement.strategy, spec.effective_min_workers, spec.num_workers)

    # Of a job with workers, tasks may run just now.
    begun, begins = (_ingests(spec), 0) if own else (0, _ingests(spec))
    workers = fits(begins + _not_running(begun))
    if workers > more_than and (others := concurrent_ingests()):
        workers = fits(begins + _not_running(begun + others))
    return Size(workers, bundle)


def lacking(
    spec: TrainingSpec,
    device: str,
    concurrent_ingests: Callable[[], int] = lambda: 0,
    nodes: Sequence[Node] | None = None,
) -> str:
    """What the cluster lacks for the fewest workers of a run on `device`; empty where they fit. `concurrent_ingests` as
    for `size_now`; `nodes` where the caller has just asked for the `usable_nodes`."""
    if spec.local:
        return ""
    nodes = usable_nodes() if nodes is None else nodes
    missing = _missing(spec, device, nodes, _ingests(spec))
    if not missing and (others := concurrent_ingests()):
        missing = _missing(spec, device, nodes, _ingests(spec) + others, others - _not_running(others))
    return missing


def _missing(spec: TrainingSpec, device: str, nodes: Sequence[Node], ingests: int, running: int = 0) -> str:
    """`ingests`: for how many jobs Ray Data prepares rows once this one has begun; for `running` of them it does just
    now, so that what is free is free besides."""
    bundle = bundle_of(spec, device)
    free = besides_ingest([node.free for node in nodes], ingests - running)
    total = besides_ingest([node.total for node in nodes], ingests)
    strategy, fewest = spec.placement.strategy, spec.effective_min_workers
    if workers_that_fit(free, bundle, strategy, fewest, spec.num_workers):
        return ""
    missing = what_is_missing(free, total, bundle, strategy, fewest)
    verb = "prepares" if ingests == 1 else "prepare"
    return f"{missing}, besides {ingests * INGEST_CPUS:g} CPU that {verb} rows" if ingests else missing


def _ingests(spec: TrainingSpec) -> int:
    return int(spec.ingest == RAY_DATA)


def _not_running(jobs: int) -> int:
    """For how many of so many jobs whose rows Ray Data prepares no task holds its CPU at this moment: what is free must
    do for them, too."""
    return max(0, jobs - math.floor(cpus_of_tasks() / INGEST_CPUS + GRAIN)) if jobs else 0


def cpus_of_tasks() -> float:
    """How many CPUs of the nodes that may take workers tasks hold now: what neither is free, nor in a placement group,
    nor an actor's."""
    free = free_of_nodes()
    all_there_is: Mapping[str, Resources] = ray_state.total_resources_per_node()  # type: ignore[no-untyped-call]
    held = 0.0
    mine = {node["NodeID"] for node in ray.nodes() if node["Alive"] and _takes_workers(node)}  # type: ignore[no-untyped-call]
    for node_id in mine & free.keys() & all_there_is.keys():
        total = all_there_is[node_id]
        groups = sum(amount for name, amount in total.items() if GROUP_CPUS.fullmatch(name))
        held += total.get("CPU", 0.0) - free[node_id].get("CPU", 0.0) - groups
    accessor = ray_state.state._connect_and_get_accessor()
    for one in accessor.get_actor_table(None, "ALIVE"):
        actor = gcs_pb2.ActorTableData.FromString(one)  # type: ignore[attr-defined]
        if actor.address.node_id.hex() in mine:
            held -= actor.required_resources.get("CPU", 0.0)
    return max(held, 0.0)  # Ray tells the parts one after the other


def cluster_use() -> ClusterUse:
    """Who holds what of all nodes that live, by what Ray knows of its actors and placement groups."""
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    free = free_of_nodes()
    accessor = ray_state.state._connect_and_get_accessor()
    tables = map(gcs_pb2.ActorTableData.FromString, accessor.get_actor_table(None, "ALIVE"))  # type: ignore[attr-defined]
    groups = map(gcs_pb2.PlacementGroupTableData.FromString, accessor.get_placement_group_table())  # type: ignore[attr-defined]
    return use_of(
        [node["Resources"] for node in alive],
        [free.get(node["NodeID"], {}) for node in alive],
        [
            RayActor(
                actor_id=one.actor_id.hex(),
                name=one.name,
                process=one.address.worker_id.hex(),
                owner=one.owner_address.worker_id.hex(),
                group=one.placement_group_id.hex(),
                resources=dict(one.required_resources),
            )
            for one in tables
        ],
        [
            RayGroup(creator=one.creator_actor_id.hex(), resources=_of_bundles(one))
            for one in groups
            if one.state == gcs_pb2.PlacementGroupTableData.CREATED  # type: ignore[attr-defined]
        ],
    )


def _of_bundles(group: Any) -> dict[str, float]:
    sums: Counter[str] = Counter()
    for bundle in group.bundles:
        sums.update(bundle.unit_resources)
    return dict(sums)


def is_settling(spec: TrainingSpec, device: str) -> bool:
    """Whether there would be room for more workers on `device` if the nodes were empty: somebody, maybe the attempt
    that has just ended, still holds it."""
    nodes = usable_nodes()
    bundle = bundle_of(spec, device)

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


# --- CPUs for Ray Data ---

AT_WORK = (JobState.RUNNING, JobState.CANCELLING, JobState.SUSPENDING)


def count_concurrent_ingests(store: ObjectStore, job_name: str) -> int:
    """How many other jobs have an attempt at work whose rows Ray Data prepares. Reads the state of every live job."""
    return len(_at_work(store) - {job_name})


class IngestReservation:
    """The same for whoever asks for many jobs: it reads the live ones once between two looks, and only if asked."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._names: set[str] | None = None

    def poll(self) -> None:
        """What was read is old from here on."""
        self._names = None

    def concurrent_ingests(self, job_name: str) -> int:
        if self._names is None:
            self._names = _at_work(self._store)
        return len(self._names - {job_name})

    def begins(self, job_name: str) -> None:
        """An attempt at this job will be at work, whose rows Ray Data prepares."""
        if self._names is None:
            self._names = _at_work(self._store)
        self._names.add(job_name)


def _at_work(store: ObjectStore) -> set[str]:
    jobs = Jobs(store, TRAIN_KIND)
    live = (jobs.find(one.folder) for one in jobs.live())
    return {job.name for job in live if job is not None and _prepares(job)}


def _prepares(job: JobRecord) -> bool:
    return job.state in AT_WORK and TrainingSpec.from_config(job.spec["training"]).ingest == RAY_DATA
