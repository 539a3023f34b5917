"""Resources: a run's demand, a cluster's capacity, and the queue of jobs for it.

The module computes whether a cluster can provide a run's resources, how many workers fit now, who holds the rest, and
which jobs begin.

All functions work on plain values: the nodes' totals, the nodes' free resources, and Ray's lists of actors and groups.

In the queue, who was before takes first, and only what fits begins. A job that waits holds the place of its fewest
workers against those behind it, so that smaller jobs cannot pass it for ever. It holds only resources that it asks for:
jobs that ask for others begin. An attempt that has begun counts until its workers hold their resources, as free
resources still include them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.durable import fields_of
from train_service.domain.spec import CPU, FSDP, GPU, RAY_DATA, TrainingSpec

# --- Demand of a run ---

# The amount of its accelerator type that a worker requests. The type marks a node, which has 1 of it.
MARK = 0.001
INGEST_CPUS = 1.0
FIELDS = {"CPU": "spec.placement.cpus_per_worker", "GPU": "spec.placement.gpus_per_worker"}


def device_of_run(spec: TrainingSpec, totals: Sequence[Resources]) -> str:
    """Return the device of a run: GPU or CPU.

    If `spec` leaves it open, the first attempt chooses it for the whole run. `totals` are all resources of each node.
    """
    gpus = spec.placement.gpus_per_worker
    if spec.local or gpus == 0:
        return CPU
    if spec.placement.parallel == FSDP and spec.placement.backend == "gloo":  # it shards on CPUs alone
        return CPU
    if gpus is None and spec.placement.backend != "nccl":
        return GPU if sum(node.get("GPU", 0.0) for node in totals) >= spec.effective_min_workers else CPU
    return GPU


def device_of_attempt(spec: TrainingSpec, run: str, totals: Sequence[Resources]) -> str:
    """Return the device of a run's next attempt.

    It is `run`, the device of the run, unless the cluster lost the GPUs that the run needs and the run may fall back to
    CPUs. GPUs that other jobs hold are not lost.
    """
    falls_back = run == GPU and spec.placement.allow_cpu_fallback and not _could_hold(spec, GPU, totals)
    return CPU if falls_back else run


def bundle_of(spec: TrainingSpec, device: str) -> dict[str, float]:
    """Return the resources of one worker on `device`. The worker requests them from Ray. Zeros are left out."""
    placement = spec.placement
    gpus = 0.0
    if device == GPU:
        gpus = 1.0 if placement.gpus_per_worker is None else placement.gpus_per_worker
    bundle = {"CPU": placement.cpus_per_worker, "GPU": gpus, **placement.resources_per_worker}
    # For a run on GPUs this is the type of its GPUs, which a node without GPUs need not have.
    if placement.accelerator_type and (device == GPU or not placement.allow_cpu_fallback):
        bundle[f"{ACCELERATOR}{placement.accelerator_type}"] = MARK
    return {name: amount for name, amount in bundle.items() if amount > 0}


def lasts(resource: str) -> bool:
    """Return whether `resource` describes the size of a node.

    Other resources identify the node, or differ each time it starts.
    """
    return not resource.startswith(("node:", "object_store_memory"))


def besides_ingest(nodes: Sequence[Resources], jobs: int) -> list[Resources]:
    """Return the resources that ingest leaves for workers.

    Ray Data prepares the rows of `jobs` jobs meanwhile. Ray Data's tasks need a CPU for each of these jobs.
    """
    left = [dict(node) for node in nodes]
    for _ in range(jobs if left else 0):
        roomiest = max(left, key=lambda node: node.get("CPU", 0.0))
        roomiest["CPU"] = roomiest.get("CPU", 0.0) - INGEST_CPUS
    return list(left)


def never_fits(spec: TrainingSpec, clusters: Sequence[Sequence[Resources]]) -> tuple[list[str], str]:
    """Return the fields that request too much.

    They request more than any of `clusters` could give to the fewest workers. Each cluster is a list of its nodes'
    totals. The second value describes the last cluster's resources in words. No fields are returned if one of the
    clusters could hold the workers, or if no cluster is known.
    """
    if spec.local or not clusters or any(_could_hold(spec, _first_device(spec, nodes), nodes) for nodes in clusters):
        return [], ""
    nodes = clusters[-1]
    bundle = first_bundle(spec, nodes)
    sums = {name: sum(node.get(name, 0.0) for node in nodes) for name in bundle}
    has = f"{resources_text(sums)} on {len(nodes)} node{'' if len(nodes) == 1 else 's'}"
    # If no single node could hold one worker, the worker's resources are at fault, not the number of workers.
    alone = [
        name for name, need in bundle.items() if lasts(name) and not any(node.get(name, 0.0) >= need for node in nodes)
    ]
    return [_field(spec, name) for name in alone] or [_workers(spec)], has


def beyond(spec: TrainingSpec, most: Mapping[str, float]) -> list[str]:
    """Return the fields that request more than `most`.

    `most` is the size that the cluster never exceeds; see `never_fits`. A resource that `most` does not name has no
    bound.
    """
    if spec.local:
        return []
    bundle = first_bundle(spec, [])
    over = [name for name, need in bundle.items() if name in most and spec.effective_min_workers * need > most[name]]
    alone = [name for name in over if bundle[name] > most[name]]
    return [_field(spec, name) for name in alone] or ([_workers(spec)] if over else [])


def first_bundle(spec: TrainingSpec, nodes: Sequence[Resources]) -> dict[str, float]:
    """Return the resources of a first attempt's worker. The cluster has these `nodes`."""
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
        return "spec.placement.backend"  # nccl; for other backends the cluster's GPUs decide
    if resource.startswith(ACCELERATOR):
        return "spec.placement.accelerator_type"
    return FIELDS.get(resource, f"spec.placement.resources_per_worker[{resource}]")


