"""How many workers fit into what a cluster has free, and how to say what is missing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

PACK, SPREAD, STRICT_PACK, STRICT_SPREAD = "PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"
# Ray counts in ten-thousandths.
GRAIN = 1e-4
ACCELERATOR = "accelerator_type:"

Resources = Mapping[str, float]


def workers_that_fit(free: Sequence[Resources], bundle: Resources, strategy: str, fewest: int, most: int) -> int:
    """The largest number of workers from `fewest` to `most`, each of one `bundle`, for which there is room; else 0.

    `free` is what each node has left, by name; `bundle` what a worker asks for, above 0 each. No worker spans nodes.
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
    """What `fewest` workers wait for; e.g. `2 workers of 1 CPU: the cluster has 1 CPU free on 1 node`."""
    wanted = f"{_counted(fewest, 'worker')} of {told(bundle)}"
    if strategy == STRICT_PACK and fewest > 1:
        wanted += " on one node"
    if strategy == STRICT_SPREAD and fewest > 1:
        wanted += " on a node each"
    if not total:
        return f"{wanted}: the cluster has no node"
    with_some = sum(1 for node in free if any(node.get(name, 0.0) >= GRAIN for name in _amounts(bundle)))
    text = f"{wanted}: the cluster has {told(_sums(free, bundle))} free on {_counted(with_some, 'node')}"
    if not workers_that_fit(total, bundle, strategy, fewest, fewest):
        text += f", and {told(_sums(total, bundle))} in all"
    return text


def _capacity(node: Resources, bundle: Resources) -> int:
    return min(math.floor((node.get(name, 0.0) + GRAIN / 2) / need) for name, need in bundle.items())


def _sums(nodes: Sequence[Resources], bundle: Resources) -> dict[str, float]:
    return {name: sum(node.get(name, 0.0) for node in nodes) for name in bundle}


def _amounts(bundle: Resources) -> list[str]:
    return [name for name in bundle if not name.startswith(ACCELERATOR)] or list(bundle)


def told(resources: Resources) -> str:
    """For people, e.g. `2 CPU and 1 GPU`."""
    # An accelerator's type is no amount but a mark on a node.
    parts = [
        (name.removeprefix(ACCELERATOR) if amount else f"no {name.removeprefix(ACCELERATOR)}")
        if name.startswith(ACCELERATOR)
        else f"{amount:.10g} {name}"
        for name, amount in resources.items()
    ]
    return " and ".join(parts) if len(parts) < 3 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
