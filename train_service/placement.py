"""Placement of a run's workers: Ray's free resources, how many workers fit, and the request to Ray Train.

Ray reserves no CPU for the tasks of Ray Data that prepare the rows of running jobs, so other jobs leave CPUs free for
them here. Ray Data takes any CPU that is free at the moment; with CPUs in a placement group, its tasks could use no
others.

The reconciler knows the queue, and writes to `clusters/queue.json` what waiting jobs keep for themselves. An attempt
reads it where it finds room to grow.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray
from ray._private import state as ray_state
from ray.core.generated import gcs_pb2

from shared.durable import fields_of
from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.actor import find_actor, staying_nodes, worker_labels
from shared.storage import ObjectMissing, ObjectStore
from train_service.domain.capacity import (
    GRAIN,
    INGEST_CPUS,
    Claim,
    ClusterUse,
    RayActor,
    RayGroup,
    Resources,
    besides_ingest,
    bundle_of,
    device_of_attempt,
    device_of_run,
    left_by,
    use_of,
    what_is_missing,
    workers_that_fit,
)
from train_service.domain.spec import CPU, GPU, RAY_DATA, TrainingSpec
from train_service.records.event_log import TRAIN_KIND

# --- Placement ---

ROLE_LABEL = "millrace.role"
# Ray's name of the CPUs that a placement group holds on a node; those of its bundles also have a number.
GROUP_CPUS = re.compile(r"CPU_group_[0-9a-f]{20,}")


@dataclass(frozen=True)
class Node:
    """A node that takes workers. `free` and `total` are keyed by resource."""

    node_id: str
    free: Resources
    total: Resources


@dataclass(frozen=True)
class Size:
    """The number of workers, and each worker's resources."""

    workers: int
    bundle: dict[str, float]

    @property
    def use_gpu(self) -> bool:
        return self.bundle.get("GPU", 0.0) > 0

    @property
    def device(self) -> str:
        return GPU if self.use_gpu else CPU

    def held(self, workers: Mapping[str, int]) -> dict[str, Resources]:
        """Return the resources that workers hold, by node id. `workers` is their number per node."""
        return {
            node_id: {name: number * need for name, need in self.bundle.items()} for node_id, number in workers.items()
        }


