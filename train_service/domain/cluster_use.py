"""Who holds which CPUs and GPUs of a Ray cluster: summed up from what Ray tells, as plain values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.durable import fields_of
from train_service.domain.sizing import GRAIN, Resources

# An attempt's own process, which Ray knows by the kind of its job and a random number; and a replica of Serve, whose
# application has the uid of its deployment in front.
ATTEMPT = re.compile(r"(?P<kind>[a-z-]+)-[0-9a-f]{32}")
REPLICA = re.compile(r"SERVE_REPLICA::(?P<uid>.+)-v[^#]*#.*")
COUNTED = ("CPU", "GPU")


@dataclass(frozen=True, kw_only=True)
class RayActor:
    """One that is alive. `process` is that of its worker, `owner` that of who started it; `group` is its placement
    group, whose resources are not its own."""

    actor_id: str
    name: str
    process: str
    owner: str
    group: str
    resources: Resources


@dataclass(frozen=True, kw_only=True)
class RayGroup:
    """A placement group that is placed. `creator` is an actor's id, `resources` are those of all its bundles."""

    creator: str
    resources: Resources


@dataclass(frozen=True, kw_only=True)
class Holder:
    """`attempt` is the name of the Ray actor of a job's attempt, `deployment_uid` that of a deployment; with neither,
    `what` says what it is."""

    attempt: str = ""
    deployment_uid: str = ""
    what: str = ""
    cpus: float = 0.0
    gpus: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ClusterUse:
    """`free` CPUs and GPUs of those that there are; who holds the rest."""

    nodes: int = 0
    cpus: float = 0.0
    gpus: float = 0.0
    free_cpus: float = 0.0
    free_gpus: float = 0.0
    holders: Sequence[Holder] = field(default_factory=list)

    @classmethod
    def from_state(cls, state: Mapping[str, object]) -> ClusterUse:
        read = fields_of(cls, state)
        return cls(**{**read, "holders": [Holder(**fields_of(Holder, one)) for one in read["holders"]]})


def use_of(
    totals: Sequence[Resources], free: Sequence[Resources], actors: Iterable[RayActor], groups: Iterable[RayGroup]
) -> ClusterUse:
    """`totals` and `free` are those of the nodes. What neither is free nor an actor's or a group's, tasks hold."""
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
    # Ray tells the parts one after the other.
    add(("", "", "tasks, which read, prepare or transform rows"), {name: max(0.0, one) for name, one in tasks.items()})
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
    """The kind of the job whose attempt runs in the actor of that name."""
    found = ATTEMPT.fullmatch(attempt)
    return found["kind"] if found else ""


def _holder(actor: RayActor, by_process: Mapping[str, RayActor]) -> tuple[str, str, str]:
    """Of an actor that another one started, as of a pool that prepares rows, it is the first of them."""
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
