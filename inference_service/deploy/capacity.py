"""Checks whether the cluster could ever hold a deployment's replicas, on the Ray nodes that this process has seen
lately.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from inference_service.domain.deployment import Spec
from shared.errors import FailedPrecondition

# --- Fitting ---
# Checks whether a cluster could ever hold a deployment's replicas, by its nodes' total resources, as plain values.

Resources = Mapping[str, float]

# Ray's amounts are multiples of a ten-thousandth, and sums of fractions are not exact.
TOLERANCE = 1e-6


# During a roll-out the new version runs next to the old one.
VERSIONS_OF_A_ROLLOUT = 2


def check_fits(spec: Spec, nodes: Sequence[Resources], versions: int = 1) -> None:
    """Raises `FailedPrecondition` naming the field that no cluster of these nodes could satisfy.

    A node must hold one replica, and all nodes together the minimum replicas of `versions` versions. Without nodes
    nothing is checked.
    """
    need = _need(spec)
    if not nodes:
        return
    for name, amount in need.items():
        most = max(node.get(name, 0.0) for node in nodes)
        if most + TOLERANCE < amount:
            raise _never(_field(spec, name), f"a replica takes {amount:g} {name}, and no node has more than {most:g}")
    places = sum(_places(node, need) for node in nodes)
    if places == 0:
        raise _never(_field(spec, "CPU"), f"no node has {_described(need)} together, which a replica takes")
    if places < versions * spec.num_replicas:
        raise _too_many(spec, versions, need, f"there is room for {places}")


def check_within(spec: Spec, most: Resources, versions: int = 1) -> None:
    """Checks the same for a cluster with at most `most` resources; missing resources are unlimited."""
    for name, amount in _need(spec).items():
        if name in most and amount > most[name] + TOLERANCE:
            why = f"a replica takes {amount:g} {name}, and the cluster never has more than {most[name]:g}"
            raise _never(_field(spec, name), why)
        if name in most and amount * versions * spec.num_replicas > most[name] + TOLERANCE:
            raise _too_many(spec, versions, {name: amount}, f"the cluster never has more than {most[name]:g}")


def _need(spec: Spec) -> dict[str, float]:
    """Returns the resources of one replica, without zeros."""
    scale = spec.scale()
    return {name: amount for name, amount in (("CPU", scale.cpus), ("GPU", scale.gpus)) if amount}


def _places(node: Resources, need: Resources) -> int:
    return min(int((node.get(name, 0.0) + TOLERANCE) / amount) for name, amount in need.items())


def _field(spec: Spec, resource: str) -> str:
    if resource == "GPU":
        return "spec.gpus_per_replica"
    return "spec.threads_per_replica" if spec.cpus_per_replica is None else "spec.cpus_per_replica"


def _too_many(spec: Spec, versions: int, need: Resources, bound: str) -> FailedPrecondition:
    if versions == 1:
        field = "spec.autoscaling.min_replicas" if spec.autoscaling else "spec.num_replicas"
        return _never(field, f"{spec.num_replicas} replicas take {_described(need)} each, and {bound}")
    # A roll-out's request has no replica counts: its deployment has.
    why = (
        f"while it rolls out it has {versions} versions of {spec.num_replicas} replicas, which take "
        f"{_described(need)} each"
    )
    return _never("name", f"{why}, and {bound}")


def _described(need: Resources) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in need.items())


def _never(field: str, why: str) -> FailedPrecondition:
    remedy = "ask for less; of a cluster that grows, its operator sets MILLRACE_CLUSTER_MAX"
    return FailedPrecondition(
        f"{field}: this can never be placed: {why}; {remedy}",
        reason="NEVER_SCHEDULABLE",
        fields=[(field, f"{why}; {remedy}")],
    )


# --- Cluster ---
# The Ray nodes that this process has seen lately: deployments that none of them could hold are refused.

# A missing node may be restarting, or be replaced by a similar one.
REMEMBERED_S = 3600.0


class Cluster:
    """Remembers the cluster's nodes.

    `most` is the operator's limit of a growing cluster, None without a limit. `clock` returns seconds. Safe to read
    from any thread.
    """

    def __init__(self, most: Resources | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._seen: dict[str, tuple[Resources, float]] = {}  # by id

    def note(self, nodes: Mapping[str, Resources]) -> None:
        """Records the total resources of the present nodes, by their ids."""
        now_s = self._clock()
        kept = {name: one for name, one in self._seen.items() if now_s - one[1] < REMEMBERED_S}
        self._seen = {**kept, **{name: (resources, now_s) for name, resources in nodes.items()}}

    def check_fits(self, spec: Spec, versions: int = 1) -> None:
        """Raises `FailedPrecondition` if the replicas of `versions` versions could never be placed together, as far as
        known.
        """
        if self._most is not None:
            check_within(spec, self._most, versions)
        else:
            check_fits(spec, [resources for resources, _ in self._seen.values()], versions)
