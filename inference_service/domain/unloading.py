"""Taking a deployment out of service and back. What it serves, its traffic and its versions stay; its replicas go."""

from __future__ import annotations

from dataclasses import replace

from inference_service.domain.deployment import Deployment, State, checked
from inference_service.domain.rolling import check_can_begin


def with_unloaded(deployment: Deployment | None, name: str, now_s: float) -> Deployment | None:
    """After a client's wish to unload it; None if it is unloaded.

    Raises `NotFound`, and `FailedPrecondition` where it is not READY, or a roll-out is under way.
    """
    there = checked(deployment, name, "")
    if there.state is State.UNLOADED:
        return None
    check_can_begin(there, "it can be unloaded")
    return _now(there, State.UNLOADED, now_s)


def with_loaded_again(deployment: Deployment | None, name: str, now_s: float) -> Deployment | None:
    """After a client's wish to have it loaded: READY, as after a loss of all replicas; None unless it is unloaded.
    Raises `NotFound`."""
    there = checked(deployment, name, "")
    return _now(there, State.READY, now_s) if there.state is State.UNLOADED else None


def _now(deployment: Deployment, state: State, now_s: float) -> Deployment:
    return replace(deployment, state=state, generation=deployment.generation + 1, update_time=now_s)
