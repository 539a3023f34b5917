"""One actor ahead of the next attempt: a process takes longer to start, and to import what it needs, than a short job
takes to run."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from shared.jobs.actor import AttemptActor, find_actor, new_actor_name, start_actor
from shared.jobs.nodes import node_of, staying_nodes

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
