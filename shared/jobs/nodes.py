"""Which of Ray's nodes will stay: those that nobody takes away and that answer.

Ray itself takes up to a quarter of a minute to see that a node is dead, and until then places work on it.
"""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray._private import state as ray_state

ANSWERS_TIMEOUT_S = 2.0
AT_ONCE = 32


def draining_nodes() -> set[str]:
    """The ids of the nodes that Ray was told will be taken away."""
    return set(ray_state.state.get_draining_nodes())


def staying_nodes() -> list[dict[str, Any]]:
    """As `ray.nodes()` tells them. Blocks for `ANSWERS_TIMEOUT_S` where one is silent."""
    draining = draining_nodes()
    nodes = [
        node
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"] and node["NodeID"] not in draining
    ]
    if not nodes:
        return []
    with ThreadPoolExecutor(min(len(nodes), AT_ONCE)) as pool:
        return [node for node, answers in zip(nodes, pool.map(_answers, nodes), strict=True) if answers]


def node_of(actor: ray.actor.ActorHandle[Any]) -> str:
    """The id of the actor's node; empty while it has none."""
    known = ray_state.actors(actor_id=actor._actor_id.hex())
    node_id: str = known.get("Address", {}).get("NodeID", "")
    return node_id


def _answers(node: dict[str, Any]) -> bool:
    try:
        with socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), ANSWERS_TIMEOUT_S):
            return True
    except OSError:
        return False