def _workers(spec: TrainingSpec) -> str:
    return "spec.min_workers" if spec.min_workers else "spec.num_workers"


# --- Workers that fit ---

PACK, SPREAD, STRICT_PACK, STRICT_SPREAD = "PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"
# Ray counts in ten-thousandths.
GRAIN = 1e-4
ACCELERATOR = "accelerator_type:"

Resources = Mapping[str, float]


def workers_that_fit(free: Sequence[Resources], bundle: Resources, strategy: str, fewest: int, most: int) -> int:
    """Return the largest number of workers that fit.

    The number is from `fewest` to `most`, or 0 if fewer than `fewest` fit. `free` is what each node has left, by
    resource name. `bundle` is what one worker requests, each amount above 0. No worker spans nodes.
    """
    rooms = [_capacity(node, bundle) for node in free]
    if strategy == STRICT_PACK:
        capacity = max(rooms, default=0)
    elif strategy == STRICT_SPREAD:
        capacity = sum(1 for one in rooms if one > 0)
    else:
        capacity = sum(rooms)
    number = min(capacity, most)
    return number if number >= fewest else 0


def what_is_missing(
    free: Sequence[Resources], total: Sequence[Resources], bundle: Resources, strategy: str, fewest: int
) -> str:
    """Return what `fewest` workers wait for.

    An example is `2 workers of 1 CPU: the cluster has 1 CPU free on 1 node`.
    """
    wanted = described_workers(fewest, bundle, strategy)
    if not total:
        return f"{wanted}: the cluster has no node"
    with_some = sum(1 for node in free if any(node.get(name, 0.0) >= GRAIN for name in _amounts(bundle)))
    text = f"{wanted}: the cluster has {resources_text(_sums(free, bundle))} free on {_counted(with_some, 'node')}"
    if not workers_that_fit(total, bundle, strategy, fewest, fewest):
        text += f", and {resources_text(_sums(total, bundle))} in all"
    return text