def usable_nodes() -> list[Node]:
    """Return the live nodes that stay and are not reserved for a service."""
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
    """Return the total resources of the nodes that take workers, as Ray knows them."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return [node["Resources"] for node in nodes if node["Alive"] and _takes_workers(node)]


def devices_of(spec: TrainingSpec, run: str, nodes: Sequence[Node]) -> tuple[str, str]:
    """Return the device, GPU or CPU, of the run and of its next attempt on these nodes.

    `run` is the device that the first attempt chose, empty before that.
    """
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
    most: int | None = None,
    claims: Callable[[], Sequence[Claim]] = lambda: (),
) -> Size:
    """Return the most workers on `device` that fit, 0 if even the minimum does not fit.

    `concurrent_ingests` returns for how many other jobs Ray Data prepares rows. It is called only if more than
    `more_than` workers would fit without them. `own` holds the resources of the caller's workers by node id, which
    those would free. No more than `most` workers fit, by default as many as the job asks for. `claims` returns what
    jobs in the queue keep for themselves of what is free. It is called where `concurrent_ingests` is.
    """
    nodes = usable_nodes()
    bundle = bundle_of(spec, device)
    most = spec.num_workers if most is None else most

    def fits(ingests: int, claimed: Sequence[Claim] = ()) -> int:
        left = left_by(claimed, [node.free for node in nodes], [node.total for node in nodes])
        free = [_with_own(one, (own or {}).get(node.node_id, {})) for node, one in zip(nodes, left, strict=True)]
        left = besides_ingest(free, ingests)
        return workers_that_fit(left, bundle, spec.placement.strategy, spec.effective_min_workers, most)

    # If the job has workers, its tasks may be running now.
    begun, begins = (_ingests(spec), 0) if own else (0, _ingests(spec))
    ingests = begins + _not_running(begun)
    workers = fits(ingests)
    if workers > more_than and (others := concurrent_ingests()):
        ingests = begins + _not_running(begun + others)
        workers = fits(ingests)
    if workers > more_than and (claimed := claims()):
        workers = fits(ingests, claimed)
    return Size(workers, bundle)


def lacking(
    spec: TrainingSpec,
    device: str,
    concurrent_ingests: Callable[[], int] = lambda: 0,
    nodes: Sequence[Node] | None = None,
) -> str:
    """Return what the cluster lacks for the minimum of workers on `device`. Empty if they fit.

    `concurrent_ingests` as for `size_now`. `nodes` avoids a second query of the `usable_nodes`.
    """
    if spec.local:
        return ""
    nodes = usable_nodes() if nodes is None else nodes
    missing = _missing(spec, device, nodes, _ingests(spec))
    if not missing and (others := concurrent_ingests()):
        missing = _missing(spec, device, nodes, _ingests(spec) + others, others - _not_running(others))
    return missing


def _missing(spec: TrainingSpec, device: str, nodes: Sequence[Node], ingests: int, running: int = 0) -> str:
    """Return what is missing if Ray Data prepares rows for `ingests` jobs once this one has begun.

    Tasks of `running` of these jobs hold their CPU now, so that the free resources already exclude it.
    """
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
    """Return for how many of `jobs` no Ray Data task holds its CPU now. Free CPUs must suffice for them, too."""
    return max(0, jobs - math.floor(cpus_of_tasks() / INGEST_CPUS + GRAIN)) if jobs else 0


def cpus_of_tasks() -> float:
    """Return how many CPUs tasks hold now, on the nodes that take workers.

    These CPUs are not free, not in a placement group, and not an actor's.
    """
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
    return max(held, 0.0)  # Ray's answers are from different moments


def cluster_use() -> ClusterUse:
    """Return the use of all live nodes, by Ray's actors and placement groups."""
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
                actor_id=table.actor_id.hex(),
                name=table.name,
                process=table.address.worker_id.hex(),
                owner=table.owner_address.worker_id.hex(),
                group=table.placement_group_id.hex(),
                resources=dict(table.required_resources),
            )
            for table in tables
        ],
        [
            RayGroup(creator=group.creator_actor_id.hex(), resources=_of_bundles(group))
            for group in groups
            if group.state == gcs_pb2.PlacementGroupTableData.CREATED  # type: ignore[attr-defined]
        ],
    )


def _of_bundles(group: Any) -> dict[str, float]:
    sums: Counter[str] = Counter()
    for bundle in group.bundles:
        sums.update(bundle.unit_resources)
    return dict(sums)


def is_settling(spec: TrainingSpec, device: str) -> bool:
    """Return whether more workers on `device` would fit if the nodes were empty.

    Something still holds the resources then, e.g. the attempt that has just ended.
    """
    nodes = usable_nodes()
    bundle = bundle_of(spec, device)

    def fits(resources: list[Resources]) -> int:
        return workers_that_fit(resources, bundle, spec.placement.strategy, 1, spec.num_workers)

    return fits([node.free for node in nodes]) < fits([node.total for node in nodes])


def selector() -> dict[str, str]:
    """Return the labels that a worker's node must have. Blocks for `NODE_ANSWERS_TIMEOUT_S` if a node is silent."""
    return worker_labels()


def _takes_workers(node: Mapping[str, Any]) -> bool:
    return (node.get("Labels") or {}).get(ROLE_LABEL) != "service"


def _with_own(free: Resources, own: Resources) -> Resources:
    return {**free, **{name: free.get(name, 0.0) + amount for name, amount in own.items()}}


# --- The queue ---

# An attempt that holds nothing so long after its beginning no longer counts: Ray does not place its workers.
UNPLACED_S = 120.0


