"""The detached Ray actor in which an attempt runs: one actor per attempt, started for it or in advance.

One actor is started ahead of the next attempt, because starting a process and importing its modules takes longer than a
short job runs.

Attempts run on nodes that stay: nodes that answer and are not being drained. Ray itself needs up to 15 seconds to
notice that a node is dead, and places work on it until then.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray._private import state as ray_state
from ray.exceptions import GetTimeoutError, RayActorError

from shared.jobs.attempt import AttemptContext, Entry, run_attempt
from shared.logging_and_tracing import configure_logging
from shared.settings import StoreSettings
from shared.storage import open_store

# --- Actor of an attempt ---

logger = logging.getLogger(__name__)

NAMESPACE = "millrace"
# The starter of an actor calls it from then on. If the starter dies, the actor would never be called again.
CALL_TIMEOUT_S = 60.0
# In the long text of Ray's memory monitor.
MEMORY_USED = re.compile(r"[\d.]+GB used / [\d.]+GB limit")
# An actor that requests no CPU may be placed on any node; a service's own node, labelled so, ends with the service.
ROLE_LABEL, SERVICE = "millrace.role", "service"
NOT_BESIDE_A_SERVICE = {ROLE_LABEL: f"!{SERVICE}"}
# Ray gives each node a label of this name.
NODE_ID_LABEL = "ray.io/node-id"


class AttemptActor:
    """Actor that runs one attempt on its main thread, which Ray Train needs, and ends with it."""

    def __init__(self) -> None:
        self._unclaimed = self._countdown()

    def _countdown(self) -> threading.Timer:
        timer = threading.Timer(CALL_TIMEOUT_S, os._exit, args=(1,))
        timer.daemon = True
        timer.start()
        return timer

    def prepare(self, function: str) -> None:
        """Call `module:function` before there is an attempt, so that its imports are ready for one."""
        # Other calls wait until this one ends, which may take long if processors are busy.
        self._unclaimed.cancel()
        try:
            _load(function)()
        finally:
            self._unclaimed = self._countdown()

    def hold(self) -> None:
        """Postpone the actor's end: its starter lives, and may still need it."""
        self._unclaimed.cancel()
        self._unclaimed = self._countdown()

    def run(self, entry: str, settings: StoreSettings, kind: str, folder: str, attempt: int) -> None:
        self._unclaimed.cancel()
        configure_logging(f"{kind}-attempt", "INFO")

        def load_and_run(context: AttemptContext) -> dict[str, Any]:
            # Inside the attempt, so that an entry function that cannot be imported loses the attempt like any other
            # error.
            function: Entry = _load(entry)
            return function(context)

        try:
            run_attempt(load_and_run, open_store(settings), kind, folder, attempt)
        except Exception:
            logger.exception("attempt %d of %s ended without saying so", attempt, folder)
        finally:
            gc.freeze()  # as in `warm_workers.load`: its imports need not be collected at its end
            # In any case: the job would wait forever for an actor that stays.
            ray.actor.exit_actor()  # type: ignore[no-untyped-call]


def new_actor_name(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def start_actor(name: str) -> ray.actor.ActorHandle[AttemptActor]:
    """Start an actor on a node that stays. Return at once, or after `NODE_ANSWERS_TIMEOUT_S` if a node is silent."""
    options: dict[str, Any] = {"num_cpus": 0, "label_selector": worker_labels()}
    if NODE_ID_LABEL in options["label_selector"]:
        # Ray sends an actor that requests nothing to any node, whatever its labels; this one to the caller's node,
        # which looks at them.
        options["memory"] = 1
    actor: ray.actor.ActorHandle[AttemptActor] = (
        ray.remote(AttemptActor)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=0,
            max_task_retries=0,
            **options,
        )
        .remote()  # type: ignore[assignment]
    )
    return actor


