"""The deployments as their logs said when they were last read, and as this process has written them since."""

from __future__ import annotations

from collections.abc import Iterable

from inference_service.domain.deployment import Deployment, State
from shared.errors import Unavailable, invalid_field, not_found

MAX_SHOWN_NAME = 100


class Catalog:
    """Changed on one event loop, and read from any thread."""

    def __init__(self) -> None:
        self._deployments: dict[str, Deployment] | None = None
        self._puts: list[Deployment] = []

    @property
    def is_read(self) -> bool:
        """Whether the logs have been read at all."""
        return self._deployments is not None

    def deployments(self) -> list[Deployment]:
        """None before the logs are read."""
        return [*(self._deployments or {}).values()]

    def find(self, model_name: str, field: str = "model_name") -> Deployment:
        """Raises `InvalidArgument` naming the `field` (no name), `NotFound`, and `Unavailable` before the logs are
        read."""
        if not model_name:
            raise invalid_field(field, model_name, "name the model, which is the deployment's id")
        if self._deployments is None:
            raise starting()
        found = self._deployments.get(model_name)
        if found is None:
            raise not_found(f"model {model_name[:MAX_SHOWN_NAME]!r}")
        return found

    def begin_reading(self) -> None:
        """Before the logs are read for `replace`: what is `put` from here on may be newer than what is read."""
        self._puts = []

    def replace(self, deployments: Iterable[Deployment]) -> None:
        """Takes over what the logs said."""
        read: dict[str, Deployment] = {}
        for one in (*deployments, *self._puts):
            _take_over(read, one)
        self._deployments = read  # at once: other threads read it

    def put(self, deployment: Deployment) -> None:
        """Takes over one deployment whose log was written just now."""
        self._puts.append(deployment)
        if self._deployments is not None:
            _take_over(self._deployments, deployment)


def starting() -> Unavailable:
    """What is told of models before the logs are read."""
    return Unavailable("the service is starting; try again", reason="STARTING", retry_after_s=1.0)


def _take_over(deployments: dict[str, Deployment], newest: Deployment) -> None:
    there = deployments.get(newest.model_name)
    if there is not None and there.uid == newest.uid and there.update_time > newest.update_time:
        return  # two wrote, and the first came back last
    if newest.state is not State.GONE:
        deployments[newest.model_name] = newest
    elif there is not None and there.uid == newest.uid:
        del deployments[newest.model_name]
