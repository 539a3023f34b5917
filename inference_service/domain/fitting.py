"""Whether a cluster could ever hold a deployment's replicas: on what its nodes have in all, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inference_service.domain.deployment import Spec
from shared.errors import FailedPrecondition

Resources = Mapping[str, float]

# Amounts are multiples of a ten-thousandth in Ray, and sums of fractions are not exact.
TOLERANCE = 1e-6


def check_fits(spec: Spec, nodes: Sequence[Resources]) -> None:
    """Raises `FailedPrecondition` naming the field where no node could hold a replica, or all together not the fewest
    that a version begins with. Without nodes nothing is known."""
    need = _need(spec)
    if not nodes:
        return
    for name, amount in need.items():
        most = max(node.get(name, 0.0) for node in nodes)
        if most + TOLERANCE < amount:
            raise _never(_field(spec, name), f"a replica takes {amount:g} {name}, and no node has more than {most:g}")
    places = sum(_places(node, need) for node in nodes)
    if places == 0:
        raise _never(_field(spec, "CPU"), f"no node has {_told(need)} together, which a replica takes")
    if places < spec.num_replicas:
        field = "spec.autoscaling.min_replicas" if spec.autoscaling else "spec.num_replicas"
        raise _never(field, f"{spec.num_replicas} replicas take {_told(need)} each, and there is room for {places}")


def check_within(spec: Spec, most: Resources) -> None:
    """The same for a cluster that becomes no larger than `most` in all; what it does not name has no bound."""
    for name, amount in _need(spec).items():
        if name in most and amount > most[name] + TOLERANCE:
            why = f"a replica takes {amount:g} {name}, and the cluster never has more than {most[name]:g}"
            raise _never(_field(spec, name), why)
        if name in most and amount * spec.num_replicas > most[name] + TOLERANCE:
            field = "spec.autoscaling.min_replicas" if spec.autoscaling else "spec.num_replicas"
            why = f"{spec.num_replicas} replicas take {amount:g} {name} each, and the cluster never has more than "
            raise _never(field, f"{why}{most[name]:g}")


def _need(spec: Spec) -> dict[str, float]:
    """Of one replica, without zeros."""
    scale = spec.scale()
    return {name: amount for name, amount in (("CPU", scale.cpus), ("GPU", scale.gpus)) if amount}


def _places(node: Resources, need: Resources) -> int:
    return min(int((node.get(name, 0.0) + TOLERANCE) / amount) for name, amount in need.items())


def _field(spec: Spec, resource: str) -> str:
    if resource == "GPU":
        return "spec.gpus_per_replica"
    return "spec.threads_per_replica" if spec.cpus_per_replica is None else "spec.cpus_per_replica"


def _told(need: Resources) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in need.items())


def _never(field: str, why: str) -> FailedPrecondition:
    remedy = "ask for less; of a cluster that grows, its operator sets MILLRACE_CLUSTER_MAX"
    return FailedPrecondition(
        f"{field}: this can never be placed: {why}; {remedy}", reason="NEVER_FITS", fields=[(field, f"{why}; {remedy}")]
    )