def find_actor(name: str) -> ray.actor.ActorHandle[AttemptActor] | None:
    """Return the live actor of that name, or one that is being started. None for the empty name."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE) if name else None
    except ValueError:
        return None


def memory_kill(actor: ray.actor.ActorHandle[AttemptActor]) -> str:
    """Return how full the node was if Ray ended the actor because the node ran low on memory. Otherwise empty."""
    cause = ray_state.actors(actor_id=actor._actor_id.hex()).get("DeathCause")
    if cause is None or not cause.HasField("oom_context"):
        return ""
    found = MEMORY_USED.search(cause.oom_context.error_message)
    return f"the node ran low on memory{f', with {found[0]}' if found else ''}"


def _load(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


# --- Standby ---

# An idle actor answers within milliseconds. Ray notices a dead one after a second.
ANSWERS_TIMEOUT_S = 5.0
# An actor that cannot even start is not tried again at every poll.
RETRY_DELAY_S = 10.0


class Standby:
    """The idle actor that one reconciler keeps for attempts of its kind. Without `hold` calls it ends by itself."""

    def __init__(self, kind: str, prepare: str, rest_s: float = 0.0) -> None:
        """Prepare the standby. `prepare` is `module:function`, called in the actor before there is an attempt.

        A taken actor is replaced after `rest_s`, because the starting attempt needs the processors more.
        """
        self._kind = kind
        self._prepare = prepare
        self._rest_s = rest_s
        self._name = ""
        self._actor: ray.actor.ActorHandle[AttemptActor] | None = None
        self._start_after = 0.0

    def hold(self, *, replace: bool) -> None:
        """Keep the actor alive. Call this at every poll. With `replace`, a taken or dead actor is replaced."""
        if self._actor is not None and find_actor(self._name) is None:
            self._actor = None
        if self._actor is not None:
            self._actor.hold.remote()
        elif replace and time.monotonic() >= self._start_after:
            self._start_after = time.monotonic() + RETRY_DELAY_S
            self._name = new_actor_name(self._kind)
            self._actor = start_actor(self._name)
            self._actor.prepare.remote(self._prepare)

    def take(self) -> tuple[str, ray.actor.ActorHandle[AttemptActor]] | None:
        """Return the actor's name and handle, which then belong to the caller. None if there is none."""
        actor, self._actor = self._actor, None
        if actor is None or find_actor(self._name) is None or _has_died(actor):
            return None
        if _leaves(actor):
            ray.kill(actor)
            return None
        self._start_after = time.monotonic() + self._rest_s
        return self._name, actor


def _has_died(actor: Any) -> bool:
    """Return whether the actor is dead: Ray still lists one that died a moment ago.

    An actor that runs its `prepare` answers afterwards; an attempt would also begin only then.
    """
    try:
        ray.get(actor.hold.remote(), timeout=ANSWERS_TIMEOUT_S)
    except GetTimeoutError:
        return False
    except RayActorError:
        return True
    return False


def _leaves(actor: ray.actor.ActorHandle[AttemptActor]) -> bool:
    """Return whether the actor's node is dead or draining: an attempt there would soon be lost."""
    node_id = node_of(actor)
    return bool(node_id) and node_id not in {node["NodeID"] for node in staying_nodes()}


# --- Nodes that stay ---

NODE_ANSWERS_TIMEOUT_S = 2.0
AT_ONCE = 32


def draining_nodes() -> set[str]:
    """Return the ids of the nodes that Ray drains."""
    return set(ray_state.state.get_draining_nodes())


def staying_nodes() -> list[dict[str, Any]]:
    """Return the live nodes of `ray.nodes()` that stay. Blocks for `NODE_ANSWERS_TIMEOUT_S` if a node is silent."""
    draining = draining_nodes()
    return _answering(
        [
            node
            for node in ray.nodes()  # type: ignore[no-untyped-call]
            if node["Alive"] and node["NodeID"] not in draining
        ]
    )


def _answering(nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if not nodes:
        return []
    with ThreadPoolExecutor(min(len(nodes), AT_ONCE)) as pool:
        return [node for node, answers in zip(nodes, pool.map(_answers, nodes), strict=True) if answers]


def worker_labels() -> dict[str, str]:
    """Return the labels that a node of an attempt or a worker must have.

    The node is not a service's own. It is not one that is alive to Ray but does not answer, unless no other node
    answers: labels stay for an actor's life, and the node may answer again.
    """
    nodes = [
        node
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"] and node.get("Labels", {}).get(ROLE_LABEL) != SERVICE
    ]
    answering = {node["NodeID"] for node in _answering(nodes)}
    unresponsive = [node["NodeID"] for node in nodes if node["NodeID"] not in answering]
    if not answering or not unresponsive:
        return dict(NOT_BESIDE_A_SERVICE)
    return {**NOT_BESIDE_A_SERVICE, NODE_ID_LABEL: f"!in({','.join(unresponsive)})"}


def node_of(actor: ray.actor.ActorHandle[Any]) -> str:
    """Return the id of the actor's node. Empty while it has none."""
    known = ray_state.actors(actor_id=actor._actor_id.hex())
    node_id: str = known.get("Address", {}).get("NodeID", "")
    return node_id


def _answers(node: dict[str, Any]) -> bool:
    try:
        with socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), NODE_ANSWERS_TIMEOUT_S):
            return True
    except OSError:
        return False