class Queue:
    """What jobs before the next one take, of the resources that Ray reports as free.

    The reconciler asks for one job after another, in the order of the queue, between two calls of `poll`.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        holding: Callable[[], Collection[str]] = lambda: attempts_with_workers(),
        is_alive: Callable[[str], bool] = lambda actor: find_actor(actor) is not None,
        kept: Callable[[], Resources] = lambda: kept_by_deployments(),
    ) -> None:
        """Prepare the queue. `kept` returns what deployments hold of the cluster, for as long as they live."""
        self._clock = clock
        self._kept = kept
        # What `kept` has returned, as of this poll; None before a job waits.
        self._kept_now: Resources | None = None
        self._holding = holding
        self._is_alive = is_alive
        # By actor: what an attempt is about to take, and when it began.
        self._begun: dict[str, tuple[Claim, float]] = {}
        # By the job's uid: what the jobs that wait will take, as of this poll.
        self._waiting: dict[str, Claim] = {}
        # By the job's uid: what an attempt will take if it begins, and since when.
        self._next: dict[str, tuple[Claim, float]] = {}
        self._has_polled = False

    def poll(self) -> list[Claim] | None:
        """Forget the jobs that waited, and the attempts that hold their resources by now, or have ended.

        Return the claims of the jobs that waited, the first one first; None at the first poll.
        """
        waited = [*self._waiting.values()] if self._has_polled else None
        self._has_polled = True
        self._waiting = {}
        self._kept_now = None
        now = self._clock()
        # An attempt may turn out to have begun at a later poll, if the store did not answer.
        self._next = {uid: one for uid, one in self._next.items() if now - one[1] < UNPLACED_S}
        if not self._begun:
            return waited
        holding = self._holding()
        self._begun = {
            actor: (claim, since)
            for actor, (claim, since) in self._begun.items()
            if actor not in holding and now - since < UNPLACED_S and self._is_alive(actor)
        }
        return waited

    def first_before(self, uid: str, bundle: Resources) -> str:
        """Return the name of the first job that is before the job with that uid and wants some of the same resources.

        Jobs that wait are before those that have just begun. Empty if there is none.
        """
        claims = [claim for waiting, claim in self._waiting.items() if waiting != uid]
        claims += [claim for claim, _ in self._begun.values()]
        return next((claim.job for claim in claims if claim.bundle.keys() & bundle.keys()), "")

    def nodes(self, uid: str, nodes: Sequence[Node]) -> list[Node]:
        """Return the nodes with what is left for the job with that uid, the next one in the queue."""
        claims = [claim for claim, _ in self._begun.values()]
        claims += [claim for waiting, claim in self._waiting.items() if waiting != uid]
        left = left_by(claims, [node.free for node in nodes], [node.total for node in nodes])
        return [replace(node, free=free) for node, free in zip(nodes, left, strict=True)]

    def waits(self, uid: str, spec: TrainingSpec, device: str, nodes: Sequence[Node], job: str = "") -> None:
        """Keep the place of a job that waits for its fewest workers. `job` is its name.

        It keeps none if these nodes could not hold them once all other jobs have ended.
        """
        bundle, strategy, fewest = bundle_of(spec, device), spec.placement.strategy, spec.effective_min_workers
        total = besides_ingest([node.total for node in nodes], _ingests(spec))
        if not workers_that_fit(total, bundle, strategy, fewest, fewest):
            return
        if self._kept_now is None:
            self._kept_now = self._kept()
        for name, need in bundle.items():
            left = sum(node.get(name, 0.0) for node in total) - self._kept_now.get(name, 0.0)
            if left < fewest * need - GRAIN:
                return
        self._waiting[uid] = Claim(bundle=bundle, workers=fewest, strategy=strategy, job=job)

    def may_begin(self, uid: str, spec: TrainingSpec, device: str, left: Sequence[Node]) -> None:
        """Note what the job takes if it begins now: it fits into what is `left`."""
        bundle, strategy = bundle_of(spec, device), spec.placement.strategy
        free = [node.free for node in left]
        workers = workers_that_fit(free, bundle, strategy, spec.effective_min_workers, spec.num_workers)
        self._next[uid] = Claim(bundle=bundle, workers=workers, strategy=strategy), self._clock()

    def max_workers(self, uid: str) -> int | None:
        """Return how many workers the job takes if it begins now; None if no other job claims resources."""
        claimed = self._begun or any(waiting != uid for waiting in self._waiting)
        found = self._next.get(uid)
        return found[0].workers if found and claimed else None

    def begun(self, job: JobRecord) -> None:
        """Count the attempt until it holds its resources."""
        if found := self._next.pop(job.uid, None):
            self._begun[job.actor] = (replace(found[0], job=job.name), self._clock())


def kept_by_deployments() -> Resources:
    """Return the CPUs and GPUs that deployments hold. Of these, a job that waits gets none when other jobs end."""
    held = [holder for holder in cluster_use().holders if holder.deployment_uid]
    return {"CPU": sum(holder.cpus for holder in held), "GPU": sum(holder.gpus for holder in held)}


def attempts_with_workers() -> set[str]:
    """Return the names of the attempts' actors whose workers hold their resources."""
    return {holder.attempt for holder in cluster_use().holders if holder.attempt}