def described_workers(workers: int, bundle: Resources, strategy: str) -> str:
    """Return workers in words: `2 workers of 1 CPU on one node`."""
    wanted = f"{_counted(workers, 'worker')} of {resources_text(bundle)}"
    if strategy == STRICT_PACK and workers > 1:
        wanted += " on one node"
    if strategy == STRICT_SPREAD and workers > 1:
        wanted += " on a node each"
    return wanted


def _capacity(node: Resources, bundle: Resources) -> int:
    return min(math.floor((node.get(name, 0.0) + GRAIN / 2) / need) for name, need in bundle.items())


def _sums(nodes: Sequence[Resources], bundle: Resources) -> dict[str, float]:
    return {name: sum(node.get(name, 0.0) for node in nodes) for name in bundle}


def _amounts(bundle: Resources) -> list[str]:
    return [name for name in bundle if not name.startswith(ACCELERATOR)] or list(bundle)


def resources_text(resources: Resources) -> str:
    """Return resources in words: `2 CPU and 1 GPU`."""
    # An accelerator's type is a mark on a node, not an amount.
    parts = [
        (name.removeprefix(ACCELERATOR) if amount else f"no {name.removeprefix(ACCELERATOR)}")
        if name.startswith(ACCELERATOR)
        else f"{amount:.10g} {name}"
        for name, amount in resources.items()
    ]
    return " and ".join(parts) if len(parts) < 3 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


# --- Use of a cluster ---

# Names of Ray actors. An attempt's process is named after its job's kind and a random number. A replica of Serve is
# named after its application, whose name begins with the uid of its deployment.
ATTEMPT = re.compile(r"(?P<kind>[a-z-]+)-[0-9a-f]{32}")
REPLICA = re.compile(r"SERVE_REPLICA::(?P<uid>.+)-v[^#]*#.*")
COUNTED = ("CPU", "GPU")


@dataclass(frozen=True, kw_only=True)
class RayActor:
    """A Ray actor that is alive.

    `process` is the id of the actor's worker process, `owner` that of the process that started it. `group` is its
    placement group; the group's resources do not count as the actor's own.
    """

    actor_id: str
    name: str
    process: str
    owner: str
    group: str
    resources: Resources


