"""The detached Ray actor in which an attempt runs: one actor an attempt, one name each, made for it or in advance.

One actor is ahead of the next attempt: a process takes longer to start, and to import what it needs, than a short job
takes to run.

Attempts run on nodes that will stay: those that nobody takes away and that answer. Ray itself takes up to a quarter of
a minute to see that a node is dead, and until then places work on it.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray._private import state as ray_state
from ray.exceptions import GetTimeoutError, RayActorError

from shared.jobs.attempt import AttemptContext, Entry, run_attempt
from shared.settings import StoreSettings
from shared.storage import open_store
from shared.telemetry import configure_logging

# --- Actor of an attempt ---

logger = logging.getLogger(__name__)

NAMESPACE = "millrace"
# Whoever starts an actor calls it from then on. If it dies, nobody would ever call again.
CALL_TIMEOUT_S = 60.0
# An actor that asks for no CPU may be put on any node; a service's own, labelled so, comes and goes with the service.
NOT_BESIDE_A_SERVICE = {"millrace.role": "!service"}


class AttemptActor:
    """Runs one attempt on its main thread, which Ray Train needs, and ends with it."""

    def __init__(self) -> None:
        self._unclaimed = self._countdown()

    def _countdown(self) -> threading.Timer:
        timer = threading.Timer(CALL_TIMEOUT_S, os._exit, args=(1,))
        timer.daemon = True
        timer.start()
        return timer

    def prepare(self, function: str) -> None:
        """Calls `module:function` before there is an attempt to run: what it imports, the attempt finds there."""
        # Calls wait for this one's end, which may take long where processors are busy.
        self._unclaimed.cancel()
        try:
            _load(function)()
        finally:
            self._unclaimed = self._countdown()

    def hold(self) -> None:
        """Whoever started this actor lives, and may still need it."""
        self._unclaimed.cancel()
        self._unclaimed = self._countdown()

    def run(self, entry: str, settings: StoreSettings, kind: str, folder: str, attempt: int) -> None:
        self._unclaimed.cancel()
        configure_logging(f"{kind}-attempt", "INFO")

        def load_and_run(context: AttemptContext) -> dict[str, Any]:
            # Inside the attempt: an entry function that cannot be imported is a lost attempt like any other.
            function: Entry = _load(entry)
            return function(context)

        try:
            run_attempt(load_and_run, open_store(settings), kind, folder, attempt)
        except Exception:
            logger.exception("attempt %d of %s ended without saying so", attempt, folder)
        finally:
            gc.freeze()  # as in `warm_workers.load`: what it has imported need not be looked through as it ends
            # In any case: the job would wait for ever for an actor that stays.
            ray.actor.exit_actor()  # type: ignore[no-untyped-call]


def new_actor_name(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def start_actor(name: str) -> ray.actor.ActorHandle[AttemptActor]:
    """Returns at once."""
    actor: ray.actor.ActorHandle[AttemptActor] = (
        ray.remote(AttemptActor)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            label_selector=NOT_BESIDE_A_SERVICE,
            max_restarts=0,
            max_task_retries=0,
        )
        .remote()  # type: ignore[assignment]
    )
    return actor


def find_actor(name: str) -> ray.actor.ActorHandle[AttemptActor] | None:
    """The live actor of that name; one that is being started counts. None for the empty name."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE) if name else None
    except ValueError:
        return None


def _load(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


# --- Standby ---

# An idle actor answers within milliseconds; that one has died Ray knows after a second.
ANSWERS_TIMEOUT_S = 5.0
# An actor that cannot even start is not tried again at every look.
RETRY_DELAY_S = 10.0


class Standby:
    """The idle actor that one reconciler keeps for attempts of its kind. It ends by itself once nobody holds it."""

    def __init__(self, kind: str, prepare: str, rest_s: float = 0.0) -> None:
        """`prepare` is `module:function`, called in the actor before there is an attempt.

        One that was taken is replaced after `rest_s`: while the attempt starts it has more need of the processors.
        """
        self._kind = kind
        self._prepare = prepare
        self._rest_s = rest_s
        self._name = ""
        self._actor: ray.actor.ActorHandle[AttemptActor] | None = None
        self._start_after = 0.0

    def hold(self, *, replace: bool) -> None:
        """To be called at every look. With `replace`, a spare that was taken, or has died, is followed by another."""
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
        """The spare's name and handle, which is then another's to call; None where there is none."""
        actor, self._actor = self._actor, None
        if actor is None or find_actor(self._name) is None or _has_died(actor):
            return None
        if _leaves(actor):
            ray.kill(actor)
            return None
        self._start_after = time.monotonic() + self._rest_s
        return self._name, actor


def _has_died(actor: Any) -> bool:
    """Whether the actor answers no call: Ray names one that died a moment ago still. One that is at its `prepare`
    answers after that, and so would the attempt begin after that."""
    try:
        ray.get(actor.hold.remote(), timeout=ANSWERS_TIMEOUT_S)
    except GetTimeoutError:
        return False
    except RayActorError:
        return True
    return False


def _leaves(actor: ray.actor.ActorHandle[AttemptActor]) -> bool:
    """Whether the actor is on a node that is dead, or will be taken away: an attempt there would soon be lost."""
    node_id = node_of(actor)
    return bool(node_id) and node_id not in {node["NodeID"] for node in staying_nodes()}


# --- Nodes that stay ---

NODE_ANSWERS_TIMEOUT_S = 2.0
AT_ONCE = 32


def draining_nodes() -> set[str]:
    """The ids of the nodes that Ray was told will be taken away."""
    return set(ray_state.state.get_draining_nodes())


def staying_nodes() -> list[dict[str, Any]]:
    """As `ray.nodes()` tells them. Blocks for `NODE_ANSWERS_TIMEOUT_S` where one is silent."""
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
        with socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), NODE_ANSWERS_TIMEOUT_S):
            return True
    except OSError:
        return False