# --- CPUs for Ray Data ---

AT_WORK = (JobState.RUNNING, JobState.CANCELLING, JobState.SUSPENDING)


def count_concurrent_ingests(store: ObjectStore, job_name: str) -> int:
    """Return how many other running jobs have rows prepared by Ray Data. Reads the state of every live job."""
    return len(_at_work(store) - {job_name})


class IngestReservation:
    """Cached count of running ingests, for a caller that checks many jobs.

    It reads the live jobs at most once between two polls, and only on demand.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._names: set[str] | None = None

    def poll(self) -> None:
        """Drop the cached jobs."""
        self._names = None

    def concurrent_ingests(self, job_name: str) -> int:
        if self._names is None:
            self._names = _at_work(self._store)
        return len(self._names - {job_name})

    def begins(self, job_name: str) -> None:
        """Count this job, whose rows Ray Data prepares, as running."""
        if self._names is None:
            self._names = _at_work(self._store)
        self._names.add(job_name)


def _at_work(store: ObjectStore) -> set[str]:
    jobs = Jobs(store, TRAIN_KIND)
    live = (jobs.find(one.folder) for one in jobs.live())
    return {job.name for job in live if job is not None and _prepares(job)}


def _prepares(job: JobRecord) -> bool:
    return job.state in AT_WORK and TrainingSpec.from_config(job.spec["training"]).ingest == RAY_DATA


# --- Record of the queue ---

KEY = "clusters/queue.json"
# Claims are written again after this time although nothing changed. This shows that the reconciler still runs.
REFRESHED_S = 60.0
# Older claims count no more: no reconciler runs that could begin their jobs. Clocks of nodes may differ by a minute.
EXPIRED_S = 3 * REFRESHED_S


class QueueRecord:
    """Writer and reader of the claims in the store. `clock` returns seconds since the epoch."""

    def __init__(self, store: ObjectStore, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._last: tuple[list[Claim], float] | None = None

    def write(self, claims: Sequence[Claim]) -> None:
        """Record the claims of the jobs that wait, the first one first. Costs nothing while nothing changes."""
        now, noted = self._clock(), list(claims)
        if self._last is not None:
            last, at = self._last
            if noted == last and (not noted or now - at < REFRESHED_S):
                return
        state = {"claims": [asdict(claim) for claim in noted], "time": now}
        self._store.put(KEY, json.dumps(state).encode())
        self._last = (noted, now)

    def read(self) -> list[Claim]:
        """Return the claims, without those that have expired."""
        try:
            state = json.loads(self._store.get(KEY))
        except ObjectMissing:
            return []
        if self._clock() - state["time"] > EXPIRED_S:
            return []
        return [Claim(**fields_of(Claim, claim)) for claim in state["claims"]]