@dataclass(frozen=True, kw_only=True)
class RayGroup:
    """A placement group that has been placed.

    `creator` is an actor's id. `resources` are the sums over all bundles of the group.
    """

    creator: str
    resources: Resources


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A holder of CPUs and GPUs of the cluster.

    `attempt` is the name of the Ray actor of a job's attempt. `deployment_uid` identifies a deployment. If both are
    empty, `what` describes the holder.
    """

    attempt: str = ""
    deployment_uid: str = ""
    what: str = ""
    cpus: float = 0.0
    gpus: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ClusterUse:
    """The use of the cluster's CPUs and GPUs.

    It tells how many there are, how many are free, and who holds the rest.
    """

    nodes: int = 0
    cpus: float = 0.0
    gpus: float = 0.0
    free_cpus: float = 0.0
    free_gpus: float = 0.0
    holders: Sequence[Holder] = field(default_factory=list)

    @classmethod
    def from_state(cls, state: Mapping[str, object]) -> ClusterUse:
        read = fields_of(cls, state)
        return cls(**{**read, "holders": [Holder(**fields_of(Holder, holder)) for holder in read["holders"]]})


def use_of(
    totals: Sequence[Resources], free: Sequence[Resources], actors: Iterable[RayActor], groups: Iterable[RayGroup]
) -> ClusterUse:
    """Return who uses the cluster.

    `totals` and `free` are resources of the nodes. Tasks hold whatever is neither free nor held by an actor or a group.
    """
    actors = list(actors)
    by_id = {one.actor_id: one for one in actors}
    by_process = {one.process: one for one in actors}
    held: dict[tuple[str, str, str], dict[str, float]] = {}

    def add(holder: tuple[str, str, str], resources: Resources) -> None:
        sums = held.setdefault(holder, dict.fromkeys(COUNTED, 0.0))
        for name in COUNTED:
            sums[name] += resources.get(name, 0.0)

    for actor in actors:
        if not actor.group:
            add(_holder(actor, by_process), actor.resources)
    for group in groups:
        creator = by_id.get(group.creator)
        add(_holder(creator, by_process) if creator else ("", "", "others, in placement groups"), group.resources)
    total, left = _sum(totals), _sum(free)
    tasks = {name: total[name] - left[name] - sum(sums[name] for sums in held.values()) for name in COUNTED}
    # Ray reports totals, free resources and holders at slightly different times, so a difference may be negative.
    add(
        ("", "", "tasks, which read, prepare or transform rows"), {name: max(0.0, task) for name, task in tasks.items()}
    )
    holders = [
        Holder(attempt=attempt, deployment_uid=uid, what=what, cpus=round(sums["CPU"], 4), gpus=round(sums["GPU"], 4))
        for (attempt, uid, what), sums in sorted(held.items())
        if max(sums.values()) >= GRAIN
    ]
    return ClusterUse(
        nodes=len(totals),
        cpus=total["CPU"],
        gpus=total["GPU"],
        free_cpus=left["CPU"],
        free_gpus=left["GPU"],
        holders=holders,
    )


def kind_of(attempt: str) -> str:
    """Return the kind of the job of an attempt.

    The attempt runs in the actor named `attempt`. Other actors have an empty kind.
    """
    found = ATTEMPT.fullmatch(attempt)
    return found["kind"] if found else ""


def _holder(actor: RayActor, by_process: Mapping[str, RayActor]) -> tuple[str, str, str]:
    """Return the holder that an actor belongs to.

    The holder is an attempt, a deployment or a description. If another actor started this one, such as a pool that
    prepares rows, the first known ancestor counts.
    """
    seen = set[str]()
    while actor.actor_id not in seen:
        seen.add(actor.actor_id)
        if ATTEMPT.fullmatch(actor.name):
            return actor.name, "", ""
        if replica := REPLICA.fullmatch(actor.name):
            return "", replica["uid"], ""
        actor = by_process.get(actor.owner, actor)
    return "", "", "other actors"


def _sum(nodes: Sequence[Resources]) -> dict[str, float]:
    return {name: sum(node.get(name, 0.0) for node in nodes) for name in COUNTED}


# --- Queue ---

BEFORE = "is before it in the queue"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Workers that take resources which a cluster still reports as free.

    `bundle` is what each of them requests, and `job` the name of their job.
    """

    bundle: Resources
    workers: int
    strategy: str
    job: str = ""


def left_by(claims: Sequence[Claim], free: Sequence[Resources], totals: Sequence[Resources]) -> list[Resources]:
    """Return what the claims leave of the free resources of each node. `totals` are all resources of each node.

    Each worker takes the node that has the most room for its kind. If none has, it takes what there is of the node that
    could hold the most of its kind if it were empty: it is the next one there. Workers that must be on one node all
    take from one that could hold them all.
    """
    left = [dict(node) for node in free]
    for claim in claims:
        taken = set[int]()
        # At once, so that each of them takes from the same node.
        together = claim.workers if claim.strategy == STRICT_PACK else 1
        for _ in range(0, claim.workers, max(together, 1)):
            alone = claim.strategy == STRICT_SPREAD
            could = [place for place, total in enumerate(totals) if _bundles_that_fit(total, claim.bundle) >= together]
            places = [place for place in could if not (alone and place in taken)]
            if not places:
                break
            best = max(places, key=lambda at: [_bundles_that_fit(node[at], claim.bundle) for node in (left, totals)])
            taken.add(best)
            for name, need in claim.bundle.items():
                left[best][name] = max(0.0, left[best].get(name, 0.0) - together * need)
    return list(left)


def _bundles_that_fit(node: Resources, bundle: Resources) -> float:
    """Return for how many workers a node has room, with fractions, so that a node that is nearly free counts more."""
    return min(((node.get(name, 0.0) + 1e-9) / need for name, need in bundle.items()), default=0.0)
