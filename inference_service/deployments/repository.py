"""Triton's model repository: deployments are taken out of service, and loaded again, by the names of their models."""

from __future__ import annotations

import time
from collections.abc import Callable

from inference_service.deployments.registry import Deployments
from inference_service.domain.deployment import Deployment
from inference_service.domain.unloading import with_loaded_again, with_unloaded
from shared.errors import NotFound, not_found
from shared.names import ID, check_id

FIELD = "model_name"


class ModelRepository:
    """Blocking; safe to call from several threads. Each returns the newest state of the deployment."""

    def __init__(self, deployments: Deployments) -> None:
        self._deployments = deployments

    def unload(self, model_name: str) -> Deployment:
        """Changes nothing where it is unloaded. Raises `InvalidArgument` (no name), `NotFound` and `FailedPrecondition`
        (it is not READY, or a roll-out is under way)."""
        return self._wish(model_name, with_unloaded)

    def load(self, model_name: str) -> Deployment:
        """Changes nothing unless it is unloaded. Raises `InvalidArgument` (no name) and `NotFound`."""
        return self._wish(model_name, with_loaded_again)

    def _wish(self, model_name: str, step: Callable[[Deployment | None, str, float], Deployment | None]) -> Deployment:
        name = f"deployments/{_id_of(model_name)}"
        try:
            return self._deployments.wish(name, lambda before: step(before, name, time.time()))
        except NotFound:
            raise _unknown(model_name) from None


def _id_of(model_name: str) -> str:
    if model_name and not ID.fullmatch(model_name):
        raise _unknown(model_name)
    return check_id(FIELD, model_name)


def _unknown(model_name: str) -> NotFound:
    return not_found(f"model {model_name[:100]!r}", "CreateDeployment makes it, of a checkpoint")
